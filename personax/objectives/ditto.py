"""Ditto: a personal model beside the shared one, pulled toward it."""

import jax

from personax.objectives import objective
from personax.objectives.objective import Memory, Visit
from personax.typing import Batch, Batches, LossFn, Params, Personal, Scalar, Shared
from personax.values import OBJECTIVES, Tuned, require_nonnegative, require_positive, value


@OBJECTIVES.register(
    summary="The client's loss at its own model, pulled toward the shared one, which is trained beside it",
    source="Li 2021, Algorithm 1",
    citations=("li2021",),
)
@value
class Ditto:
    """`h_i(v; w) = f_i(v) + (strength / 2) |v - w|^2` over v, while w minimizes `f_i(w)`: Ditto (Li 2021), lambda.

    At each local step, with the downloaded model w^t and one batch for both (Algorithm 1):

        w_i <- w_i - eta grad f_i(w_i)
        v   <- v   - eta (grad f_i(v) + strength (v - w^t))

    v stays with the client and never influences w. `local_lr` is the step size of v; by default it is eta_t. v starts
    at the initial model, and a client that is not selected keeps it.

    Departures from the paper: v takes as many steps as w (the paper's s is free), on the same batches, as in the
    authors' code, and plain gradient steps whatever optimizer or clipping `Local` gives w. `strength` is the same for
    all clients (their code can also choose it by a client's validation data).

    >>> import personax as px
    >>> px.Ditto(0.5).default_scoring()
    {'model': 'personal'}
    """

    strength: Tuned[float]
    local_lr: float | None = None

    federated = True
    is_plain = False
    is_at_iterate = False
    kept_model = "trained"
    default_scoring = objective.score_personal
    newcomer_model = objective.newcomer_personalizes
    tracked = objective.no_single_function
    theorem = objective.no_theorem
    personal_number = objective.no_number
    citations = objective.no_citations
    roles = objective.outer_only
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed

    def __post_init__(self) -> None:
        require_nonnegative("strength", self.strength, "With 0 the personal model is that of `local_only(...)`.")
        require_positive("local_lr", self.local_lr, "To use the step size of `Local`, leave it out.")

    def init_personal(self, params: Params) -> Personal:
        return params

    def gradients_per_step(self) -> int:
        return 2

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        batch = objective.only_batch(batches, "outer")
        local_lr = visit.lr if self.local_lr is None else self.local_lr
        return jax.grad(loss)(iterate, batch), self._step(loss, memory, visit.anchor, batch, local_lr)

    def _step(self, loss: LossFn, v: Params, w: Params, batch: Batch, lr: Scalar) -> Params:
        """`v - lr grad h_i(v; w)`."""
        pulled = jax.tree.map(lambda g, v, w: g + self.strength * (v - w), jax.grad(loss)(v, batch), v, w)
        return objective.descent_step(v, pulled, lr)

    def models(self, params: Params, personal: Personal) -> dict[str, Params]:
        return {"global": params, "personal": personal}

    def personalize(
        self, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar
    ) -> Params:
        """Steps of v on h_i(v; params), from the client's v; a newcomer's starts at `params`."""
        step = lambda v, batch: (self._step(loss, v, params, batch, lr), None)
        return jax.lax.scan(step, personal, batches)[0]
