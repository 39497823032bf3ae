"""Federations: layout, types on the device, and errors that name the client and the row."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from personax.data.federation import Federation
from personax.data.partition import Partition
from personax.data.schema import Schema


def pair(num=3, width=2, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.uniform(1, 9, size=(num, width)).astype(dtype), rng.integers(0, 4, num)


def with_entry(array, row, entry):
    array = np.array(array, float)
    array[row] = entry
    return array


CLIENTS = [pair(3, seed=1), pair(1, seed=2), pair(5, seed=3)]
TESTS = [pair(2, seed=4), pair(4, seed=5), pair(1, seed=6)]


# layout


def test_clients_lie_one_after_another():
    federation = Federation.from_clients(CLIENTS, TESTS)
    assert federation.num_clients == 3 and federation.counts.tolist() == [3, 1, 5]
    assert federation.offsets.tolist() == [0, 3, 4, 9] and federation.test_offsets.tolist() == [0, 2, 6, 7]
    np.testing.assert_array_equal(federation.x, np.concatenate([x for x, _ in CLIENTS]))
    for i in range(3):
        for got, given in zip(
            (*federation.client(i), *federation.client_test(i)), (*CLIENTS[i], *TESTS[i]), strict=True
        ):
            np.testing.assert_array_equal(got, given)


@pytest.mark.parametrize("part", ["train", "test"])
def test_device_data_has_starts_and_counts(part):
    federation = Federation.from_clients(CLIENTS, TESTS, ids=[7, 0, 2**32 - 1])
    data, clients = getattr(federation, part), CLIENTS if part == "train" else TESTS
    counts = [len(x) for x, _ in clients]
    assert data.num_samples.tolist() == counts and data.start.tolist() == np.r_[0, np.cumsum(counts)[:-1]].tolist()
    assert data.ids.tolist() == [7, 0, 2**32 - 1] and data.ids.dtype == jnp.uint32
    assert data.start.dtype == data.num_samples.dtype == jnp.int32 and all(isinstance(leaf, jax.Array) for leaf in data)
    for begin, count, (x, y) in zip(data.start, data.num_samples, clients, strict=True):
        np.testing.assert_array_equal(data.x[begin : begin + count], x)
        np.testing.assert_array_equal(data.y[begin : begin + count], y)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32, np.float64])
def test_samples_keep_their_type(dtype):
    federation = Federation.from_clients([pair(dtype=dtype), pair(dtype=dtype)], [pair(dtype=dtype)] * 2)
    assert federation.x.dtype == federation.train.x.dtype == federation.test.x.dtype == dtype


def test_data_is_copied_to_the_device_once():
    federation = Federation.from_clients(CLIENTS, TESTS)
    assert federation.train is federation.train and federation.test is federation.test


def test_data_first_read_inside_a_trace_outlives_it():
    federation = Federation.from_clients(CLIENTS)
    total = jax.jit(lambda: federation.train.x.sum())()
    np.testing.assert_allclose(total, federation.x.sum(), rtol=1e-6)
    np.testing.assert_array_equal(federation.train.x, federation.x)


def test_a_flat_federation_is_the_same_as_one_from_clients():
    made = Federation.from_clients(CLIENTS)
    flat = Federation(made.x, made.y, np.array([0, 3, 4, 9]))
    assert [*flat.names] == [*made.names] == ["client 0", "client 1", "client 2"] and flat.ids.tolist() == [0, 1, 2]
    for i in range(3):
        np.testing.assert_array_equal(flat.client(i)[0], made.client(i)[0])


def test_names_follow_ids_unless_given():
    assert Federation.from_clients(CLIENTS, ids=[4, 9, 2]).names[1:][1] == "client 2"
    assert Federation.from_clients(CLIENTS, names=["a", "b", "c"]).names == ["a", "b", "c"]


def test_samples_may_have_any_shape():
    images = [(np.zeros((n, 4, 4, 1), np.uint8), np.zeros((n, 3), np.float32)) for n in (2, 5)]
    assert Federation.from_clients(images).train.x.shape == (7, 4, 4, 1)
    numbers = [(np.zeros(n, np.int32), np.zeros(n)) for n in (1, 3)]
    assert Federation.from_clients(numbers).train.x.shape == (4,)


def test_large_finite_numbers_are_accepted():
    assert Federation.from_clients([(np.full((4, 2), 1e300), np.zeros(4))]).num_clients == 1


@pytest.mark.filterwarnings("ignore:overflow encountered in reduce")
@pytest.mark.parametrize(("dtype", "size"), [(np.float16, 60_000.0), (np.float32, 3e38), (np.float64, 1e308)])
def test_finite_data_whose_sum_overflows_is_accepted(dtype, size):
    assert Federation.from_clients([(np.full((4, 2), size, dtype), np.zeros(4))]).num_clients == 1


# errors


A, B, C = CLIENTS
NAMES = ["anna", "boris", "clara"]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Federation.from_clients([]), "at least one client, got none"),
        (lambda: Federation.from_clients([A, pair(0), C], names=NAMES), "boris has no training samples. Remove it"),
        (lambda: Federation.from_clients([A, pair(0), C], ids=[4, 9, 2]), "client 9 has no training samples"),
        (lambda: Federation.from_clients([A, B], [A, pair(0)], names=NAMES[:2]), "boris has no test samples"),
        (
            lambda: Federation.from_clients([A, (B[0], np.zeros(4)), C], names=NAMES),
            r"boris: x and y must have one row per sample, got shapes \(1, 2\) and \(4,\)",
        ),
        (
            lambda: Federation.from_clients([A, B, pair(5, width=3)], names=NAMES),
            r"clara: samples must have the shapes and types of anna, x \(2,\) float32 and y \(\), got x \(3,\) float32",
        ),
        (
            lambda: Federation.from_clients([A, B, pair(5, dtype=np.uint8)], names=NAMES),
            r"clara: samples must have the shapes and types of anna.*got x \(2,\) uint8",
        ),
        (
            lambda: Federation.from_clients([A, (B[0], np.zeros((1, 2)))], names=NAMES[:2]),
            r"boris: samples must have the shapes and types of anna.*and y \(2,\)",
        ),
        (
            lambda: Federation.from_clients([(with_entry(x, -1, np.nan), y) for x, y in [A]]),
            "client 0: the training data must be finite, got x with a NaN or infinite entry in its row 2. Remove",
        ),
        (
            lambda: Federation.from_clients(
                [(x.astype(float), y) for x, y in [A, B]] + [(with_entry(C[0], 3, np.inf), C[1])]
            ),
            "client 2: the training data must be finite, got x .* in its row 3",
        ),
        (
            lambda: Federation.from_clients([(A[0], A[1] * 1.0), B, (C[0], with_entry(C[1], 4, -np.inf))], names=NAMES),
            "clara: the training data must be finite, got y with a NaN or infinite entry in its row 4",
        ),
        (
            lambda: Federation.from_clients([A, B], [A, (B[0], with_entry(B[1], 0, np.nan))], names=NAMES[:2]),
            "boris: the test data must be finite, got y with a NaN or infinite entry in its row 0",
        ),
        (
            lambda: Federation.from_clients([A, B, C], ids=[1, 2, 1]),
            "unique for each of the 3 clients, got 2 different ids",
        ),
        (lambda: Federation.from_clients([A, B, C], [A, B]), "one pair for each of the 3 clients, got 2"),
        (lambda: Federation(*A, np.array([0, 2, 3]), names=("a",)), "unique for each of the 2 clients, got .* 1 names"),
        (
            lambda: Federation(*A, np.array([0, 2, 4])),
            "increase from 0 to the number of rows, got 0 to 4 for 3 rows of x and 3",
        ),
        (lambda: Federation(*A, np.array([1, 3])), "increase from 0 to the number of rows, got 1 to 3"),
        (lambda: Federation(*A, np.array([0, 2, 1, 3])), "increase from 0 to the number of rows"),
        (lambda: Federation(A[0], A[1][:2], np.array([0, 3])), "for 3 rows of x and 2 of y"),
        (lambda: Federation(*A, np.array([0, 3]), test_x=B[0]), "all of `test_x`, `test_y` and `test_offsets`"),
        (
            lambda: Federation(*A, np.array([0, 3]), *B, np.array([0, 1, 1])),
            "`test_offsets` must have 2 entries, got 3",
        ),
        (lambda: Federation.from_clients(CLIENTS).client_test(0), "no test data. Build it with `test=...`"),
        (lambda: Federation.from_clients(CLIENTS).test, "no test data. Build it with `test=...`"),
    ],
)
def test_errors_name_the_client_and_the_remedy(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Federation.from_clients([A, B], ids=[0.2, 0.7]), "ids"),  # both are 0 on the device
        (lambda: Federation.from_clients([A, B], ids=[0, 2**32]), "ids"),  # likewise
        (lambda: Federation.from_clients([A, B], ids=[0, -1]), "ids"),
        (lambda: Federation.from_clients([A, B], ids=[3]), "2 clients"),
        (lambda: Federation.from_clients([A, B], names=["anna"]), "2 clients"),
        (lambda: Federation.from_clients([A, (B[0], 1)], names=NAMES[:2]), "boris: x and y must have one row"),
        (
            lambda: Federation.from_clients([A], [pair(2, width=5)], names=["anna"]),
            "anna: test samples must look like training samples",
        ),
        (lambda: Federation(A[0][:0], A[1][:0], np.array([0])), "at least one client"),
    ],
)
def test_more_errors_name_the_client_and_the_remedy(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# columns, partitions, parts of a federation


def column_of(order, names):
    """The clients' samples in a different order, with a column of clients."""
    owners = np.repeat(np.asarray(names), [len(x) for x, _ in CLIENTS])
    x, y = (np.concatenate(parts) for parts in zip(*CLIENTS, strict=True))
    return x[order], y[order], owners[order]


@pytest.mark.parametrize("names", [[3, 7, 2**32 - 1], ["ada", "bob", "cyd"], [-5, 0, 4], np.array([1, 2, 9], np.uint8)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_columns_give_the_clients_that_they_name(names, shuffled):
    order = np.random.default_rng(0).permutation(9) if shuffled else np.arange(9)
    x, y, owners = column_of(order, names)
    federation = Federation.from_columns(x, y, owners, test=(x[::-1], y[::-1], owners[::-1]))
    for i, name in enumerate(names):
        np.testing.assert_array_equal(federation.client(i)[0], x[owners == np.asarray(names)[i]])
        np.testing.assert_array_equal(federation.client_test(i)[1], y[owners == np.asarray(names)[i]][::-1])
        assert str(name) in federation.names[i]
    numbered = not isinstance(names[0], str) and names[0] >= 0
    assert federation.ids.tolist() == (list(names) if numbered else [0, 1, 2])


def test_columns_in_order_are_not_copied():
    x, y, owners = column_of(np.arange(9), [3, 7, 8])
    assert np.shares_memory(Federation.from_columns(x, y, owners).x, x)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda x, y, owners: Federation.from_columns(x, y[:-1], owners),
            "one entry per sample, got 9 of x, 8 of y",
        ),
        (lambda x, y, owners: Federation.from_columns(x, y, owners * 1.5), "integers or strings.* got float64"),
        (
            lambda x, y, owners: Federation.from_columns(x, y, owners, test=(x[:4], y[:4], owners[:4])),
            "same clients; 1 have only one of them, the first is .*8",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(*column_of(np.arange(9), [3, 7, 8]))


def test_a_partition_gives_each_client_its_rows():
    x, y, _ = column_of(np.arange(9), [3, 7, 8])
    train, test = (
        Partition(np.array([4, 0, 2, 8]), np.array([0, 1, 4])),
        Partition(np.array([1, 3]), np.array([0, 1, 2])),
    )
    same = Federation.from_partition(x, y, train, test)
    other = Federation.from_partition(x, y, train, test, test_x=x[5:], test_y=y[5:], origin="A pool.")
    for federation, pool in ((same, x), (other, x[5:])):
        np.testing.assert_array_equal(federation.client(1)[0], x[[0, 2, 8]])
        np.testing.assert_array_equal(federation.client_test(0)[0], pool[[1]])
    assert "A pool." in str(other) and Federation.from_partition(x, y, train).test_x is None


@pytest.mark.parametrize(
    "given, message",
    [
        (lambda x, y, p: ((p, p), {}), "must be disjoint, got 4 in both, first row 4 of client 0"),
        (lambda x, y, p: ((p, p), {"test_x": x}), "needs all of `test`, `test_x` and `test_y`"),
        (lambda x, y, p: ((p,), {"test_x": x, "test_y": y}), "needs all of `test`, `test_x` and `test_y`"),
        (
            lambda x, y, p: ((p, p), {"test_x": x[:3], "test_y": y[:3]}),
            "must divide the 3 samples of its pool, got row 8",
        ),
    ],
)
def test_partitions_that_do_not_fit_are_refused(given, message):
    x, y, _ = column_of(np.arange(9), [3, 7, 8])
    parts, tests = given(x, y, Partition(np.array([4, 0, 2, 8]), np.array([0, 1, 4])))
    with pytest.raises(ValueError, match=message):
        Federation.from_partition(x, y, *parts, **tests)


def test_numbers_that_a_device_would_change_are_refused():
    with jax.enable_x64(False):
        for x, y in (
            (np.array([[3e9], [1]]).astype(int), [0, 1]),
            (np.ones((2, 1)), [2**40, 1]),
            (np.array([[1e39], [0]]), [0, 1]),
        ):
            with pytest.raises(ValueError, match=r"client 0: [xy] must fit into"):
                Federation.from_clients([(x, np.array(y))]).train  # noqa: B018
        assert Federation.from_clients([(np.ones((2, 1)), np.array([2**31 - 1, 1]))]).train.y.dtype == jnp.int32


def test_newcomers_have_their_own_test_data():
    whole = Federation.from_clients([pair(10, seed=1), pair(5, seed=2), pair(5, seed=3)])
    parted = whole.hold_out([2]).split_tests(0.2, key=jax.random.key(1))
    assert parted.newcomers.counts.tolist() == [4] and len(parted.newcomers.client_test(0)[1]) == 1
    with pytest.raises(ValueError, match="already has held-out clients"):
        parted.hold_out([0])


def test_local_tests_are_a_share_of_each_clients_own_data():
    whole = Federation.from_clients([pair(10, seed=1), pair(5, seed=2)], ids=[8, 3])
    parted = whole.split_tests(0.2, key=jax.random.key(1))
    assert parted.counts.tolist() == [8, 4] and parted.ids.tolist() == [8, 3]
    for i in range(2):
        mine = np.concatenate([parted.client(i)[0], parted.client_test(i)[0]])
        np.testing.assert_array_equal(np.sort(mine, axis=0), np.sort(whole.client(i)[0], axis=0))
    with pytest.raises(ValueError, match="already has test data"):
        parted.split_tests(key=jax.random.key(1))


@pytest.mark.parametrize("chosen", [[2, 0], 2])
def test_clients_can_be_held_out_of_training(chosen):
    whole = Federation.from_clients([*CLIENTS, pair(4, seed=9)], [*TESTS, pair(2, seed=8)], ids=[5, 6, 7, 8])
    held = whole.hold_out(chosen, key=jax.random.key(0))
    new = held.newcomers
    assert held.num_clients == new.num_clients == 2 and sorted([*held.ids, *new.ids]) == [5, 6, 7, 8]
    for part in (held, new):
        for i, ident in enumerate(part.ids):
            for got, given in zip(
                (*part.client(i), *part.client_test(i)),
                (*whole.client(ident - 5), *whole.client_test(ident - 5)),
                strict=True,
            ):
                np.testing.assert_array_equal(got, given)
            assert part.names[i] == f"client {ident}"
    if chosen != 2:
        assert new.ids.tolist() == [5, 7]


@pytest.mark.parametrize(
    "chosen, message",
    [
        ([0, 0], "got 2 positions with 1 different"),
        ([1, 3], "got 2 positions with 1"),
        ([], "at least one"),
        ([0, 1, 2], "keep at least one of the 3"),
        (1, "needs a `key`"),
        (1.5, "must be a whole number"),
    ],
)
def test_invalid_held_out_clients_are_errors(chosen, message):
    with pytest.raises(ValueError, match=message):
        Federation.from_clients(CLIENTS).hold_out(chosen)


# summaries


def test_a_federation_prints_a_summary():
    labels = [np.array([0, 0, 0, 0]), np.array([0, 1, 1]), np.array([2] * 5)]
    clients = [(np.zeros((len(y), 2, 3), np.uint8), y) for y in labels]
    federation = Federation.from_clients(clients, test=clients, origin="Made here.")
    text = str(federation.hold_out([1]))
    shares = {0: 5 / 12, 1: 2 / 12, 2: 5 / 12}
    away = [1 - shares[0], (abs(1 / 3 - shares[0]) + abs(2 / 3 - shares[1]) + shares[2]) / 2, 1 - shares[2]]
    assert f"{np.mean(away):.2f} (total variation" in str(federation)
    assert "12 samples, 3 to 5 per client (median 4); 2 x 3, uint8" in str(federation)
    assert "3 classes: 0: 41.7%, 1: 16.7%, 2: 41.7%" in str(federation) and "1 to 2 classes per client" in str(
        federation
    )
    assert "Made here." in text and "1 clients, 3 samples" in text and len(repr(federation)) < 80


def test_real_targets_are_described_by_their_spread():
    clients = [(np.zeros((2, 1)), np.array([1.0, 3.0])), (np.zeros((1, 1)), np.array([5.0]))]
    text = str(Federation.from_clients(clients))
    assert f"mean 3, standard deviation {np.std([1, 3, 5]):.4g}" in text and "standard deviation 1.5" in text


def test_a_federation_comes_back_from_its_folder_and_stays_in_its_files(tmp_path):
    rng = np.random.default_rng(0)
    make = lambda num: (rng.integers(0, 256, (num, 3)).astype(np.uint8), rng.integers(0, 4, num))
    fed = Federation.from_clients(
        [make(num) for num in (4, 7, 5, 9)],
        test=[make(2) for _ in range(4)],
        names=["a", "b", "c", "d"],
        origin="Here.",
    ).hold_out([1])
    fed.save(tmp_path / "made" / "folder")
    back = Federation.open(tmp_path / "made" / "folder")
    assert str(back) == str(fed) and list(back.names) == list(fed.names)
    for here, there in ((fed, back), (fed.newcomers, back.newcomers)):
        for name in ("x", "y", "offsets", "test_x", "test_y", "test_offsets", "ids"):
            np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    assert back.is_mapped and not fed.is_mapped and not back.select([0]).is_mapped
    with pytest.raises(ValueError, match="Folder not empty"):
        fed.save(tmp_path / "made")
    with pytest.raises(ValueError, match=r"File not found: .*\. Give a folder written by `Federation.save`"):
        Federation.open(tmp_path)


def test_data_of_a_few_clients_is_that_of_all():
    rng = np.random.default_rng(0)
    fed = Federation.from_clients(
        [(rng.normal(size=(num, 3)), rng.normal(size=num)) for num in (4, 7, 5)], ids=[5, 9, 2]
    )
    some = fed.train_of(np.array([0, 2]), num_rows=12, num_clients=4)
    assert some.num_samples.tolist() == [4, 5, 1, 1] and some.ids.tolist() == [5, 2, 0, 0]
    for place, client in enumerate([0, 2]):
        rows = slice(some.start[place], some.start[place] + some.num_samples[place])
        np.testing.assert_array_equal(some.x[rows], fed.client(client)[0])
        np.testing.assert_array_equal(some.y[rows], fed.client(client)[1])
    assert not some.x[9:].any() and some.x.shape == (12, 3)


# the schema


NAMED = Schema((2,), "float32", ("age", "dose"), ("dead", "ill", "sick", "well"))


def test_arrays_imply_a_schema():
    assert Federation.from_clients(CLIENTS, TESTS).schema == Schema((2,), "float32", classes=("0", "1", "2", "3"))
    real = Federation.from_clients([(x, y + 0.5) for x, y in CLIENTS])
    assert real.schema == Schema((2,), "float32")
    vectors = Federation.from_clients([(np.ones((3, 4, 4), np.uint8), np.ones((3, 2)))])
    assert vectors.schema == Schema((4, 4), "uint8", target_shape=(2,))
    signs = Federation.from_clients([(np.ones((3, 1)), np.array([-1, 1, 1]))])
    assert signs.schema.classes == ()  # -1 is not a class number


def test_there_is_a_class_for_the_largest_label_of_anyone():
    fed = Federation.from_clients([(np.ones((2, 1)), np.array([0, 1]))], [(np.ones((1, 1)), np.array([4]))])
    assert fed.schema.classes == tuple("01234")
    newcomer = Federation.from_clients([(np.ones((1, 1)), np.array([6]))], [(np.ones((1, 1)), np.array([7]))])
    assert replace(fed, newcomers=newcomer).schema.classes == tuple("01234567")


def test_the_schema_is_kept(tmp_path):
    key = jax.random.key(0)
    fed = Federation.from_clients(CLIENTS[::2], schema=NAMED)
    assert fed.select([1]).schema == fed.split_tests(0.5, key=key).schema == NAMED
    held = fed.hold_out(1, key=key)
    assert held.schema == held.newcomers.schema == NAMED
    held.save(tmp_path / "saved")
    opened = Federation.open(tmp_path / "saved")
    assert opened.schema == opened.newcomers.schema == NAMED
    pool = Federation.from_partition(*CLIENTS[2], Partition(np.array([0, 4]), np.array([0, 2])), schema=NAMED)
    assert pool.schema == Federation.from_columns(*CLIENTS[0], np.zeros(3, int), schema=NAMED).schema == NAMED
    few = Federation.from_clients([(np.ones((2, 2)), np.array([0, 1]))], schema=Schema((2,), "float64", (), ("0",) * 0))
    assert few.select([0]).schema.classes == ("0", "1")


def test_a_folder_of_an_older_version_has_the_schema_of_its_arrays(tmp_path):
    fed = Federation.from_clients(CLIENTS)
    fed.save(tmp_path)
    (tmp_path / "about.json").write_text('{"names": [], "origin": ""}')
    assert Federation.open(tmp_path).schema == fed.schema


@pytest.mark.parametrize(
    "schema",
    [
        Schema((3,), "float32", ("a", "b", "c"), NAMED.classes),
        Schema((2,), "uint8", ("a", "b"), NAMED.classes),
        Schema((2,), "float32", ("a", "b"), ("ill", "well")),
        Schema((2,), "float32", ("a", "b")),
    ],
)
def test_a_schema_that_does_not_match_the_data_is_rejected(schema):
    with pytest.raises(ValueError, match=r"The schema does not match the data: it has .*, but the data have float32"):
        Federation.from_clients(CLIENTS, schema=schema)


def test_the_summary_names_columns_and_classes():
    text = str(Federation.from_clients(CLIENTS, schema=NAMED).standardize())
    assert "features       age, dose; standardized" in text and "sick: 11.1%, well: 22.2%" in text


def test_data_are_brought_into_the_form_of_a_schema():
    (x, y), notes = CLIENTS[2], []
    own = Schema((3,), "float32", ("dose", "x", "age"), ("well", "ill"))
    given = np.stack([x[:, 1], x[:, 0], x[:, 0]], axis=1)
    fed = Federation.from_clients([(given, y % 2)], [(given[:2], y[:2] % 2)], schema=own, origin="own.csv.")
    found = fed.conform(NAMED, notes.append)
    np.testing.assert_array_equal(found.x, x)
    assert found.y.tolist() == [{0: 3, 1: 1}[label] for label in y % 2] and found.schema == NAMED
    np.testing.assert_array_equal(found.test_x, x[:2])
    assert notes == ["own.csv: ignored 1 column that the model does not use: 'x'."]  # once


def regression(*sizes):
    rng = np.random.default_rng(0)
    return [(rng.normal(5, 2, (n, 3)) * [1, 1e4, 0], rng.normal(100, 3, n)) for n in sizes]


def test_standardization_is_fitted_on_the_training_data_of_clients_that_train():
    fed = Federation.from_clients(regression(5, 9, 4), regression(3, 2, 4)).hold_out([1])
    scaled = fed.standardize()
    deviation = np.where(fed.x.std(axis=0) > 0, fed.x.std(axis=0), 1)
    for part in ("x", "test_x"):
        for one, other in ((fed, scaled), (fed.newcomers, scaled.newcomers)):
            np.testing.assert_allclose(getattr(other, part), (getattr(one, part) - fed.x.mean(axis=0)) / deviation)
    for part in ("y", "test_y"):
        for one, other in ((fed, scaled), (fed.newcomers, scaled.newcomers)):
            np.testing.assert_allclose(getattr(other, part), (getattr(one, part) - fed.y.mean()) / fed.y.std())
    assert scaled.x[:, 2].tolist() == [0.0] * 9 and scaled.newcomers.schema == scaled.schema
    assert scaled.select([0]).schema == scaled.schema


def test_classes_are_not_scaled_and_whole_numbers_become_floats():
    x, y = np.arange(12).reshape(6, 2), np.arange(6) % 2
    scaled = Federation.from_clients([(x, y)]).standardize()
    assert scaled.x.dtype == np.float32 and scaled.schema.dtype == "float32" and scaled.y.tolist() == y.tolist()
    np.testing.assert_allclose(scaled.x.mean(axis=0), 0, atol=1e-6)


def test_errors_explain_what_cannot_be_standardized(tmp_path):
    fed = Federation.from_clients(CLIENTS[::2])
    fed.save(tmp_path)
    with pytest.raises(ValueError, match="Standardize it before `save"):
        Federation.open(tmp_path).standardize()
    with pytest.raises(ValueError, match="Images in bytes cannot be standardized"):
        Federation.from_clients([pair(dtype=np.uint8)]).standardize()
    scaled = fed.standardize()
    for again in (
        lambda: scaled.standardize(),
        lambda: scaled.hold_out([0]),
        lambda: scaled.split_tests(key=jax.random.key(0)),
    ):
        with pytest.raises(ValueError, match=r"already standardized. Call `.*` before `standardize`"):
            again()
