"""MNIST."""

import numpy as np

from personax.datasets.fetch import load
from personax.datasets.pool import Pool
from personax.datasets.sources import MNIST


def mnist() -> Pool:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28 bytes.

    Reads what `fetch("mnist")`, or `personax data fetch mnist`, got.

    LeCun, Bottou, Bengio and Haffner 1998, Gradient-based learning applied to document recognition.
    """
    arrays = load(MNIST)
    return Pool(
        arrays["x"],
        arrays["y"].astype(np.int32),
        arrays["test_x"],
        arrays["test_y"].astype(np.int32),
        num_classes=10,
        name="MNIST",
        citation="LeCun, Bottou, Bengio and Haffner 1998.",
    )
