"""What datasets there are, for people who look for one."""

from dataclasses import dataclass

from personax.datasets.fetch import folder
from personax.datasets.sources import CIFAR10, MNIST, SOURCES


@dataclass(frozen=True)
class Entry:
    """A dataset. `how` one gets it is told where it is not fetched."""

    name: str
    description: str
    size: str
    citation: str
    how: str = ""

    @property
    def where(self) -> str:
        """Whether it is here, or how to get it."""
        if self.name not in SOURCES:
            return self.how
        return "here" if (folder() / f"{self.name}.npz").exists() else "not here"


ENTRIES = (
    Entry("digits", "1,797 digits, 8x8", "45 kB", "Alpaydin, Kaynak 1998", "embedded"),
    Entry("mnist", "70,000 digits, 28x28", MNIST.size, "LeCun et al. 1998"),
    Entry("cifar10", "60,000 photos, 32x32", CIFAR10.size, "Krizhevsky 2009"),
    Entry("synthetic", "linear classifiers", "", "APFL; Li et al. 2018", "generated"),
    Entry("femnist", "characters by writer", "", "Caldas et al. 2018", "needs a folder"),
)
