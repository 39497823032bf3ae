"""A client's samples in the form that a recipe describes, and the moments from which a server fits a common scaling."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from personax.data import datasets
from personax.data.federation import Federation
from personax.data.scaling import ColumnSums, Scaling, add_up, moments
from personax.data.schema import Notify, Schema
from personax.live.limits import Limits, Refused
from personax.live.messages import Mismatch
from personax.live.recipe import Recipe

TEST_SHARE = 0.2  # share of a client's samples used for tests if its file has no test data


class SampleSource(Protocol):
    """One client's samples: a `Federation`, or a file that is read once the schema is known."""

    def conform(self, schema: Schema, notify: Notify) -> Federation:
        """The samples in the form a schema describes; raise a ValueError that names the first mismatch."""
        ...


@dataclass(frozen=True)
class SampleFile:
    """A client's file in npz, CSV or Parquet format."""

    path: Path
    label: str = "label"
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(f"File not found: {self.path}.")

    def conform(self, schema: Schema, notify: Notify) -> Federation:
        """Read the file in the form a schema describes."""
        found = datasets.read_client(self.path, label=self.label, shape=self.shape, schema=schema, notify=notify)
        if found.schema.dtype == "uint8" != schema.dtype and not found.schema.features:
            raise ValueError(
                f"{self.path.name}: the server's model takes {schema.dtype} numbers, got bytes (uint8). Convert and "
                "scale them as the server does."
            )
        return found.conform(schema, notify)


def conformed(source: SampleSource, recipe: Recipe, notify: Notify) -> Federation:
    """One client's samples with a recipe's columns, classes and scaling; a fifth are for tests if none are yet."""
    schema = recipe.schema
    if isinstance(source, Federation) and source.schema == schema and source.test_x is not None:
        return source
    plain = replace(schema, feature_scaling=None, target_scaling=None)  # samples are split before scaling
    data = source.conform(plain, notify)
    if data.test_x is None:
        data = data.split_tests(TEST_SHARE, key=jax.random.key(0))
    return data.conform(schema)


def moments_of(data: Federation, limits: Limits) -> dict[str, Any]:
    """The moments that a client sends for a common scaling; raise if its owner does not allow it."""
    if not limits.share_moments:
        raise Refused(
            "The server standardizes the data, so it asks for the number of this client's samples and for the mean "
            "and spread of each column, which the client's owner does not allow (limit `share_moments`)."
        )
    table = lambda found: {"count": found.count, "total": found.total.tolist(), "squares": found.squares.tolist()}
    return {"features": table(moments(data.x)), "targets": None if data.schema.classes else table(moments(data.y))}


def fit_scaling(schema: Schema, parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit the scaling of features, and of targets in a regression, from the moments of all clients; as a table."""
    parts, sizes = list(parts), {"features": schema.num_inputs, "targets": schema.num_targets}
    wanted = ["features"] if schema.classes else ["features", "targets"]
    fit = lambda which: Scaling.from_moments(add_up(_sums(part.get(which), sizes[which], which) for part in parts))
    try:
        return {which: fit(which).to_dict() for which in wanted}
    except ValueError as error:
        raise Mismatch(f"A scaling cannot be fitted: {error}") from None


def with_scaling(recipe: Recipe, found: Mapping[str, Any]) -> Recipe:
    """The recipe with the scaling that `fit_scaling` found."""
    features, targets = (found.get(which) and Scaling.from_dict(found[which]) for which in ("features", "targets"))
    schema = replace(recipe.schema, feature_scaling=features, target_scaling=targets)
    return replace(recipe, schema=schema, fits_scaling=False)


def _sums(table: Any, size: int, which: str) -> ColumnSums:
    """Read the moments in a client's table, which is untrusted."""
    try:
        found = ColumnSums(int(table["count"]), *(np.array(table[key], float) for key in ("total", "squares")))
        fits = found.total.shape == found.squares.shape == (size,) and 0 < found.count < 2**53
        if fits and np.isfinite([found.total, found.squares]).all() and (found.squares >= 0).all():
            return found
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise ValueError(
        f"the moments of {which} must be of {size} columns, and finite. Install the server's version of personax."
    )
