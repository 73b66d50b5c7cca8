"""What the parts of the study share: one replay, one picture file, the costs that all of them assume."""

from functools import lru_cache
from statistics import median

from matplotlib.figure import Figure

from bench.markdown import MEASUREMENTS
from mimatrix.cluster import Fabric, named
from mimatrix.collectives import Collective, Fitted, Wishes, fit
from mimatrix.netsim import Costs, Traffic, run

COSTS = Costs(sync_s=5e-6)
PICTURES = MEASUREMENTS / "simulated"
KB, MB, GB = 10**3, 10**6, 10**9


@lru_cache(maxsize=2)
def laid_out(algorithm: str, cluster: str, wishes: Wishes = Wishes()) -> tuple[Fitted, Traffic]:  # noqa: B008 (a value)
    """An algorithm on a cluster, ready for messages of any size; the last two are kept."""
    fabric = Fabric(named(cluster))
    fitted = fit(algorithm, fabric, Collective.ALL_REDUCE, wishes)
    return fitted, Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)


def seconds(algorithm: str, cluster: str, size: int, wishes: Wishes = Wishes()) -> float:  # noqa: B008 (a value)
    """Simulated time of an all-reduce."""
    _, traffic = laid_out(algorithm, cluster, wishes)
    return run(traffic, size, COSTS).seconds


def over_seeds(algorithm: str, cluster: str, size: int, seeds: int, **wishes: object) -> tuple[float, float, float]:
    """Median, least and most over several seeds of ECMP's hashes and of the placement."""
    found = [
        seconds(algorithm, cluster, size, Wishes(seed=seed, **wishes))  # type: ignore[arg-type]
        for seed in range(seeds)
    ]
    return median(found), min(found), max(found)


def save(figure: Figure, name: str) -> str:
    """Write a picture of the study; returns the Markdown that shows it."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / name, dpi=110)
    return f"![{name.removesuffix('.png').replace('_', ' ')}](simulated/{name})\n"
