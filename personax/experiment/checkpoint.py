"""Checkpoints of a run: arrays in safetensors and everything else in JSON, never pickle.

Checkpoint 12 of a folder is `00000012.safetensors` and `00000012.json`. Each file is written to a temporary file,
flushed to disk and renamed, the JSON last: a checkpoint exists if its JSON does, even after a crash. The JSON has the
SHA-256 digests of the arrays and of itself, so that damage is detected. A digest is not a signature: anyone who can
write the files can forge them. Only one process may use a folder at a time.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from personax.experiment.tensors import DTYPE_NAMES, leaves_by_name, read_tensors, write_tensors
from personax.sharing import dotted
from personax.typing import PyTree
from personax.values import require_count

_FORMAT = 1
_NUMBER = r"(\d{8}|[1-9]\d{8,})"
_JSON = re.compile(rf"{_NUMBER}\.json")
_OURS = re.compile(rf"{_NUMBER}\.(json|safetensors)|\.{_NUMBER}\.(json|safetensors)\.[0-9a-f]{{8}}\.tmp")


class Checkpoint(NamedTuple):
    """A saved state as NumPy arrays, with its number and metadata."""

    number: int
    tree: PyTree
    about: dict[str, Any]


class AllDamaged(ValueError):
    """All checkpoints of a folder are damaged."""


class _Damaged(Exception):
    """A file of a checkpoint is missing or damaged."""


def save(folder: Path, number: int, tree: PyTree, about: dict[str, Any], *, private: bool = False) -> None:
    """Save a pytree of arrays as checkpoint `number` of a folder, and keep only this one and the previous one.

    If saving is interrupted, existing checkpoints are unchanged until the new one is complete. (A checkpoint with the
    same number is replaced file by file; an interruption in between loses it, but not the previous one.)

    Args:
        folder: created if it does not exist.
        number: at least the newest undamaged number in the folder.
        tree: arrays of numbers or bools. Save random keys as `jax.random.key_data(key)`.
        about: JSON-serializable metadata. It is loaded as JSON: keys become strings, and tuples lists.
        private: if True, only the owner may read the files, which contain personal state.
    """
    require_count("number", number, least=0)
    leaves = _by_path(tree)
    arrays = {path: _array(f"Leaf {path}", leaf) for path, leaf in leaves.items()}
    _refuse_newer(folder, number)
    content = safetensors.numpy.save(arrays)
    record = {
        "format": _FORMAT,
        "number": int(number),
        "arrays": {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
        "leaves": [_described(path, leaf) for path, leaf in leaves.items()],
        "about": about,
    }
    text = seal(record)
    write_atomically(_file(folder, number, "safetensors"), content, private=private)
    write_atomically(_file(folder, number, "json"), text, private=private)
    _tidy(folder, number)


def load(
    folder: Path,
    template: PyTree | Callable[[dict[str, Any]], PyTree],
    notify: Callable[[str], None] = warnings.warn,
    accept: Callable[[dict[str, Any]], bool] = lambda about: True,
) -> Checkpoint | None:
    """Load the newest undamaged checkpoint of a folder in the structure of `template`; None if there is none.

    If a newer one is damaged, `notify` is called with a message. If all are damaged, a ValueError is raised.

    Args:
        folder: the folder that was given to `save`.
        template: a pytree of arrays or `jax.ShapeDtypeStruct` with the required paths, shapes and types; or a function
            that makes it from the checkpoint's metadata.
        notify: called with a message.
        accept: a function of the metadata that returns True for usable checkpoints; others are skipped.
    """
    problems = []
    for number in reversed(_numbers(folder)):
        try:
            record, arrays = _read(folder, number)
        except _Damaged as damage:
            problems.append(str(damage))
            continue
        if not accept(record["about"]):
            continue
        wanted = template(record["about"]) if callable(template) else template
        _require_same(wanted, record["leaves"], _file(folder, number, "json"))
        paths, structure = list(_by_path(wanted)), jax.tree.structure(wanted)
        for problem in problems:
            notify(f"{problem} Using checkpoint {number} instead.")
        return Checkpoint(number, jax.tree.unflatten(structure, [arrays[path] for path in paths]), record["about"])
    if problems:
        what = f"All {len(problems)} checkpoints in {folder} are damaged"
        raise AllDamaged(
            f"{what}: {' '.join(problems)} Restore the files from a copy, or empty the folder and start over."
        )
    return None


def peek(folder: Path) -> dict[str, Any] | None:
    """Return the metadata of the newest checkpoint with an undamaged JSON file; None without one. Reads no arrays."""
    for number in reversed(_numbers(folder)):
        with contextlib.suppress(_Damaged):
            return _read_record(folder, number)["about"]
    return None


def discard(folder: Path, above: int = -1) -> None:
    """Remove the checkpoints of a folder with a number above `above`; by default all."""
    for number in [n for n in _numbers(folder) if n > above]:
        for kind in ("json", "safetensors"):
            _file(folder, number, kind).unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file atomically and durably: it has either the old or the new content, even after a power failure.

    The content is written to a hidden temporary file, which is flushed to disk and renamed. Missing folders are
    created. A `private` file has mode 0600 from the start.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        mode = 0o600 if private else 0o666  # minus the umask
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the error of a full disk does not name the file
        raise
    if os.name == "posix":  # other systems cannot flush folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def export(path: Path, params: PyTree, about: Mapping[str, str], *, private: bool = False) -> None:
    """Write a model's parameters to one safetensors file, with `about` as its metadata.

    Leaves are named by their keys, such as `dense_0.kernel`; a single array is named `params`.
    """
    for key, text in about.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise ValueError(f"`about` must map strings to strings, got {key!r}: {text!r}. Convert it with `str`.")
    named = {name: _array(f"Parameter {name}", leaf) for name, leaf in _named(params).items()}
    write_atomically(Path(path), write_tensors(named, about), private=private)


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a file written by `export`: parameters as nested dictionaries of NumPy arrays, and metadata."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"File not found: {path}.")
    content = path.read_bytes()
    try:
        arrays = read_tensors(content)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}. Export the model again.") from None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    params: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return params, header.get("__metadata__", {})


def in_structure_of(template: PyTree, params: Any) -> PyTree:
    """Restructure the parameters from `read_model` like a template with the same names and shapes."""
    names, given = _named(template), _named(params)
    for name, leaf in names.items():
        got = np.shape(given[name]) if name in given else "none"
        if got != np.shape(leaf):
            what = f"Parameter {name} must have shape {np.shape(leaf)}"
            raise ValueError(f"{what}, got {got}. Use the configuration that the model was trained with.")
    leaves = [np.asarray(given[name], _dtype(leaf)) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _named(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by name, in the order of the tree."""
    return leaves_by_name(tree, _parameter_name)


def _parameter_name(keys: Any) -> str:
    name = dotted(keys) or "params"
    if name == "__metadata__" or any("." in dotted((key,)) for key in keys):
        what = "Keys of parameters must not contain dots or be `__metadata__`"
        raise ValueError(f"{what}, got {jax.tree_util.keystr(keys)}. Rename it.")
    return name


def _by_path(tree: PyTree) -> dict[str, Any]:
    return leaves_by_name(tree, jax.tree_util.keystr)


def _array(what: str, leaf: Any) -> np.ndarray:
    """Return a leaf in the memory layout that safetensors expects, or raise an error that begins with `what`."""
    if _dtype(leaf).name not in {dtype.name for dtype in DTYPE_NAMES}:
        hint = "Save random keys as `jax.random.key_data(key)`." if _is_key(leaf) else "Convert it."
        raise ValueError(f"{what} must be an array of numbers or bools, got {_dtype(leaf).name}. {hint}")
    return np.asarray(leaf, order="C")


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(_dtype(leaf), jax.dtypes.prng_key)


def _dtype(leaf: Any) -> Any:
    typed = isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)
    return leaf.dtype if typed else np.asarray(leaf).dtype


def _described(path: str, leaf: Any) -> dict[str, Any]:
    return {"path": path, "shape": list(np.shape(leaf)), "dtype": _dtype(leaf).name}


def _file(folder: Path, number: int, kind: str) -> Path:
    return Path(folder) / f"{number:08d}.{kind}"


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of all checkpoints in a folder, including damaged ones, in order."""
    names = os.listdir(folder) if Path(folder).is_dir() else []
    return sorted(int(match[1]) for match in map(_JSON.fullmatch, names) if match)


def seal(record: dict[str, Any]) -> bytes:
    """Encode a record as JSON together with its SHA-256 digest, which `load` verifies."""
    try:
        plain = json.loads(json.dumps(record))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`about` must be JSON-serializable: {error}. Convert it.") from None
    return json.dumps({**plain, "sha256": _digest(plain)}, indent=1).encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unseal(content: bytes) -> dict[str, Any] | None:
    """Decode a record written by `seal`; None if the bytes are damaged."""
    try:
        record = json.loads(content)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.pop("sha256", None) != _digest(record):
        return None
    return record


def _read_record(folder: Path, number: int) -> dict[str, Any]:
    path = _file(folder, number, "json")
    record = unseal(_content(path))
    if record is None or record.get("number") != number:
        raise _Damaged(f"{path} is damaged: its digest does not match.")
    if record["format"] != _FORMAT:
        got = f"got {record['format']}"
        raise ValueError(f"{path} must have format {_FORMAT}, {got}. Use the version of personax that wrote it.")
    return record


def _read(folder: Path, number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    record = _read_record(folder, number)
    path, expected = _file(folder, number, "safetensors"), record["arrays"]
    content = _content(path)
    if len(content) != expected["num_bytes"]:
        raise _Damaged(f"{path} is damaged: it has {len(content)} bytes instead of {expected['num_bytes']}.")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise _Damaged(f"{path} is damaged: its digest does not match.")
    return record, read_tensors(content)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _Damaged(f"{path} is missing.") from None
    except OSError as error:
        raise _Damaged(f"Cannot read {path}: {error.strerror}.") from None


def _require_same(template: PyTree, found: list[dict[str, Any]], path: Path) -> None:
    """Raise an error about the first leaf that is not as in the template."""
    wanted = [_described(name, leaf) for name, leaf in _by_path(template).items()]
    words = lambda leaf: f"{leaf['dtype']} of shape {tuple(leaf['shape'])}" if leaf else "no such leaf"
    have, want = ({leaf["path"]: leaf for leaf in leaves} for leaves in (found, wanted))
    for name in [*want, *have]:
        if want.get(name) != have.get(name):
            raise ValueError(
                f"{path}: leaf {name or 'of the whole tree'} must match this run, {words(want.get(name))}, "
                f"got {words(have.get(name))}. The checkpoint has a different configuration: resume with that "
                "configuration, or use another folder."
            )


def _refuse_newer(folder: Path, number: int) -> None:
    """Raise an error if a save would hide newer undamaged checkpoints; newer damaged ones may be replaced."""
    for newer in (n for n in _numbers(folder) if n > number):
        try:
            _read(folder, newer)
        except _Damaged:
            continue
        what = f"`number` must be at least {newer}, the newest checkpoint in {folder}"
        raise ValueError(f"{what}, got {number}. Resume from that checkpoint, or save to another folder.")


def _tidy(folder: Path, number: int) -> None:
    """Remove all other checkpoints except the newest complete one before this, and keep unrelated files."""
    before = [n for n in _numbers(folder) if n < number and _file(folder, n, "safetensors").exists()]
    kept = {_file(folder, n, kind) for n in [number, *before[-1:]] for kind in ("json", "safetensors")}
    ours = [path for path in Path(folder).iterdir() if _OURS.fullmatch(path.name) and path not in kept]
    for path in sorted(ours, key=lambda path: path.suffix != ".json"):
        path.unlink(missing_ok=True)
