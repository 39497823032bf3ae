"""Handwritten digits, included in the package."""

from importlib.resources import files

import numpy as np

from personax.data.datasets.pool import Pool
from personax.values import DATASETS


@DATASETS.register(summary="1,797 digits, 8x8", source="Alpaydin 1998, test part", citations=("alpaydin1998",))
def digits() -> Pool:
    """Digits: 1797 handwritten digits by 13 people, 8x8 bytes, which need no download.

    The test part of Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository (CC BY 4.0). The original pixels count the ink v = 0..16 of a 4x4 block; here they are
    255/16 v, rounded, because images in bytes are read as numbers from 0 to 1.

    >>> print(digits())  # doctest: +ELLIPSIS
    Digits: 1,797 samples of shape (8, 8), uint8, 10 classes. Alpaydin and Kaynak 1998, ...
    """
    with (files("personax.data.datasets") / "digits.npz").open("rb") as file, np.load(file) as arrays:
        ink, y = arrays["x"], arrays["y"]
    return Pool(
        np.rint(ink * (255 / 16)).astype(np.uint8),
        y.astype(np.int32),
        num_classes=10,
        name="Digits",
        citation="Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, test part (CC BY 4.0).",
    )
