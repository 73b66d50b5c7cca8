"""Parameter servers, for comparison: a few ranks own all blocks, all others send to them and read from them."""

from mimatrix.collectives.gdraa import gather_from_owners, reduce_to_owners
from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError


def parameter_server(collective: Collective, ranks: int, *, servers: int = 1, shares: Shares | None = None) -> Schedule:
    """Build the all-reduce through `servers` of the ranks, spread evenly; each serves one block and works as well."""
    assert collective is Collective.ALL_REDUCE
    if not 1 <= servers <= ranks:
        raise UserError(f"{servers} servers among {ranks} ranks cannot be; use 1 to {ranks}")
    owners = tuple(index * ranks // servers for index in range(servers))
    rounds = (reduce_to_owners(ranks, owners, 0), gather_from_owners(ranks, owners, 0))
    name = "parameter_server" if servers == 1 else "sharded_parameter_server"
    sizes = (shares or Shares.equal(ranks)).for_blocks(owners)
    return Schedule(name, collective, ranks, owners, sizes, rounds)
