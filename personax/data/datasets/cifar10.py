"""CIFAR-10."""

from personax.data.datasets.fetch import load_pool
from personax.data.datasets.pool import Pool
from personax.data.datasets.sources import CIFAR10
from personax.values import DATASETS


@DATASETS.register(summary="60,000 photos, 32x32", source="Krizhevsky 2009", citations=("krizhevsky2009",))
def cifar10() -> Pool:
    """CIFAR-10: 50,000 training and 10,000 test photographs of ten classes, 32x32 bytes in red, green and blue.

    The classes are airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck. Download it first with
    `fetch("cifar10")` or `personax data fetch cifar10`.

    Krizhevsky 2009, Learning multiple layers of features from tiny images.

    >>> import personax as px
    >>> px.datasets.cifar10().x.shape  # doctest: +SKIP
    (50000, 32, 32, 3)
    """
    return load_pool(CIFAR10, num_classes=10, name="CIFAR-10", citation="Krizhevsky 2009.")
