"""Personalized federated learning in JAX. Everything public is named here."""

from personax import datasets, partition, theory
from personax.algorithms import (
    Algorithm,
    apfl,
    aruba,
    fedasync,
    fedasync_mixing,
    fedavg,
    fedbuff,
    fedprox,
    local_only,
    per_fedavg,
    persafl,
    pfedme,
    scaffold,
)
from personax.curvature import exact, finite_difference, first_order, relative_difference
from personax.evaluate import adaptation_curve, evaluate, observer, personalize
from personax.federation import Federation
from personax.iterates import RandomIterate, WeightedAverage
from personax.local import Local
from personax.models import cnn, cnn2, cnn3, from_equinox, from_flax, from_nnx, logistic_regression, mlp, standardized
from personax.objectives import Aruba, Erm, LocalOnly, Meta, Mixture, Moreau, Objective, Proximal, Scaffold
from personax.optimizers import optimizer
from personax.protocol import Protocol, fallah_protocol
from personax.results import NonFiniteUpdate, Result, Snapshot
from personax.sampling import BatchSizes, batch_indices
from personax.schedules import (
    Delays,
    Exponential,
    Fixed,
    Gamma,
    Given,
    LogNormal,
    Schedule,
    arrivals,
    persafl_delays,
    rounds,
    uniform_arrivals,
)
from personax.scores import Comparison, Evaluation, Interval, Trajectory
from personax.server import Constant, Hinge, Polynomial, Server, asynchronous, buffered, synchronous
from personax.simulate import simulate
from personax.step_sizes import Decay, InverseDecay, InverseSqrt, StronglyConvex
from personax.stream import Stream
from personax.tasks import classification, regression, rematerialize
from personax.typing import Batch, Model, Task

__all__ = [
    "Algorithm",
    "Aruba",
    "Batch",
    "BatchSizes",
    "Comparison",
    "Constant",
    "Decay",
    "Delays",
    "Erm",
    "Evaluation",
    "Exponential",
    "Federation",
    "Fixed",
    "Gamma",
    "Given",
    "Hinge",
    "Interval",
    "InverseDecay",
    "InverseSqrt",
    "Local",
    "LocalOnly",
    "LogNormal",
    "Meta",
    "Mixture",
    "Model",
    "Moreau",
    "NonFiniteUpdate",
    "Objective",
    "Polynomial",
    "Protocol",
    "Proximal",
    "RandomIterate",
    "Result",
    "Scaffold",
    "Schedule",
    "Server",
    "Snapshot",
    "Stream",
    "StronglyConvex",
    "Task",
    "Trajectory",
    "WeightedAverage",
    "adaptation_curve",
    "apfl",
    "arrivals",
    "aruba",
    "asynchronous",
    "batch_indices",
    "buffered",
    "classification",
    "cnn",
    "cnn2",
    "cnn3",
    "datasets",
    "evaluate",
    "exact",
    "fallah_protocol",
    "fedasync",
    "fedasync_mixing",
    "fedavg",
    "fedbuff",
    "fedprox",
    "finite_difference",
    "first_order",
    "from_equinox",
    "from_flax",
    "from_nnx",
    "local_only",
    "logistic_regression",
    "mlp",
    "observer",
    "optimizer",
    "partition",
    "per_fedavg",
    "persafl",
    "persafl_delays",
    "personalize",
    "pfedme",
    "regression",
    "relative_difference",
    "rematerialize",
    "rounds",
    "scaffold",
    "simulate",
    "standardized",
    "synchronous",
    "theory",
    "uniform_arrivals",
]
