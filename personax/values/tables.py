"""Values as text: short reprs and plain tables."""

import dataclasses
from typing import Any

import numpy as np

from personax.values.axes import name_of
from personax.values.fields import is_value_class


def short_repr(item: Any) -> str:
    """Format a value as a constructor call, without fields that have their default.

    >>> from personax.values import Static, value
    >>> @value
    ... class Step:
    ...     lr: float
    ...     num: Static[int] = 1
    >>> short_repr(Step(0.1)), short_repr(Step(0.1, 2))
    ('Step(lr=0.1)', 'Step(lr=0.1, num=2)')
    """
    if not is_value_class(type(item)):
        return repr(item)
    given = [(f.name, getattr(item, f.name)) for f in dataclasses.fields(item) if not _is_default(item, f)]
    return f"{type(item).__name__}({', '.join(f'{name}={short_repr(one)}' for name, one in given)})"


def _is_default(item: Any, field: dataclasses.Field) -> bool:
    """Return True if a field has its default; arrays of swept numbers never do."""
    given = getattr(item, field.name)
    if isinstance(given, tuple):
        return not given and field.default == ()
    return type(given) is type(field.default) and np.ndim(given) == 0 and bool(given == field.default)


def to_dict(item: Any) -> Any:
    """A value as plain tables, lists, numbers and strings, which TOML and JSON can hold.

    A field that is None or an empty tuple is left out. What is not part of personax is written as an import.

    >>> import personax as px
    >>> px.values.to_dict(px.Proximal(0.1))
    {'kind': 'Proximal', 'strength': 0.1}
    """
    is_empty = lambda one: one is None or (isinstance(one, tuple) and not one)
    if is_value_class(type(item)):
        name = name_of(item)
        kind = {"kind": "import", "path": name} if ":" in name else {"kind": name}
        given = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        return {**kind, **{k: to_dict(v) for k, v in given.items() if not is_empty(v)}}
    if isinstance(item, tuple | list):
        return [to_dict(entry) for entry in item]
    if isinstance(item, int | float | str):
        return item
    return np.asarray(item).tolist()
