"""The parameters that are shared, personal or frozen, and the parts of a model that they form.

A *part* of a model is the model's own tree with None in place of all other leaves. JAX sees no leaf there, so a server,
an optimizer or a checkpoint handles a part like any other tree.

Leaves are selected by patterns: globs over their names, such as `dense_1.kernel`. A pattern also selects everything
below the name that it matches (`dense_1`), and a leading `!` excludes what the other patterns select.
"""

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np

from personax.typing import Params, PyTree, StatisticsFn, Task
from personax.values import ConfigError, Static, short_repr, value

__all__ = [
    "Sharing",
    "dotted",
    "fingerprint",
    "join",
    "like",
    "names_of",
    "only",
    "over",
    "require_patterns",
    "selects",
    "without",
]

Patterns = str | tuple[str, ...]
Keys = tuple[Any, ...]  # the path of a leaf in a tree


def as_patterns(given: Patterns | Sequence[str], where: str) -> tuple[str, ...]:
    """Return one pattern or several as a tuple; raise unless they are strings.

    >>> as_patterns("dense_1", "personal")
    ('dense_1',)
    """
    patterns = (given,) if isinstance(given, str) else given
    if callable(patterns) or not all(isinstance(pattern, str) and pattern.strip("!") for pattern in patterns):
        raise ValueError(
            f"`{where}` must name parameters by strings, got {given!r:.80}. "
            'Give patterns such as "dense_1" or "*.bias", one or several.'
        )
    return tuple(patterns)


def dotted(keys: Keys) -> str:
    """Return the keys of a leaf with dots between them, such as `dense_0.kernel`.

    >>> [dotted(keys) for keys, _ in jax.tree_util.tree_leaves_with_path({"a": [1.0]})]
    ['a.0']
    """
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def names_of(tree: PyTree) -> list[str]:
    """Return the name of every leaf, in the order of the tree.

    >>> names_of({"dense_0": {"kernel": 1.0, "bias": 2.0}})
    ['dense_0.bias', 'dense_0.kernel']
    """
    return [dotted(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]


def by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by their names, in the order of the tree.

    >>> by_name({"dense_0": {"kernel": 1.0, "bias": 2.0}})
    {'dense_0.bias': 2.0, 'dense_0.kernel': 1.0}
    """
    return dict(zip(names_of(tree), jax.tree.leaves(tree), strict=True))


def only(tree: PyTree, patterns: Patterns) -> PyTree:
    """Return the part of a tree that the patterns select.

    >>> only({"a": 1.0, "b": {"c": 2.0, "d": 3.0}}, "b")
    {'a': None, 'b': {'c': 2.0, 'd': 3.0}}
    """
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: leaf if selects(patterns, dotted(keys)) else None, tree)


def without(tree: PyTree, patterns: Patterns) -> PyTree:
    """Return the part of a tree that the patterns do not select.

    >>> without({"a": 1.0, "b": {"c": 2.0, "d": 3.0}}, ("b", "!*.d"))
    {'a': 1.0, 'b': {'c': None, 'd': 3.0}}
    """
    if not patterns:
        return tree
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: None if selects(patterns, dotted(keys)) else leaf, tree)


def like(tree: PyTree, part: PyTree) -> PyTree:
    """Return the leaves of a tree that `part` has too.

    >>> like({"a": 1.0, "b": 2.0}, {"a": None, "b": 0.0})
    {'a': None, 'b': 2.0}
    """
    return jax.tree.map(lambda own, leaf: None if own is None else leaf, part, tree, is_leaf=is_none)


def join(*parts: PyTree) -> PyTree:
    """Join several parts into one tree. If several parts have a leaf, the first one is used.

    >>> join({"a": None, "b": 2.0}, {"a": 1.0, "b": None})
    {'a': 1.0, 'b': 2.0}
    """
    given = [part for part in parts if part is not None]
    if len(given) <= 1:
        return given[0] if given else None
    first = lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None)
    return jax.tree.map(first, *given, is_leaf=is_none)


def selects(patterns: Patterns, name: str) -> bool:
    """Return True if the patterns select the leaf of this name.

    >>> selects(("dense_*", "!*.bias"), "dense_0.kernel"), selects(("dense_*", "!*.bias"), "dense_0.bias")
    (True, False)
    """
    given = (patterns,) if isinstance(patterns, str) else patterns
    wanted = [pattern for pattern in given if not pattern.startswith("!")]
    excluded = [pattern[1:] for pattern in given if pattern.startswith("!")]
    return any(_matches(one, name) for one in wanted) and not any(_matches(one, name) for one in excluded)


def require_patterns(patterns: Patterns, names: Sequence[str], where: str) -> set[str]:
    """Return the names that the patterns select. Raise if one matches nothing, or if two select the same leaf.

    >>> require_patterns("a", ["a.bias", "b"], "personal")
    {'a.bias'}
    """
    seen: dict[str, str] = {}
    for pattern in as_patterns(patterns, where):
        found = [name for name in names if _matches(pattern.removeprefix("!"), name)]
        if not found:
            raise ValueError(
                f"`{where}` has {pattern!r}, which matches no parameter. Use the names {', '.join(names)}."
            )
        if pattern.startswith("!"):
            continue
        if twice := [name for name in found if name in seen]:
            raise ValueError(
                f"`{where}` has {seen[twice[0]]!r} and {pattern!r}, which both match {', '.join(twice)}. Remove one."
            )
        seen |= dict.fromkeys(found, pattern)
    return {name for name in seen if selects(patterns, name)}


@value
class Sharing:
    """The division of a model's parameters into `personal`, `frozen` and shared ones, which are all others.

    Args:
        personal: parameters that each client trains and keeps. They never leave it. (This is not a privacy guarantee:
            the shared parameters are trained with them, so uploads depend on them.)
        frozen: parameters that keep their initial values, the same for all clients. They are never uploaded.
        tuned: frozen parameters that the steps of an `"adapted"` model move as well, after training, such as FedBABU's
            head. Until then the shared model is not complete.

    Each is a pattern over the names of the parameters, or several (see `names_of`): `"dense_1"` selects everything
    below that name, `"*.bias"` all biases, and `("*", "!dense_0")` everything except `dense_0`.

    >>> Sharing(personal="dense_1")
    Sharing(personal=('dense_1',))
    """

    personal: Static[Patterns] = ()
    frozen: Static[Patterns] = ()
    tuned: Static[Patterns] = ()

    def __post_init__(self) -> None:
        for field in ("personal", "frozen", "tuned"):
            object.__setattr__(self, field, as_patterns(getattr(self, field), field))
        if self.personal and self.tuned:
            raise ValueError(
                f"`tuned` parameters ({listed(self.tuned)}) cannot be combined with personal ones. Make them personal, "
                "too."
            )

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def divides(self) -> bool:
        """True unless everything is shared."""
        return bool(self.personal or self.frozen)

    @property
    def is_completed_by_clients(self) -> bool:
        """True if a new client must train a part of the model before it has a complete one."""
        return bool(self.personal or self.tuned)

    def trained(self, params: Params) -> Params:
        """Return the part that clients train: the shared and the personal parameters."""
        return without(params, self.frozen)

    def adapted(self, params: Params) -> Params:
        """Return the part that the steps of an adapted model move: what clients train, and the tuned parameters."""
        return join(self.trained(params), only(params, self.tuned)) if self.tuned else self.trained(params)

    def shared(self, params: Params) -> Params:
        """Return the part that is sent and that the server averages."""
        return without(self.trained(params), self.personal)

    def own(self, params: Params) -> Params:
        """Return the personal part."""
        return only(params, self.personal)

    def base(self, params: Params) -> Params:
        """Return the frozen part."""
        return only(params, self.frozen)

    def rest(self, params: Params) -> Params:
        """Return everything that is not shared: the frozen part, and the initial values of the personal part."""
        return join(self.base(params), self.own(params))

    def require_division(self, params: Params) -> None:
        """Raise unless the patterns divide this model and leave something to share."""
        names = names_of(params)
        personal = require_patterns(self.personal, names, "sharing.personal")
        frozen = require_patterns(self.frozen, names, "sharing.frozen")
        tuned = require_patterns(self.tuned, names, "sharing.tuned")
        if trained := [name for name in names if name in tuned - frozen]:
            raise ValueError(f"`sharing.tuned` has {', '.join(trained)}, not frozen. Freeze them, or leave them out.")
        if both := [name for name in names if name in personal & frozen]:
            raise ValueError(f"A parameter is personal or frozen, not both: {', '.join(both)}. Remove it from one.")
        if len(personal | frozen) == len(names):
            raise ValueError(
                f"All parameters are personal or frozen: {', '.join(names)}. Share some, or "
                "use `local_only(...)` for clients that train alone."
            )

    def describe(self) -> str:
        """Describe the division; "" if everything is shared."""
        said = [f"{listed(self.personal)} personal"] if self.personal else []
        return " and ".join([*said, *([f"{listed(self.frozen)} frozen"] if self.frozen else [])])


def listed(patterns: Patterns) -> str:
    """Return the patterns as text.

    >>> listed(("dense_1", "*.bias"))
    '`dense_1`, `*.bias`'
    """
    return ", ".join(f"`{pattern}`" for pattern in patterns)


def over(task: Task, base: Params) -> Task:
    """Return the task as a function of the other parameters, with the frozen ones (`base`) held at their values.

    Autodiff then never computes a gradient of a frozen parameter. If none is frozen, the task is returned unchanged.

    >>> import personax as px
    >>> task = px.classification(px.mlp((4,), 3))
    >>> params = task.model.init(jax.random.key(0), np.zeros((1, 5)))
    >>> batch = px.Batch(np.zeros((2, 5)), np.zeros(2, int), np.ones(2), jax.random.key(0))
    >>> body_task = over(task, only(params, "dense_1"))
    >>> bool(body_task.loss(without(params, "dense_1"), batch) == task.loss(params, batch))
    True
    """
    if not jax.tree.leaves(base):
        return task
    whole = lambda params: join(params, base)
    return task._replace(
        loss=lambda params, batch: task.loss(whole(params), batch),
        metrics=lambda params, batch: task.metrics(whole(params), batch),
        statistics=statistics_at(task.statistics, base),
    )


def statistics_at(statistics: StatisticsFn | None, base: Params) -> StatisticsFn | None:
    """Return the statistics as a function of a part of the model; the other parameters come from `base`."""
    if statistics is None:
        return None
    return lambda part, batch: like(statistics(join(part, base), batch), part)


def fingerprint(tree: PyTree) -> str:
    """Return a digest of the names, types and values of a tree's leaves; "" if it has none.

    >>> fingerprint({"a": None})
    ''
    >>> fingerprint({"a": np.zeros(2)}) == fingerprint({"a": np.zeros(2), "b": None})
    True
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    digest = hashlib.sha256()
    for keys, leaf in leaves:
        array = np.asarray(leaf)
        digest.update(f"{dotted(keys)} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest() if leaves else ""


def require_same_base(found: str, before: str, where: str, remedy: str) -> None:
    """Raise an error unless the fingerprint of the parameters that are not shared is the same as before.

    >>> require_same_base("ab", "ab", "The checkpoint", "Restore it.")
    """
    if found != before:
        raise ConfigError(
            f"{where} was trained with different frozen or initial personal parameters (fingerprint "
            f"{before[:12] or 'empty'}, now {found[:12] or 'empty'}). {remedy}"
        )


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def is_none(leaf: object) -> bool:
    """Return True for the places of a part that other parts have, as `is_leaf` of functions on trees."""
    return leaf is None
