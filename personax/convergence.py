"""What the convergence theorems are about, along a run: the squared gradient norm of what the clients minimise."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from personax import theory
from personax.algorithms import Algorithm
from personax.build import Plan
from personax.curvature import FirstOrder
from personax.iterates import RandomIterate
from personax.objectives import Erm, Meta, Moreau
from personax.objectives.objective import descend
from personax.records import BoundRecord
from personax.results import Snapshot
from personax.sampling import BatchSizes
from personax.schedules import Schedule
from personax.simulate import initial_params
from personax.theory import fallah, gmeta, persafl
from personax.typing import Batch, Params

MOST_CLIENTS, MOST_SAMPLES = 50, 64  # that stand for the federation; constants cost more and take fewer
FEW_CLIENTS, FEW_SAMPLES = 10, 16


@dataclass(frozen=True)
class Convergence:
    """One algorithm's stationarity on a federation: of the server's models and of Fallah's random iterates."""

    plan: Plan
    algorithm: Algorithm

    @property
    def tracker(self) -> RandomIterate | None:
        """What follows the random iterates of Remark 4.7: synchronous rounds with a number of local steps have them."""
        waits = self.algorithm.server.buffer_size is None
        return RandomIterate() if waits and self.algorithm.local.num_steps is not None else None

    @cached_property
    def batches(self) -> Batch:
        """The samples that stand for the clients' losses."""
        return self._sampled(MOST_CLIENTS, MOST_SAMPLES)

    def _sampled(self, num_clients: int, num_samples: int) -> Batch:
        federation = self.plan.federation
        some = federation.select(np.arange(min(num_clients, federation.num_clients)))
        return theory.sample_clients(some, num_samples, key=jax.random.key(0))

    def of(self, models: Params) -> list[float]:
        """|grad F(w)|^2 of each seed's model."""
        region = theory.Region(models, "")
        found = theory.stationarity_along(self.algorithm.objective, self.plan.task.loss, region, self.batches)
        return np.asarray(found.squared_norm, float).tolist()

    def at(self, snapshot: Snapshot) -> tuple[list[float], list[float] | None]:
        """Of the server's models, and of the random iterates where they are followed."""
        iterates = self.of(snapshot.state.tracked) if self.tracker is not None else None
        return self.of(snapshot.params), iterates

    def bound(self, schedule: Schedule, end: Params, rounds: list[int]) -> BoundRecord:
        """The theorem's curve, with constants measured at the first seed's first and last model; or why there is none.

        A synchronous run has one number for each of `rounds`; an asynchronous one, whose step size its theorem ties to
        the whole length, one for the last.
        """
        first = initial_params(self.plan.task, self.plan.federation, key=self.plan.keys[0])
        region = theory.path([first, end])
        loss, few = self.plan.task.loss, self._sampled(FEW_CLIENTS, FEW_SAMPLES)
        constants = theory.constants_of(theory.measure(loss, region, few, key=jax.random.key(0), num_steps=10))
        gap = float(np.mean([self._objective_value(first, client) for client in _each(few)]))
        try:
            waits = self.algorithm.server.buffer_size is None
            if not waits:
                rounds = rounds[-1:]
            bound = self._synchronous if waits else self._asynchronous
            values = [bound(schedule, constants, gap, num) for num in rounds]
        except ValueError as error:
            return BoundRecord(f"No theorem covers this run: {error}", [], [])
        source = "Fallah (111), gMeta Theorem 8" if waits else "PersA-FL Theorems 1 to 3"
        words = (
            f"{source}, corrected as docs/theory.md says, with constants measured at the first and the last model and "
            "Hessian-free products taken as exact"
        )
        return BoundRecord(words, rounds, values)

    def _objective_value(self, params: Params, batch: Batch) -> float:
        """F_i(w), an upper bound of F_i(w) - F* because losses are not negative; for the envelope f_i(w) is one."""
        objective, loss = self.algorithm.objective, self.plan.task.loss
        if isinstance(objective, Meta):
            steps = jax.tree.map(lambda leaf: jnp.stack([leaf] * objective.num_adapt_steps), batch)
            params = descend(loss, params, steps, objective.adapt_lr)[0]
        return float(loss(params, batch))

    def _synchronous(self, schedule: Schedule, constants: theory.Constants, gap: float, num_rounds: int) -> float:
        objective, local = self.algorithm.objective, self.algorithm.local
        if isinstance(objective, Moreau):
            raise ValueError("the papers have none for a synchronous Moreau envelope.")
        lr, num_steps = self._plain_local()
        meta = objective if isinstance(objective, Meta) else Meta(0.0)  # no adaptation: FedAvg
        adapt_lr, nu = float(meta.adapt_lr), meta.num_adapt_steps
        sizes = local.batch_size if isinstance(local.batch_size, BatchSizes) else BatchSizes(local.batch_size)
        error = gmeta.first_order_error if isinstance(meta.hvp, FirstOrder) else gmeta.exact_error
        cohort = schedule.num_events // int(schedule.round_ends.sum())
        training = fallah.Training(lr, num_steps, num_rounds, cohort, schedule.num_clients)
        level = gmeta.meta_smoothness(constants, adapt_lr, nu)
        return fallah.stationarity_bound(
            training,
            gap,
            level,
            error(constants, adapt_lr, nu, sizes),
            gmeta.meta_spread(constants, adapt_lr, nu),
        )

    def _asynchronous(self, schedule: Schedule, constants: theory.Constants, gap: float, num_rounds: int) -> float:
        objective, batch_size = self.algorithm.objective, self.algorithm.local.size_of("outer")
        lr, num_steps = self._plain_local()
        del num_rounds  # it is the last one
        training = persafl.Training(schedule.num_events, num_steps, int(schedule.staleness().max()))
        if isinstance(objective, Meta):
            adapt_lr = float(objective.adapt_lr)
            _require_lr(lr, training, persafl.meta_smoothness(constants, adapt_lr))
            return persafl.persafl_meta_bound(training, gap, constants, adapt_lr, batch_size)
        if isinstance(objective, Moreau):
            strength, tolerance = float(objective.strength), float(objective.tolerance or 0.0)
            _require_lr(lr, training, persafl.moreau_smoothness(constants, strength))
            return persafl.persafl_moreau_bound(training, gap, constants, strength, tolerance, batch_size)
        _require_lr(lr, training, constants.smoothness)
        return persafl.fedasync_bound(training, gap, constants, batch_size)

    def _plain_local(self) -> tuple[float, int]:
        local, server = self.algorithm.local, self.algorithm.server
        if callable(local.lr) or local.num_steps is None or float(server.lr) != 1:
            raise ValueError("the theorems are for a constant `lr`, a number of local steps and a server step of 1.")
        return float(local.lr), local.num_steps


def _require_lr(lr: float, training: persafl.Training, smoothness: float) -> None:
    wanted = persafl.local_lr(training, smoothness)
    if not np.isclose(lr, wanted, rtol=0.01):
        raise ValueError(f"PersA-FL's have `lr` = 1 / (Q sqrt(L T)) = {wanted:.3g}, got {lr:.3g}.")


def can_follow(algorithm: Algorithm) -> bool:
    """Whether an algorithm's clients minimise one function together."""
    return isinstance(algorithm.objective, Erm | Meta | Moreau)


def _each(batches: Batch) -> list[Batch]:
    return [jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in range(len(batches.weight))]
