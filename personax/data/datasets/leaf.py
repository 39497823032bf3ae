"""Readers of LEAF's folders of JSON files."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from personax.data.datasets.columns import numbered_classes
from personax.data.federation import Federation
from personax.data.schema import Schema
from personax.values import DATASETS

Pair = tuple[np.ndarray, np.ndarray]
Clients = dict[str, Pair]
Convert = Callable[[np.ndarray, np.ndarray, str], Pair]  # x, y, and their owner for error messages

CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_KEYS = ("users", "num_samples", "user_data")
_AGAIN = "The file is damaged: recreate it with LEAF's preprocess.sh."
_LAYOUT = "LEAF stores its files in train/*.json and test/*.json, or all in one folder."


@DATASETS.register(
    "leaf", summary="a folder of JSON files in the format of LEAF", source="Caldas 2018", citations=("caldas2018",)
)
def read_leaf(path: str | Path) -> Federation:
    """Read a federation from a folder in LEAF's format (Caldas et al. 2018), with one client per user.

    The folder has `train/*.json` and `test/*.json`, directly or within `data`; or it directly contains `*.json` files,
    which are training data only. Samples are numbers: integers become int32, others float32. Integer labels are
    classes, numbered 0, 1, ... in sorted order. If there are test data, clients without training or test samples are
    left out; the federation's `origin` states how many.

    >>> import personax as px
    >>> import json
    >>> from pathlib import Path
    >>> Path("leaf").mkdir()
    >>> users = {"anna": {"x": [[0.5], [1.5]], "y": [0, 1]}, "bert": {"x": [[2.5]], "y": [1]}}
    >>> content = {"users": ["anna", "bert"], "num_samples": [2, 1], "user_data": users}
    >>> _ = Path("leaf/all.json").write_text(json.dumps(content))
    >>> px.datasets.read_leaf("leaf").names
    ['anna', 'bert']
    """
    return _read(Path(path), _numbers, "LEAF", ())


@DATASETS.register(summary="characters by writer", source="Caldas 2018", citations=("caldas2018",))
def femnist(path: str | Path, *, digits_only: bool = False) -> Federation:
    """FEMNIST: handwritten characters by writer (Caldas et al. 2018), read from the folder that LEAF's scripts create.

    Images are (28, 28) bytes: LEAF divides them by 255, which is undone exactly. Labels are 0..9 for digits, 10..35
    for capitals and 36..61 for small letters.

    Args:
        path: the folder with `train` and `test`, see `read_leaf`.
        digits_only: keep only the digits (APFL appendix B.1); clients without digits are left out.

    >>> import personax as px
    >>> import json
    >>> from pathlib import Path
    >>> Path("femnist").mkdir()
    >>> users = {"writer": {"x": [[0.0] * 784, [1.0] * 784], "y": [3, 10]}}
    >>> content = {"users": ["writer"], "num_samples": [2], "user_data": users}
    >>> _ = Path("femnist/all.json").write_text(json.dumps(content))
    >>> fed = px.datasets.femnist("femnist")
    >>> fed.x.shape, [fed.schema.classes[label] for label in fed.y]
    ((2, 28, 28), ['3', 'A'])
    """

    def convert(x: np.ndarray, y: np.ndarray, whose: str) -> Pair:
        x, y = _images(x, whose), _numbers(y, y, whose)[1]
        return (x[y < 10], y[y < 10]) if digits_only else (x, y)

    if digits_only:
        return _read(Path(path), convert, "FEMNIST, digits only", CHARACTERS[:10])
    return _read(Path(path), convert, "FEMNIST", CHARACTERS)


def _read(folder: Path, convert: Convert, origin: str, classes: tuple[str, ...]) -> Federation:
    if not folder.is_dir():
        raise FileNotFoundError(f"Folder not found: {folder}. {_LAYOUT}")
    for place in (folder, folder / "data"):
        if (place / "train").is_dir():
            train = _read_part(place / "train", convert)
            if not (place / "test").is_dir():
                raise FileNotFoundError(
                    f"Folder not found: {place / 'test'}. For training data only, read {place / 'train'}."
                )
            train, test, note = _join(train, _read_part(place / "test", convert), folder)
            return _federation(train, test, f"{origin}.{note}", classes)
    return _federation(_read_part(folder, convert), {}, f"{origin}.", classes)


def _federation(train: Clients, test: Clients, origin: str, classes: tuple[str, ...]) -> Federation:
    """Build a federation with one dtype, whose labels index `classes` or the labels that occur."""
    pairs = _alike([*train.values(), *test.values()])
    x, y = pairs[0]
    if not classes and y.dtype.kind == "i" and y.ndim == 1:
        named = numbered_classes(np.concatenate([labels for _, labels in pairs]))
        if named is not None:
            codes = np.split(named.codes, np.cumsum([len(labels) for _, labels in pairs])[:-1])
            pairs, classes = [(x, own) for (x, _), own in zip(pairs, codes, strict=True)], tuple(named.names)
    schema = Schema(x.shape[1:], str(x.dtype), classes=classes, target_shape=y.shape[1:])
    tests = pairs[len(train) :] if test else None
    return Federation.from_clients(pairs[: len(train)], tests, names=list(train), origin=origin, schema=schema)


def _join(train: Clients, test: Clients, folder: Path) -> tuple[Clients, Clients, str]:
    """Return the clients with training and test samples, in one order, and a note on the number of others."""
    both = [user for user in train if user in test]
    if not both:
        raise ValueError(
            f"{folder}: no user has both training and test samples ({len(train)} have training samples, {len(test)} "
            "others test samples). Split each user's samples: run LEAF's preprocess.sh with `-t sample`."
        )
    left_out = len(train.keys() | test.keys()) - len(both)
    note = f" {left_out} clients without training or without test samples were left out." if left_out else ""
    return {user: train[user] for user in both}, {user: test[user] for user in both}, note


def _read_part(folder: Path, convert: Convert) -> Clients:
    clients: Clients = {}
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"No *.json files in {folder}. {_LAYOUT}")
    for file in files:
        content = _content(file)
        for user, num in zip(map(str, content["users"]), content["num_samples"], strict=True):
            whose = f"{file}, user {user!r}"
            if user in clients:
                raise ValueError(f"{whose}: this user is in two files of the folder. Remove one.")
            x, y = convert(*_samples(content["user_data"].pop(user, None), num, whose), whose)
            if len(x):
                clients[user] = (x, y)
    if not clients:
        raise ValueError(f"{folder}: no samples in {len(files)} files.")
    return clients


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}). Recreate it with LEAF's preprocess.sh.") from error
    missing = [key for key in _KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"Missing {', '.join(missing)} in {file}. A LEAF file has {', '.join(_KEYS)}.")
    _require_types(file, content)
    if len(content["users"]) != len(content["num_samples"]):
        raise ValueError(
            f"{file}: `num_samples` must have a number for each of the {len(content['users'])} users, "
            f"got {len(content['num_samples'])}."
        )
    return content


def _require_types(file: Path, content: dict[str, Any]) -> None:
    """Raise an error that names an entry of the wrong type, such as `null`."""
    wanted: dict[str, tuple[type, str]] = {
        "users": (list, "a list of names"),
        "num_samples": (list, "a list of integers"),
    }
    wanted["user_data"] = (dict, "an object with an entry for each user")
    fits = {"users": lambda item: isinstance(item, str | int), "num_samples": lambda item: type(item) is int}
    for key, (kind, words) in wanted.items():
        items = content[key]
        got = [items] if not isinstance(items, kind) else [i for i in items if not fits.get(key, lambda i: True)(i)]
        if got:
            raise ValueError(f"{file}: `{key}` must be {words}, got {json.dumps(got[0]):.60}. {_AGAIN}")


def _samples(data: Any, num: int, whose: str) -> Pair:
    if not isinstance(data, dict) or "x" not in data or "y" not in data:
        raise ValueError(f"{whose}: `user_data` must have an entry with `x` and `y`, got {_brief(data)}.")
    for letter in ("x", "y"):
        if not isinstance(data[letter], list):
            raise ValueError(f"{whose}: `{letter}` must be a list, got {json.dumps(data[letter]):.60}. {_AGAIN}")
    if not len(data["x"]) == len(data["y"]) == num:
        raise ValueError(
            f"{whose}: `num_samples` is {num}, got {len(data['x'])} of x and {len(data['y'])} of y. {_AGAIN}"
        )
    try:
        return np.array(data["x"]), np.array(data["y"])
    except ValueError as error:
        raise ValueError(f"{whose}: all samples must have the same length ({error}).") from error


def _brief(data: Any) -> str:
    return f"one with {', '.join(data) or 'nothing'}" if isinstance(data, dict) else "none"


def _numbers(x: np.ndarray, y: np.ndarray, whose: str) -> Pair:
    for letter, array in (("x", x), ("y", y)):
        if len(array) and array.dtype.kind not in "iufb":
            raise ValueError(
                f"{whose}: `{letter}` must be numbers, got {array.flat[0]!r:.60}. "
                "Encode text, and load images, before reading."
            )
        if array.dtype.kind in "iu" and len(array) and np.abs(array).max() >= 2**31:
            raise ValueError(f"{whose}: `{letter}` must fit into 32 bits, got {array.max()}. Scale it.")
    small = lambda array: array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    return small(x), small(y)


def _alike(pairs: list[Pair]) -> list[Pair]:
    """Convert all x to one dtype and all y to one dtype: a client may have only integers by chance."""
    x_type, y_type = (_common([pair[i].dtype for pair in pairs]) for i in (0, 1))
    return [(x.astype(x_type, copy=False), y.astype(y_type, copy=False)) for x, y in pairs]


def _common(types: list[np.dtype]) -> np.dtype:
    return next((t for t in types if t.kind == "f"), types[0])


def _images(x: np.ndarray, whose: str) -> np.ndarray:
    if not len(x):
        return np.zeros((0, 28, 28), np.uint8)
    if x.dtype.kind not in "iuf" or x.shape[1:] != (784,):
        raise ValueError(f"{whose}: a FEMNIST image must have 784 numbers, got {x.dtype} of shape {x.shape[1:]}.")
    if not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"{whose}: the pixels must lie between 0 and 1, got {x.min():g} to {x.max():g}. "
            "For other images, use `read_leaf`."
        )
    pixels = np.rint(x * 255)
    if np.abs(pixels - x * 255).max() > 0.01:
        raise ValueError(f"{whose}: the pixels must be multiples of 1/255. For other images, use `read_leaf`.")
    return pixels.astype(np.uint8).reshape(-1, 28, 28)
