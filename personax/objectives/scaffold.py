"""SCAFFOLD: local steps corrected by the difference of control variates."""

from collections.abc import Callable
from typing import Literal

import jax
import optax

from personax.objectives import objective
from personax.objectives.objective import Memory, Visit
from personax.typing import Batches, Extra, LossFn, Params, Personal, Shared
from personax.values import OBJECTIVES, Static, value


@OBJECTIVES.register(
    summary="The client's loss with control variates",
    source="Karimireddy 2020, Algorithm 1",
    citations=("karimireddy2020",),
)
@value
class Scaffold:
    """The client's loss with control variates, steps along `grad f_i(y) - c_i + c`: Karimireddy 2020, Algorithm 1.

    At the end of a visit, with anchor x, end point y and K local steps, the client computes

        option 1   c_i+ = grad f_i(x), a pass over the client's data
        option 2   c_i+ = c_i - c + (x - y) / (K eta);  if step sizes vary, their sum replaces K eta

    c_i stays with the client and c_i+ - c_i is uploaded. The server adds to c the sum of the uploads divided by the
    total number of clients N, which is the paper's (|S| / N) times the mean. Control variates start at 0.

    Option 2 assumes plain SGD in `Local`, as the paper does. If the server drops an update, the client still keeps its
    new c_i, but c does not change.

    Departures from the paper: none. (Option 1 uses all of the client's data; the paper also allows a part.)
    """

    option: Static[Literal[1, 2]] = 1

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
    begin = objective.from_anchor
    project = objective.unconstrained
    models = objective.only_global
    personalize = objective.fine_tune

    def __post_init__(self) -> None:
        if self.option not in (1, 2):
            raise ValueError(f"`option` must be 1 (a pass over the data) or 2 (from the end point), got {self.option}.")

    def init_personal(self, params: Params) -> Personal:
        return optax.tree.zeros_like(params)

    def init_shared(self, params: Params) -> Shared:
        return optax.tree.zeros_like(params)

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        gradient = jax.grad(loss)(iterate, objective.only_batch(batches, "outer"))
        return jax.tree.map(lambda g, own, all_: g - own + all_, gradient, memory, visit.shared), memory

    def finish(
        self, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
    ) -> tuple[Personal, Extra]:
        if self.option == 1:
            variate = full_gradient(visit.anchor)
        else:
            implied = lambda own, all_, x, y: own - all_ + (x - y) / visit.lr
            variate = jax.tree.map(implied, memory, visit.shared, visit.anchor, end)
        return variate, optax.tree.sub(variate, memory)

    def absorb(self, shared: Shared, total: Extra, num_clients: int) -> Shared:
        return jax.tree.map(lambda c, t: c + t / num_clients, shared, total)
