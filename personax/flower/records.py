"""Pytrees as Flower's records, accompanied by JSON."""

import json
from typing import TYPE_CHECKING, Any

from personax.flower.api import Array, ArrayRecord, ConfigRecord, RecordDict  # pyright: ignore[reportAttributeAccessIssue]
from personax.flower.arrays import Arrays, to_arrays

if TYPE_CHECKING:  # these modules import JAX
    from personax.live.messages import Layout
    from personax.typing import PyTree


def to_record(layout: "Layout", tree: "PyTree") -> ArrayRecord:
    """Convert a pytree of JAX or NumPy arrays to a record with an entry per leaf, by name."""
    return _record(to_arrays(layout, tree))


def to_content(about: dict[str, Any], arrays: Arrays | ArrayRecord) -> RecordDict:
    """Make the content of a message from its JSON table and arrays."""
    record = arrays if isinstance(arrays, ArrayRecord) else _record(arrays)
    return RecordDict({"about": ConfigRecord({"json": json.dumps(about)}), "arrays": record})


def from_content(content: RecordDict) -> tuple[dict[str, Any], Arrays]:
    """The JSON table and arrays of a message."""
    about = json.loads(str(content["about"]["json"]))
    if not isinstance(about, dict):
        raise ValueError(f"The JSON of a message must be a table, got {type(about).__name__}.")
    return about, {name: array.numpy() for name, array in content["arrays"].items()}


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
