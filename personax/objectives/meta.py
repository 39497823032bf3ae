"""Per-FedAvg and its generalization: an initialization that adapts well on each client."""

from dataclasses import replace
from typing import Any, Literal

import jax

from personax.curvature import Hvp, exact, require_hvp
from personax.fast.near import Point, Seen, near
from personax.objectives import objective
from personax.objectives.objective import Answer, Memory, Theorems, Visit
from personax.typing import Batches, LossFn, Params
from personax.values import OBJECTIVES, Static, Tuned, require_count, require_nonnegative, require_one_of, value


@OBJECTIVES.register(
    summary="The client's loss after any number of adaptation steps",
    source="Fallah 2020, (3) and (4); gMeta 2025, (7), (8) and (11); PersA-FL 2023, (4)",
    citations=("fallah2020", "jamali2025", "toghani2023"),
)
@value
class Meta:
    """The client's loss after adaptation, `F_i(w) = f_i(w_nu)`: Per-FedAvg and gMeta.

    The adaptation takes nu = `num_adapt_steps` gradient steps from w_0 = w:

        w_l = w_{l-1} - a grad f_i(w_{l-1}),     a = adapt_lr.

    This is Fallah (3), (4) and PersA-FL (4) for one step, and gMeta (7) for any number. Its gradient, gMeta (8), is

        (I - a H(w_0)) (I - a H(w_1)) ... (I - a H(w_{nu-1})) grad f_i(w_nu).

    It is estimated with independent batches: gMeta (11); Fallah (8) and PersA-FL (9) for nu = 1. The papers use the
    letter D' for different batches:

        adapt      nu batches, for w_1 ... w_nu               D in Fallah, D_{i,0..nu-1} in gMeta, D' in PersA-FL
        outer      one batch, for grad f_i(w_nu)              D' in Fallah, D_{i,nu} in gMeta, D in PersA-FL
        curvature  nu batches, for H(w_0) ... H(w_{nu-1})     D'' in Fallah and PersA-FL, D' in gMeta

    `hvp=exact` is gMeta's Algorithm 2. `first_order` is gMeta (31), Algorithm 3 and Fallah (112), and draws no
    curvature batches. `finite_difference` is gMeta (35)-(36), Algorithm 4 and Fallah (120)-(121).

    With `curvature_on="outer"`, every Hessian is evaluated on the outer batch and no curvature batches are drawn. This
    follows the text below Fallah (8) and the last line of the inner loop of Fallah's Algorithm 1, which print D' for
    the Hessian. The lemmas assume independent batches as in (8), so no theorem covers this variant.

    Departures from the paper: none.
    """

    adapt_lr: Tuned[float]
    num_adapt_steps: Static[int] = 1
    hvp: Hvp = exact
    curvature_on: Static[Literal["own", "outer"]] = "own"

    federated = True
    is_plain = False
    is_at_iterate = False
    newcomer_model = objective.newcomer_personalizes
    personal_number = objective.no_number
    init_personal = objective.nothing_kept
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed
    models = objective.only_global
    personalize = objective.fine_tune

    def __post_init__(self) -> None:
        require_nonnegative("adapt_lr", self.adapt_lr, "For plain averaging use `fedavg(...)`.")
        require_count("num_adapt_steps", self.num_adapt_steps, least=0)
        require_hvp(self.hvp)
        require_one_of("curvature_on", self.curvature_on, ("own", "outer"))

    def default_scoring(self) -> dict[str, Any]:
        return {"model": "adapted", "num_steps": self.num_adapt_steps, "lr": float(self.adapt_lr)}

    def gradients_per_step(self) -> int:
        return 1 + self.num_adapt_steps

    def tracked(self) -> "Meta":
        return replace(self, hvp=exact)

    def theorem(self, theorems: Theorems[Answer]) -> Answer:
        if self.hvp.needs_batch and self.curvature_on == "outer":
            return theorems.none()
        return theorems.meta(float(self.adapt_lr), self.num_adapt_steps, not self.hvp.needs_batch)

    def citations(self) -> tuple[str, ...]:
        several = self.num_adapt_steps != 1  # gMeta generalizes Fallah's single step
        return ("fallah2020", "jamali2025") if several else ("fallah2020",)

    def roles(self) -> dict[str, int]:
        num_curvature = self.num_adapt_steps if self.hvp.needs_batch and self.curvature_on == "own" else 0
        return {"adapt": self.num_adapt_steps, "outer": 1, "curvature": num_curvature}

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        if self.num_adapt_steps == 0:
            return jax.grad(loss)(iterate, objective.only_batch(batches, "outer")), memory
        here = near(loss, iterate, batches, 1 + self.num_adapt_steps, self.hvp)
        outer = here.batch("outer")

        def adapt(w: Point, batch: Seen) -> tuple[Point, Point]:
            return here.step(w, -self.adapt_lr, here.gradient(w, batch)), w

        def pull_back(d: Point, w: Point, batch: Seen = outer) -> tuple[Point, None]:
            return here.step(d, -self.adapt_lr, here.hvp(self.hvp, w, d, batch)), None

        adapted, path = here.loop(adapt, here.start(), here.batches("adapt"))
        direction = here.gradient(adapted, outer)
        if self.hvp.needs_batch:
            own = () if self.curvature_on == "outer" else (here.batches("curvature"),)
            direction, _ = here.loop(pull_back, direction, path, *own, reverse=True)
        return here.vector(direction), memory
