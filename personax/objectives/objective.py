"""The objective protocol: one client's mathematics, from the downloaded model to its upload.

The functions below the protocol are default implementations. An objective assigns those that apply to it:

    class Erm:
        init_personal = objective.nothing_kept
        default_scoring = objective.score_global
        ...
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from personax.fast.backends import unroll_length
from personax.objectives.statistics import updated
from personax.typing import (
    Array,
    Batch,
    Batches,
    Clock,
    Extra,
    LossFn,
    Params,
    Personal,
    PyTree,
    Scalar,
    Shared,
    StatisticsFn,
)
from personax.values import OBJECTIVES, require_one_of

__all__ = [
    "Objective",
    "Theorems",
    "Visit",
    "descend",
    "descent_step",
    "fine_tune",
    "from_anchor",
    "keep_memory",
    "loss_gradient",
    "newcomer_personalizes",
    "no_citations",
    "no_number",
    "no_single_function",
    "no_theorem",
    "nothing_absorbed",
    "nothing_kept",
    "one_gradient",
    "only_batch",
    "only_global",
    "outer_only",
    "require_objective",
    "score_global",
    "score_personal",
    "shrink_to",
    "unconstrained",
]

Answer = TypeVar("Answer", covariant=True)
KEPT_MODELS = ("none", "latest", "trained")
Memory = PyTree  # state of an objective from step to step within a visit


class Visit(NamedTuple):
    """Everything that a client knows during one visit, apart from its own state.

    >>> import jax.numpy as jnp, personax as px
    >>> visit = px.Visit(anchor={"w": jnp.zeros(2)}, shared=(), clock=px.Clock(0, 0, 5), lr=0.1)
    >>> visit.clock.num_steps
    5
    """

    anchor: Params  # the downloaded model
    shared: Shared  # the shared state downloaded with it
    clock: Clock
    lr: Scalar  # the step size of this local step; at the end of a visit, the sum over its steps


class Theorems(Protocol[Answer]):
    """The families of convergence theorems. An objective calls the method that fits it (see `Objective.theorem`).

    >>> import personax as px
    >>> class Name:
    ...     plain = lambda self: "FedAvg's"
    ...     meta = lambda self, adapt_lr, num_adapt_steps, is_first_order: f"with {num_adapt_steps} adaptation steps"
    ...     envelope = lambda self, strength, tolerance: "the Moreau envelope's"
    ...     none = lambda self: "none"
    >>> px.Erm().theorem(Name()), px.Meta(0.1, num_adapt_steps=2).theorem(Name()), px.Mixture(0.5).theorem(Name())
    ("FedAvg's", 'with 2 adaptation steps', 'none')
    """

    def plain(self) -> Answer: ...
    def meta(self, adapt_lr: float, num_adapt_steps: int, is_first_order: bool) -> Answer: ...
    def envelope(self, strength: float, tolerance: float) -> Answer: ...
    def none(self) -> Answer: ...


@OBJECTIVES.describes
class Objective(Protocol):
    """The function that client i minimizes, the state that it keeps and uploads, and the facts that the library needs.

    Methods, in the order in which a visit calls them:

    - `roles` returns the number of batches that a local step draws for each role: `adapt`, `outer`, `curvature`.
    - `init_personal` and `init_shared` create the client's own state and the state that is broadcast with w.
    - `begin` returns the first iterate of a visit and a memory.
    - `gradient` returns a direction and the next memory.
    - `project` maps an iterate back to its domain.
    - `finish` returns the personal state to keep and an extra to upload.
    - `absorb` updates the shared state with the sum of the uploaded extras, on the server.
    - `models` names the models that the client holds.
    - `personalize` computes the client's personal model from any w with fresh batches (leading axis: steps). An
      objective that `is_at_iterate` also takes `statistics`, the `Task.statistics` of a model with some, see `descend`.

    Facts:

    - `federated` is False if nothing is uploaded.
    - `is_plain` is True if the direction is the loss gradient on one outer batch, without memory or projection.
    - `is_at_iterate` is True if a local step computes gradients at the iterate alone. The statistics of its batch,
      which batch normalization averages, are then those of one model.
    - `kept_model` is the model that a client keeps: `"none"`; the `"latest"` that it computed from the shared model,
      which training does not read; or one that is `"trained"` further at each visit.
    - `default_scoring` gives the fields of `Scoring` that a run uses by default.
    - `newcomer_model` names the model with which a client unseen in training replaces the model `scored`: `"adapted"`,
      `"recomputed"` (by `personalize`), or None if there is none.
    - `gradients_per_step` is the approximate cost of a local step, in gradients.
    - `tracked` is the objective whose exact gradient is the gradient of a single function F_i(w), so that the
      stationarity of the clients' mean can be tracked; None if the clients do not minimize one function together.
    - `theorem` selects the convergence theorem that applies.
    - `personal_number` returns the name and value of the number that reports show for a personal state, or None.
    - `citations` returns the keys of the papers to cite besides those of the recipe.

    >>> import personax as px
    >>> sorted(px.Meta(0.1).roles())
    ['adapt', 'curvature', 'outer']
    >>> px.Mixture(0.5).newcomer_model("personal")
    'recomputed'
    """

    federated: bool
    is_plain: bool
    is_at_iterate: bool
    kept_model: str

    def default_scoring(self) -> dict[str, Any]: ...
    def newcomer_model(self, scored: str, /) -> str | None: ...
    def gradients_per_step(self) -> int: ...
    def tracked(self) -> "Objective | None": ...
    def theorem(self, theorems: Theorems[Answer], /) -> Answer: ...
    def personal_number(self, personal: Personal, /) -> "tuple[str, Array] | None": ...
    def citations(self) -> tuple[str, ...]: ...

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


def require_objective(given: Any) -> None:
    """Raise an error unless `given` implements the whole protocol.

    >>> import personax as px
    >>> px.objective.require_objective(px.Erm())
    """
    contract = {*Objective.__annotations__, *(name for name in vars(Objective) if not name.startswith("_"))}
    missing = sorted(name for name in contract if name not in dir(given))
    plain = {"gradient": loss_gradient, "project": unconstrained}
    changed = [name for name, answer in plain.items() if getattr(type(given), name, None) is not answer]
    if not missing and given.is_plain and changed:
        name = type(given).__name__
        raise ValueError(f"The objective {name} is `is_plain` but has its own `{changed[0]}`. Set `is_plain = False`.")
    if missing:
        raise ValueError(
            f"The objective {type(given).__name__} lacks {', '.join(f'`{name}`' for name in missing)}. "
            "Implement each, or assign a default from `personax.objectives.objective`."
        )
    require_one_of("kept_model", given.kept_model, KEPT_MODELS)


def require_one_model(given: Objective, statistics: Params | None) -> None:
    """Raise an error if the model has statistics and this objective computes gradients at several models."""
    if statistics is not None and not given.is_at_iterate:
        raise ValueError(
            f"{given} computes gradients at several models, which would mix their batch normalization statistics. "
            "Use layer or group normalization, or an algorithm that computes them at one model, such as `fedavg(...)` "
            "or `fedprox(...)`."
        )


def score_global(self: Any) -> dict[str, Any]:
    """Score the shared model.

    >>> import personax as px
    >>> px.objective.score_global(px.Erm())
    {'model': 'global'}
    """
    return {"model": "global"}


def score_personal(self: Any) -> dict[str, Any]:
    """Score the client's personal model.

    >>> import personax as px
    >>> px.objective.score_personal(px.LocalOnly())
    {'model': 'personal'}
    """
    return {"model": "personal"}


def newcomer_personalizes(self: Any, scored: str) -> str | None:
    """Let a newcomer adapt the shared model, or compute its personal model with `personalize`.

    >>> import personax as px
    >>> px.objective.newcomer_personalizes(px.Erm(), "personal"), px.objective.newcomer_personalizes(px.Erm(), "global")
    ('recomputed', None)
    """
    return {"adapted": "adapted", "recomputed": "recomputed", "personal": "recomputed"}.get(scored)


def one_gradient(self: Any) -> int:
    """Return 1: one gradient per local step.

    >>> import personax as px
    >>> px.objective.one_gradient(px.Erm())
    1
    """
    return 1


def no_single_function(self: Any) -> None:
    """Return None: the clients do not minimize one function together.

    >>> import personax as px
    >>> px.objective.no_single_function(px.LocalOnly()) is None
    True
    """
    return None


def no_theorem(self: Any, theorems: Theorems[Answer]) -> Answer:
    """Return the case in which no theorem of the papers applies.

    >>> import personax as px
    >>> class NoName:
    ...     none = lambda self: "no theorem applies"
    >>> px.objective.no_theorem(px.LocalOnly(), NoName())
    'no theorem applies'
    """
    return theorems.none()


def no_number(self: Any, personal: Personal) -> None:
    """Return None: reports show no personal number.

    >>> import personax as px
    >>> px.objective.no_number(px.Erm(), ()) is None
    True
    """
    return None


def no_citations(self: Any) -> tuple[str, ...]:
    """Return no citations besides those of the recipe.

    >>> import personax as px
    >>> px.objective.no_citations(px.Erm())
    ()
    """
    return ()


def loss_gradient(
    self: Any, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
) -> tuple[Params, Memory]:
    """Return the gradient of the loss on the outer batch; the memory does not change.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> batch = px.Batch(jnp.ones((1, 2, 1)), jnp.zeros((1, 2)), jnp.ones((1, 2)), keys)
    >>> loss = lambda w, batch: jnp.mean((batch.x - w[None]) ** 2) / 2
    >>> visit = px.Visit(jnp.zeros(1), (), px.Clock(0, 0, 1), 0.1)
    >>> px.objective.loss_gradient(px.Erm(), loss, jnp.zeros(1), (), visit, {"outer": batch})[0].tolist()
    [-1.0]
    """
    return jax.grad(loss)(iterate, only_batch(batches, "outer")), memory


def outer_only(self: Any) -> dict[str, int]:
    """Draw one batch per step, for the gradient itself.

    >>> import personax as px
    >>> px.objective.outer_only(px.Erm())
    {'outer': 1}
    """
    return {"outer": 1}


def nothing_kept(self: Any, params: Params) -> tuple[()]:
    """Keep no state besides the model.

    >>> import personax as px
    >>> px.objective.nothing_kept(px.Erm(), {"w": 1.0})
    ()
    """
    return ()


def from_anchor(self: Any, anchor: Params, personal: Personal) -> tuple[Params, Memory]:
    """Start at the downloaded model, with the personal state as the memory.

    >>> import personax as px
    >>> px.objective.from_anchor(px.Erm(), {"w": 1.0}, ())
    ({'w': 1.0}, ())
    """
    return anchor, personal


def unconstrained(self: Any, iterate: Params) -> Params:
    """Return the iterate unchanged: the domain is the whole space.

    >>> import personax as px
    >>> px.objective.unconstrained(px.Erm(), {"w": 1.0})
    {'w': 1.0}
    """
    return iterate


def keep_memory(
    self: Any, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
) -> tuple[Personal, Extra]:
    """Keep the memory as the personal state; upload nothing but the delta.

    >>> import personax as px
    >>> px.objective.keep_memory(px.LocalOnly(), {"w": 1.0}, {"v": 2.0}, None, None)
    ({'v': 2.0}, ())
    """
    return memory, ()


def nothing_absorbed(self: Any, shared: Shared, total: Extra, num_clients: int) -> Shared:
    """Leave the shared state unchanged.

    >>> import personax as px
    >>> px.objective.nothing_absorbed(px.Erm(), (), (), 10)
    ()
    """
    return shared


def only_global(self: Any, params: Params, personal: Personal) -> dict[str, Params]:
    """Return the shared model as the client's only model.

    >>> import personax as px
    >>> px.objective.only_global(px.Erm(), {"w": 1.0}, ())
    {'global': {'w': 1.0}}
    """
    return {"global": params}


def fine_tune(
    self: Any,
    loss: LossFn,
    params: Params,
    personal: Personal,
    shared: Shared,
    batches: Batch,
    lr: Scalar,
    statistics: StatisticsFn | None = None,
) -> Params:
    """Take one gradient step on the client's loss per batch: Fallah (3), gMeta (7), "FedAvg + update".

    >>> import jax, jax.numpy as jnp, personax as px
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> batches = px.Batch(jnp.ones((3, 2, 1)), jnp.zeros((3, 2)), jnp.ones((3, 2)), keys)
    >>> loss = lambda w, batch: jnp.mean((batch.x - w[None]) ** 2) / 2
    >>> px.objective.fine_tune(px.Erm(), loss, jnp.zeros(1), (), (), batches, 0.5).tolist()  # three steps toward 1
    [0.875]
    """
    return descend(loss, params, batches, lr, statistics)[0]


def descend(
    loss: LossFn, params: Params, batches: Batch, lr: Scalar, statistics: StatisticsFn | None = None
) -> tuple[Params, Params]:
    """Take one step per batch, `w_l = w_{l-1} - lr grad f(w_{l-1}, D_{l-1})`; also return w_0, ..., w_{n-1}.

    The leaves that `statistics` has become `statistics(w_{l-1}, D_{l-1})`.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> batches = px.Batch(jnp.ones((3, 2, 1)), jnp.zeros((3, 2)), jnp.ones((3, 2)), keys)
    >>> loss = lambda w, batch: jnp.mean((batch.x - w[None]) ** 2) / 2
    >>> end, path = px.objective.descend(loss, jnp.zeros(1), batches, 0.5)
    >>> end.tolist(), path.tolist()
    ([0.875], [[0.0], [0.5], [0.75]])
    """

    def step(w: Params, batch: Batch) -> tuple[Params, Params]:
        new = None if statistics is None else statistics(w, batch)
        return updated(descent_step(w, jax.grad(loss)(w, batch), lr), new), w

    return jax.lax.scan(step, params, batches, unroll=unroll_length(len(batches.weight)))


def descent_step(params: Params, gradient: Params, lr: Scalar) -> Params:
    """Return `w - lr g` in the dtype of w.

    >>> import jax.numpy as jnp, personax as px
    >>> px.objective.descent_step({"w": jnp.array([1.0])}, {"w": jnp.array([2.0])}, 0.25)["w"].tolist()
    [0.5]
    """
    return jax.tree.map(lambda w, g: (w - lr * g).astype(w.dtype), params, gradient)


def first_extra(objective: Objective, anchor: Params, personal: Personal) -> Extra:
    """Return the extra upload of a visit without steps, which has the shapes of any visit's and is quick to trace."""
    start, memory = objective.begin(anchor, personal)
    lr = jnp.zeros((), jnp.result_type(*jax.tree.leaves(anchor)))
    visit = Visit(anchor, objective.init_shared(anchor), Clock(jnp.zeros((), jnp.int32), 0, 1), lr)
    return objective.finish(start, memory, visit, optax.tree.zeros_like)[1]


def shrink_to(tree: Params, bound: Scalar) -> Params:
    """Return the nearest point of the ball of radius `bound` around 0.

    >>> import jax.numpy as jnp, personax as px
    >>> px.objective.shrink_to(jnp.array([3.0, 4.0]), 1.0).round(2).tolist()
    [0.6, 0.8]
    """
    norm = optax.tree.norm(tree)
    return optax.tree.scale(jnp.where(norm > bound, bound / norm, 1).astype(norm.dtype), tree)


def only_batch(batches: Batches, role: str) -> Batch:
    """Return the batch of a role that draws one.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> keys = jax.random.split(jax.random.key(0), 1)
    >>> batches = px.Batch(jnp.ones((1, 2, 3)), jnp.zeros((1, 2)), jnp.ones((1, 2)), keys)
    >>> px.objective.only_batch({"outer": batches}, "outer").x.shape
    (2, 3)
    """
    return jax.tree.map(lambda leaf: leaf[0], batches[role])
