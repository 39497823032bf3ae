"""Personalized federated learning in JAX. Everything public is named here."""

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
from personax.federation import Federation
from personax.iterates import RandomIterate, WeightedAverage
from personax.local import Local
from personax.models import cnn, from_equinox, from_flax, logistic_regression, mlp
from personax.objectives import Aruba, Erm, LocalOnly, Meta, Mixture, Moreau, Objective, Proximal, Scaffold
from personax.optimizers import optimizer
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
from personax.server import Constant, Hinge, Polynomial, Server, asynchronous, buffered, synchronous
from personax.simulate import NonFiniteUpdate, Result, Snapshot, simulate
from personax.step_sizes import Decay, InverseDecay, InverseSqrt, StronglyConvex
from personax.tasks import classification, regression
from personax.typing import Batch, Model, Task
