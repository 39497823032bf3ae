"""Configuration as values: frozen dataclasses that print, compare and hash, and whose numbers are pytree leaves.

A field annotated `Static[...]` is part of the program (a count, a name): changing it recompiles. Every other
field is a number or another value: changing it does not recompile, and `vmap` can sweep over it.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform

import jax
import numpy as np

_STATIC = "static"
KINDS: dict[str, type] = {}  # every value class by name, for `from_dict`
T = TypeVar("T")
Static = Annotated[T, _STATIC]


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree.

    `__post_init__` validates what a person constructs; JAX rebuilds values without it, because tracers and
    swept arrays pass through there.

    >>> @value
    ... class Step:
    ...     lr: float
    ...     num: Static[int] = 1
    >>> jax.tree.leaves(Step(0.1, num=3))
    [0.1]
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    static = tuple(f.name for f in dataclasses.fields(cls) if _is_static(f.type))  # pyright: ignore[reportArgumentType]
    dynamic = tuple(f.name for f in dataclasses.fields(cls) if f.name not in static)  # pyright: ignore[reportArgumentType]

    def flatten(self: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in dynamic]
        return children, tuple(getattr(self, name) for name in static)

    def unflatten(aux: tuple[Any, ...], children: Any) -> T:
        self = object.__new__(cls)
        for name, item in zip(dynamic + static, (*children, *aux), strict=True):
            object.__setattr__(self, name, item)
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    KINDS[cls.__name__] = cls
    return cls


def _is_static(annotation: Any) -> bool:
    return _STATIC in getattr(annotation, "__metadata__", ())


def to_dict(item: Any) -> Any:
    """A value as plain tables, lists, numbers and strings, which TOML and JSON can hold.

    A field that is None is left out.
    """
    if KINDS.get(type(item).__name__) is type(item):
        given = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        return {"kind": type(item).__name__, **{k: to_dict(v) for k, v in given.items() if v is not None}}
    if isinstance(item, tuple | list):
        return [to_dict(entry) for entry in item]
    if isinstance(item, int | float | str):
        return item
    return np.asarray(item).tolist()


def from_dict(item: Any) -> Any:
    """The value that `to_dict` came from."""
    if isinstance(item, dict):
        if item.get("kind") not in KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(sorted(KINDS))}, got {item.get('kind')!r}.")
        return KINDS[item["kind"]](**{k: from_dict(v) for k, v in item.items() if k != "kind"})
    if isinstance(item, list):
        return tuple(from_dict(entry) for entry in item)
    return item


def require(condition: Callable[[Any], Any], name: str, given: Any, must: str, hint: str = "") -> None:
    """Raise a ValueError that says what must hold, what was given and what to do, unless `condition` holds.

    `given` may be an array of swept numbers: the condition must hold for all of them.
    """
    if given is None:
        return
    try:
        holds = bool(np.all(condition(np.asarray(given))))
    except TypeError:  # not a number at all
        holds = False
    if not holds:
        raise ValueError(" ".join(filter(None, [f"`{name}` must {must}, got {given}.", hint])))


def require_positive(name: str, given: Any, hint: str = "") -> None:
    """Require a finite number above zero; `None` means that it was not given."""
    require(lambda v: np.isfinite(v) & (v > 0), name, given, "be positive", hint)


def require_nonnegative(name: str, given: Any, hint: str = "") -> None:
    """Require a finite number of at least zero; `None` means that it was not given."""
    require(lambda v: np.isfinite(v) & (v >= 0), name, given, "not be negative", hint)


def require_count(name: str, given: Any, least: int = 1, hint: str = "") -> None:
    """Require a whole number of at least `least`; `None` means that it was not given."""
    whole = lambda v: np.issubdtype(v.dtype, np.integer) & (v >= least)
    require(whole, name, given, f"be a whole number of at least {least}", hint)


def require_one_of(name: str, given: Any, options: tuple[str, ...]) -> None:
    """Require one of the named options."""
    if given not in options:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, options))}, got {given!r}.")
