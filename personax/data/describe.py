"""Summaries of a federation: its samples, its labels and the differences between clients."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from personax.data.schema import Schema


class LabelCounts(NamedTuple):
    """The number of samples per client and class, for pairs that occur, ordered by client and class."""

    client: np.ndarray
    label: np.ndarray  # positions in `classes`
    num: np.ndarray
    classes: np.ndarray
    totals: np.ndarray  # samples per class


def label_counts(y: np.ndarray, offsets: np.ndarray) -> LabelCounts:
    """Count the labels of each client, with memory proportional to samples instead of clients times classes."""
    classes, label, totals = np.unique(y, return_inverse=True, return_counts=True)
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pairs, num = np.unique(owner * len(classes) + label.ravel(), return_counts=True)
    return LabelCounts(pairs // len(classes), pairs % len(classes), num, classes, totals)


def heterogeneity(y: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return each client's total variation distance from the whole federation, between label distributions.

    It is 0 if a client's label distribution equals the pooled one, and near 1 if it holds only rare labels.
    """
    found = label_counts(y, offsets)
    own = found.num / np.diff(offsets)[found.client]
    everyone = (found.totals / len(y))[found.label]
    add_up = lambda entries: np.bincount(found.client, entries, minlength=len(offsets) - 1)
    # Classes that the client lacks contribute their pooled share.
    return (add_up(np.abs(own - everyone)) + 1 - add_up(everyone)) / 2


def describe_samples(x: np.ndarray, offsets: np.ndarray) -> str:
    """Describe the number of samples, their spread over clients, and the shape of a sample."""
    counts = np.diff(offsets)
    look = " x ".join(map(str, x.shape[1:])) or "number"
    return (
        f"{len(x):,} samples, {counts.min():,} to {counts.max():,} per client (median {np.median(counts):,.0f}); "
        f"{look}, {x.dtype}"
    )


def describe_features(schema: Schema, most: int = 8) -> Iterator[tuple[str, str]]:
    """Yield titled lines with the names of the columns and their scaling, if there are any."""
    names = [*schema.features[:most], *([f"and {len(schema.features) - most} more"] * (len(schema.features) > most))]
    scaled = "" if schema.feature_scaling is None else "standardized"
    if names or scaled:
        yield "features", "; ".join(filter(None, [", ".join(names), scaled]))


def describe_labels(y: np.ndarray, offsets: np.ndarray, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield titled lines with the label histogram and the heterogeneity, or the spread of real targets."""
    if not np.issubdtype(y.dtype, np.integer):
        means = np.add.reduceat(y, offsets[:-1], axis=0) / np.diff(offsets).reshape(-1, *[1] * (y.ndim - 1))
        yield "targets", f"mean {y.mean():.4g}, standard deviation {y.std():.4g}"
        yield "heterogeneity", f"the clients' mean targets have standard deviation {means.std(axis=0).mean():.4g}"
        return
    if y.ndim > 1:  # several labels per sample: the histogram counts each of them
        y, offsets = y.reshape(-1), np.asarray(offsets) * int(np.prod(y.shape[1:]))
    found = label_counts(y, offsets)
    held = np.bincount(found.client, minlength=len(offsets) - 1)
    yield "labels", f"{len(found.classes)} classes: {_histogram(found, names)}"
    yield (
        "heterogeneity",
        f"{heterogeneity(y, offsets).mean():.2f} (total variation of labels, 0 is IID); "
        f"{held.min()} to {held.max()} classes per client (median {np.median(held):.0f})",
    )


def _histogram(found: LabelCounts, names: Sequence[str], most: int = 20) -> str:
    share = found.totals / found.totals.sum()
    name = lambda label: names[label] if 0 <= label < len(names) else str(label)
    shown = ", ".join(f"{name(label)}: {part:.1%}" for label, part in zip(found.classes[:most], share, strict=False))
    return shown + (f", and {len(share) - most} more" if len(share) > most else "")
