"""States of a run on disk: arrays in safetensors, the rest in JSON, never pickle.

Checkpoint 12 of a folder is `00000012.safetensors` and `00000012.json`. Each file is written beside its place, flushed
to the disk and renamed, the JSON last: a checkpoint exists when its JSON does, wherever the process or the machine
stopped. The JSON has the SHA-256 digests of the arrays and of itself, so damage is noticed. A digest is no signature:
who can write the files can make others that fit. A folder belongs to one process at a time.
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
    """A state that was saved, as NumPy arrays, its number, and what is recorded about it."""

    number: int
    tree: PyTree
    about: dict[str, Any]


class AllDamaged(ValueError):
    """A folder has checkpoints and none of them is whole."""


class _Damaged(Exception):
    """A file of a checkpoint is missing or is not what was written."""


def save(folder: Path, number: int, tree: PyTree, about: dict[str, Any], *, private: bool = False) -> None:
    """Save a pytree of arrays as checkpoint `number` of a folder; keep it and the one before, and no others.

    Whatever stops this, the checkpoints that were there stay as they are until the new one is complete. (One with the
    same number is replaced file by file; a stop between the two loses it, but not the one before.)

    Args:
        folder: made if there is none.
        number: at least the newest number in the folder that is not damaged.
        tree: arrays of numbers or bools. Random keys go in as `jax.random.key_data(key)`.
        about: what JSON can hold. It comes back as JSON gives it: keys are strings, tuples are lists.
        private: whether only the owner may read the files, which have personal state.
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
    """The newest good checkpoint of a folder in the structure of `template`; None where there is none.

    Where a newer one is damaged, `notify` is called with a message. If all are damaged, that is a ValueError.

    Args:
        folder: where `save` put them.
        template: a pytree of arrays or of `jax.ShapeDtypeStruct`, whose paths, shapes and types the leaves must have;
            or a function that gives it from what is recorded about the checkpoint.
        notify: takes a message.
        accept: whether a checkpoint will do, from what is recorded about it; others are skipped.
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
            notify(f"{problem} Checkpoint {number} is used instead.")
        return Checkpoint(number, jax.tree.unflatten(structure, [arrays[path] for path in paths]), record["about"])
    if problems:
        what = f"Of the checkpoints in {folder} at least one must be whole, got {len(problems)} damaged"
        raise AllDamaged(
            f"{what}: {' '.join(problems)} Restore the files from a copy, or empty the folder and start again."
        )
    return None


def peek(folder: Path) -> dict[str, Any] | None:
    """Return what is recorded about the newest checkpoint with a good JSON; None without one. Reads no arrays."""
    for number in reversed(_numbers(folder)):
        with contextlib.suppress(_Damaged):
            return _read_record(folder, number)["about"]
    return None


def discard(folder: Path, above: int = -1) -> None:
    """Remove the checkpoints of a folder whose number is greater; by default all."""
    for number in [n for n in _numbers(folder) if n > above]:
        for kind in ("json", "safetensors"):
            _file(folder, number, kind).unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file so that its place has the old content or the new, never a part, and the new survives a power cut.

    The content goes to a hidden file beside it, which is flushed to the disk and takes its place. Folders are made.
    A `private` file has mode 0600 from the beginning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        mode = 0o600 if private else 0o666  # less the umask
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # a full disk does not say where
        raise
    if os.name == "posix":  # elsewhere folders cannot be flushed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def export(path: Path, params: PyTree, about: Mapping[str, str], *, private: bool = False) -> None:
    """Write a model's parameters to one safetensors file, with `about` as its metadata.

    A leaf is named by its keys, for example `dense_0.kernel`; parameters that are a single array are named `params`.
    """
    for key, text in about.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise ValueError(f"`about` must map strings to strings, got {key!r}: {text!r}. Convert it with `str`.")
    named = {name: _array(f"Parameter {name}", leaf) for name, leaf in _named(params).items()}
    write_atomically(Path(path), write_tensors(named, about), private=private)


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What `export` wrote: the parameters as nested dictionaries of NumPy arrays, and the metadata."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"File not found: {path}.")
    content = path.read_bytes()
    try:
        arrays = read_tensors(content)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file, got: {error}. Export the model again.") from None
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
    """What `read_model` gave, in the structure of a template of the same names and shapes."""
    names, given = _named(template), _named(params)
    for name, leaf in names.items():
        got = np.shape(given[name]) if name in given else "none"
        if got != np.shape(leaf):
            what = f"Parameter {name} must have shape {np.shape(leaf)}"
            raise ValueError(f"{what}, got {got}. Use the configuration that the model was trained with.")
    leaves = [np.asarray(given[name], _dtype(leaf)) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _named(tree: PyTree) -> dict[str, Any]:
    """The leaves by their keys, in the order of the tree."""
    return leaves_by_name(tree, _parameter_name)


def _parameter_name(keys: Any) -> str:
    name = dotted(keys) or "params"
    if name == "__metadata__" or any("." in dotted((key,)) for key in keys):
        what = "Keys of parameters must be without dots and not `__metadata__`"
        raise ValueError(f"{what}, got {jax.tree_util.keystr(keys)}. Rename it.")
    return name


def _by_path(tree: PyTree) -> dict[str, Any]:
    return leaves_by_name(tree, jax.tree_util.keystr)


def _array(what: str, leaf: Any) -> np.ndarray:
    """The leaf in the memory layout that safetensors takes for granted, or an error that begins with `what`."""
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
    """The numbers of the checkpoints in a folder, good or damaged, in order."""
    names = os.listdir(folder) if Path(folder).is_dir() else []
    return sorted(int(match[1]) for match in map(_JSON.fullmatch, names) if match)


def seal(record: dict[str, Any]) -> bytes:
    """Encode a record as JSON together with its SHA-256 digest, which `load` checks."""
    try:
        plain = json.loads(json.dumps(record))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`about` must hold what JSON can, got: {error}. Convert it.") from None
    return json.dumps({**plain, "sha256": _digest(plain)}, indent=1).encode()


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unseal(content: bytes) -> dict[str, Any] | None:
    """The record that `seal` encoded; None if these bytes are not what it gave."""
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
        raise _Damaged(f"{path} is damaged: it is not what was written there.")
    if record["format"] != _FORMAT:
        got = f"got {record['format']}"
        raise ValueError(f"{path} must have format {_FORMAT}, {got}. Use the version of personax that wrote it.")
    return record


def _read(folder: Path, number: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    record = _read_record(folder, number)
    path, expected = _file(folder, number, "safetensors"), record["arrays"]
    content = _content(path)
    if len(content) != expected["num_bytes"]:
        raise _Damaged(f"{path} is damaged: it has {len(content)} bytes and had {expected['num_bytes']}.")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise _Damaged(f"{path} is damaged: it is not what was written there.")
    return record, read_tensors(content)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _Damaged(f"{path} is missing.") from None
    except OSError as error:
        raise _Damaged(f"{path} cannot be read: {error.strerror}.") from None


def _require_same(template: PyTree, found: list[dict[str, Any]], path: Path) -> None:
    """Raise an error about the first leaf that is not as in the template."""
    wanted = [_described(name, leaf) for name, leaf in _by_path(template).items()]
    words = lambda leaf: f"{leaf['dtype']} of shape {tuple(leaf['shape'])}" if leaf else "no such leaf"
    have, want = ({leaf["path"]: leaf for leaf in leaves} for leaves in (found, wanted))
    for name in [*want, *have]:
        if want.get(name) != have.get(name):
            raise ValueError(
                f"{path}: leaf {name or 'of the whole tree'} must be as in this run, {words(want.get(name))}, "
                f"got {words(have.get(name))}. The checkpoint was made with another configuration: continue with that "
                "one, or start in another folder."
            )


def _refuse_newer(folder: Path, number: int) -> None:
    """A run that went back before damaged checkpoints replaces them; one that would hide good ones is an error."""
    for newer in (n for n in _numbers(folder) if n > number):
        try:
            _read(folder, newer)
        except _Damaged:
            continue
        what = f"`number` must be at least {newer}, the newest checkpoint in {folder}"
        raise ValueError(f"{what}, got {number}. Continue from that one, or save to another folder.")


def _tidy(folder: Path, number: int) -> None:
    """Remove all but the checkpoint just saved, the newest complete one before it, and what others put there."""
    before = [n for n in _numbers(folder) if n < number and _file(folder, n, "safetensors").exists()]
    kept = {_file(folder, n, kind) for n in [number, *before[-1:]] for kind in ("json", "safetensors")}
    ours = [path for path in Path(folder).iterdir() if _OURS.fullmatch(path.name) and path not in kept]
    for path in sorted(ours, key=lambda path: path.suffix != ".json"):
        path.unlink(missing_ok=True)
