"""Which ranks share a host."""

from collections.abc import Sequence


def ranks_by_host(hosts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of every host; `hosts[r]` is the host of rank r. Hosts come in the order of their first rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return {host: tuple(members) for host, members in ranks.items()}
