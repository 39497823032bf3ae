"""Pytrees as Flower's records, and what is said beside them as JSON."""

import json
from typing import TYPE_CHECKING, Any

from personax.flower.api import Array, ArrayRecord, ConfigRecord, RecordDict  # pyright: ignore[reportAttributeAccessIssue]
from personax.flower.arrays import Arrays, to_arrays

if TYPE_CHECKING:  # its module imports JAX
    from personax.live.messages import Layout
    from personax.typing import PyTree


def to_record(layout: "Layout", tree: "PyTree") -> ArrayRecord:
    """A pytree of JAX or NumPy arrays as a record: an entry for each leaf, by its name."""
    return _record(to_arrays(layout, tree))


def to_content(about: dict[str, Any], arrays: Arrays | ArrayRecord) -> RecordDict:
    """What a message carries: words and arrays."""
    record = arrays if isinstance(arrays, ArrayRecord) else _record(arrays)
    return RecordDict({"about": ConfigRecord({"json": json.dumps(about)}), "arrays": record})


def from_content(content: RecordDict) -> tuple[dict[str, Any], Arrays]:
    """The words and arrays of a message."""
    about = json.loads(str(content["about"]["json"]))
    if not isinstance(about, dict):
        raise ValueError(f"What a message says must be a table, got {type(about).__name__}.")
    return about, {name: array.numpy() for name, array in content["arrays"].items()}


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})
