"""Partitions: the papers' counts, disjointness, dependence on the key, random requests, and errors."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personax.data.partition import (
    Partition,
    classes_per_client,
    dirichlet,
    dirichlet_by_class,
    fallah_halves,
    iid,
    natural,
    shards,
)

KEY = jax.random.key(3)
OTHER = jax.random.key(4)
MNIST = (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
MNIST_TEST = (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
CIFAR = (5000,) * 10
SMALL = (40, 55, 61, 48, 44, 59)
small = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**31).map(jax.random.key)


def pool(sizes, seed=0):
    """Labels with these numbers of samples per class, in random order."""
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def class_counts(labels, partition):
    """The numbers of samples of each client and class, [clients, classes]."""
    classes = np.unique(labels)
    return np.stack([(labels[rows][:, None] == classes).sum(axis=0) for rows in partition])


def pools(least=0, max_classes=8, even=False):
    """Strategies for labels, whose classes are not 0, 1, 2, ..."""
    names = st.lists(st.integers(0, 300), min_size=2, max_size=max_classes, unique=True)
    names = names.filter(lambda found: len(found) % 2 == 0) if even else names
    sizes = lambda found: st.lists(st.integers(least + 1, 60), min_size=len(found), max_size=len(found))
    rows = lambda found: sizes(found).map(lambda num: np.random.default_rng(1).permutation(np.repeat(found, num)))
    return names.flatmap(rows)


def assert_valid(partition, num_samples):
    """Check that rows are in the pool and unique within each client."""
    assert partition.rows.dtype == partition.offsets.dtype == np.int64
    assert partition.rows.min() >= 0 and partition.rows.max() < num_samples
    assert all(len(np.unique(rows)) == len(rows) for rows in partition)


def assert_disjoint(partition, num_samples):
    assert_valid(partition, num_samples)
    assert len(np.unique(partition.rows)) == len(partition.rows) and partition.num_shared == 0


def assert_all_used_once(partition, num_samples):
    np.testing.assert_array_equal(np.sort(partition.rows), np.arange(num_samples))


LABELS = pool(SMALL)
RANDOM = {
    "iid": lambda key: iid(range(len(LABELS)), 7, key=key),
    "shards": lambda key: shards(LABELS, 7, key=key),
    "classes per client": lambda key: classes_per_client(LABELS, 7, 2, key=key),
    "classes per client, fixed size": lambda key: classes_per_client(LABELS, 7, 2, num_per_client=13, key=key),
    "dirichlet": lambda key: dirichlet(LABELS, 7, 0.5, num_per_client=40, key=key),
    "dirichlet by class": lambda key: dirichlet_by_class(LABELS, 7, 0.5, key=key),
    "fallah's halves": lambda key: fallah_halves(LABELS, 7, 6, key=key),
}
each_random = pytest.mark.parametrize("make", RANDOM.values(), ids=list(RANDOM))


# the papers' settings


def test_iid_gives_100_clients_600_images_of_mnist():
    partition = iid(range(60_000), 100, key=KEY)
    assert partition.counts.tolist() == [600] * 100
    assert_all_used_once(partition, 60_000)


def test_shards_are_200_of_300_sorted_by_label_two_for_each_of_100_clients():
    labels = pool(MNIST)
    partition = shards(labels, 100, key=KEY)
    assert partition.counts.tolist() == [600] * 100
    assert_all_used_once(partition, 60_000)
    shard_of_rank = np.arange(60_000) // 300
    runs = np.stack([np.bincount(np.sort(labels)[shard_of_rank == shard], minlength=10) for shard in range(200)])
    held = class_counts(labels, partition)
    pairs = {tuple(runs[a] + runs[b]) for a in range(200) for b in range(a)}
    assert all(tuple(row) in pairs for row in held)
    np.testing.assert_array_equal(held.sum(axis=0), MNIST)
    assert (held > 0).sum(axis=1).max() <= 4


@pytest.mark.parametrize(("sizes", "num_classes_each"), [(MNIST, 2), (MNIST, 4), (CIFAR, 2), (CIFAR, 10)])
def test_apfl_clients_have_exactly_the_requested_classes(sizes, num_classes_each):
    labels = pool(sizes)
    partition = classes_per_client(labels, 100, num_classes_each, key=KEY)
    held = class_counts(labels, partition)
    assert ((held > 0).sum(axis=1) == num_classes_each).all()
    np.testing.assert_array_equal((held > 0).sum(axis=0), 100 * num_classes_each // 10)
    for column in held.T:
        assert np.ptp(column[column > 0]) <= 1
    assert_all_used_once(partition, sum(sizes))


@pytest.mark.parametrize("num_classes_each", [2, 3, 7, 10])
def test_clients_of_a_fixed_size_can_use_up_the_pool(num_classes_each):
    labels = pool(CIFAR)
    partition = classes_per_client(labels, 50, num_classes_each, num_per_client=1000, key=KEY)
    held = class_counts(labels, partition)
    assert partition.counts.tolist() == [1000] * 50
    assert set(held[held > 0]) <= {1000 // num_classes_each, -(-1000 // num_classes_each)}
    assert ((held > 0).sum(axis=1) == num_classes_each).all()
    assert_all_used_once(partition, 50_000)


@pytest.mark.parametrize(("num_clients", "num_per_client"), [(10, 5), (20, 3), (40, 7)])
def test_two_classes_for_each_client_can_use_up_the_pool(num_clients, num_per_client):
    """One sample remains for each client, and all classes are used up."""
    labels = pool((num_clients * num_per_client // 10,) * 10)
    for seed in range(10):
        key = jax.random.key(seed)
        partition = classes_per_client(labels, num_clients, 2, num_per_client=num_per_client, key=key)
        assert partition.counts.tolist() == [num_per_client] * num_clients
        assert_all_used_once(partition, len(labels))


def test_a_remainder_goes_where_samples_are_left():
    for key in (KEY, OTHER):
        for labels, expected in (([3, 3, 7, 7, 7], [2, 3]), ([3, 3, 3, 7, 7], [3, 2])):
            partition = classes_per_client(labels, 1, 2, num_per_client=5, key=key)
            assert class_counts(np.array(labels), partition).tolist() == [expected]


def test_gmeta_clients_share_samples_of_overdrawn_classes_only():
    labels = pool(CIFAR)
    partition = dirichlet(labels, 50, 0.01, num_per_client=1000, key=KEY)
    assert partition.counts.tolist() == [1000] * 50
    assert_valid(partition, 50_000)
    wanted = class_counts(labels, partition).sum(axis=0)
    times = np.bincount(partition.rows, minlength=50_000)
    assert wanted.max() > 5000 > wanted.min()
    for name in range(10):
        own = times[labels == name]
        assert own.sum() == wanted[name] and np.ptp(own) <= 1
        assert (own.max() > 1) == (wanted[name] > 5000)
    assert partition.num_shared == np.sum(times > 1) > 0
    expected = [f"class {name} (needed {wanted[name]}, available 5000)" for name in range(10) if wanted[name] > 5000]
    assert partition.notes == (f"Clients share samples of {', '.join(expected)}.",)


def test_gmeta_clients_train_on_800_and_test_on_200():
    labels = pool(CIFAR)
    train, test = dirichlet(labels, 50, 0.01, num_per_client=1000, key=KEY).split(key=KEY)
    assert train.counts.tolist() == [800] * 50 and test.counts.tolist() == [200] * 50
    assert any("may be a training sample of another" in note for note in test.notes)
    assert len(train.notes) == 1 and len(test.notes) == 2


FALLAH = [(MNIST, 196), (MNIST_TEST, 32), (CIFAR, 68)]


@pytest.mark.parametrize("without_first", [False, True])
@pytest.mark.parametrize(("sizes", "num_each"), FALLAH, ids=["MNIST", "MNIST test", "CIFAR-10"])
def test_fallah_halves_follow_section_5(sizes, num_each, without_first):
    labels = pool(sizes)
    partition = fallah_halves(labels, 50, num_each, without_first=without_first, key=KEY)
    held = class_counts(labels, partition)
    np.testing.assert_array_equal(held[:25], np.tile([num_each] * 5 + [0] * 5, (25, 1)))
    few, many = np.sort(held[25:, :5])[:, ::-1], np.sort(held[25:, 5:])[:, ::-1]
    np.testing.assert_array_equal(few, np.tile([0 if without_first else num_each // 2, 0, 0, 0, 0], (25, 1)))
    np.testing.assert_array_equal(many, np.tile([2 * num_each, 0, 0, 0, 0], (25, 1)))
    taken = (held[25:] > 0).sum(axis=0)
    assert taken.tolist() == [0 if without_first else 5] * 5 + [5] * 5
    assert_disjoint(partition, sum(sizes))


def test_different_heterogeneity_only_removes_the_first_classes():
    labels = pool(CIFAR)
    held, less = (
        class_counts(labels, fallah_halves(labels, 50, 68, without_first=without, key=KEY)) for without in (False, True)
    )
    np.testing.assert_array_equal(held[:25], less[:25])
    np.testing.assert_array_equal(held[25:, 5:], less[25:, 5:])
    assert not less[25:, :5].any() and held[25:, :5].any()


def test_of_an_odd_number_of_clients_the_second_half_is_larger():
    labels = pool((500,) * 4)
    held = class_counts(labels, fallah_halves(labels, 7, 9, key=KEY))
    np.testing.assert_array_equal(held[:3], np.tile([9, 9, 0, 0], (3, 1)))
    assert np.sort(held[3:]).tolist() == [[0, 0, 4, 18]] * 4
    assert (held[3:] > 0).sum(axis=0).tolist() == [2, 2, 2, 2]


def test_the_two_classes_of_a_client_are_independent():
    """Fallah: each of 25 pairs of classes is chosen for 1 client in 25."""
    labels = pool((200,) * 10)
    pairs = np.zeros((5, 5))
    for seed in range(40):
        held = class_counts(labels, fallah_halves(labels, 100, 2, key=jax.random.key(seed)))[50:] > 0
        np.add.at(pairs, (held[:, :5].argmax(axis=1), held[:, 5:].argmax(axis=1)), 1)
    expected = 40 * 50 / 25
    statistic = ((pairs - expected) ** 2 / expected).sum()
    assert statistic < 24 + 5 * np.sqrt(2 * 24)


def test_natural_clients_are_the_ids_in_sorted_order():
    partition = natural(np.array([30, 4, 30, 17, 4, 30]))
    assert [rows.tolist() for rows in partition] == [[1, 4], [3], [0, 2, 5]]
    names = ["b", "aa", "b", "a"]
    for ids in (names, np.array(names), np.array(names, object), np.array(names, "S")):
        assert [rows.tolist() for rows in natural(ids)] == [[3], [1], [0, 2]]


# the value itself


def test_a_partition_is_its_clients():
    partition = Partition(np.array([5, 2, 9]), np.array([0, 1, 1, 3]), "three clients", ("The second has none.",))
    assert len(partition) == partition.num_clients == 3
    assert partition.counts.tolist() == [1, 0, 2]
    assert [rows.tolist() for rows in partition] == [[5], [], [2, 9]]
    assert partition.client(2).tolist() == [2, 9]
    text = "Partition: three clients\n  3 clients, 3 samples, 0 to 2 each\n  note: The second has none."
    assert str(partition) == text
    with pytest.raises(IndexError, match=r"must be between 0 and 2, got -1"):
        partition.client(-1)


def test_shared_rows_are_counted_once_and_not_within_a_client():
    rows = np.array([1, 2, 3, 3, 2, 3, 2, 4])  # the first client has 3 twice; all three clients have 2
    assert Partition(rows, np.array([0, 4, 6, 8])).num_shared == 2
    assert Partition(np.array([3, 3, 1]), np.array([0, 2, 3])).num_shared == 0
    assert Partition(np.array([], int), np.array([0, 0])).num_shared == 0


@each_random
def test_partitions_describe_the_request(make):
    partition = make(KEY)
    assert "7 clients" in partition.origin or "3 clients" in partition.origin  # Fallah's first half
    assert partition.origin in str(partition)


def test_classes_without_clients_are_noted():
    partition = classes_per_client(LABELS, 2, 2, key=KEY)
    held = class_counts(LABELS, partition).sum(axis=0)
    missing = ", ".join(map(str, np.flatnonzero(held == 0)))
    assert partition.notes == (f"No client holds classes {missing}: 2 x 2 places are fewer than 6 classes.",)
    np.testing.assert_array_equal(held[held > 0], np.array(SMALL)[held > 0])


# dependence on the key


@each_random
def test_partitions_depend_on_the_key(make):
    one, same, other = make(KEY), make(KEY), make(OTHER)
    np.testing.assert_array_equal(one.rows, same.rows)
    np.testing.assert_array_equal(one.offsets, same.offsets)
    assert len(one.rows) != len(other.rows) or np.any(one.rows != other.rows)


@each_random
def test_rows_of_a_client_come_in_random_order(make):
    """The first half of a client's rows looks like the second: neither sorted by class nor by row."""
    labels, first, count = LABELS, np.zeros(6), np.zeros(6)
    rising = []
    for seed in range(12):
        for rows in make(jax.random.key(seed)):
            rising += (np.diff(rows) > 0).tolist()
            half = len(rows) // 2
            first += np.bincount(labels[rows[:half]], minlength=6)
            count += np.bincount(labels[rows[-half:]] if half else [], minlength=6)
            if len(set(labels[rows])) > 1 and len(rows) > 20:
                assert np.any(np.diff(labels[rows]) < 0) and np.any(np.diff(labels[rows]) > 0)
    assert abs(np.mean(rising) - 0.5) < 5 * 0.5 / np.sqrt(len(rising))
    assert np.all(np.abs(first - count) < 5 * np.sqrt(first + count))


@pytest.mark.parametrize(
    "make",
    [
        lambda labels, each, key: classes_per_client(labels, 23, 3, key=key),
        lambda labels, each, key: classes_per_client(labels, 23, 3, num_per_client=5 * each, key=key),
        lambda labels, each, key: fallah_halves(labels, 23, 2 * each, key=key),
        lambda labels, each, key: fallah_halves(labels, 23, 2 * each, without_first=True, key=key),
        lambda labels, each, key: dirichlet(labels, 23, 1e-3, num_per_client=20 * each, key=key),
    ],
    ids=["classes", "classes, fixed size", "halves", "different heterogeneity", "dirichlet"],
)
def test_a_training_and_a_test_pool_give_a_client_the_same_classes(make):
    # At a concentration of 0.001, all but 1 in some hundred clients have one class, the most frequent of their samples.
    main = lambda held: held > 0.05 * held.sum(axis=1, keepdims=True)
    train, test = pool(MNIST), pool(MNIST_TEST, seed=1)
    ours, theirs, others = (
        main(class_counts(labels, make(labels, each, key)))
        for labels, each, key in ((train, 6, KEY), (test, 1, KEY), (test, 1, OTHER))
    )
    np.testing.assert_array_equal(ours, theirs)
    assert np.any(theirs != others)


def test_class_distributions_do_not_depend_on_the_pool():
    train, test = pool(MNIST), pool(MNIST_TEST, seed=1)
    counts = [class_counts(labels, dirichlet(labels, 30, 0.5, num_per_client=300, key=KEY)) for labels in (train, test)]
    np.testing.assert_array_equal(*counts)
    more = class_counts(train, dirichlet(train, 30, 0.5, num_per_client=5000, key=KEY)) / 5000
    spread = np.sqrt(more * (1 - more) * (1 / 300 + 1 / 5000)) + 1 / 300
    assert np.all(np.abs(counts[0] / 300 - more) < 5 * spread)


@pytest.mark.parametrize("make", [classes_per_client, shards])
def test_every_choice_of_classes_is_equally_likely(make):
    """6 classes of one sample, 2 for each of 3 clients: any of the 15 pairs for the first client."""
    labels, seen = np.arange(6), {}
    for seed in range(600):
        held = class_counts(labels, make(labels, 3, 2, key=jax.random.key(seed)))
        assert held.sum(axis=0).tolist() == [1] * 6
        pair = tuple(np.flatnonzero(held[0]))
        seen[pair] = seen.get(pair, 0) + 1
    counts = np.array(list(seen.values()))
    assert len(counts) == 15
    assert ((counts - 40) ** 2 / 40).sum() < 14 + 5 * np.sqrt(2 * 14)


def test_neighbors_share_classes_as_often_as_others():
    """6 classes, 2 for each of 6 clients: two clients have on average 2 places x 1 other holder / 5 in common."""
    labels, common = np.repeat(np.arange(6), 2), np.zeros((6, 6))
    for seed in range(300):
        held = class_counts(labels, classes_per_client(labels, 6, 2, key=jax.random.key(seed)))
        common += held @ held.T / 300
    pairs = common[np.triu_indices(6, 1)]
    assert np.all(np.abs(pairs - 2 / 5) < 5 * np.sqrt(0.5 / 300))


# measured distributions


def test_a_large_concentration_is_near_uniform():
    labels = pool((3000,) * 10)
    shares = class_counts(labels, dirichlet(labels, 200, 1e6, num_per_client=1000, key=KEY)) / 1000
    assert np.all(np.abs(shares - 0.1) < 6 * np.sqrt(0.1 * 0.9 / 1000))
    by_class = class_counts(labels, dirichlet_by_class(labels, 30, 1e6, key=KEY))
    assert np.all(np.abs(by_class - 100) <= 2)


@pytest.mark.parametrize("concentration", [1e-2, 1e-3, 1e-12])
def test_a_small_concentration_is_near_one_class(concentration):
    """Of 10 classes the largest share is 1 - O(concentration), and each class is the largest equally often."""
    labels = pool((1000,) * 10)
    shares = class_counts(labels, dirichlet(labels, 1000, concentration, num_per_client=100, key=KEY)) / 100
    assert shares.max(axis=1).mean() > 1 - 10 * concentration
    largest = np.bincount(shares.argmax(axis=1), minlength=10)
    assert ((largest - 100) ** 2 / 100).sum() < 9 + 5 * np.sqrt(2 * 9)


@pytest.mark.parametrize("concentration", [0.3, 2.0])
def test_shares_vary_as_a_dirichlet_does(concentration):
    """Share variance m (1 - m) / (K a + 1) with m = 1 / K, plus that of drawing num_per_client samples."""
    labels, num = pool((1000,) * 5), 400
    shares = class_counts(labels, dirichlet(labels, 2000, concentration, num_per_client=num, key=KEY)) / num
    own = 0.2 * 0.8 / (5 * concentration + 1)
    expected = own + (0.2 * 0.8 - own) / num
    np.testing.assert_allclose(shares.var(axis=0), expected, rtol=0.12)
    np.testing.assert_allclose(shares.mean(axis=0), 0.2, atol=5 * np.sqrt(expected / 2000))


def test_proportions_of_a_class_vary_as_a_dirichlet_does():
    labels = pool((20_000,) * 40)
    shares = class_counts(labels, dirichlet_by_class(labels, 20, 0.5, key=KEY)) / 20_000
    np.testing.assert_allclose(shares.var(), (1 / 20) * (19 / 20) / (20 * 0.5 + 1), rtol=0.25)


# random requests


@small
@given(st.integers(1, 400), st.data(), seeds)
def test_iid_of_any_size(num_samples, data, key):
    num_clients = data.draw(st.integers(1, num_samples))
    partition = iid(range(num_samples), num_clients, key=key)
    assert np.ptp(partition.counts) <= 1 and partition.num_clients == num_clients
    assert_all_used_once(partition, num_samples)
    each = data.draw(st.integers(1, num_samples // num_clients))
    partition = iid(range(num_samples), num_clients, num_per_client=each, key=key)
    assert partition.counts.tolist() == [each] * num_clients
    assert_disjoint(partition, num_samples)


@small
@given(pools(), st.data(), seeds)
def test_shards_of_any_size(labels, data, key):
    num_clients = data.draw(st.integers(1, min(len(labels), 40)))
    num_each = data.draw(st.integers(1, min(5, len(labels) // num_clients)))
    partition = shards(labels, num_clients, num_each, key=key)
    assert_all_used_once(partition, len(labels))
    assert np.ptp(partition.counts) <= num_each
    num_shards = num_clients * num_each
    borders = len(np.unique(labels)) - 1  # a shard has one class more for each border between classes within it
    assert (class_counts(labels, partition) > 0).sum() <= num_shards + borders


@small
@given(pools(least=9), st.data(), seeds)
def test_classes_per_client_of_any_size(labels, data, key):
    num_classes = len(np.unique(labels))
    num_each = data.draw(st.integers(1, num_classes))
    num_clients = data.draw(st.integers(1, 9 * num_classes // num_each))
    partition = classes_per_client(labels, num_clients, num_each, key=key)
    held = class_counts(labels, partition)
    assert ((held > 0).sum(axis=1) == num_each).all() and np.ptp((held > 0).sum(axis=0)) <= 1
    assert all(np.ptp(column[column > 0]) <= 1 for column in held.T if column.any())
    assert_disjoint(partition, len(labels))
    sizes = np.unique(labels, return_counts=True)[1]
    np.testing.assert_array_equal(held.sum(axis=0), np.where(held.any(axis=0), sizes, 0))


def spread_is_possible(holds, sizes, num_per_client):
    """Hall's condition, over all sets of classes: the clients' samples that must lie within a set fit into it."""
    num_each = holds[0].sum()
    base, rest = divmod(num_per_client, num_each)
    for chosen in np.ndindex(*(2,) * len(sizes)):
        inside = holds[:, np.array(chosen, bool)].sum(axis=1)
        forced = base * inside + np.maximum(rest - (num_each - inside), 0)
        if forced.sum() > sizes[np.array(chosen, bool)].sum():
            return False
    return True


@settings(max_examples=120, deadline=None)
@given(pools(max_classes=5), st.data(), seeds)
def test_a_fixed_size_is_refused_only_if_it_is_impossible(labels, data, key):
    sizes = np.unique(labels, return_counts=True)[1]
    num_each = data.draw(st.integers(1, len(sizes)))
    num_clients = data.draw(st.integers(1, 8))
    roomy = np.repeat(np.arange(len(sizes)), 1000)
    holds = class_counts(roomy, classes_per_client(roomy, num_clients, num_each, key=key)) > 0
    most = int((sizes[holds.any(axis=0)] // holds.sum(axis=0)[holds.any(axis=0)]).min()) * num_each
    num_per_client = data.draw(st.integers(max(num_each, most - 1), max(num_each, most) + num_each))
    if num_clients * num_per_client > len(labels) or not spread_is_possible(holds, sizes, num_per_client):
        with pytest.raises(ValueError, match="must have"):
            classes_per_client(labels, num_clients, num_each, num_per_client=num_per_client, key=key)
        return
    partition = classes_per_client(labels, num_clients, num_each, num_per_client=num_per_client, key=key)
    held = class_counts(labels, partition)
    np.testing.assert_array_equal(held > 0, holds)
    assert partition.counts.tolist() == [num_per_client] * num_clients
    assert all(np.ptp(row[row > 0]) <= 1 for row in held)
    assert_disjoint(partition, len(labels))


@small
@given(pools(least=9), st.integers(1, 30), st.sampled_from([1e-3, 0.01, 0.3, 1.0, 100.0]), st.integers(1, 10), seeds)
def test_dirichlet_of_any_size(labels, num_clients, concentration, num_per_client, key):
    partition = dirichlet(labels, num_clients, concentration, num_per_client=num_per_client, key=key)
    assert partition.counts.tolist() == [num_per_client] * num_clients
    assert_valid(partition, len(labels))
    times = np.bincount(partition.rows, minlength=len(labels))
    for name in np.unique(labels):
        own = times[labels == name]
        assert np.ptp(own) <= 1
        assert (f"class {name} (needed {own.sum()}, available {own.size})" in str(partition)) == (own.max() > 1)
    assert bool(partition.notes) == bool(partition.num_shared)


@small
@given(pools(), st.integers(1, 12), st.sampled_from([1e-3, 0.5, 100.0]), seeds)
def test_dirichlet_by_class_uses_every_sample_once(labels, num_clients, concentration, key):
    assert_all_used_once(dirichlet_by_class(labels, num_clients, concentration, least=0, key=key), len(labels))


@small
@given(st.integers(6, 8), st.integers(5, 9), seeds)
def test_dirichlet_by_class_gives_every_client_enough(num_clients, least, key):
    partition = dirichlet_by_class(LABELS, num_clients, 0.3, least=least, key=key)
    assert partition.counts.min() >= least and partition.num_clients == num_clients
    assert_all_used_once(partition, len(LABELS))


@small
@given(pools(least=29, even=True), st.integers(2, 9), st.booleans(), seeds)
def test_fallah_halves_of_any_size(labels, num_clients, without_first, key):
    half = len(np.unique(labels)) // 2
    held = class_counts(labels, fallah_halves(labels, num_clients, 3, without_first=without_first, key=key))
    first, others = held[: num_clients // 2], held[num_clients // 2 :]
    assert (first[:, :half] == 3).all() and not first[:, half:].any()
    assert (others[:, :half].sum(axis=1) == (0 if without_first else 1)).all()
    assert (others[:, half:].max(axis=1) == 6).all() and (others[:, half:].sum(axis=1) == 6).all()
    taken = (others > 0).sum(axis=0)
    assert np.ptp(taken[:half]) <= 1 and np.ptp(taken[half:]) <= 1


@small
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_natural_partitions_group_by_id(ids):
    partition = natural(ids)
    expected = [[row for row, name in enumerate(ids) if name == wanted] for wanted in sorted(set(ids))]
    assert [rows.tolist() for rows in partition] == expected


# the local split


@small
@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.floats(0.01, 0.99), seeds)
def test_a_split_divides_each_client(counts, share, key):
    whole = iid(range(300), len(counts), num_per_client=30, key=KEY)
    rows = [whole.client(i)[:count] for i, count in enumerate(counts)]
    partition = Partition(np.concatenate(rows), np.cumsum([0, *counts]))
    train, test = partition.split(share, key=key)
    assert test.counts.tolist() == [min(max(round(share * count), 1), count - 1) for count in counts]
    for own, ours, theirs in zip(partition, train, test, strict=True):
        np.testing.assert_array_equal(np.sort(np.concatenate([ours, theirs])), np.sort(own))


def test_a_split_does_not_depend_on_the_order_of_the_rows():
    partition = iid(range(200), 5, key=KEY)
    backwards = dataclasses.replace(partition, rows=np.concatenate([rows[::-1] for rows in partition]))
    for one, other in zip(partition.split(key=KEY), backwards.split(key=KEY), strict=True):
        assert [set(rows) for rows in one] == [set(rows) for rows in other]


def test_a_split_is_random_whatever_the_order():
    """Each position of a client with ordered rows is in the test part equally often, and anywhere in its part."""
    partition, tested = natural(np.arange(20_000) % 1000), np.zeros(20)
    train, test = partition.split(0.3, key=KEY)
    np.add.at(tested, test.rows // 1000, 1)
    assert np.all(np.abs(tested - 300) < 5 * np.sqrt(1000 * 0.3 * 0.7))
    for part in (train, test):
        rising = np.mean([np.diff(rows) > 0 for rows in part])
        assert abs(rising - 0.5) < 0.03
    same, other = (partition.split(0.3, key=key)[1] for key in (KEY, OTHER))
    np.testing.assert_array_equal(test.rows, same.rows)
    assert np.any(test.rows != other.rows)


def test_a_split_keeps_origin_and_notes():
    partition = Partition(np.arange(10), np.array([0, 4, 10]), "by {hand}", ("Read this.",))
    train, test = partition.split(0.25, key=KEY)
    assert train.origin == "by {hand}, training part of a local split with a test share of 0.25"
    assert test.origin == "by {hand}, test part of a local split with a test share of 0.25"
    assert train.notes == test.notes == ("Read this.",)


# scale


def test_many_clients_are_quick():
    """100,000 clients of 10 samples: no Python work for each of them, and all of it checked."""
    num_clients, num_samples = 100_000, 1_000_000
    ids = np.arange(num_samples) * 7919 % num_clients
    for partition in (iid(range(num_samples), num_clients, key=KEY), natural(ids)):
        assert partition.counts.min() == partition.counts.max() == 10
        train, test = partition.split(key=KEY)
        assert train.counts.max() == 8 and test.counts.min() == 2 and partition.num_shared == 0
    assert np.all(ids[partition.rows] == np.repeat(np.arange(num_clients), 10))


# errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: iid(range(0), 1, key=KEY), "`number of labels` must be a whole number of at least 1, got 0"),
        (lambda: iid(range(5), 0, key=KEY), "`num_clients` must be a whole number of at least 1, got 0"),
        (lambda: iid(range(5), 6, key=KEY), r"at least 6 clients x 1 = 6 samples, got 5\. Reduce `num_clients`"),
        (lambda: iid(range(5), 2, num_per_client=3, key=KEY), "at least 2 clients x 3 = 6 samples, got 5"),
        (
            lambda: iid(range(5), 2, num_per_client=0, key=KEY),
            "`num_per_client` must be a whole number of at least 1, got 0",
        ),
        (lambda: iid(range(5), 2, key=jax.random.split(KEY, 2)), "take a single key"),
        (lambda: shards(LABELS, 100, 4, key=KEY), "100 clients x 4 = 400 samples, got 307.*`num_shards_each`"),
        (lambda: shards(LABELS, 3, 0, key=KEY), "`num_shards_each` must be a whole number of at least 1, got 0"),
        (lambda: classes_per_client(LABELS, 3, 7, key=KEY), "at most the 6 classes of the pool, got 7"),
        (lambda: classes_per_client(LABELS, 308, 1, key=KEY), "308 clients x 1 = 308 samples, got 307"),
        (lambda: classes_per_client(LABELS, 41, 6, key=KEY), r"Class 0 must have 41 x 1 = 41 samples .*, got 40"),
        (
            lambda: classes_per_client(LABELS, 10, 3, num_per_client=2, key=KEY),
            "`num_per_client` must be at least 1 for each of the 3 classes of a client, got 2",
        ),
        (
            lambda: classes_per_client(LABELS, 10, 6, num_per_client=30, key=KEY),
            r"Class 0 must have 10 x 5 = 50 samples \(clients x samples\), got 40\. Reduce `num_clients`",
        ),
        (
            lambda: classes_per_client([3, 7, 7, 7, 7], 1, 2, num_per_client=5, key=KEY),
            r"Class 3 must have 1 x 2 = 2 samples .*, got 1",
        ),
        (lambda: dirichlet(LABELS, 3, 0.0, num_per_client=5, key=KEY), "`concentration` must be positive, got 0.0"),
        (
            lambda: dirichlet(LABELS, 3, 1.0, num_per_client=308, key=KEY),
            "`num_per_client` must be at most the 307 samples, got 308",
        ),
        (
            lambda: dirichlet(LABELS, 3, 1e-9, num_per_client=100, key=KEY),
            r"client 0 drew 100 of class \d, which has \d\d samples.*`num_per_client` \(100\); up to 40 always works",
        ),
        (lambda: dirichlet_by_class(LABELS, 3, -1.0, key=KEY), "`concentration` must be positive, got -1.0"),
        (lambda: dirichlet_by_class(LABELS, 50, 1.0, least=7, key=KEY), "50 clients x 7 = 350 samples, got 307"),
        (lambda: dirichlet_by_class(LABELS, 3, 1.0, least=-1, key=KEY), "`least` must be a whole number of at least 0"),
        (
            lambda: dirichlet_by_class(LABELS, 12, 1e-6, key=KEY),
            "at least 2 of the 307 samples, got at most 0 for the smallest of 12 in 1000 draws. Increase",
        ),
        (lambda: fallah_halves(LABELS, 1, 6, key=KEY), "`num_clients` must be a whole number of at least 2, got 1"),
        (lambda: fallah_halves(LABELS, 4, 1, key=KEY), "`num_each` must be a whole number of at least 2, got 1"),
        (lambda: fallah_halves([0, 1, 2], 4, 2, key=KEY), "an even number of classes, got 3"),
        (
            lambda: fallah_halves(pool(CIFAR), 50, 196, key=KEY),
            r"Class 0 must have 5 x 98 \+ 25 x 196 = 5390 samples \(clients x samples\), got 5000\. Reduce `num_each`",
        ),
        (
            lambda: fallah_halves(pool((5000,) * 5 + (1000,) * 5), 50, 180, key=KEY),
            "Class 5 must have 5 x 360 = 1800 samples .*, got 1000",
        ),
        (lambda: natural([]), "`client_ids` must be a row of integers or strings, one for each sample, got"),
        (lambda: natural([0.5, 1.0]), "`client_ids` must be a row of integers or strings.*got float64"),
        (lambda: natural(np.array(["a", None], object)), "`client_ids` must be a row of integers or strings"),
        (lambda: natural(np.zeros((2, 2), int)), r"`client_ids` must be a row.*got int64 of shape \(2, 2\)"),
        (
            lambda: Partition(np.arange(4), np.array([0, 2, 3, 4])).split(key=KEY),
            r"at least 2 samples.*got 1 for client 1 and fewer than 2 for 2 of 3 clients",
        ),
        (
            lambda: iid(range(9), 3, key=KEY).split(1.0, key=KEY),
            "`share` must be strictly between 0 and 1, got 1.0",
        ),
        (lambda: iid(range(9), 3, key=KEY).split(0, key=KEY), "`share` must be strictly between 0 and 1, got 0"),
        (lambda: Partition(np.arange(4), np.array([0, 3])), r"`offsets` must run from 0 to the 4 rows.*got \[0 3\]"),
        (lambda: Partition(np.arange(0), np.array([0])), "`offsets` must run from 0 to the 0 rows"),
        (lambda: Partition(np.arange(4), np.array([0, 3, 2, 4])), "`offsets` must not decrease"),
        (lambda: Partition(np.array([0, -2]), np.array([0, 2])), "`rows` must not be negative, got -2 at 1"),
        (lambda: Partition(np.array([0.0]), np.array([0, 1])), "`rows` must be a row of integers, got float64"),
    ],
)
def test_impossible_requests_are_refused_with_the_numbers(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda labels: shards(labels, 2, key=KEY),
        lambda labels: classes_per_client(labels, 2, 1, key=KEY),
        lambda labels: dirichlet(labels, 2, 1.0, num_per_client=1, key=KEY),
        lambda labels: dirichlet_by_class(labels, 2, 1.0, key=KEY),
        lambda labels: fallah_halves(labels, 2, 2, key=KEY),
    ],
)
@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ([], "`labels` is empty. Give one entry per sample."),
        ([0.0, 1.0], r"`labels` must be a row of integers, got float64 of shape \(2,\)"),
        ([True, False], "`labels` must be a row of integers, got bool"),
        (["a", "b"], "`labels` must be a row of integers"),
        ([[0, 1], [1, 0]], r"`labels` must be a row of integers, got int64 of shape \(2, 2\)"),
        ([0, 1, -1], "`labels` must not be negative, got -1 at 2"),
    ],
)
def test_labels_are_whole_numbers(make, labels, match):
    with pytest.raises(ValueError, match=match):
        make(labels)
