"""The contract of an objective: one client's mathematics, from the downloaded model to what it uploads.

The functions below the contract are the trivial answers; an objective names the ones that it needs:

    class Erm:
        init_personal = objective.nothing_kept
        ...
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from personax.step_sizes import Clock
from personax.typing import Batch, Extra, LossFn, Params, Personal, PyTree, Scalar, Shared

Batches = dict[str, Batch]  # by role; the leading axis counts the role's batches of this step
Memory = PyTree  # what an objective carries from step to step of one visit


class Visit(NamedTuple):
    """What a client knows during one visit, beside its own state."""

    anchor: Params  # the model that it downloaded
    shared: Shared  # what came with it
    clock: Clock
    lr: Scalar  # the step size of this local step; at the end of a visit, the sum over its steps


class Objective(Protocol):
    """What client i minimises, and what it keeps and says.

    `roles` gives the number of batches that a local step draws for each role: `adapt`, `outer`, `curvature`.
    `init_personal` and `init_shared` make the state that stays and the state that is broadcast beside w.
    `begin` gives the first iterate of a visit and a memory; `gradient` a direction and the next memory; `project` maps
    an iterate back to its domain; `finish` gives the personal state to keep and an extra to upload. The server adds up
    the extras and `absorb`s their sum. `models` names the models that the client holds, and `personalize` makes its
    personal model from any w with fresh batches (leading axis: steps).
    `federated` is False when nothing is uploaded.
    """

    federated: bool

    def roles(self) -> dict[str, int]: ...
    def init_personal(self, params: Params, /) -> Personal: ...
    def init_shared(self, params: Params, /) -> Shared: ...
    def begin(self, anchor: Params, personal: Personal, /) -> tuple[Params, Memory]: ...
    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches, /
    ) -> tuple[Params, Memory]: ...
    def project(self, iterate: Params, /) -> Params: ...
    def finish(
        self, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params], /
    ) -> tuple[Personal, Extra]: ...
    def absorb(self, shared: Shared, total: Extra, num_clients: int, /) -> Shared: ...
    def models(self, params: Params, personal: Personal, /) -> dict[str, Params]: ...
    def personalize(
        self, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar, /
    ) -> Params: ...


def outer_only(self: Any) -> dict[str, int]:
    """One batch a step, for the gradient itself."""
    return {"outer": 1}


def nothing_kept(self: Any, params: Params) -> tuple[()]:
    """No state beside the model."""
    return ()


def from_anchor(self: Any, anchor: Params, personal: Personal) -> tuple[Params, Memory]:
    """Start at the downloaded model and carry the personal state along."""
    return anchor, personal


def unconstrained(self: Any, iterate: Params) -> Params:
    """The domain is the whole space."""
    return iterate


def keep_memory(
    self: Any, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
) -> tuple[Personal, Extra]:
    """Keep what was carried; upload nothing but the delta."""
    return memory, ()


def nothing_absorbed(self: Any, shared: Shared, total: Extra, num_clients: int) -> Shared:
    """The broadcast state does not change."""
    return shared


def only_global(self: Any, params: Params, personal: Personal) -> dict[str, Params]:
    """The client holds the shared model and no other."""
    return {"global": params}


def fine_tune(
    self: Any, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar
) -> Params:
    """Gradient steps on the client's own loss, one for each batch: Fallah (3), gMeta (7), "FedAvg + update"."""
    return descend(loss, params, batches, lr)[0]


def descend(loss: LossFn, params: Params, batches: Batch, lr: Scalar) -> tuple[Params, Params]:
    """`w_l = w_{l-1} - lr grad f(w_{l-1}, D_{l-1})`, one step for each batch; also the path w_0, ..., w_{n-1}."""

    def step(w: Params, batch: Batch) -> tuple[Params, Params]:
        return descent_step(w, jax.grad(loss)(w, batch), lr), w

    return jax.lax.scan(step, params, batches, unroll=unrolled(len(batches.weight)))


def unrolled(num_steps: int) -> int:
    """How far to unroll a loop over inner steps: a short one altogether, which saves copies of the model.

    On a GPU, which runs one small kernel after another, longer ones are worth the time to compile.
    """
    short = 3 if jax.default_backend() == "cpu" else 8
    return num_steps if num_steps <= short else 1


def descent_step(params: Params, gradient: Params, lr: Scalar) -> Params:
    """`w - lr g`, in the type of w."""
    return jax.tree.map(lambda w, g: (w - lr * g).astype(w.dtype), params, gradient)


def shrink_to(tree: Params, bound: Scalar) -> Params:
    """The nearest point of the ball of radius `bound` around 0."""
    norm = optax.tree.norm(tree)
    return optax.tree.scale(jnp.where(norm > bound, bound / norm, 1).astype(norm.dtype), tree)


def only_batch(batches: Batches, role: str) -> Batch:
    """The batch of a role that draws one."""
    return jax.tree.map(lambda leaf: leaf[0], batches[role])
