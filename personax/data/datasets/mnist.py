"""MNIST."""

from personax.data.datasets.fetch import load_pool
from personax.data.datasets.pool import Pool
from personax.data.datasets.sources import MNIST
from personax.values import DATASETS


@DATASETS.register(summary="70,000 digits, 28x28", source="LeCun 1998", citations=("lecun1998",))
def mnist() -> Pool:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28 bytes.

    Download it first with `fetch("mnist")` or `personax data fetch mnist`.

    LeCun, Bottou, Bengio and Haffner 1998, Gradient-based learning applied to document recognition.

    >>> import personax as px
    >>> px.datasets.mnist().x.shape  # doctest: +SKIP
    (60000, 28, 28)
    """
    return load_pool(MNIST, num_classes=10, name="MNIST", citation="LeCun, Bottou, Bengio and Haffner 1998.")
