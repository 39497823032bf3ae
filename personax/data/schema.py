"""Schemas that describe the samples that a model was trained on, which all other data must match."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from personax.data.scaling import Scaling
from personax.values import did_you_mean

Notify = Callable[[str], None]
MOST_CLASSES = 1 << 20  # larger labels are not class numbers


class Samples(NamedTuple):
    """Unconverted inputs and labels or targets, and their origin for messages."""

    x: np.ndarray
    y: np.ndarray
    where: str


@dataclass(frozen=True)
class Schema:
    """The schema of a sample: its inputs, its classes or targets, and their scaling.

    Args:
        shape: the shape of one sample's inputs.
        dtype: the dtype in which the model reads inputs. Bytes (uint8) are images.
        features: the names of the columns in order; () for arrays without names.
        classes: the names of the classes, indexed by the labels; () for a regression.
        target_shape: the shape of one sample's labels or targets; () for one number.
        feature_scaling: the standardization of the inputs; None if there is none.
        target_scaling: the standardization of a regression's targets; None if there is none.

    >>> schema = Schema((2,), "float32", ("age", "dose"), ("ill", "well"))
    >>> schema == Schema.from_dict(schema.to_dict())
    True
    >>> schema.number(np.array([0, 0]), ["well"], "new.csv")
    array([1, 1], dtype=int32)
    >>> schema.number(np.array([0, 1]), ["ill", "dead"], "new.csv")
    Traceback (most recent call last):
        ...
    ValueError: new.csv: unknown label 'dead' in row 1 (counted from 0). The classes are 'ill', 'well'. Rename it, ...
    """

    shape: tuple[int, ...]
    dtype: str
    features: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    target_shape: tuple[int, ...] = ()
    feature_scaling: Scaling | None = None
    target_scaling: Scaling | None = None

    def __post_init__(self) -> None:
        for name in ("features", "classes"):
            names = getattr(self, name)
            twice = [one for one, num in Counter(names).items() if num > 1]
            if twice:
                raise ValueError(f"Duplicate name {twice[0]!r} in `{name}`. Rename one.")
        if min(self.shape + self.target_shape, default=1) < 1:
            raise ValueError(f"Sizes must be at least 1, got the shape {self.shape}.")
        if np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"`dtype` must be numeric, got {self.dtype}.")
        if self.features and len(self.features) != self.num_inputs:
            raise ValueError(f"A sample of shape {self.shape} cannot have {len(self.features)} named columns.")
        if self.classes and self.target_scaling is not None:
            raise ValueError("Classes cannot be scaled. Omit `target_scaling`.")
        for scaling, size in ((self.feature_scaling, self.num_inputs), (self.target_scaling, self.num_targets)):
            if scaling is not None and len(scaling.mean) != size:
                raise ValueError(f"A scaling of {len(scaling.mean)} columns does not fit {size} numbers.")

    @classmethod
    def of(cls, x: np.ndarray, ys: Sequence[np.ndarray]) -> "Schema":
        """Infer the schema of arrays without names: integer labels number the classes from 0 to the largest."""
        y, classes = ys[0], ()
        if np.issubdtype(y.dtype, np.integer) and all(len(part) for part in ys):
            least, most = min(int(part.min()) for part in ys), max(int(part.max()) for part in ys)
            classes = numbered(most + 1) if least >= 0 and most < MOST_CLASSES else ()
        return cls(x.shape[1:], str(x.dtype), classes=classes, target_shape=y.shape[1:])

    @property
    def num_inputs(self) -> int:
        """Return the number of inputs of one sample."""
        return int(np.prod(self.shape, dtype=int))

    @property
    def num_targets(self) -> int:
        """Return the number of targets of one sample."""
        return int(np.prod(self.target_shape, dtype=int))

    @property
    def num_outputs(self) -> int:
        """Return the number of model outputs: one per class or target."""
        return len(self.classes) or self.num_targets

    @property
    def has_numbered_classes(self) -> bool:
        """Return True if the classes are named 0, 1, 2, ... (or there are none)."""
        return self.classes == numbered(len(self.classes))

    @property
    def is_plain(self) -> bool:
        """Return True if arrays alone determine the schema: it has no names and no scaling."""
        return self.has_numbered_classes and (self.features, self.feature_scaling, self.target_scaling) == (
            (),
            None,
            None,
        )

    @property
    def look(self) -> str:
        """Describe the shapes, types and number of classes."""
        targets = f"{len(self.classes)} classes" if self.classes else f"targets of shape {self.target_shape}"
        return f"{self.dtype} samples of shape {self.shape} and {targets}"

    def column(self, at: int) -> str:
        """Describe a column."""
        return repr(self.features[at]) if self.features else f"column {at}"

    def to_dict(self) -> dict[str, Any]:
        """Return the schema as a plain table, for JSON."""
        table = {name: getattr(self, name) for name in _FIELDS}
        table = {name: list(item) if isinstance(item, tuple) else item for name, item in table.items()}
        scalings = {name: item.to_dict() for name, item in table.items() if isinstance(item, Scaling)}
        return {**table, **scalings}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Schema":
        """Read a schema from a plain table, which may come from another machine."""
        if not isinstance(table, Mapping):
            raise ValueError(f"A schema must be a table, got {table!r:.80}. Write it with `to_dict`.")
        if table.keys() - set(_FIELDS) or {"shape", "dtype"} - table.keys():
            got = ", ".join(map(repr, table))
            raise ValueError(f"A schema needs `shape` and `dtype`, and may have {', '.join(_FIELDS[2:])}; got {got}.")
        try:
            return cls(**{name: _READ[name](item) for name, item in table.items() if item is not None})
        except TypeError as error:
            raise ValueError(f"Invalid schema: {error}. Write it with `to_dict`.") from None

    def number(self, codes: np.ndarray, names: Sequence[str], where: str) -> np.ndarray:
        """Convert labels to indices of these classes, from `codes` that index other `names`, as in a client's file.

        An unknown label raises a ValueError that names its row. The labels may be a subset of the classes.
        """
        known = {name: place for place, name in enumerate(self.classes)}
        places = np.array([known.get(name, -1) for name in names], np.int32)
        found = places[codes]
        wrong = np.flatnonzero(found.reshape(len(found), -1).min(axis=1) < 0)
        if wrong.size:
            row = int(wrong[0])
            name = next(names[int(code)] for code in np.ravel(codes[row]) if places[code] < 0)
            near = did_you_mean(name, self.classes)
            raise ValueError(
                f"{where}: unknown label {name!r} in row {row} (counted from 0). "
                f"The classes are {listed(self.classes)}.{near} Rename it, or remove the row."
            )
        return found

    def columns_in(self, names: Sequence[str], where: str, notify: Notify) -> tuple[str, ...]:
        """Return the features, which must all be among the columns `names`; other columns are reported as ignored."""
        missing = [name for name in self.features if name not in set(names)]
        if missing:
            near = did_you_mean(missing[0], [name for name in names if name not in self.features])
            raise ValueError(
                f"{where}: missing column {listed(missing)}, which the model was trained on.{near} "
                f"The columns are {listed(names)}. Rename or add the missing ones."
            )
        extra = [name for name in names if name not in set(self.features)]
        if extra:
            notify(f"{where}: ignored {_count(len(extra), 'column')} that the model does not use: {listed(extra)}.")
        return self.features

    def pick(self, x: np.ndarray, names: Sequence[str], where: str, notify: Notify) -> np.ndarray:
        """Select these features by name, in this order, from the columns `names` of flat samples."""
        places = {name: at for at, name in enumerate(names)}
        order = [places[name] for name in self.columns_in(names, where, notify)]
        rows = x.reshape(len(x), -1)
        return (rows if order == list(range(len(names))) else rows[:, order]).reshape(len(x), *self.shape)

    def conform(
        self, samples: Samples, own: "Schema", notify: Notify = lambda text: None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Convert inputs and labels described by `own` to this schema: columns, shape, dtype, classes and scaling."""
        x, y, where = samples
        if own == self:
            return x, y
        if own.feature_scaling or own.target_scaling:
            raise ValueError(f"{where}: the data have a different standardization. Give the original samples.")
        return self.inputs(x, own, where, notify), self._targets(y, own, where)

    def inputs(self, x: np.ndarray, own: "Schema", where: str, notify: Notify) -> np.ndarray:
        """Convert inputs described by `own` to this schema: columns by name, shape, dtype and scaling."""
        if own.num_inputs != self.num_inputs and not (self.features and own.features):
            raise ValueError(
                f"{where}: a sample must have {self.num_inputs} numbers (shape {self.shape}), got {own.num_inputs} "
                f"(shape {own.shape})."
            )
        if self.features and own.features:
            x = self.pick(x, own.features, where, notify)
        elif own.shape != self.shape and len(own.shape) != 1:
            raise ValueError(f"{where}: a sample must have the shape {self.shape}, got {own.shape}. Reshape it.")
        elif self.features:
            notify(f"{where}: columns without names are read in the order {listed(self.features)}.")
        elif own.features:
            notify(f"{where}: the model has no column names, so columns are read in the order of the file.")
        x = x.reshape(len(x), *self.shape)
        if self.feature_scaling is not None:
            floats = x.astype(self.dtype) if x.dtype == np.uint8 else x
            return self.feature_scaling.apply(floats).astype(self.dtype, copy=False)
        return self._typed(x, where)

    def _typed(self, x: np.ndarray, where: str) -> np.ndarray:
        kind = np.dtype(self.dtype)
        if x.dtype == kind:
            return x
        if kind == np.uint8 and (x.min() < 0 or x.max() > 255 or np.any(x % 1)):
            raise ValueError(
                f"{where}: the model was trained on bytes (integers from 0 to 255), got other values. Convert them."
            )
        if kind.kind in "iu" and x.dtype.kind == "f" and np.any(x % 1):
            raise ValueError(f"{where}: the model was trained on integers ({kind}), got other values. Convert them.")
        return x.astype(kind, copy=False)

    def _targets(self, y: np.ndarray, own: "Schema", where: str) -> np.ndarray:
        if own.target_shape != self.target_shape:
            raise ValueError(f"{where}: labels must have the shape {self.target_shape}, got {own.target_shape}.")
        if self.classes:
            if own.classes == self.classes:
                return y
            if not np.issubdtype(y.dtype, np.integer):
                raise ValueError(f"{where}: labels must be classes ({listed(self.classes)}), got {y.dtype} numbers.")
            if own.classes:
                return self.number(y, own.classes, where)
            values, codes = np.unique(y, return_inverse=True)
            return self.number(codes.reshape(y.shape), [str(value) for value in values.tolist()], where)
        y = as_targets(y, own, where)
        return y if self.target_scaling is None else self.target_scaling.apply(y)


def settle(found: Schema, given: Schema | None, newcomers: Schema | None) -> Schema:
    """Return the schema of a federation with arrays like `found`: the given one, if they match it.

    A given schema without names and scaling only sets the least number of classes.
    """
    if given is None or given.is_plain:
        others = [one.classes for one in (given, newcomers) if one is not None and one.is_plain]
        most = max(map(len, [found.classes, *others]))
        return replace(found, classes=numbered(most)) if found.classes else found
    looks = [(one.shape, one.dtype, one.target_shape, bool(one.classes)) for one in (given, found)]
    if looks[0] != looks[1] or len(given.classes) < len(found.classes):
        raise ValueError(
            f"The schema does not match the data: it has {given.look}, but the data have {found.look}. Change it, or "
            "use `conform`."
        )
    if newcomers not in (None, given):
        raise ValueError("Newcomers must have the schema of the training clients. Use `conform` on them first.")
    return given


def as_targets(y: np.ndarray, own: Schema, where: str) -> np.ndarray:
    """Convert labels to regression targets: the numbers that name their classes."""
    if own.has_numbered_classes:
        return y.astype(np.float32) if y.dtype.kind in "iu" else y
    try:
        return np.array([float(name) for name in own.classes], np.float32)[y]
    except ValueError:
        raise ValueError(f"{where}: targets must be numbers, got the labels {listed(own.classes)}.") from None


def numbered(num: int) -> tuple[str, ...]:
    """Return the default names of classes: their numbers."""
    return tuple(map(str, range(num)))


def listed(names: Sequence[str], most: int = 10) -> str:
    """List names in quotes, at most `most` of them."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + rest


def _count(num: int, word: str) -> str:
    return f"{num} {word}{'' if num == 1 else 's'}"


def _sizes(item: Any) -> tuple[int, ...]:
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in item):
        raise ValueError(f"A shape must be a list of integers, got {item!r:.80}.")
    return tuple(item)


def _names(item: Any) -> tuple[str, ...]:
    if isinstance(item, str) or not all(isinstance(name, str) for name in item):
        raise ValueError(f"Names must be a list of strings, got {item!r:.80}.")
    return tuple(item)


_FIELDS = tuple(field.name for field in fields(Schema))
_READ: dict[str, Callable[[Any], Any]] = {
    "shape": _sizes,
    "dtype": lambda item: str(np.dtype(item)),
    "features": _names,
    "classes": _names,
    "target_shape": _sizes,
    "feature_scaling": Scaling.from_dict,
    "target_scaling": Scaling.from_dict,
}
