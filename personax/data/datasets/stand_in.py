"""A stand-in for FEMNIST if the real one is unavailable: MNIST's digits, rewritten by simulated writers."""

import json
from pathlib import Path

import jax
import numpy as np

from personax.data.datasets.mnist import mnist
from personax.keys import host_generator
from personax.typing import Array
from personax.values import require_count

STAND_IN = "stand-in"  # the prefix of its writers' names


def write_stand_in(folder: str | Path, num_writers: int = 1000, *, key: Array | None = None) -> Path:
    """Write a folder in LEAF's format that `femnist` reads, and return it.

    Each writer has an individual slant, rotation, size and pressure for all its digits, individual class proportions,
    and about 30 samples, a fifth of them for tests. Results on it are not results on FEMNIST.

    >>> import personax as px
    >>> folder = px.datasets.write_stand_in("stand-in", 50)  # doctest: +SKIP
    >>> px.datasets.femnist(folder).num_clients  # doctest: +SKIP
    50
    """
    require_count("num_writers", num_writers)
    place, pool = Path(folder), mnist()
    rng = host_generator(jax.random.key(0) if key is None else key)
    by_class = [np.flatnonzero(pool.y == label) for label in range(10)]
    parts = {"train": {}, "test": {}}
    for writer in range(num_writers):
        num = int(np.clip(rng.lognormal(3.4, 0.3), 15, 90))
        labels = rng.choice(10, num, p=rng.dirichlet(np.full(10, 5.0)))
        images = _rewritten(pool.x[[rng.choice(by_class[label]) for label in labels]], rng)
        first_test = num * 4 // 5
        for part, rows in (("train", slice(None, first_test)), ("test", slice(first_test, None))):
            x = (images[rows].reshape(-1, 784) / 255).tolist()
            parts[part][f"{STAND_IN}-{writer:04}"] = {"x": x, "y": labels[rows].tolist()}
    for part, users in parts.items():
        (place / part).mkdir(parents=True, exist_ok=True)
        counts = [len(data["y"]) for data in users.values()]
        content = {"users": list(users), "num_samples": counts, "user_data": users}
        (place / part / f"{STAND_IN}.json").write_text(json.dumps(content), encoding="utf-8")
    return place


def _rewritten(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Transform digits to one writer's handwriting, as bytes."""
    slant, angle = rng.uniform(-0.5, 0.5), np.radians(rng.uniform(-20, 20))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ np.array([[1, 0], [slant, 1]]) / rng.uniform(0.7, 1.1)
    pressure = rng.uniform(0.5, 2)
    middle = np.full(2, 13.5)
    whole = np.eye(3)  # for a stack of images: the first axis is unchanged
    whole[1:, 1:], offset = matrix, np.r_[0, middle - matrix @ middle]
    from scipy import ndimage  # takes half a second to import

    moved = ndimage.affine_transform(images.reshape(-1, 28, 28) / 255, whole, list(offset), order=1)  # pyright: ignore[reportArgumentType]
    return np.round(255 * np.clip(moved, 0, 1) ** pressure).astype(np.uint8)
