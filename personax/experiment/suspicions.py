"""Warnings about data that is valid but likely to be a mistake, given before training."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax import theory
from personax.data.federation import Federation
from personax.data.scaling import moments
from personax.data.schema import listed
from personax.experiment.build import Study
from personax.simulation.simulate import initial_params

WIDEST_SPREAD = 1e3  # largest ratio of column scales
LARGEST_LOSS, LARGEST_GRADIENT = 1e2, 1e3  # for a new model; the cross-entropy of a thousand classes is 7
_MOST_ROWS, _MOST_NUMBERS = 20_000, 1 << 26  # limits on the inspected data
_REMEDY = "Set `standardize = true` in `[data]` (in Python: `federation.standardize()`)"


def suspicions_of(study: Study) -> list[str]:
    """Return a warning with its remedy for each likely mistake in the data."""
    federation = study.federation
    found = _of_labels(federation)
    if (
        federation.x.dtype == np.uint8 or federation.is_mapped
    ):  # skip images, and files, which would have to be read completely
        return found
    columns = _scales_of(federation)
    found += [text for text in (_spread(federation, columns), _constant(federation, columns)) if text]
    return [*found, *_identifiers(federation, columns), *_explosion(study, columns)]


def _of_labels(federation: Federation) -> list[str]:
    classes, labels = federation.schema.classes, np.unique(federation.y)
    if not classes:
        return []
    if len(labels) == 1:
        return [f"All training samples have the same class, {classes[labels[0]]!r}. Check the label column."]
    if len(classes) > 2 * len(labels):
        return [
            f"There are {len(classes)} classes but only {len(labels)} different labels in the training data. "
            "Number the classes from 0 without gaps, or read them from a file, which numbers them."
        ]
    if len(labels) > max(20, len(federation.y) // 5):
        return [
            f"There are {len(labels)} classes for {len(federation.y)} samples. If the labels are quantities, set "
            '`kind = "regression"` in `[task]`.'
        ]
    return []


class _Scales(NamedTuple):
    """The root mean square of each column, and a mask of constant columns."""

    scale: np.ndarray
    constant: np.ndarray


def _scales_of(federation: Federation) -> _Scales:
    rows = federation.x[:: 1 + len(federation.x) // _MOST_ROWS]
    found = moments(rows)
    mean = found.total / found.count
    scale = np.sqrt(mean**2 + found.squares / found.count)
    flat = rows.reshape(len(rows), -1)
    return _Scales(scale, (flat == flat[:1]).all(axis=0))


def _spread(federation: Federation, columns: _Scales) -> str:
    """Return the warning about columns with very different scales."""
    varied = np.flatnonzero(~columns.constant & (columns.scale > 0))
    if federation.schema.feature_scaling is not None or len(varied) < 2:
        return ""
    order = varied[np.argsort(columns.scale[varied])]
    least, most = columns.scale[order[0]], columns.scale[order[-1]]
    if most < WIDEST_SPREAD * least or (most < 10 and not federation.schema.features):  # such as images from 0 to 1
        return ""
    large = [at for at in order[::-1] if columns.scale[at] >= most / 10][:5]
    name = federation.schema.column
    return (
        f"The features have very different scales: {', '.join(map(name, large))} about {most:.2g}, and "
        f"{name(order[0])} about {least:.2g}. {_REMEDY}."
    )


def _constant(federation: Federation, columns: _Scales) -> str:
    """Return the warning about constant columns."""
    if len(federation.schema.shape) != 1:
        return ""  # the borders of images
    flat = federation.x
    places = [at for at in np.flatnonzero(columns.constant) if (flat[:, at] == flat[0, at]).all()]
    if not places:
        return ""
    return f"Columns with the same value in every row: {_named(federation, places)}. Remove them with `exclude`."


def _identifiers(federation: Federation, columns: _Scales) -> list[str]:
    """Return the warnings about columns that identify rows or clients."""
    if len(federation.schema.shape) != 1 or federation.x.size > _MOST_NUMBERS:
        return []
    x, offsets = federation.x, np.asarray(federation.offsets)
    rows = [at for at in np.flatnonzero(~columns.constant) if len(x) >= 10 and _numbers_rows(_unscaled(federation, at))]
    least, most = np.minimum.reduceat(x, offsets[:-1], axis=0), np.maximum.reduceat(x, offsets[:-1], axis=0)
    same = np.flatnonzero((least == most).all(axis=0) & ~columns.constant)
    different = [at for at in same if len(np.unique(least[:, at])) == len(least)]
    clients = different if len(least) > 1 and federation.counts.max() > 1 else []
    return [
        f"Columns that {what}: {_named(federation, places)}. They look like identifiers, which a model memorizes. "
        "Remove them with `exclude`."
        for what, places in (
            ("have a different integer in every row", rows),
            ("differ only between clients", clients),
        )
        if places
    ]


def _unscaled(federation: Federation, at: Any) -> np.ndarray:
    """Return a column in its original units."""
    column, scaling = federation.x[:, at], federation.schema.feature_scaling
    return column if scaling is None else column.astype(float) * scaling.deviation[at] + scaling.mean[at]


def _numbers_rows(column: np.ndarray) -> bool:
    error = np.abs(column).max() * 4 * float(np.finfo(np.float32).eps)  # rounding error of scaled integers
    whole = error < 0.1 and bool(np.all(np.abs(column - np.rint(column)) <= error))
    return whole and len(np.unique(column)) == len(column)


def _explosion(study: Study, columns: _Scales) -> list[str]:
    """Return the warning about a loss or gradient that is too large to start training."""
    federation = study.federation
    few = federation.select(np.arange(min(8, federation.num_clients)))
    batches = theory.sample_clients(few, 32, key=jax.random.key(0))
    params = initial_params(study.task, federation, key=study.keys[0])
    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(study.task.loss), (None, 0)))(params, batches)
    squares = [jnp.square(leaf.reshape(len(leaf), -1)).sum(axis=1) for leaf in jax.tree.leaves(gradients)]
    loss, gradient = float(losses.max()), float(jnp.sqrt(sum(squares)).max())
    if loss <= LARGEST_LOSS and gradient <= LARGEST_GRADIENT:  # False for NaN
        return []
    largest, scale = int(np.argmax(columns.scale)), float(columns.scale.max())
    target = 0.0 if federation.schema.classes else float(np.sqrt(np.square(federation.y.astype(float)).mean()))
    whose = f"the column {federation.schema.column(largest)}" if scale >= target else "the targets"
    return [
        f"Training may diverge: a new model has a loss of {loss:.2g} and a gradient norm of {gradient:.2g}. "
        f"The largest values are in {whose}, about {max(scale, target):.2g}. {_REMEDY}, or reduce `lr`."
    ]


def _named(federation: Federation, places: Sequence[Any]) -> str:
    if federation.schema.features:
        return listed([federation.schema.features[at] for at in places])
    return ", ".join(map(str, places[:10])) + (f" and {len(places) - 10} more" if len(places) > 10 else "")
