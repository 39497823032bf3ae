"""FedProx: the local loss, held near the downloaded model."""

import jax

from personax.objectives.objective import (
    Batches,
    Memory,
    Visit,
    fine_tune,
    from_anchor,
    keep_memory,
    nothing_absorbed,
    nothing_kept,
    only_batch,
    only_global,
    outer_only,
    unconstrained,
)
from personax.typing import LossFn, Params
from personax.values import require_nonnegative, value


@value
class Proximal:
    """`f_i(w) + (strength / 2) |w - anchor|^2`: FedProx (Li 2020, (2)), whose mu is `strength`.

    Departures from the paper: the subproblem is solved by the steps of `Local`, as in that paper's experiments, rather
    than to a given inexactness.
    """

    strength: float

    federated = True
    roles = outer_only
    init_personal = nothing_kept
    init_shared = nothing_kept
    begin = from_anchor
    project = unconstrained
    finish = keep_memory
    absorb = nothing_absorbed
    models = only_global
    personalize = fine_tune

    def __post_init__(self) -> None:
        require_nonnegative("strength", self.strength, "With 0 this is plain averaging: `fedavg(...)`.")

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        gradient = jax.grad(loss)(iterate, only_batch(batches, "outer"))
        pulled = jax.tree.map(lambda g, w, a: g + self.strength * (w - a), gradient, iterate, visit.anchor)
        return pulled, memory
