"""APFL: each client mixes its own model with its local copy of the shared model."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from personax.objectives import objective
from personax.objectives.objective import Memory, Objective, Visit
from personax.typing import Array, Batch, Batches, LossFn, Params, Personal, Scalar, Shared
from personax.values import (
    OBJECTIVES,
    Static,
    TunedShare,
    require,
    require_nonnegative,
    require_one_of,
    require_positive,
    value,
)


class Mixed(NamedTuple):
    """The personal state of an APFL client: its own model v and its mixing weight."""

    model: Params
    mix: Array


@OBJECTIVES.register(
    summary="The client's loss at a mixture of its own model and the shared one",
    source="APFL 2020, (3) to (6)",
    citations=("deng2020",),
)
@value
class Mixture:
    """The client's loss at a mixture of its own model v and the shared model w: APFL (3), (4).

    v minimizes `f_i(mix v + (1 - mix) w)`, while w minimizes `f_i(w)`; `mix` is the paper's alpha_i. Each local step
    uses one batch. With v_bar = mix v + (1 - mix) w_i, APFL (5), (6):

        w_i <- P(w_i - eta_t grad f_i(w_i))
        v   <- P(v   - eta_t grad_v f_i(v_bar))          grad_v carries the factor mix
        mix <- mix   - eta_t <v - w_i, grad f_i(v_bar)>,  clipped to [0, 1]

    All right-hand sides use the values before the step. Parameters are mixed, not outputs. v starts at the initial
    model. Clients that are not selected keep v and their mixing weight. v and the mixing weight always take plain
    gradient steps; `Local`'s optimizer and clipping apply to w alone. The very first update of the weight is 0,
    because v = w at that point.

    Args:
        mix: the initial mixing weight.
        mix_lr: the step size of the mixing weight; by default eta_t.
        update_mix: when the mixing weight is updated: `"never"`, at the first step of each `"round"` as in the text
            above (6), or at each `"step"`.
        local_lr: the step size of v; by default eta_t.
        radius: P projects onto the ball of this radius around 0; by default there is no projection.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.Mixture(0.5, update_mix="step").default_scoring()
    {'model': 'personal'}
    """

    mix: TunedShare[float]
    mix_lr: float | None = None
    update_mix: Static[Literal["never", "round", "step"]] = "round"
    local_lr: float | None = None
    radius: float | None = None

    federated = True
    is_plain = False
    is_at_iterate = False
    kept_model = "trained"
    default_scoring = objective.score_personal
    newcomer_model = objective.newcomer_personalizes
    tracked = objective.no_single_function
    theorem = objective.no_theorem
    citations = objective.no_citations
    roles = objective.outer_only
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed

    def __post_init__(self) -> None:
        require(lambda v: (v >= 0) & (v <= 1), "mix", self.mix, "lie in [0, 1]")
        require_one_of("update_mix", self.update_mix, ("never", "round", "step"))
        require_nonnegative("mix_lr", self.mix_lr, "For a fixed weight use `update_mix='never'`.")
        require_nonnegative("local_lr", self.local_lr)
        require_positive("radius", self.radius, "To disable the projection, omit it.")

    def init_personal(self, params: Params) -> Personal:
        return Mixed(params, jnp.asarray(self.mix, jax.tree.leaves(params)[0].dtype))

    def gradients_per_step(self) -> int:
        return 2

    def personal_number(self, personal: Mixed) -> tuple[str, Array]:
        return "mixing weight", personal.mix

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        batch = objective.only_batch(batches, "outer")
        mixed_loss = lambda personal: loss(mix_models(personal, iterate), batch)
        slope = jax.grad(mixed_loss)(memory)
        local_lr = visit.lr if self.local_lr is None else self.local_lr
        model = self.project(objective.descent_step(memory.model, slope.model, local_lr))
        return jax.grad(loss)(iterate, batch), Mixed(model, self._next_mix(memory.mix, slope.mix, visit))

    def _next_mix(self, mix: Array, slope: Array, visit: Visit) -> Array:
        if self.update_mix == "never":
            return mix
        moved = jnp.clip(mix - (visit.lr if self.mix_lr is None else self.mix_lr) * slope, 0, 1).astype(mix.dtype)
        return moved if self.update_mix == "step" else jnp.where(visit.clock.step == 0, moved, mix)

    def project(self, iterate: Params) -> Params:
        return iterate if self.radius is None else objective.shrink_to(iterate, self.radius)

    def models(self, params: Params, personal: Personal) -> dict[str, Params]:
        return {"global": params, "local": personal.model, "personal": mix_models(personal, params)}

    def personalize(
        self, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar
    ) -> Params:
        """Take steps of v alone, then mix: APFL (7). A newcomer's v starts at `params`."""

        def step(own: Mixed, batch: Batch) -> tuple[Mixed, None]:
            slope = jax.grad(lambda v: loss(mix_models(Mixed(v, own.mix), params), batch))(own.model)
            return Mixed(self.project(objective.descent_step(own.model, slope, lr)), own.mix), None

        return mix_models(jax.lax.scan(step, personal, batches)[0], params)


def mix_models(personal: Mixed, params: Params) -> Params:
    """Return `mix v + (1 - mix) w`, parameter by parameter."""
    return jax.tree.map(lambda v, w: personal.mix * v + (1 - personal.mix) * w, personal.model, params)


def mixes_models(given: Objective) -> bool:
    """Return True if the personal state of an objective is a model and its mixing weight."""
    return isinstance(jax.eval_shape(given.init_personal, {"w": jnp.zeros(())}), Mixed)
