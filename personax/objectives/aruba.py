"""ARUBA: per-coordinate step sizes learned across clients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from personax.objectives import objective
from personax.objectives.objective import Memory, Visit
from personax.objectives.statistics import updated
from personax.typing import Array, Batch, Batches, Extra, LossFn, Params, Personal, Scalar, Shared, StatisticsFn
from personax.values import OBJECTIVES, Tuned, require_nonnegative, require_positive, value


class Geometry(NamedTuple):
    """Running sums of squared distances and squared gradients, with the number of tasks.

    As shared state they cover all visits so far, and the count is the t of the next visit. As an upload they cover
    one visit.
    """

    distances: Params
    gradients: Params
    num_tasks: Array


@OBJECTIVES.register(
    summary="The client's loss, with learned step sizes",
    source="Khodak 2019, Algorithm 2",
    citations=("khodak2019",),
)
@value
class Aruba:
    """ARUBA, a learned step size for each coordinate: Khodak 2019, Algorithm 2.

        w <- w - eta * grad f_i(w),     eta = sqrt(b / g),     elementwise.

    b and g start at epsilon^2 and zeta^2 (`distance_scale`, `gradient_scale`). Visit t = 1, 2, ..., with first iterate
    phi, last iterate theta and gradients g_1 ... g_m, updates them:

        b <- b + epsilon^2 / (t + 1)^p + (phi - theta)^2 / 2
        g <- g + zeta^2 / (t + 1)^p + sum_j g_j^2,           p = `power`.

    After training, a client refines the shared model with ARUBA++: the same steps, except that each one adds
    `refinement` times the squared gradient to g, so the step sizes shrink along the way.

    `Local`'s step size multiplies eta; the recipe sets it to 1.

    Departures from the paper: all clients of a round use the same phi and eta, because they train at the same time.

    >>> import personax as px
    >>> px.Aruba().roles()
    {'outer': 1}
    """

    distance_scale: Tuned[float] = 0.05
    gradient_scale: float = 1.0
    power: float = 1.0
    refinement: float = 0.0

    federated = True
    is_plain = False
    is_at_iterate = True
    kept_model = "none"
    default_scoring = objective.score_global
    newcomer_model = objective.newcomer_personalizes
    gradients_per_step = objective.one_gradient
    tracked = objective.no_single_function
    theorem = objective.no_theorem
    personal_number = objective.no_number
    citations = objective.no_citations
    roles = objective.outer_only
    init_personal = objective.nothing_kept
    project = objective.unconstrained
    models = objective.only_global

    def __post_init__(self) -> None:
        require_positive("distance_scale", self.distance_scale)
        require_positive("gradient_scale", self.gradient_scale)
        require_positive("power", self.power)
        require_nonnegative("refinement", self.refinement)

    def init_shared(self, params: Params) -> Shared:
        full = lambda scale: jax.tree.map(lambda w: jnp.full_like(w, scale**2), params)
        return Geometry(full(self.distance_scale), full(self.gradient_scale), jnp.asarray(1))

    def begin(self, anchor: Params, personal: Personal) -> tuple[Params, Memory]:
        return anchor, optax.tree.zeros_like(anchor)

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        gradient = jax.grad(loss)(iterate, objective.only_batch(batches, "outer"))
        return _scaled(gradient, visit.shared), _plus_squares(memory, gradient, 1)

    def finish(
        self, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
    ) -> tuple[Personal, Extra]:
        distances = jax.tree.map(lambda a, w: (a - w) ** 2 / 2, visit.anchor, end)
        return (), Geometry(distances, memory, jnp.asarray(1))

    def absorb(self, shared: Shared, total: Extra, num_clients: int) -> Shared:
        def prior(task: Array, so_far: Array) -> Array:
            return so_far + (shared.num_tasks + task + 1.0) ** -self.power

        weight = jax.lax.fori_loop(0, total.num_tasks, prior, jnp.zeros_like(self.power * 1.0))
        grow = lambda scale: lambda old, new: old + (scale**2 * weight).astype(old.dtype) + new
        return Geometry(
            jax.tree.map(grow(self.distance_scale), shared.distances, total.distances),
            jax.tree.map(grow(self.gradient_scale), shared.gradients, total.gradients),
            shared.num_tasks + total.num_tasks,
        )

    def personalize(
        self,
        loss: LossFn,
        params: Params,
        personal: Personal,
        shared: Shared,
        batches: Batch,
        lr: Scalar,
        statistics: StatisticsFn | None = None,
    ) -> Params:
        """Refine the model with ARUBA++, one step per batch; `lr` multiplies the learned step sizes."""

        def step(carry: tuple[Params, Geometry], batch: Batch) -> tuple[tuple[Params, Geometry], None]:
            w, geometry = carry
            gradient = jax.grad(loss)(w, batch)
            moved = jax.tree.map(lambda w, d: w - lr * d, w, _scaled(gradient, geometry))
            squares = _plus_squares(geometry.gradients, gradient, self.refinement)
            moved = updated(moved, None if statistics is None else statistics(w, batch))
            return (moved, geometry._replace(gradients=squares)), None

        return jax.lax.scan(step, (params, shared), batches)[0][0]


def _scaled(gradient: Params, geometry: Geometry) -> Params:
    return jax.tree.map(lambda g, b, s: jnp.sqrt(b / s) * g, gradient, geometry.distances, geometry.gradients)


def _plus_squares(total: Params, gradient: Params, factor: Scalar) -> Params:
    return jax.tree.map(lambda s, g: s + factor * g**2, total, gradient)
