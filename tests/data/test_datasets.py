"""Pools and federations from embedded data, generated data and files."""

import json
import subprocess
import sys
import time

import jax
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from scipy import stats

from personax.data.datasets import Pool, digits, femnist, read_client, read_leaf, read_pool, read_table, synthetic
from personax.data.datasets.synthetic import MAX_SAMPLES, draw_client

KEY = jax.random.key(0)


def rng(seed=0):
    return np.random.default_rng(seed)


# pools


def test_the_embedded_digits():
    began = time.perf_counter()
    pool = digits()
    assert time.perf_counter() - began < 1
    assert pool.x.shape == (1797, 8, 8) and pool.x.dtype == np.uint8 and pool.y.dtype == np.int32
    assert np.bincount(pool.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    ink = np.arange(17)
    assert np.unique(pool.x).tolist() == np.rint(255 * ink / 16).astype(int).tolist()
    assert pool.y[:10].tolist() == list(range(10)) and pool.test_x is None
    assert not pool.x[0][3:5, 3:5].any()  # a zero has no ink in its middle


def test_a_pool_prints_a_summary():
    pool = Pool(np.zeros((1200, 4)), np.zeros(1200, int), np.zeros((3, 4)), np.ones(3, int), **TOY)
    assert str(pool) == "Toy: 1,200 training and 3 test samples of shape (4,), float64, 2 classes. Doe 2020."


TOY = {"num_classes": 2, "name": "Toy", "citation": "Doe 2020."}


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ((np.zeros((3, 2)), np.zeros(2, int)), "Toy: `x` and `y` must have one row per sample, got 3 and 2"),
        ((np.zeros((0, 2)), np.zeros(0, int)), "got 0 and 0"),
        ((np.zeros(3), np.arange(3)), "Toy: `y` must hold classes from 0 to 1, got int64 from 0 to 2"),
        ((np.zeros(3), np.zeros(3)), "got float64"),
        ((np.zeros(3), np.zeros(3, int), np.zeros(2)), "needs both `test_x` and `test_y`"),
        ((np.zeros(3), np.zeros(3, int), np.zeros(2), -np.ones(2, int)), "`test_y` must hold classes.* from -1 to -1"),
    ],
)
def test_broken_pools(arrays, match):
    with pytest.raises(ValueError, match=match):
        Pool(*arrays, **TOY)


# synthetic


def draw(seed=0, model=1.0, inputs=1.0, m=60, c=10, num=None):
    return draw_client(rng(seed), model, inputs, m, c, num)


def test_labels_are_the_best_class_of_the_clients_model():
    made = draw(num=200)
    logits = np.array([[made.weight[:, k] @ x + made.bias[k] for k in range(10)] for x in made.x.astype(float)])
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    np.testing.assert_array_equal(made.y, (odds / odds.sum(axis=1, keepdims=True)).argmax(axis=1))
    assert made.x.dtype == np.float32 and made.y.dtype == np.int32


def test_features_vary_as_k_to_the_minus_1_2():
    made = draw(num=20_000)
    spread = made.x.astype(float).var(axis=0) / np.arange(1, 61) ** -1.2
    np.testing.assert_allclose(spread, 1, atol=6 * np.sqrt(2 / 20_000))  # six standard errors of a variance
    correlation = np.corrcoef(made.x[:, :5].astype(float).T) - np.eye(5)
    assert np.abs(correlation).max() < 6 / np.sqrt(20_000)


def spread_within(samples, variance):
    """Return True if independent normal numbers have this variance, to six standard errors."""
    return abs(np.var(samples) / variance - 1) < 6 * np.sqrt(2 / len(samples))


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_spreads_are_variances_of_the_clients_means(spread):
    num, m, c = 2000, 30, 4
    makes = [draw(i, model=spread, inputs=0, m=m, c=c, num=1) for i in range(num)]
    means = [np.r_[made.weight.ravel(), made.bias].mean() for made in makes]  # mu_i and a mean of (m + 1) c normals
    assert spread_within(means, spread + 1 / ((m + 1) * c))
    assert spread_within([made.weight[0, 0] for made in makes], spread + 1)
    assert spread_within([made.bias[0] for made in makes], spread + 1)
    makes = [draw(i, model=0, inputs=spread, m=m, c=2, num=1) for i in range(num)]
    noise = (np.arange(1, m + 1) ** -1.2).sum() / m**2
    assert spread_within([made.x.astype(float).mean() for made in makes], spread + 1 / m + noise)
    assert spread_within([float(made.x[0, 0]) for made in makes], spread + 2)


def test_no_spread_still_gives_every_client_its_own_model():
    one, two = draw(0, 0, 0, num=5), draw(1, 0, 0, num=5)
    assert np.abs(one.weight - two.weight).mean() > 1 and not np.array_equal(one.x, two.x)


def test_numbers_of_samples_follow_li_2018():
    counts = np.array([len(draw(i, m=2, c=2).x) for i in range(3000)])
    expected = np.minimum(50 + np.floor(np.exp(4 + 2 * rng(1).normal(size=200_000))), MAX_SAMPLES)
    assert counts.min() >= 50 and counts.max() == MAX_SAMPLES
    assert stats.ks_2samp(counts, expected).pvalue > 1e-3


def test_synthetic_federation():
    made = synthetic(0.5, 0.25, num_clients=6, key=KEY)
    assert made.num_clients == 6 and made.x.shape[1:] == (60,) and made.x.dtype == np.float32
    for i in range(6):
        num_train, num_test = len(made.client(i)[1]), len(made.client_test(i)[1])
        assert num_test == round(0.2 * (num_train + num_test))
    assert made.origin == "synthetic(0.5, 0.25), APFL appendix B.1."
    assert made.y.min() >= 0 and made.y.max() <= 9


@pytest.mark.parametrize("spread", [0.25, 4.0])
def test_the_input_spread_of_a_federation_is_a_variance(spread):
    """Over clients, the mean of one sample's m features has the variance beta + (1 + mean of Sigma_kk) / m."""
    num, m = 3000, 20
    made = synthetic(1.0, spread, num_clients=num, num_features=m, num_samples=1, test_share=0, key=KEY)
    noise = (1 + (np.arange(1, m + 1) ** -1.2).mean()) / m
    assert spread_within(made.x.astype(float).mean(axis=1), spread + noise)


def test_each_spread_affects_its_own_part():
    inputs = lambda *spreads: synthetic(*spreads, num_clients=50, num_samples=2, key=KEY).x.mean(axis=1)
    assert np.std(inputs(0, 400)) > 10 > 1 > np.std(inputs(400, 0))


def test_more_clients_extend_a_smaller_federation():
    few, many = (synthetic(1, 1, num_clients=n, num_samples=9, key=KEY) for n in (3, 5))
    np.testing.assert_array_equal(many.x[: len(few.x)], few.x)
    np.testing.assert_array_equal(many.y[: len(few.y)], few.y)
    np.testing.assert_array_equal(many.test_x[: len(few.test_x)], few.test_x)


def test_synthetic_follows_its_key():
    make = lambda key, **kwargs: synthetic(1, 1, num_clients=2, num_samples=10, key=key, **kwargs)
    np.testing.assert_array_equal(make(KEY).x, make(jax.random.PRNGKey(0)).x)
    assert not np.array_equal(make(KEY).x, make(jax.random.key(1)).x)
    assert not np.array_equal(make(KEY).client(0)[0], make(KEY).client(1)[0])
    assert make(KEY, test_share=0).test_x is None and make(KEY, test_share=0).counts.tolist() == [10, 10]
    assert make(KEY, num_features=3, num_classes=2).x.shape == (16, 3)
    assert synthetic(1, 1, num_clients=1, num_samples=2, test_share=0.9, key=KEY).counts.tolist() == [1]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"model_spread": -1}, "`model_spread` must not be negative, got -1"),
        ({"input_spread": float("nan")}, "`input_spread`"),
        ({"num_clients": 0}, "`num_clients`"),
        ({"num_classes": 1}, "`num_classes` must be a whole number of at least 2"),
        ({"num_samples": 1}, "`num_samples` must be a whole number of at least 2, got 1. A client needs"),
        ({"test_share": 1}, "`test_share` must be at least 0 and below 1, got 1"),
    ],
)
def test_broken_synthetic(wrong, match):
    with pytest.raises(ValueError, match=match):
        synthetic(**{"model_spread": 1, "input_spread": 1, "key": KEY} | wrong)


# LEAF


def write_leaf(file, users):
    """Users' lists of x and y in LEAF's format."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    file.write_text(json.dumps(content))


def samples(num, seed=0, width=3):
    return rng(seed).normal(size=(num, width)).tolist(), rng(seed).integers(0, 62, num).tolist()


@pytest.mark.parametrize("within", ["", "data"])
def test_a_leaf_folder(tmp_path, within):
    train = {"f_1": samples(3, 1), "f_0": samples(1, 2), "f_2": samples(4, 3)}
    test = {"f_2": samples(1, 4), "f_0": samples(2, 5), "f_1": samples(1, 6)}
    write_leaf(tmp_path / within / "train" / "a.json", {user: train[user] for user in ("f_1", "f_0")})
    write_leaf(tmp_path / within / "train" / "b.json", {"f_2": train["f_2"]})
    write_leaf(tmp_path / within / "test" / "a.json", test)
    made = read_leaf(tmp_path)
    assert tuple(made.names) == ("f_1", "f_0", "f_2") and made.origin == "LEAF."
    for i, user in enumerate(made.names):
        for found, given in ((made.client(i), train[user]), (made.client_test(i), test[user])):
            np.testing.assert_array_equal(found[0], np.array(given[0], np.float32))
            assert [made.schema.classes[label] for label in found[1]] == list(map(str, given[1]))
    assert made.x.dtype == np.float32 and made.y.dtype == np.int32
    given = {label for _, labels in (*train.values(), *test.values()) for label in labels}
    assert made.schema.classes == tuple(map(str, sorted(given)))  # some of 0..61


def test_leaf_without_test_data(tmp_path):
    write_leaf(tmp_path / "all.json", {"a": samples(2), "b": samples(3)})
    made = read_leaf(tmp_path)
    assert made.counts.tolist() == [2, 3] and made.test_x is None


def test_leaf_clients_without_both_parts_are_left_out_and_counted(tmp_path):
    write_leaf(tmp_path / "train" / "a.json", {"a": samples(2), "b": samples(3), "c": ([], []), "d": samples(1)})
    write_leaf(tmp_path / "test" / "a.json", {"b": samples(1), "c": samples(1), "e": samples(1), "d": ([], [])})
    made = read_leaf(tmp_path)
    assert tuple(made.names) == ("b",)
    assert made.origin == "LEAF. 4 clients without training or without test samples were left out."


def test_integers_stay_integers_unless_other_clients_have_floats(tmp_path):
    write_leaf(tmp_path / "a.json", {"a": ([[1, 2]], [1]), "b": ([[3, 4]], [0.5])})
    made = read_leaf(tmp_path)
    assert made.x.dtype == np.int32 and made.y.dtype == np.float32 and made.y.tolist() == [1, 0.5]


def broken_leaf(folder, content):
    folder.mkdir(exist_ok=True)
    (folder / "a.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


USER = {"x": [[1.0], [2.0]], "y": [0, 1]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"users": [', r"a\.json is not JSON \(.*Recreate it with LEAF's preprocess.sh"),
        ([1, 2], r"Missing users, num_samples, user_data in .*a\.json\. A LEAF file has"),
        ({"users": [], "num_samples": []}, r"Missing user_data in"),
        ({"users": ["u"], "num_samples": [], "user_data": {}}, "a number for each of the 1 users, got 0"),
        (
            {"users": ["u"], "num_samples": [3], "user_data": {"u": USER}},
            r"a\.json, user 'u': `num_samples` is 3, got 2 of x and 2 of y",
        ),
        (
            {"users": ["u"], "num_samples": [2], "user_data": {"u": USER | {"y": [1]}}},
            "`num_samples` is 2, got 2 of x and 1 of y",
        ),
        ({"users": ["u"], "num_samples": [2], "user_data": {"v": USER}}, "user 'u': `user_data` must.*, got none"),
        ({"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": []}}}, "user 'u'.*got one with x"),
        (
            {"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": ["text"], "y": [1]}}},
            "`x` must be numbers, got",
        ),
        ({"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [1], "y": ["e"]}}}, "`y` must be numbers, got"),
        (
            {"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": [[1], [2, 3]], "y": [0, 1]}}},
            "user 'u': all samples must have the same length",
        ),
        ({"users": [], "num_samples": [], "user_data": {}}, "no samples in 1 files"),
    ],
)
def test_broken_leaf_files(tmp_path, content, match):
    with pytest.raises(ValueError, match=match):
        read_leaf(broken_leaf(tmp_path, content))


def test_broken_leaf_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Folder not found: .*nowhere\. LEAF stores its files in"):
        read_leaf(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"No \*.json files in .*\. LEAF stores"):
        read_leaf(tmp_path)
    write_leaf(tmp_path / "train" / "a.json", {"a": samples(2)})
    with pytest.raises(FileNotFoundError, match=r"Folder not found: .*test\. For training data only, read .*train"):
        read_leaf(tmp_path)
    write_leaf(tmp_path / "test" / "a.json", {"b": samples(2)})
    with pytest.raises(ValueError, match=r"no user has both training and test samples \(1 have.* `-t sample`"):
        read_leaf(tmp_path)
    write_leaf(tmp_path / "train" / "b.json", {"a": samples(2)})
    with pytest.raises(ValueError, match=r"b\.json, user 'a': this user is in two files of the folder"):
        read_leaf(tmp_path)


def characters(labels, seed=0):
    images = rng(seed).integers(0, 256, (len(labels), 784))
    return images, ((images / 255).round(6).tolist(), list(labels))


def test_femnist_images_are_bytes_again(tmp_path):
    images, given = characters([3, 40, 61])
    every_byte, more = characters([0] * 256)
    every_byte[:] = np.arange(256)[:, None]
    write_leaf(tmp_path / "train" / "a.json", {"w": given, "v": ((every_byte / 255).tolist(), more[1])})
    write_leaf(tmp_path / "test" / "a.json", {"w": given, "v": given})
    made = femnist(tmp_path)
    assert made.x.shape == (259, 28, 28) and made.x.dtype == np.uint8
    np.testing.assert_array_equal(made.client(0)[0], images.reshape(-1, 28, 28))
    np.testing.assert_array_equal(made.client(1)[0], every_byte.reshape(-1, 28, 28))
    assert made.client(0)[1].tolist() == [3, 40, 61] and made.y.dtype == np.int32 and made.origin == "FEMNIST."
    assert [made.schema.classes[label] for label in made.client(0)[1]] == ["3", "e", "z"]


def test_femnist_digits_only(tmp_path):
    images, given = characters([9, 10, 0])
    write_leaf(tmp_path / "train" / "a.json", {"w": given, "v": characters([11])[1], "u": characters([1])[1]})
    write_leaf(tmp_path / "test" / "a.json", {"w": given, "v": given, "u": characters([61])[1]})
    made = femnist(tmp_path, digits_only=True)
    assert tuple(made.names) == ("w",) and made.y.tolist() == made.test_y.tolist() == [9, 0]
    assert made.schema.classes == tuple("0123456789")
    np.testing.assert_array_equal(made.x, images.reshape(-1, 28, 28)[[0, 2]])
    assert made.origin.startswith("FEMNIST, digits only. 2 clients without")


@pytest.mark.parametrize(
    ("pixels", "match"),
    [
        (np.full(784, 255), "user 'w': the pixels must lie between 0 and 1, got 255 to 255. For other images, use"),
        (np.full(784, -0.1), "got -0.1 to -0.1"),
        (np.full(784, np.nan), "between 0 and 1, got nan"),
        (np.full(784, 0.3), "must be multiples of 1/255. For other"),  # 76.5 of them
        (np.zeros(783), r"must have 784 numbers, got float64 of shape \(783,\)"),
    ],
)
def test_invalid_femnist_images_are_errors(tmp_path, pixels, match):
    write_leaf(tmp_path / "a.json", {"w": ([pixels.tolist()], [0])})
    with pytest.raises(ValueError, match=match):
        femnist(tmp_path)


# tables


def table(ids, num=12, seed=0):
    """Unsorted columns of features, labels and clients."""
    x = rng(seed).normal(size=(num, 4)).astype(np.float32)
    return x, rng(seed + 1).integers(0, 5, num), np.asarray(ids)[rng(seed + 2).integers(0, len(ids), num)]


def write(path, x, y, client, **more):
    """The same samples in any of the formats; features in the middle of other columns."""
    if path.suffix == ".npz":
        return np.savez(path, x=x, y=y, client=client, **more)
    features = {f"pixel {j}": x[:, j] for j in range(x.shape[1])}
    columns = pa.table({"label": y, **features, "client": client, **more})
    pa.csv.write_csv(columns, path) if path.suffix == ".csv" else pa.parquet.write_table(columns, path)


def assert_holds(made, x, y, client):
    """Each client's samples, in the order of the rows."""
    for i, name in enumerate(np.unique(client)):
        np.testing.assert_array_equal(made.client(i)[0], x[client == name])
        np.testing.assert_array_equal(made.client(i)[1], y[client == name])


formats = pytest.mark.parametrize("suffix", ["npz", "csv", "parquet"])
tables = pytest.mark.parametrize("suffix", ["csv", "parquet"])


@formats
def test_numbered_clients(tmp_path, suffix):
    x, y, client = table([7, 0, 4_000_000_000])
    write(tmp_path / f"t.{suffix}", x, y, client)
    made = read_table(tmp_path / f"t.{suffix}")
    assert_holds(made, x, y, client)
    assert made.ids.tolist() == [0, 7, 4_000_000_000] and made.names[1] == "client 7"
    assert made.x.dtype == np.float32 and made.y.dtype == np.int64 and made.test_x is None
    assert made.origin == f"t.{suffix}."


@formats
def test_named_clients(tmp_path, suffix):
    x, y, client = table(["zoë", "anna", "Boris, the 2nd", "7"])
    write(tmp_path / f"t.{suffix}", x, y, client)
    made = read_table(str(tmp_path / f"t.{suffix}"))
    assert tuple(made.names) == ("7", "Boris, the 2nd", "anna", "zoë") and made.ids.tolist() == [0, 1, 2, 3]
    assert_holds(made, x, y, client)


@formats
def test_client_names_with_leading_zeros_stay_different(tmp_path, suffix):
    x, y, _ = table([0])
    client = np.array(["7", "007", "07"])[np.arange(12) % 3]
    write(tmp_path / f"t.{suffix}", x, y, client)
    made = read_table(tmp_path / f"t.{suffix}")
    assert tuple(made.names) == ("007", "07", "7")
    assert_holds(made, x, y, client)


@formats
@pytest.mark.parametrize("labels", [(3, 8), (-1, 1), (1, 2), (0, 10**12)])
def test_labels_with_gaps_become_consecutive_classes_that_keep_their_names(tmp_path, suffix, labels):
    x, y, client = table([1, 2])
    write(tmp_path / f"g.{suffix}", x, np.array(labels)[y % 2], client)
    made = read_table(tmp_path / f"g.{suffix}")
    assert_holds(made, x, y % 2, client)
    assert made.schema.classes == tuple(map(str, labels))
    assert made.as_targets().y.tolist() == np.array(labels, np.float32)[made.y].tolist()


@formats
def test_consecutive_labels_are_unchanged(tmp_path, suffix):
    x, _, client = table([1, 2])
    write(tmp_path / f"c.{suffix}", x, np.arange(12) % 3, client)
    made = read_table(tmp_path / f"c.{suffix}")
    assert made.y.dtype == np.int64 and made.schema.classes == ("0", "1", "2")


@tables
def test_features_keep_their_names(tmp_path, suffix):
    write(tmp_path / f"t.{suffix}", *table([1, 2]))
    made = read_table(tmp_path / f"t.{suffix}")
    assert made.schema.features == tuple(f"pixel {j}" for j in range(4))
    assert read_table(tmp_path / f"t.{suffix}", shape=(2, 2)).schema.features == made.schema.features


@tables
def test_columns_are_chosen_by_name(tmp_path, suffix):
    x, y, client = table([1, 2])
    words = [f"row {i}" for i in range(12)]
    write(tmp_path / f"t.{suffix}", x, y, client, remark=words)
    with pytest.raises(ValueError, match=r"column 'remark'.*remove it with `exclude`"):
        read_table(tmp_path / f"t.{suffix}")
    left = read_table(tmp_path / f"t.{suffix}", exclude=("remark", "pixel 1"))
    assert_holds(left, x[:, [0, 2, 3]], y, client)
    assert left.schema.features == ("pixel 0", "pixel 2", "pixel 3")
    picked = read_table(tmp_path / f"t.{suffix}", include=("pixel 3", "pixel 0"))
    assert_holds(picked, x[:, [3, 0]], y, client)
    for options in ({"include": ("pixel 9",)}, {"exclude": ("pixel 9",)}):
        with pytest.raises(ValueError, match=r"must have a feature column 'pixel 9', got 'pixel 0'.*Did you mean"):
            read_table(tmp_path / f"t.{suffix}", **options)


def test_columns_of_an_npz_file_cannot_be_chosen(tmp_path):
    write(tmp_path / "t.npz", *table([1, 2]))
    with pytest.raises(ValueError, match=r"t.npz: columns of an .npz file have no names"):
        read_table(tmp_path / "t.npz", exclude=("a",))


@formats
def test_a_file_without_clients_is_a_pool(tmp_path, suffix):
    x, y, client = table([1, 2])
    if suffix == "npz":
        np.savez(tmp_path / "p.npz", x=x, y=y * 5)
    else:
        write(tmp_path / f"p.{suffix}", x, y * 5, client)
    options = {} if suffix == "npz" else {"exclude": ("client",)}
    pool = read_pool(tmp_path / f"p.{suffix}", **options)
    np.testing.assert_array_equal(pool.x, x)
    assert pool.y.tolist() == y.tolist() and pool.num_classes == 5
    assert pool.schema.classes == ("0", "5", "10", "15", "20") and not pool.is_divided
    assert str(pool) == f"p.{suffix}: 12 samples of shape (4,), float32, 5 classes."
    with pytest.raises(ValueError, match="For data without clients, use `read_pool`"):
        read_table(tmp_path / f"p.{suffix}", client="patient")


def test_a_pool_may_have_regression_targets(tmp_path):
    x, y, _ = table([1])
    np.savez(tmp_path / "p.npz", x=x, y=y + 0.5)
    pool = read_pool(tmp_path / "p.npz")
    assert pool.num_classes == 0 and pool.y.tolist() == (y + 0.5).tolist() and "targets of a regression" in str(pool)


@formats
def test_labels_may_be_words_or_real_numbers(tmp_path, suffix):
    x, y, client = table([1, 2])
    words = np.array(["cat", "ant", "dog", "bee", "eel"])
    write(tmp_path / f"w.{suffix}", x, words[y], client)
    made = read_table(tmp_path / f"w.{suffix}")
    assert_holds(made, x, np.searchsorted(np.unique(words[y]), words[y]), client)
    assert made.schema.classes == tuple(np.unique(words[y]).tolist()) and made.y.dtype == np.int32
    write(tmp_path / f"r.{suffix}", x, y + 0.25, client)
    made = read_table(tmp_path / f"r.{suffix}")
    assert_holds(made, x, y + np.float32(0.25), client)
    assert made.y.dtype == np.float32


@formats
@pytest.mark.parametrize("ids", [[3, 8], ["anna", "boris"]])
def test_a_split_column(tmp_path, suffix, ids):
    x, y, client = table(ids, num=40)
    split = np.where(rng(5).random(40) < 0.5, "train", "test")
    write(tmp_path / f"t.{suffix}", x, y, client, part=split)
    made = read_table(tmp_path / f"t.{suffix}", split="part")
    assert len(made.x) == (split == "train").sum() and made.x.shape[1] == 4
    assert_holds(made, *(column[split == "train"] for column in (x, y, client)))
    for i, name in enumerate(ids):
        np.testing.assert_array_equal(made.client_test(i)[0], x[(split == "test") & (client == name)])
        np.testing.assert_array_equal(made.client_test(i)[1], y[(split == "test") & (client == name)])


@formats
def test_a_split_without_test_rows(tmp_path, suffix):
    x, y, client = table([1])
    write(tmp_path / f"t.{suffix}", x, y, client, split=np.full(12, "train"))
    assert read_table(tmp_path / f"t.{suffix}", split="split").test_x is None


@pytest.mark.parametrize("ids", [[3, 8], ["anna", "boris"]])
def test_arrays_of_test_samples(tmp_path, ids):
    (x, y, client), (test_x, test_y, test_client) = table(ids), table(ids, 9, seed=7)
    tests = {"test_x": test_x, "test_target": test_y, "test_who": test_client}
    np.savez(tmp_path / "t.npz", x=x, target=y, who=client, **tests)
    made = read_table(tmp_path / "t.npz", client="who", label="target")
    assert_holds(made, x, y, client)
    for i, name in enumerate(ids):
        np.testing.assert_array_equal(made.client_test(i)[0], test_x[test_client == name])
        np.testing.assert_array_equal(made.client_test(i)[1], test_y[test_client == name])


def test_words_of_training_and_test_samples_get_the_same_numbers(tmp_path):
    arrays = {"x": np.zeros((2, 1)), "y": ["b", "c"], "client": ["u", "v"]}
    tests = {"test_x": np.zeros((2, 1)), "test_y": ["a", "c"], "test_client": ["v", "u"]}
    np.savez(tmp_path / "t.npz", **arrays, **tests)
    made = read_table(tmp_path / "t.npz")
    assert made.y.tolist() == [1, 2] and made.test_y.tolist() == [2, 0]


@formats
def test_images_get_their_shape(tmp_path, suffix):
    x, y, client = table([1, 2])
    write(tmp_path / f"t.{suffix}", x, y, client)
    made = read_table(tmp_path / f"t.{suffix}", shape=(2, 2, 1))
    assert_holds(made, x.reshape(-1, 2, 2, 1), y, client)
    for shape in ((2, 3), (4, 0), (-1, 2)):
        with pytest.raises(ValueError, match=rf"t.{suffix}: `shape` must be that of 4 features, got \({shape[0]}"):
            read_table(tmp_path / f"t.{suffix}", shape=shape)


def test_bytes_stay_bytes(tmp_path):
    x = rng().integers(0, 256, (6, 4), np.uint8)
    for suffix in ("npz", "parquet"):
        write(tmp_path / f"t.{suffix}", x, np.arange(6), np.arange(6) % 2)
        made = read_table(tmp_path / f"t.{suffix}")
        assert made.x.dtype == np.uint8
        assert_holds(made, x, np.arange(6), np.arange(6) % 2)
    mixed = pa.table({"a": x[:, 0], "b": x[:, 1] / 2, "c": x[:, 2] > 9, "client": np.arange(6), "label": np.arange(6)})
    pa.parquet.write_table(mixed, tmp_path / "m.parquet")
    np.testing.assert_array_equal(
        read_table(tmp_path / "m.parquet").x, np.stack([x[:, 0], x[:, 1] / 2, x[:, 2] > 9], 1).astype(np.float32)
    )


def test_types_of_arrays(tmp_path):
    for given, kept in ((np.float64, np.float32), (np.int32, np.int32), (np.float16, np.float16)):
        np.savez(tmp_path / "t.npz", x=np.ones((2, 3), given), label=np.ones(2, bool), client=np.arange(2))
        made = read_table(tmp_path / "t.npz")
        assert made.x.dtype == kept and made.y.dtype == np.int32


def test_labels_must_be_numbers_or_strings(tmp_path):
    days = np.array(["2020-01-01", "2020-01-02"], "datetime64[s]")
    for suffix in ("npz", "parquet"):
        write(tmp_path / f"t.{suffix}", np.zeros((2, 1)), days, np.arange(2))
        with pytest.raises(ValueError, match=rf"t.{suffix}: labels must be numbers or strings, got datetime64"):
            read_table(tmp_path / f"t.{suffix}")


def test_strings_of_bytes(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 1)), y=np.array([b"b", b"a"]), client=np.array([b"v", b"u"]))
    made = read_table(tmp_path / "t.npz")
    assert tuple(made.names) == ("u", "v") and made.y.tolist() == [0, 1]


def test_categories_of_pandas(tmp_path):
    client, label = (pa.array(words).dictionary_encode() for words in (["b", "a", "b"], ["yes", "no", "no"]))
    pa.parquet.write_table(pa.table({"f": [1.0, 2.0, 3.0], "client": client, "label": label}), tmp_path / "t.parquet")
    made = read_table(tmp_path / "t.parquet")
    assert tuple(made.names) == ("a", "b") and made.x.ravel().tolist() == [2, 1, 3] and made.y.tolist() == [0, 1, 0]


@tables
def test_many_blocks_are_one_table(tmp_path, suffix, monkeypatch):
    from personax.data.datasets import tables as module

    monkeypatch.setattr(module, "BLOCK", 4096)
    x, y, client = table([5, 6, 7], num=3000)
    write(tmp_path / f"t.{suffix}", x, y, client)
    assert_holds(read_table(tmp_path / f"t.{suffix}"), x, y, client)


def test_types_depend_on_all_rows_of_a_csv(tmp_path):
    labels, clients = ["1"] * 500_000 + ["1.5"], ["1"] * 500_000 + ["x"]
    rows = "\n".join(f"{label},2,{client}" for label, client in zip(labels, clients, strict=True))
    (tmp_path / "t.csv").write_text(f"label,f,client\n{rows}\n")
    made = read_table(tmp_path / "t.csv")
    assert made.y.dtype == np.float32 and made.y[-1] == 1.5 and tuple(made.names) == ("1", "x")


# errors in tables


@tables
def test_a_clients_file_is_read_as_a_schema_describes_it(tmp_path, suffix):
    x, y, client = table([1])
    words, notes = np.array(["bee", "cat", "ant"]), []
    write(tmp_path / f"all.{suffix}", x, words[y % 3], client)
    schema = read_table(tmp_path / f"all.{suffix}").schema
    rows = y % 3 != 2  # without "ant", which is class 0
    own = {f"pixel {j}": x[rows][:, j] for j in (2, 0, 3, 1)}
    columns = pa.table({"remark": ["some words"] * rows.sum(), **own, "label": words[y[rows] % 3]})
    path = tmp_path / f"own.{suffix}"
    pa.csv.write_csv(columns, path) if suffix == "csv" else pa.parquet.write_table(columns, path)
    made = read_client(path, schema=schema, notify=notes.append).conform(schema, notes.append)
    np.testing.assert_array_equal(made.x, x[rows])
    assert made.y.tolist() == (y[rows] % 3 + 1).tolist() and made.schema == schema
    assert notes == [f"own.{suffix}: ignored 1 column that the model does not use: 'remark'."]


@formats
def test_a_missing_column(tmp_path, suffix):
    write(tmp_path / f"t.{suffix}", *table([1, 2]))
    kind = "an array" if suffix == "npz" else "a column"
    with pytest.raises(
        ValueError, match=rf"t.{suffix} must have {kind} 'clients', got .*Did you mean `client`\? Name it"
    ):
        read_table(tmp_path / f"t.{suffix}", client="clients")
    with pytest.raises(ValueError, match=rf"must have {kind} 'xyz', got .* Name it with `split=...`"):
        read_table(tmp_path / f"t.{suffix}", split="xyz")


def test_a_missing_label(tmp_path):
    (tmp_path / "t.csv").write_text(",".join(["client", "Label", *(f"f{i}" for i in range(20))]) + "\n")
    with pytest.raises(
        ValueError, match=r"a column 'label', got 'client', 'Label', 'f0'.*'f7' and 12 more. Did.*`Label`"
    ):
        read_table(tmp_path / "t.csv")
    np.savez(tmp_path / "t.npz", x=np.zeros(3), client=np.zeros(3))
    with pytest.raises(ValueError, match="must have an array 'y', got 'x', 'client'"):
        read_table(tmp_path / "t.npz")


def test_a_missing_file_and_an_unknown_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"File not found: .*nothing\.csv"):
        read_table(tmp_path / "nothing.csv")
    with pytest.raises(ValueError, match=r"`path` must end in one of .npz, .csv, .parquet, got 't.xlsx'"):
        read_table(tmp_path / "t.xlsx")


@formats
def test_a_file_of_another_kind(tmp_path, suffix):
    (tmp_path / f"t.{suffix}").write_bytes(b"" if suffix == "csv" else b"\xff" * 100)
    with pytest.raises(ValueError, match=rf"Cannot read .*t\.{suffix} as an? {suffix} file \("):
        read_table(tmp_path / f"t.{suffix}")


CSV_ERRORS = [
    ("client,label,f\n", "has a header but no rows"),
    ("client,label\n1,2\n", "has no feature columns, only 'client', 'label'"),
    ("client,label,f,g\n1,2,3,red\n", "the feature column 'g' must be numeric, got string. Encode it"),
    ("client,label,f,f\n1,2,3,4\n", "Duplicate or unnamed column in t.csv: 'f'"),
    (
        ",client,label,f\n0,1,2,3\n",
        "t.csv: ''. If it is the index of a pandas table, write the file with `index=False`",
    ),
    (
        "client,label,f\n1,2,3\n1,2,\n",
        r"missing value in row 1 \(counted from 0, without the header\), column 'f'",
    ),
    ("client,label,f\n1,2,3\n1,2,nan\n", "missing value in row 1 .*, column 'f'"),
    ("client,label,f\n1,2,3\n,2,4\n", "missing value in row 1 .*, column 'client'"),
    ("client,label,f\n1,a,3\n1,,4\n", "missing value in row 1 .*, column 'label'"),
    ("client,label,f\n1,2,3,4\n", "Cannot read .* as a csv file"),
    ("client,label,f\n1,2,inf\n", "client 1: the training data must be finite"),
]


@pytest.mark.parametrize(("content", "match"), CSV_ERRORS)
def test_broken_csv(tmp_path, content, match):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(ValueError, match=match):
        read_table(tmp_path / "t.csv")


def test_a_late_word_in_a_numeric_column_of_a_csv(tmp_path):
    (tmp_path / "t.csv").write_text("client,label,f,g\n" + "1,2,3,4\n" * 300_000 + "1,2,3,oops\n")
    with pytest.raises(
        ValueError, match=r"row 300000 \(counted.*\) of the feature column 'g' must be a number, got 'oops'"
    ):
        read_table(tmp_path / "t.csv")


def test_a_broken_line_far_down_a_csv(tmp_path):
    (tmp_path / "t.csv").write_text("client,label,f,g\n" + "1,2,3,4\n" * 300_000 + "1,2,3\n")
    with pytest.raises(ValueError, match=r"Cannot read .*t\.csv \(.*Expected 4 columns, got 3"):
        read_table(tmp_path / "t.csv")


def test_nulls_of_parquet_are_found_in_any_block(tmp_path, monkeypatch):
    from personax.data.datasets import tables as module

    monkeypatch.setattr(module, "BLOCK", 4096)
    column = pa.array([1.0] * 2999 + [None])
    columns = {"client": np.zeros(3000, int), "label": np.zeros(3000, int), "f": column}
    pa.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"missing value in row 2999 .*, column 'f'. Fill it in"):
        read_table(tmp_path / "t.parquet")


def test_the_index_of_pandas_is_not_a_feature(tmp_path):
    columns = {"client": [1], "label": [1], "f": [1.0], "__index_level_0__": [3]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"'__index_level_0__'\. If it is the index"):
        read_table(tmp_path / "t.parquet")


@formats
def test_odd_splits(tmp_path, suffix):
    x, y, client = table([1, 2])
    for words, match in (
        (
            ["train", "valid"],
            "the column 'split' must contain 'train' or 'test', and at least one 'train', got 'valid'",
        ),
        (["test"], "at least one 'train', got 'test'"),
    ):
        write(tmp_path / f"t.{suffix}", x, y, client, split=np.resize(words, 12))
        with pytest.raises(ValueError, match=match):
            read_table(tmp_path / f"t.{suffix}", split="split")


@formats
@pytest.mark.parametrize(("ids", "first"), [([3, 8], "8"), (["anna", "boris"], "boris")])
def test_a_client_without_test_rows(tmp_path, suffix, ids, first):
    client = np.array(ids)[[0, 0, 1, 1]]
    split = np.array(["train", "test", "train", "train"])
    write(tmp_path / f"t.{suffix}", np.zeros((4, 2)), np.arange(4), client, split=split)
    with pytest.raises(ValueError, match=rf"first .*{first}.* Drop"):
        read_table(tmp_path / f"t.{suffix}", split="split")


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_the_client_whose_data_is_not_finite_is_named(tmp_path, suffix):
    x = np.array([[0.0], [np.nan], [1.0]])
    write(tmp_path / f"t.{suffix}", x, np.arange(3), np.array(["boris", "anna", "clara"]))
    with pytest.raises(ValueError, match=r"anna: the training data must be finite, got x .* in its row 0"):
        read_table(tmp_path / f"t.{suffix}")


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"x": np.zeros((3, 1))}, "one entry per sample, got 3 of 'x', 2 of 'y', 2 of 'client'"),
        ({"client": 3}, "the array 'client' must have one entry per sample, got a scalar"),
        ({"x": np.array(["a", "b"])}, "the array 'x' must hold numbers, got <U1. Encode it"),
        ({"client": np.array([1, "a"], object)}, r"cannot read the array 'client' \(.*Save numbers or strings"),
        ({"client": np.array([1.0, 2.0])}, "integers or strings"),
        (
            {"test_x": np.zeros((1, 1))},
            "test data must be in all of test_x, test_y, test_client, .* got test_x and split=N",
        ),
    ],
)
def test_broken_arrays(tmp_path, arrays, match):
    np.savez(tmp_path / "t.npz", **{"x": np.zeros((2, 1)), "y": np.zeros(2, int), "client": np.arange(2)} | arrays)
    with pytest.raises(ValueError, match=match):
        read_table(tmp_path / "t.npz")


def test_a_split_of_arrays_must_cover_each_sample(tmp_path):
    for split in (np.arange(2), np.array(["train"])):
        np.savez(tmp_path / "t.npz", x=np.zeros((2, 1)), y=np.zeros(2, int), client=np.arange(2), split=split)
        with pytest.raises(ValueError, match="the array 'split' must contain 'train' or 'test' for each sample"):
            read_table(tmp_path / "t.npz", split="split")


# a million clients

SCRIPT = """
import sys, time
import pyarrow.csv, pyarrow.parquet
from personax.data.datasets import read_table
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # without its parent's peak
before, began = peak(), time.perf_counter()
made = read_table(sys.argv[1])
assert made.num_clients == 1_000_000 and (made.counts == 10).all()
print((peak() - before) * 1024, time.perf_counter() - began)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads its own memory from /proc")
@formats
def test_a_million_clients(tmp_path, suffix):
    num, width = 10_000_000, 20
    x, y = rng().integers(0, 100, (num, width)).astype(np.float32), rng(1).integers(0, 10, num)
    write(tmp_path / f"t.{suffix}", x, y, rng(2).permutation(num) // 10)
    data = x.nbytes + 2 * y.nbytes
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / f"t.{suffix}")]
    peak, seconds = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert peak < 2.2 * data and seconds < 120  # the rows' order is a tenth more
