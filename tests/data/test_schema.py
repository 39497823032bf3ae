"""Schemas: classes and columns by name, types, scaling, and the round trip through JSON."""

import json
from functools import reduce

import numpy as np
import pytest

from personax.data.scaling import ColumnSums, Scaling, moments
from personax.data.schema import Samples, Schema, numbered
from tests.experiment.test_config import refused

RNG = np.random.default_rng(0)
SCALING = Scaling((1.0, 2.0, 3.0), (1.0, 0.5, 2.0))
TABLE = Schema((3,), "float32", ("age", "dose", "weight"), ("ill", "well"))
PLAIN = [
    Schema((28, 28), "uint8", classes=numbered(10)),
    TABLE,
    Schema((3,), "float32", ("a", "b", "c"), ("ill", "well"), feature_scaling=SCALING),
    Schema((3,), "float64", target_shape=(2,), feature_scaling=SCALING, target_scaling=Scaling((0.1, 2), (1 / 3, 4))),
]


def conformed(schema, own, x, y, notify=lambda text: None):
    return schema.conform(Samples(np.asarray(x), np.asarray(y), "new.csv"), own, notify)


@pytest.mark.parametrize("schema", PLAIN)
def test_a_schema_survives_json(schema):
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    assert hash(schema) == hash(Schema.from_dict(schema.to_dict()))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"shape": [3], "dtype": "float32", "labels": ["a"]}, "got 'shape', 'dtype', 'labels'"),
        ({"shape": [3]}, "needs `shape` and `dtype`"),
        ([1], "A schema must be a table"),
        ({"shape": [3.5], "dtype": "float32"}, "integers"),
        ({"shape": 3, "dtype": "float32"}, "Invalid schema"),
        ({"shape": [-3], "dtype": "float32"}, "at least 1"),
        ({"shape": [3], "dtype": "object"}, "must be numeric"),
        ({"shape": [3], "dtype": "no type"}, "Invalid schema"),
        ({"shape": [3], "dtype": "float32", "classes": "abc"}, "a list of strings"),
        ({"shape": [3], "dtype": "float32", "classes": ["a", "a"]}, "Duplicate name 'a'"),
        ({"shape": [3], "dtype": "float32", "features": ["a"]}, "1 named columns"),
        ({"shape": [1], "dtype": "float32", "feature_scaling": {"mean": [0.0]}}, "`mean` and `deviation`"),
        ({"shape": [1], "dtype": "float32", "feature_scaling": {"mean": [0.0], "deviation": [0.0]}}, "positive"),
        ({"shape": [1], "dtype": "float32", "feature_scaling": {"mean": ["nan"], "deviation": [1.0]}}, "finite"),
        ({"shape": [2], "dtype": "float32", "feature_scaling": {"mean": [0.0], "deviation": [1.0]}}, "does not fit"),
    ],
)
def test_an_invalid_table_is_rejected_as_a_schema(table, said):
    with refused(said, kind=ValueError):
        Schema.from_dict(table)


def test_labels_are_numbered_by_the_names_of_the_classes():
    own = Schema((3,), "float32", TABLE.features, ("well",))
    _, y = conformed(TABLE, own, np.ones((2, 3)), [0, 0])
    assert y.tolist() == [1, 1]  # a subset, and not the 0 that the client's own file has
    gaps = Schema((1,), "float32", classes=("3", "8"))
    assert conformed(gaps, Schema((1,), "float32", classes=("8",)), np.ones((2, 1)), [0, 0])[1].tolist() == [1, 1]
    negative = Schema((1,), "float32", classes=("-1", "1"))
    assert conformed(negative, Schema((1,), "int64"), np.ones((3, 1)), [1, -1, 1])[1].tolist() == [1, 0, 1]


def test_an_unknown_label_is_reported_by_name_and_row():
    own = Schema((3,), "float32", TABLE.features, ("wel", "well"))
    with refused("new.csv: unknown label 'wel' in row 2", "'ill', 'well'", "Did you mean `well`?", kind=ValueError):
        conformed(TABLE, own, np.ones((4, 3)), [1, 1, 0, 1])
    assert conformed(TABLE, own, np.ones((2, 3)), [1, 1])[1].tolist() == [1, 1]  # names without rows are harmless
    with refused("labels must be classes", kind=ValueError):
        conformed(TABLE, Schema((3,), "float32", TABLE.features), np.ones((2, 3)), [0.5, 1])


def test_columns_are_matched_by_name_and_others_ignored():
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    own, notes = Schema((4,), "float32", ("weight", "height", "age", "dose"), ("ill", "well")), []
    found, _ = conformed(TABLE, own, x, [0, 1], notes.append)
    np.testing.assert_array_equal(found, x[:, [2, 3, 0]])
    assert notes == ["new.csv: ignored 1 column that the model does not use: 'height'."]
    with refused("missing column 'age'", "Did you mean `Age`?", "'Age', 'dose', 'weight'", kind=ValueError):
        conformed(TABLE, Schema((3,), "float32", ("Age", "dose", "weight"), TABLE.classes), x[:, :3], [0, 1])


def test_columns_without_names_are_read_in_order_with_a_note():
    notes, x = [], np.ones((2, 3), np.float32)
    found, _ = conformed(TABLE, Schema((3,), "float32", classes=TABLE.classes), x, [0, 1], notes.append)
    np.testing.assert_array_equal(found, x)
    assert notes == ["new.csv: columns without names are read in the order 'age', 'dose', 'weight'."]
    with refused("must have 3 numbers (shape (3,)), got 2", kind=ValueError):
        conformed(TABLE, Schema((2,), "float32", classes=TABLE.classes), x[:, :2], [0, 1])
    images = Schema((2, 3), "float32", classes=("0",))
    with refused("must have the shape (2, 3), got (3, 2)", kind=ValueError):
        conformed(images, Schema((3, 2), "float32", classes=("0",)), np.ones((1, 3, 2)), [0])


def test_bytes_stay_bytes():
    images = Schema((2,), "uint8", classes=("0",))
    own = Schema((2,), "float64", classes=("0",))
    assert conformed(images, own, [[0.0, 255.0]], [0])[0].dtype == np.uint8
    for wrong in ([[0.5, 1.0]], [[-1.0, 1.0]], [[256.0, 1.0]]):
        with refused("trained on bytes (integers from 0 to 255)", kind=ValueError):
            conformed(images, own, wrong, [0])


def test_integer_labels_become_the_targets_that_they_name():
    regression = Schema((1,), "float32", target_scaling=Scaling((5.0,), (2.0,)))
    _, y = conformed(regression, Schema((1,), "float32", classes=("3", "8")), np.ones((2, 1)), [1, 0])
    np.testing.assert_allclose(y, [1.5, -1.0])
    with refused("targets must be numbers, got the labels 'ill', 'well'", kind=ValueError):
        conformed(regression, Schema((1,), "float32", classes=("ill", "well")), np.ones((2, 1)), [1, 0])


def test_samples_with_a_different_scaling_are_rejected():
    scaled = Schema((3,), "float32", feature_scaling=SCALING)
    x = np.ones((1, 3), np.float32)
    np.testing.assert_allclose(conformed(scaled, Schema((3,), "float32"), x, [0.5])[0], [[0.0, -2.0, -1.0]])
    np.testing.assert_array_equal(conformed(scaled, scaled, x, [0.5])[0], x)  # once
    other = Schema((3,), "float32", feature_scaling=Scaling((0.0,) * 3, (1.0,) * 3))
    with refused("different standardization", kind=ValueError):
        conformed(scaled, other, x, [0.5])


@pytest.mark.parametrize("sizes", [[20], [1, 19], [7, 1, 12]])
@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_the_scaling_of_clients_is_that_of_all_their_samples(sizes, offset):
    x = RNG.normal(size=(20, 3)) * [1, 1e-3, 1e6] + offset
    parts = [moments(part) for part in np.split(x, np.cumsum(sizes)[:-1])]
    found = Scaling.from_moments(reduce(ColumnSums.__add__, parts))
    np.testing.assert_allclose(found.mean, x.mean(axis=0), rtol=1e-12)
    # Relative to the resolution of the column: at 1e8 a float64 has 8 digits after the point.
    np.testing.assert_allclose(found.deviation, x.std(axis=0), rtol=1e-6 if offset else 1e-12)


def test_a_constant_column_is_only_centered():
    x = np.stack([np.full(7, 0.1), np.arange(7.0), np.zeros(7)], axis=1).astype(np.float32)
    found = Scaling.from_moments(moments(x[:3]) + moments(x[3:]))
    assert found.deviation[0] == found.deviation[2] == 1
    np.testing.assert_allclose(found.apply(x)[:, [0, 2]], 0, atol=1e-12)
    np.testing.assert_allclose(found.apply(x)[:, 1], (np.arange(7) - 3) / 2, rtol=1e-6)
    assert found.apply(x).dtype == np.float32
    with refused("Images in bytes cannot be standardized", kind=ValueError):
        found.apply(x.astype(np.uint8))
