"""Per-FedAvg and its generalization: an initialization that adapts well on each client."""

from dataclasses import replace
from typing import Any, Literal

import jax

from personax.curvature import Hvp, exact, require_hvp
from personax.fast.near import Point, Seen, near
from personax.objectives import objective
from personax.objectives.objective import Answer, Memory, Theorems, Visit
from personax.sharing import Patterns, as_patterns, join, names_of, only, require_patterns
from personax.typing import Batch, Batches, LossFn, Params, Personal, Scalar, Shared
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

    With `adapts`, the adaptation moves only these parameters (patterns, see `Sharing`), such as the head in ANIL (Raghu
    2020). With the projection P onto them, the steps are `w_l = w_{l-1} - a P grad f_i(w_{l-1})`, and the factors of
    the gradient are `(I - a H(w_l) P)`. The outer step moves all parameters. No theorem covers this variant.

    Departures from the paper: none.
    """

    adapt_lr: Tuned[float]
    num_adapt_steps: Static[int] = 1
    hvp: Hvp = exact
    curvature_on: Static[Literal["own", "outer"]] = "own"
    adapts: Static[Patterns] = ()

    federated = True
    is_plain = False
    is_at_iterate = False
    kept_model = "none"
    newcomer_model = objective.newcomer_personalizes
    personal_number = objective.no_number
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed
    models = objective.only_global

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapts", as_patterns(self.adapts, "adapts"))
        require_nonnegative("adapt_lr", self.adapt_lr, "For plain averaging use `fedavg(...)`.")
        require_count("num_adapt_steps", self.num_adapt_steps, least=0)
        require_hvp(self.hvp)
        require_one_of("curvature_on", self.curvature_on, ("own", "outer"))

    def default_scoring(self) -> dict[str, Any]:
        tunes = {"tunes": list(self.adapts)} if self.adapts else {}
        return {"model": "adapted", "num_steps": self.num_adapt_steps, "lr": float(self.adapt_lr), **tunes}

    def init_personal(self, params: Params) -> tuple[()]:
        require_patterns(self.adapts, names_of(params), "adapts")
        return ()

    def gradients_per_step(self) -> int:
        return 1 + self.num_adapt_steps

    def tracked(self) -> "Meta":
        return replace(self, hvp=exact)

    def theorem(self, theorems: Theorems[Answer]) -> Answer:
        if self.adapts or (self.hvp.needs_batch and self.curvature_on == "outer"):
            return theorems.none()
        return theorems.meta(float(self.adapt_lr), self.num_adapt_steps, not self.hvp.needs_batch)

    def citations(self) -> tuple[str, ...]:
        several = self.num_adapt_steps != 1  # gMeta generalizes Fallah's single step
        papers = ("fallah2020", "jamali2025") if several else ("fallah2020",)
        return (*papers, "raghu2020") if self.adapts else papers

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
        moved = lambda vector: here.part(vector, self.adapts) if self.adapts else vector

        def adapt(w: Point, batch: Seen) -> tuple[Point, Point]:
            return here.step(w, -self.adapt_lr, moved(here.gradient(w, batch))), w

        def pull_back(d: Point, w: Point, batch: Seen = outer) -> tuple[Point, None]:
            return here.step(d, -self.adapt_lr, here.hvp(self.hvp, w, moved(d), batch)), None

        adapted, path = here.loop(adapt, here.start(), here.batches("adapt"))
        direction = here.gradient(adapted, outer)
        if self.hvp.needs_batch:
            own = () if self.curvature_on == "outer" else (here.batches("curvature"),)
            direction, _ = here.loop(pull_back, direction, path, *own, reverse=True)
        return here.vector(direction), memory

    def personalize(
        self, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar
    ) -> Params:
        """Take one gradient step per batch, of the parameters that adapt."""
        of_moving = lambda part, batch: loss(join(part, params), batch)
        moving = only(params, self.adapts) if self.adapts else params
        return join(objective.descend(of_moving, moving, batches, lr)[0], params)
