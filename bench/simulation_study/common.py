"""What the parts of the study share: one replay, one picture file, the costs that all of them assume."""

from functools import lru_cache
from statistics import median

from matplotlib.figure import Figure

from bench.markdown import MEASUREMENTS
from mimatrix.cluster import Fabric, topology_from_name
from mimatrix.collectives import Collective, FitOptions, Fitted, fit
from mimatrix.netsim import Costs, Traffic, run

COSTS = Costs(sync_s=5e-6)
PICTURES = MEASUREMENTS / "simulated"
KB, MB, GB = 10**3, 10**6, 10**9


@lru_cache(maxsize=2)
def lay_out(algorithm: str, cluster: str, options: FitOptions = FitOptions()) -> tuple[Fitted, Traffic]:  # noqa: B008 (a value)
    """Lay an algorithm on a cluster, ready for messages of any size; the last two results are cached."""
    fabric = Fabric(topology_from_name(cluster))
    fitted = fit(algorithm, fabric, Collective.ALL_REDUCE, options)
    return fitted, Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)


def seconds(algorithm: str, cluster: str, size: int, options: FitOptions = FitOptions()) -> float:  # noqa: B008 (a value)
    """Return the simulated time of an all-reduce."""
    _, traffic = lay_out(algorithm, cluster, options)
    return run(traffic, size, COSTS).seconds


def over_seeds(algorithm: str, cluster: str, size: int, seeds: int, **options: object) -> tuple[float, float, float]:
    """Return median, minimum and maximum over several seeds of ECMP's hashes and of the placement."""
    found = [
        seconds(algorithm, cluster, size, FitOptions(seed=seed, **options))  # type: ignore[arg-type]
        for seed in range(seeds)
    ]
    return median(found), min(found), max(found)


def save(figure: Figure, name: str) -> str:
    """Write a picture of the study; return the Markdown that shows it."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / name, dpi=110)
    return f"![{name.removesuffix('.png').replace('_', ' ')}](simulated/{name})\n"
