"""Values: frozen dataclasses with fields that are part of the program (static) or its numbers (leaves)."""

import dataclasses
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import jax

_STATIC = "static"
_SCALE, _SHARE = "scale", "share"
T = TypeVar("T")
Static = Annotated[T, _STATIC]
Tuned = Annotated[T, _SCALE]
TunedShare = Annotated[T, _SHARE]

_VALUES: set[type] = set()


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree.

    `__post_init__` validates values that users construct. JAX rebuilds values without calling it, because it passes
    tracers and swept arrays. Values are final: compose them instead of inheriting.

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

    def refuse_subclass(subclass: type, **_: Any) -> None:
        raise TypeError(
            f"{cls.__name__} is final: its facts need not hold for {subclass.__name__}. Compose it instead."
        )

    cls.__init_subclass__ = classmethod(refuse_subclass)  # pyright: ignore[reportAttributeAccessIssue]
    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    _VALUES.add(cls)
    return cls


def is_value_class(cls: Any) -> bool:
    """Return True for a class decorated with `value`."""
    return cls in _VALUES


def _is_static(annotation: Any) -> bool:
    if isinstance(annotation, str):  # the module has `from __future__ import annotations`
        return "Static[" in annotation
    return _STATIC in getattr(annotation, "__metadata__", ())


def tuned_as(annotation: Any) -> Literal["scale", "share"] | None:
    """Return how a parameter with this annotation is tuned by default, or None if it is not.

    >>> tuned_as(Tuned[float]), tuned_as(TunedShare[float]), tuned_as(float)
    ('scale', 'share', None)
    """
    return next((mark for mark in getattr(annotation, "__metadata__", ()) if mark in (_SCALE, _SHARE)), None)
