"""The catalog of `personax list`: all kinds that configurations can name, registered next to their definitions."""

from personax import algorithms, curvature  # noqa: F401
from personax.data import datasets, partition  # noqa: F401
from personax.models import networks  # noqa: F401
from personax.schedules import delays  # noqa: F401  (registers its kinds)
from personax.simulation import controllers  # noqa: F401
from personax.values import CONTROLLERS, DATASETS, DELAYS, OBJECTIVES, PARTITIONS, RECIPES, Axis

CATALOG: dict[str, Axis] = {
    "algorithms": RECIPES,
    "objectives": OBJECTIVES,
    "partitions": PARTITIONS,
    "datasets": DATASETS,
    "delays": DELAYS,
    "controllers": CONTROLLERS,
}
