"""The Moreau envelope, which keeps a personal model near the shared one: pFedMe and PersA-FL-ME."""

import jax
import optax

from personax.fast.backends import unroll_length
from personax.fast.near import Point, near
from personax.objectives import objective
from personax.objectives.objective import Answer, Memory, Theorems, Visit
from personax.typing import Array, Batch, Batches, LossFn, Params, Personal, Scalar, Shared
from personax.values import OBJECTIVES, Static, Tuned, require_count, require_nonnegative, require_positive, value


@OBJECTIVES.register(
    summary="The Moreau envelope of the client's loss",
    source="Dinh 2020; PersA-FL 2023, (6) to (8) and (10)",
    citations=("dinh2020", "toghani2023"),
)
@value
class Moreau:
    """The Moreau envelope of the client's loss: pFedMe and PersA-FL-ME.

        F_i(w) = min_theta f_i(theta) + (strength / 2) |theta - w|^2

    This is PersA-FL (6), whose lambda is `strength`. The gradient is `strength (w - theta_i(w))`: PersA-FL (7), (8),
    (10) and Algorithm 2, Option C. theta_i(w) is found by gradient descent from w on the batch of the local step, with
    `num_prox_steps` steps of size `prox_lr` (PersA-FL appendix D: 10). With a `tolerance`, descent stops as soon as the
    norm of the inner problem's gradient is at most `tolerance`, and after `num_prox_steps` steps in any case.

    The personal model is theta, not w. The client keeps the last theta, and `personalize` recomputes it from any w.

    Departures from the paper: none. (The papers do not state where the inner problem starts; here it starts at w.)

    >>> import personax as px
    >>> px.Moreau(15.0, prox_lr=0.05, num_prox_steps=5).gradients_per_step()
    6
    """

    strength: Tuned[float]
    prox_lr: Tuned[float]
    num_prox_steps: Static[int]
    tolerance: float | None = None

    federated = True
    is_plain = False
    is_at_iterate = False
    kept_model = "latest"
    default_scoring = objective.score_personal
    newcomer_model = objective.newcomer_personalizes
    personal_number = objective.no_number
    roles = objective.outer_only
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed

    def __post_init__(self) -> None:
        require_positive("strength", self.strength, "To train without sharing, use `local_only(...)`.")
        require_positive("prox_lr", self.prox_lr)
        require_count("num_prox_steps", self.num_prox_steps)
        require_nonnegative("tolerance", self.tolerance)

    def init_personal(self, params: Params) -> Personal:
        return params

    def gradients_per_step(self) -> int:
        return 1 + self.num_prox_steps

    def tracked(self) -> "Moreau":
        return self

    def theorem(self, theorems: Theorems[Answer]) -> Answer:
        return theorems.envelope(float(self.strength), float(self.tolerance or 0.0))

    def citations(self) -> tuple[str, ...]:
        return ("dinh2020",)

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        theta = self.prox(loss, iterate, objective.only_batch(batches, "outer"))
        return jax.tree.map(lambda w, t: self.strength * (w - t), iterate, theta), theta

    def prox(self, loss: LossFn, center: Params, batch: Batch) -> Params:
        """Solve the inner problem on one batch, `theta_i(center)`: gradient descent from the center, PersA-FL (8)."""
        of_role = {"outer": jax.tree.map(lambda leaf: leaf[None], batch)}
        here = near(loss, center, of_role, self.num_prox_steps)
        seen = here.batch("outer")
        w = here.start(seen)

        def slope(theta: Point) -> Point:
            return jax.tree.map(lambda g, t, w: g + self.strength * (t - w), here.gradient(theta, seen), theta, w)

        def step(theta: Point, slope: Point) -> Point:
            return here.step(theta, -self.prox_lr, slope)

        tolerance = self.tolerance
        if tolerance is None:
            unroll = unroll_length(self.num_prox_steps)
            descend = lambda _, theta: step(theta, slope(theta))
            return here.params(jax.lax.fori_loop(0, self.num_prox_steps, descend, w, unroll=unroll))

        def unsolved(search: tuple[Point, Point, Array | int]) -> Array:
            return (optax.tree.norm(here.vector(search[1])) > tolerance) & (search[2] < self.num_prox_steps)

        def search_on(search: tuple[Point, Point, Array | int]) -> tuple[Point, Point, Array | int]:
            theta = step(search[0], search[1])
            return theta, slope(theta), search[2] + 1

        return here.params(jax.lax.while_loop(unsolved, search_on, (w, slope(w), 0))[0])

    def models(self, params: Params, personal: Personal) -> dict[str, Params]:
        return {"global": params, "personal": personal}

    def personalize(
        self, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar
    ) -> Params:
        """Solve the inner problem on all the given batches together; return `params` if there are none."""
        if not len(batches.weight):
            return params
        flat = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
        merged = Batch(flat(batches.x), flat(batches.y), batches.weight.reshape(-1), batches.key[0])
        return self.prox(loss, params, merged)
