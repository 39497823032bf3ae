"""Readers of NumPy npz files, one array at a time."""

from pathlib import Path
from tokenize import TokenError
from zipfile import BadZipFile

import numpy as np
from numpy.lib.npyio import NpzFile

from personax.data.datasets.columns import Column, Columns, Words, require_column, which_are_tests, words


def read_arrays(path: Path, client: str | None, label: str, split: str | None) -> Columns:
    """Read `x`, labels and clients. Test samples are in arrays with the prefix `test_`, or marked by `split`.

    Without `client`, all samples belong to one client.
    """
    try:
        with path.open("rb") as opened, NpzFile(opened) as file:
            label = "y" if label == "label" and label not in file.files else label
            for role, name in (("x", "x"), ("label", label), ("client", client), ("split", split)):
                if name is not None:
                    require_column("an array", role, name, file.files, path.name)
            names = ["x", label, *([client] if client else [])]
            tests = [f"test_{name}" for name in names]
            has_test = _has_test(file, tests, split, path.name)
            return _read(file, [names, tests] if has_test else [names], split, path.name)
    except (BadZipFile, EOFError, OSError, TokenError) as error:
        raise ValueError(f"Cannot read {path} as an npz file ({error}).") from error


def read_array(path: Path, name: str) -> np.ndarray:
    """Read one array of features."""
    try:
        with path.open("rb") as opened, NpzFile(opened) as file:
            if name not in file.files:
                raise ValueError(f"{path.name} has no array {name!r}. It has {', '.join(map(repr, file.files))}.")
            return _features(file, name, path.name)
    except (BadZipFile, EOFError, OSError, TokenError) as error:
        raise ValueError(f"Cannot read {path} as an npz file ({error}).") from error


def _has_test(file: NpzFile, tests: list[str], split: str | None, where: str) -> bool:
    there = [name for name in tests if name in file.files]
    if there and (len(there) < len(tests) or split):
        raise ValueError(
            f"{where}: test data must be in all of {', '.join(tests)}, or marked by `split`, "
            f"got {', '.join(there)} and split={split!r}."
        )
    return bool(there)


def _read(file: NpzFile, parts: list[list[str]], split: str | None, where: str) -> Columns:
    xs = [_features(file, part[0], where) for part in parts]
    y, *client = ([_array(file, name, where) for name in column] for column in list(zip(*parts, strict=True))[1:])
    client = client[0] if client else [np.zeros(len(x), int) for x in xs]
    for part, *arrays in zip(parts, xs, y, client, strict=True):
        if len({len(array) for array in arrays}) > 1:
            got = ", ".join(f"{len(array)} of {name!r}" for name, array in zip(part, arrays, strict=False))
            raise ValueError(f"{where}: the arrays must have one entry per sample, got {got}.")
    is_test = np.repeat([False, True], [len(x) for x in xs]) if len(xs) == 2 else None
    if split:
        words = _column([_array(file, split, where)])
        if not isinstance(words, Words) or len(words.codes) != len(xs[0]):
            raise ValueError(f"{where}: the array {split!r} must contain 'train' or 'test' for each sample.")
        is_test = which_are_tests(words, split, where)
    return Columns(xs, _column(y), _column(client), is_test)


def _features(file: NpzFile, name: str, where: str) -> np.ndarray:
    x = _array(file, name, where)
    if x.dtype.kind not in "iufb":
        raise ValueError(f"{where}: the array {name!r} must hold numbers, got {x.dtype}. Encode it.")
    with np.errstate(over="ignore"):  # the federation reports nonfinite values
        return x.astype(np.float32) if x.dtype == np.float64 else x


def _array(file: NpzFile, name: str, where: str) -> np.ndarray:
    try:
        array = file[name]
    except ValueError as error:  # Python objects
        raise ValueError(f"{where}: cannot read the array {name!r} ({error}). Save numbers or strings.") from error
    if array.ndim == 0:
        raise ValueError(f"{where}: the array {name!r} must have one entry per sample, got a scalar.")
    return array


def _column(arrays: list[np.ndarray]) -> Column:
    joined = np.concatenate(arrays)
    return words(joined.astype(str)) if joined.dtype.kind in "SU" else joined
