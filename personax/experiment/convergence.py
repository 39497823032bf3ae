"""The quantity of the convergence theorems during a run: the squared gradient norm of the clients' mean objective."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax import theory
from personax.algorithms import Algorithm
from personax.experiment.build import Study
from personax.experiment.records import BoundRecord
from personax.objectives.objective import descend
from personax.schedules import Schedule
from personax.simulation.averages import RandomIterate
from personax.simulation.checks import find_statistics
from personax.simulation.results import Snapshot
from personax.simulation.simulate import initial_params
from personax.theory import fallah, gmeta, persafl
from personax.typing import Batch, LossFn, Params

_NOT_WHOLE = "both need one model that all clients share completely, but here a part is personal or frozen."
_STATISTICS = "both need losses that are means over samples, but batch normalization makes them depend on the batch."
MOST_CLIENTS, MOST_SAMPLES = 50, 64  # to represent the federation; constants are expensive and use fewer
FEW_CLIENTS, FEW_SAMPLES = 10, 16


@dataclass(frozen=True)
class Convergence:
    """The stationarity of an algorithm on a federation, at the server's models and at Fallah's random iterates."""

    plan: Study
    algorithm: Algorithm

    @cached_property
    def batches(self) -> Batch:
        """Return the samples that represent the clients' losses."""
        return self._sampled(MOST_CLIENTS, MOST_SAMPLES)

    def _sampled(self, num_clients: int, num_samples: int) -> Batch:
        federation = self.plan.federation
        some = federation.select(np.arange(min(num_clients, federation.num_clients)))
        return theory.sample_clients(some, num_samples, key=jax.random.key(0))

    def of(self, models: Params) -> list[float]:
        """Compute |grad F(w)|^2 for each seed's model."""
        region = theory.Region(models, "")
        found = theory.stationarity_along(self.algorithm.objective, self.plan.task.loss, region, self.batches)
        return np.asarray(found.squared_norm, float).tolist()

    def at(self, snapshot: Snapshot) -> tuple[list[float], list[float] | None]:
        """Measure the server's models, and the random iterates if they are tracked."""
        iterates = None if tracker_of(self.algorithm) is None else self.of(snapshot.state.tracked)
        return self.of(snapshot.params), iterates

    def bound(self, schedule: Schedule, end: Params, rounds: list[int]) -> BoundRecord:
        """Return the theorem's curve, with constants measured at the first seed's first and last model, or a reason.

        A synchronous run has one number for each of `rounds`; an asynchronous run, whose theorem ties the step size to
        its length, has one for the last.
        """
        first = initial_params(self.plan.task, self.plan.federation, key=self.plan.keys[0])
        region = theory.path([first, end])
        loss, few = self.plan.task.loss, self._sampled(FEW_CLIENTS, FEW_SAMPLES)
        constants = theory.constants_of(theory.measure(loss, region, few, key=jax.random.key(0), num_steps=10))
        objective = self.algorithm.objective
        starts = [objective.theorem(_FirstValue(loss, first, client)) for client in _each(few)]
        run = _CoveredRun(self.algorithm, schedule, constants, float(np.mean(starts)))
        waits = self.algorithm.server.is_synchronous
        if not waits:
            rounds = rounds[-1:]
        theorems = _RoundTheorems if waits else _ArrivalTheorems
        try:
            run.require_losses()
            values = [objective.theorem(theorems(run, num)) for num in rounds]
        except theory.NotCovered as error:
            return BoundRecord(f"No theorem covers this run: {error}", [], [])
        source = "Fallah (111), gMeta Theorem 8" if waits else "PersA-FL Theorems 1 to 3"
        words = (
            f"{source}, corrected as in docs/theory.md, with constants measured at the first and the last model and "
            "Hessian-free products treated as exact"
        )
        return BoundRecord(words, rounds, values)


class _CoveredRun(NamedTuple):
    """The quantities of a run that a theorem needs. `gap` is an upper bound on F(w_0) - F*."""

    algorithm: Algorithm
    schedule: Schedule
    constants: theory.Constants
    gap: float

    def require_losses(self) -> None:
        """Check the theorems' assumptions on every loss."""
        if not 0 <= self.gap < np.inf or not 0 < self.constants.smoothness < np.inf:
            found = f"a mean of {self.gap:.3g} and a smoothness of {self.constants.smoothness:.3g}"
            raise theory.NotCovered(f"losses must be smooth, finite and nonnegative, got {found}.")

    def plain_local(self) -> tuple[float, int]:
        """Return the constant step size and the number of local steps that all theorems assume."""
        local, server = self.algorithm.local, self.algorithm.server
        if callable(local.lr) or float(local.lr) <= 0 or local.num_steps is None or float(server.lr) != 1:
            raise theory.NotCovered(
                "the theorems need a constant positive `lr`, a fixed number of local steps and a server step size of 1."
            )
        return float(local.lr), local.num_steps


@dataclass(frozen=True)
class _FirstValue:
    """The value F_i(w_0), which bounds F_i(w_0) - F* for nonnegative losses; f_i(w_0) bounds it for the envelope."""

    loss: LossFn
    params: Params
    batch: Batch

    def plain(self) -> float:
        return float(self.loss(self.params, self.batch))

    def meta(self, adapt_lr: float, num_adapt_steps: int, is_first_order: bool) -> float:
        steps = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_adapt_steps), self.batch)
        return float(self.loss(descend(self.loss, self.params, steps, adapt_lr)[0], self.batch))

    def envelope(self, strength: float, tolerance: float) -> float:
        return self.plain()

    def none(self) -> float:
        return self.plain()


@dataclass(frozen=True)
class _RoundTheorems:
    """The bound after a number of synchronous rounds: Fallah (111), gMeta Theorem 8."""

    run: _CoveredRun
    num_rounds: int

    def plain(self) -> float:
        return self.meta(0.0, 1, is_first_order=False)  # no adaptation: FedAvg

    def meta(self, adapt_lr: float, num_adapt_steps: int, is_first_order: bool) -> float:
        (lr, num_steps), schedule, constants = self.run.plain_local(), self.run.schedule, self.run.constants
        error = gmeta.first_order_error if is_first_order else gmeta.exact_error
        cohort = schedule.num_events // int(schedule.round_ends.sum())
        training = fallah.RoundTraining(lr, num_steps, self.num_rounds, cohort, schedule.num_clients)
        level = gmeta.meta_smoothness(constants, adapt_lr, num_adapt_steps)
        return fallah.stationarity_bound(
            training,
            self.run.gap,
            level,
            error(constants, adapt_lr, num_adapt_steps, self.run.algorithm.local.sizes),
            gmeta.meta_spread(constants, adapt_lr, num_adapt_steps),
        )

    def envelope(self, strength: float, tolerance: float) -> float:
        raise theory.NotCovered("the papers have no theorem for a synchronous Moreau envelope.")

    def none(self) -> float:
        raise theory.NotCovered("the papers have no theorem for this objective.")


@dataclass(frozen=True)
class _ArrivalTheorems:
    """The bound at the end of an asynchronous run: PersA-FL Theorems 1 to 3."""

    run: _CoveredRun
    num_rounds: int

    @property
    def training(self) -> persafl.ArrivalTraining:
        num_steps = self.run.plain_local()[1]
        return persafl.ArrivalTraining(
            self.run.schedule.num_events, num_steps, int(self.run.schedule.staleness().max())
        )

    @property
    def batch_size(self) -> int:
        return self.run.algorithm.local.size_of("outer")

    def plain(self) -> float:
        self._require_lr(self.run.constants.smoothness)
        return persafl.fedasync_bound(self.training, self.run.gap, self.run.constants, self.batch_size)

    def meta(self, adapt_lr: float, num_adapt_steps: int, is_first_order: bool) -> float:
        constants = self.run.constants
        self._require_lr(persafl.meta_smoothness(constants, adapt_lr))
        return persafl.persafl_meta_bound(self.training, self.run.gap, constants, adapt_lr, self.batch_size)

    def envelope(self, strength: float, tolerance: float) -> float:
        constants = self.run.constants
        self._require_lr(persafl.moreau_smoothness(constants, strength))
        given = (self.training, self.run.gap, constants, strength, tolerance, self.batch_size)
        return persafl.persafl_moreau_bound(*given)

    def none(self) -> float:
        raise theory.NotCovered("the papers have no theorem for this objective.")

    def _require_lr(self, smoothness: float) -> None:
        lr, wanted = self.run.plain_local()[0], persafl.local_lr(self.training, smoothness)
        if not np.isclose(lr, wanted, rtol=0.01):
            raise theory.NotCovered(f"PersA-FL's theorems need `lr` = 1 / (Q sqrt(L T)) = {wanted:.3g}, got {lr:.3g}.")


def why_not(plan: Study, algorithm: Algorithm) -> str:
    """Return the reason why theorems and stationarity do not apply to any run of this model; "" if they may."""
    if algorithm.sharing.divides:
        return _NOT_WHOLE
    return "" if find_statistics(plan.task, *plan.federation.first_sample) is None else _STATISTICS


def can_follow(algorithm: Algorithm) -> bool:
    """Return True if an algorithm's clients jointly minimize one function."""
    return algorithm.objective.tracked() is not None


def tracker_of(algorithm: Algorithm) -> RandomIterate | None:
    """Return a tracker of the random iterates of Remark 4.7, for synchronous rounds with a fixed number of steps."""
    waits = algorithm.server.is_synchronous
    return RandomIterate() if waits and algorithm.local.num_steps is not None else None


def _each(batches: Batch) -> list[Batch]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in range(len(batches.weight))]
