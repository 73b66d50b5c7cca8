"""The environment variables of torchrun, so that its scripts run unchanged under every launcher."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among all, and the address where rank 0 opens the store."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    node: int = 0
    nodes: int = 1


def torchrun_variables(place: Place, run_id: str, restarts: int, max_restarts: int) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "ROLE_RANK": str(place.rank),
        "GROUP_RANK": str(place.node),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_WORLD_SIZE": str(place.local_ranks),
        "ROLE_WORLD_SIZE": str(place.ranks),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        # Rank 0 opens the store on MASTER_PORT; there is no agent that holds one.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
