"""Objectives of APFL's published code where it differs from the paper, and the paper's mixture with its own copy.

None of these is a default of the library. `WithCopy` is the paper's mixture that also keeps the client's copy of the
shared model from before the average, as section 3 requires.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from personax.objectives import objective
from personax.objectives.mixture import Mixed, Mixture, mix_models
from personax.objectives.objective import Memory, Visit
from personax.reproduce.apfl.networks import MixedOutputs
from personax.typing import Array, Batch, Batches, Clock, Extra, LossFn, Params, Personal, Scalar, Shared
from personax.values import Static, value

MIX_DECAY = 0.02  # multiplied by the weight and added to its gradient
STEPS_PER_MOVE = 5  # batches between two updates of pFedMe's w


class KeptMixture(NamedTuple):
    """A mixture's personal state, and the client's copy of the shared model from the end of its last visit."""

    own: Mixed
    copy: Params


class Theta(NamedTuple):
    """The personal model of pFedMe, which persists between visits."""

    model: Params


@value
class WithCopy:
    """`Mixture` with clients that also keep their copy w_i of the shared model from before the average.

    Training is unchanged; one more model can be scored, `"own_copy"`: mix v + (1 - mix) w_i.
    """

    mixture: Mixture

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
    absorb = objective.nothing_absorbed

    def init_personal(self, params: Params) -> Personal:
        return KeptMixture(self.mixture.init_personal(params), params)

    def gradients_per_step(self) -> int:
        return self.mixture.gradients_per_step()

    def personal_number(self, personal: KeptMixture) -> tuple[str, Array]:
        return self.mixture.personal_number(personal.own)

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        slope, own = self.mixture.gradient(loss, iterate, memory.own, visit, batches)
        return slope, memory._replace(own=own)

    def project(self, iterate: Params) -> Params:
        return self.mixture.project(iterate)

    def finish(
        self, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
    ) -> tuple[Personal, Extra]:
        return memory._replace(copy=end), ()

    def models(self, params: Params, personal: KeptMixture) -> dict[str, Params]:
        kept = self.mixture.models(params, personal.own)
        return {**kept, "own_copy": mix_models(personal.own, personal.copy)}

    def personalize(
        self, loss: LossFn, params: Params, personal: KeptMixture, shared: Shared, batches: Batch, lr: Scalar
    ) -> Params:
        return self.mixture.personalize(loss, params, personal.own, shared, batches, lr)


@value
class OutputMixture:
    """APFL as in its authors' code: outputs are mixed, and v is updated with the already updated w.

    With h = mix f(v) + (1 - mix) f(w), one batch, and w_i already updated:

        v   <- v - local_lr grad_v l(h)
        mix <- mix - eta_t (<v - w_i, mix grad_v l(h) + (1 - mix) grad_w l(h)> + 0.02 mix),  clipped to [0, 1],

    where the weight changes at the first step of a visit, if it is `adaptive`, with the updated v and w_i. Without
    `local_lr`, v uses eta_t. The network must come from `mixing_outputs`.
    """

    mix: float
    local_lr: float | None = None
    adaptive: Static[bool] = False

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
    project = objective.unconstrained
    absorb = objective.nothing_absorbed
    personalize = objective.fine_tune

    def init_personal(self, params: Params) -> Personal:
        return KeptMixture(Mixed(params, jnp.asarray(self.mix, jax.tree.leaves(params)[0].dtype)), params)

    def gradients_per_step(self) -> int:
        return 2

    def personal_number(self, personal: KeptMixture) -> tuple[str, Array]:
        return "mixing weight", personal.own.mix

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        batch = objective.only_batch(batches, "outer")
        model, mix = memory.own
        direction = jax.grad(loss)(iterate, batch)
        stepped = objective.descent_step(iterate, direction, visit.lr)
        mixed = lambda own, copy: loss(MixedOutputs(own, copy, mix), batch)
        of_own, of_copy = jax.grad(mixed, argnums=(0, 1))(model, stepped)
        model = objective.descent_step(model, of_own, visit.lr if self.local_lr is None else self.local_lr)
        if self.adaptive:
            both = jax.tree.map(lambda own, copy: mix * own + (1 - mix) * copy, of_own, of_copy)
            slope = optax.tree.vdot(optax.tree.sub(model, stepped), both) + MIX_DECAY * mix
            moved = jnp.clip(mix - visit.lr * slope, 0, 1).astype(mix.dtype)
            mix = jnp.where(visit.clock.step == 0, moved, mix)
        return direction, memory._replace(own=Mixed(model, mix))

    def finish(
        self, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
    ) -> tuple[Personal, Extra]:
        return memory._replace(copy=end), ()

    def models(self, params: Params, personal: KeptMixture) -> dict[str, Params]:
        own, mix = personal.own
        return {
            "global": params,
            "local": own,
            "personal": MixedOutputs(own, params, mix),
            "own_copy": MixedOutputs(own, personal.copy, mix),
        }


@value
class KeptStep:
    """perFedAvg as in the code of APFL's authors: it keeps the adaptation step, then takes a step on a held-out batch.

    w <- w - adapt_lr grad f(w, D), then w <- w - lr grad f(w, D').
    """

    adapt_lr: float

    federated = True
    is_plain = False
    is_at_iterate = False
    kept_model = "trained"
    default_scoring = objective.score_global
    newcomer_model = objective.newcomer_personalizes
    tracked = objective.no_single_function
    theorem = objective.no_theorem
    personal_number = objective.no_number
    citations = objective.no_citations
    init_personal = objective.nothing_kept
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed
    models = objective.only_global
    personalize = objective.fine_tune

    def roles(self) -> dict[str, int]:
        return {"adapt": 1, "outer": 1}

    def gradients_per_step(self) -> int:
        return 2

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        first = jax.grad(loss)(iterate, objective.only_batch(batches, "adapt"))
        adapted = objective.descent_step(iterate, first, self.adapt_lr)
        second = jax.grad(loss)(adapted, objective.only_batch(batches, "outer"))
        ratio = self.adapt_lr / visit.lr
        return jax.tree.map(lambda kept, last: ratio * kept + last, first, second), memory


@value
class PersistentTheta:
    """pFedMe as in the code of APFL's authors: theta persists between visits and takes one step per batch.

    theta <- theta - prox_lr (grad f(theta) + strength (theta - w)); every fifth batch w <- w - lr strength (w - theta).
    """

    strength: float
    prox_lr: float

    federated = True
    is_plain = False
    is_at_iterate = False
    kept_model = "trained"
    default_scoring = objective.score_personal
    newcomer_model = objective.newcomer_personalizes
    gradients_per_step = objective.one_gradient
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
    personalize = objective.fine_tune

    def init_personal(self, params: Params) -> Personal:
        return Theta(params)

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        slope = jax.grad(loss)(memory.model, objective.only_batch(batches, "outer"))
        pull = lambda g, theta, w: g + self.strength * (theta - w)
        theta = objective.descent_step(memory.model, jax.tree.map(pull, slope, memory.model, iterate), self.prox_lr)
        moves = (visit.clock.step + 1) % STEPS_PER_MOVE == 0
        away = lambda w, own: jnp.where(moves, self.strength * (w - own), 0).astype(w.dtype)
        return jax.tree.map(away, iterate, theta), Theta(theta)

    def models(self, params: Params, personal: Theta) -> dict[str, Params]:
        return {"global": params, "personal": personal.model}


@value
class PerEpoch:
    """The step size `initial / divisor^e` after e passes of `steps_per_epoch` steps over a client's data."""

    initial: float
    divisor: float
    steps_per_epoch: float

    def __call__(self, clock: Clock) -> Scalar:
        return self.initial / self.divisor ** jnp.floor(clock.ticks("step") / self.steps_per_epoch)
