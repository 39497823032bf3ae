"""FedProx: the local loss with a pull toward the downloaded model."""

import jax

from personax.objectives import objective
from personax.objectives.objective import Memory, Visit
from personax.typing import Batches, LossFn, Params
from personax.values import OBJECTIVES, Tuned, require_nonnegative, value


@OBJECTIVES.register(
    summary="The client's loss plus a pull toward the downloaded model",
    source="Li 2020, (2)",
    citations=("li2020",),
)
@value
class Proximal:
    """The client's loss plus a proximal term: FedProx (Li 2020, (2)), whose mu is `strength`.

        f_i(w) + (strength / 2) |w - anchor|^2

    Departures from the paper: the subproblem is solved with the steps of `Local`, as in that paper's experiments, not
    up to a given inexactness.

    >>> import personax as px
    >>> px.Algorithm(px.Proximal(0.1), px.Local(0.1, num_steps=5), px.synchronous()).objective
    Proximal(strength=0.1)
    """

    strength: Tuned[float]

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
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed
    models = objective.only_global
    personalize = objective.fine_tune

    def __post_init__(self) -> None:
        require_nonnegative("strength", self.strength, "For plain averaging use `fedavg(...)`.")

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        gradient = jax.grad(loss)(iterate, objective.only_batch(batches, "outer"))
        pulled = jax.tree.map(lambda g, w, a: g + self.strength * (w - a), gradient, iterate, visit.anchor)
        return pulled, memory
