"""Conversion of pytrees to and from safetensors."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from personax.typing import PyTree

DTYPES = {
    "BOOL": np.dtype("bool"),
    "I8": np.dtype("int8"),
    "I16": np.dtype("int16"),
    "I32": np.dtype("int32"),
    "I64": np.dtype("int64"),
    "U8": np.dtype("uint8"),
    "U16": np.dtype("uint16"),
    "U32": np.dtype("uint32"),
    "U64": np.dtype("uint64"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
    "C64": np.dtype("complex64"),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_tensors(content: bytes) -> dict[str, np.ndarray]:
    """Read the arrays of a safetensors file; the library's own NumPy reader does not support bfloat16."""
    found = safetensors.deserialize(content)
    return {name: np.frombuffer(a["data"], DTYPES[a["dtype"]]).reshape(a["shape"]) for name, a in found}


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Read the shapes of the arrays in a safetensors file by name, and its metadata."""
    with safetensors.safe_open(path, "numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def write_tensors(arrays: dict[str, np.ndarray], about: Mapping[str, str]) -> bytes:
    """Encode a safetensors file deterministically; the library writes metadata in random order."""
    content = safetensors.numpy.save(arrays)
    end = 8 + int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(about.items())), **json.loads(content[8:end])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays start at multiples of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[end:]


def leaves_by_name(tree: PyTree, name_of: Callable[[Any], str]) -> dict[str, Any]:
    """Return the leaves of a pytree by unique names made from their keys, in the order of the tree.

    >>> from personax.sharing import dotted
    >>> leaves_by_name({"dense": {"bias": 1}}, dotted)
    {'dense.bias': 1}
    """
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = name_of(keys)
        if name in leaves:
            raise ValueError(f"Duplicate leaf name {name!r}. Rename a key.")
        leaves[name] = leaf
    return leaves
