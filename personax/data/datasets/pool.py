"""Pools of samples before they are assigned to clients."""

from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar

import numpy as np

from personax.data.schema import Schema, numbered, settle
from personax.values import require_count


@dataclass(frozen=True, eq=False)
class Pool:
    """Labeled samples, and test samples if the data set has a published test part.

    `num_classes` is 0 for regression targets. `schema` describes a sample; by default it is inferred from the arrays.

    >>> print(Pool(np.zeros((3, 2)), np.array([0, 1, 1]), num_classes=2, name="Toy", citation="Doe 2020."))
    Toy: 3 samples of shape (2,), float64, 2 classes. Doe 2020.
    """

    is_divided: ClassVar[bool] = False  # a partition must divide it among clients
    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    _: KW_ONLY
    num_classes: int
    name: str
    citation: str
    schema: Schema = field(default=None)  # pyright: ignore[reportAssignmentType]  # filled in below

    def __post_init__(self) -> None:
        require_count("num_classes", self.num_classes, least=0 if self.y.dtype.kind == "f" else 1)
        if (self.test_x is None) != (self.test_y is None):
            raise ValueError(f"{self.name}: test data needs both `test_x` and `test_y`, got only one.")
        for part, x, y in (("", self.x, self.y), ("test_", self.test_x, self.test_y)):
            if x is None or y is None:
                continue
            if len(x) != len(y) or not len(x):
                raise ValueError(
                    f"{self.name}: `{part}x` and `{part}y` must have one row per sample, got {len(x)} and {len(y)}."
                )
            if not self.num_classes:
                continue
            if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= self.num_classes:
                raise ValueError(
                    f"{self.name}: `{part}y` must hold classes from 0 to {self.num_classes - 1}, "
                    f"got {y.dtype} from {y.min()} to {y.max()}."
                )

        found = replace(Schema.of(self.x, [self.y]), classes=numbered(self.num_classes))
        object.__setattr__(self, "schema", settle(found, self.schema, None))

    def __str__(self) -> str:
        test = "" if self.test_x is None else f" and {len(self.test_x):,} test"
        labels = f"{self.num_classes} classes" if self.num_classes else "targets of a regression"
        return (
            f"{self.name}: {len(self.x):,}{' training' if test else ''}{test} samples of shape {self.x.shape[1:]}, "
            f"{self.x.dtype}, {labels}. {self.citation}"
        ).rstrip()
