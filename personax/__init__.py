"""Personalized federated learning in JAX. Everything public is named here.

Namespaces hold the names that mean little on their own: `px.curvature.exact`, `px.step_sizes.Decay`,
`px.delays.Gamma`, `px.discounts.Polynomial`, `px.partition.dirichlet`, `px.datasets.digits`, `px.plot.curves`.
`px.sharing` has the functions on parts of a model. `px.objective` and `px.values` are for extending the library
(docs/extending.md).
"""

import importlib
from typing import TYPE_CHECKING, Any

from personax import curvature, sharing, theory, values
from personax.algorithms import (
    Algorithm,
    anil,
    apfl,
    aruba,
    ditto,
    fedalt,
    fedasync,
    fedasync_mixing,
    fedavg,
    fedbabu,
    fedbn,
    fedbuff,
    feddpa,
    fedper,
    fedprox,
    fedrep,
    fedsa_lora,
    fedsim,
    lg_fedavg,
    local_only,
    per_fedavg,
    persafl,
    pfedme,
    scaffold,
)
from personax.client import step_sizes
from personax.client.local import Local, LocalOptions, Phase
from personax.client.optimizers import optimizer
from personax.client.sampling import BatchSizes, batch_indices
from personax.data import datasets, partition
from personax.data.datasets import Pool
from personax.data.federation import Federation
from personax.data.partition import Partition
from personax.data.scaling import Scaling
from personax.data.schema import Schema
from personax.evaluation.evaluate import adaptation_curve, client_models, evaluate, observer, personalize
from personax.evaluation.scores import Comparison, Evaluation, Interval
from personax.evaluation.scoring import Scoring, fallah_scoring
from personax.evaluation.validation import ValidationData, controlled, split_validation
from personax.models import (
    cnn,
    cnn2,
    cnn3,
    dual_lora,
    from_equinox,
    from_flax,
    from_nnx,
    logistic_regression,
    lora,
    mlp,
    standardized,
)
from personax.models.tasks import classification, regression, rematerialize
from personax.objectives import (
    Aruba,
    Ditto,
    Erm,
    LocalOnly,
    Meta,
    Mixture,
    Moreau,
    Objective,
    Proximal,
    Scaffold,
    Visit,
    objective,
)
from personax.schedules import Schedule, arrivals, delays, rounds, traces, uniform_arrivals
from personax.server import Server, asynchronous, buffered, discounts, synchronous
from personax.sharing import Sharing
from personax.simulation import controllers
from personax.simulation.averages import RandomIterate, WeightedAverage
from personax.simulation.control import Control
from personax.simulation.execution import Execution, Monitor
from personax.simulation.results import NonFiniteUpdate, Result, Snapshot
from personax.simulation.simulate import simulate
from personax.simulation.speed import explain_speed
from personax.simulation.stream import Stream
from personax.simulation.work import work_of
from personax.typing import Batch, Batches, Clock, LossFn, Model, Params, Task
from personax.values import Static, value

if TYPE_CHECKING:
    from personax.experiment.comparing import compare
    from personax.experiment.loading import load
    from personax.experiment.loggers import events
    from personax.experiment.pretrained import pretrained
    from personax.experiment.trained import TrainedModel
    from personax.report import plot

__version__ = "0.2.0"

__all__ = [
    "Algorithm",
    "Aruba",
    "Batch",
    "BatchSizes",
    "Batches",
    "Clock",
    "Comparison",
    "Control",
    "Ditto",
    "Erm",
    "Evaluation",
    "Execution",
    "Federation",
    "Interval",
    "Local",
    "LocalOnly",
    "LocalOptions",
    "LossFn",
    "Meta",
    "Mixture",
    "Model",
    "Monitor",
    "Moreau",
    "NonFiniteUpdate",
    "Objective",
    "Params",
    "Partition",
    "Phase",
    "Pool",
    "Proximal",
    "RandomIterate",
    "Result",
    "Scaffold",
    "Scaling",
    "Schedule",
    "Schema",
    "Scoring",
    "Server",
    "Sharing",
    "Snapshot",
    "Static",
    "Stream",
    "Task",
    "TrainedModel",
    "ValidationData",
    "Visit",
    "WeightedAverage",
    "adaptation_curve",
    "anil",
    "apfl",
    "arrivals",
    "aruba",
    "asynchronous",
    "batch_indices",
    "buffered",
    "classification",
    "client_models",
    "cnn",
    "cnn2",
    "cnn3",
    "compare",
    "controlled",
    "controllers",
    "curvature",
    "datasets",
    "delays",
    "discounts",
    "ditto",
    "dual_lora",
    "evaluate",
    "events",
    "explain_speed",
    "fallah_scoring",
    "fedalt",
    "fedasync",
    "fedasync_mixing",
    "fedavg",
    "fedbabu",
    "fedbn",
    "fedbuff",
    "feddpa",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsa_lora",
    "fedsim",
    "from_equinox",
    "from_flax",
    "from_nnx",
    "lg_fedavg",
    "load",
    "local_only",
    "logistic_regression",
    "lora",
    "mlp",
    "objective",
    "observer",
    "optimizer",
    "partition",
    "per_fedavg",
    "persafl",
    "personalize",
    "pfedme",
    "plot",
    "pretrained",
    "regression",
    "rematerialize",
    "rounds",
    "scaffold",
    "sharing",
    "simulate",
    "split_validation",
    "standardized",
    "step_sizes",
    "synchronous",
    "theory",
    "traces",
    "uniform_arrivals",
    "value",
    "values",
    "work_of",
]


_LAZY = {
    "TrainedModel": ("personax.experiment.trained", "TrainedModel"),
    "compare": ("personax.experiment.comparing", "compare"),
    "events": ("personax.experiment.loggers.events", None),
    "load": ("personax.experiment.loading", "load"),
    "pretrained": ("personax.experiment.pretrained", "pretrained"),
    "plot": ("personax.report.plot", None),
}


def __getattr__(name: str) -> Any:
    """Import slow modules on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, item = _LAZY[name]
    found = importlib.import_module(module)
    return found if item is None else getattr(found, item)
