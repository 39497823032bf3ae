"""Sampling: the counter-based generator against its definition, what a batch depends on, epochs, parts, uniformity."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32

from personax.federation import Federation
from personax.sampling import (
    ROLES,
    BatchSizes,
    Client,
    Draw,
    _hash,
    _scaled,
    batch_indices,
    draw_rows,
    init_key,
    permute,
    run_stream,
)

KEY = jax.random.key(11)
COUNTS = [40, 1, 1000, 7, 300]
IDS = [5, 0, 9, 2, 31]
small = settings(max_examples=30, deadline=None)
words = st.integers(0, 2**32 - 1)


def federation_of(counts, ids=None):
    """Row r of client i holds the number r in x and the client's count in y."""
    return Federation.from_clients([(np.arange(c)[:, None], np.full(c, c)) for c in counts], ids=ids)


FEDERATION = federation_of(COUNTS, IDS)


@partial(jax.jit, static_argnames=("num_steps", "draw", "sampling", "shared"))
def _rows(key, count, ident, update, num_steps, draw, sampling, share, shared):
    client = Client(jnp.int32(0), count, ident, update)
    return draw_rows(run_stream(key), client, jnp.arange(num_steps), draw, sampling, share if shared else None)


def rows_of(count, size, num_steps, sampling="replacement", *, key=KEY, ident=0, update=0, role="outer", draw=0, share=None):
    """The batches of the first steps of a visit, [steps, size]; -1 for filler."""
    one, numbers = Draw(role, draw, size), (np.int32(count), np.uint32(ident), np.int32(update))
    rows, weight, _ = _rows(key, *numbers, num_steps, one, sampling, share or 0.5, share is not None)
    return np.where(np.asarray(weight) > 0, np.asarray(rows), -1)


def assert_uniform(counts):
    """Pearson's statistic stays within five standard deviations of its mean, the degrees of freedom."""
    counts = np.asarray(counts, float).ravel()
    freedom, expected = counts.size - 1, counts.mean()
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert expected >= 5 and statistic < freedom + 5 * np.sqrt(2 * freedom), (statistic, freedom)


# closed forms


@small
@given(key=st.tuples(words, words), high=words, low=words)
def test_the_hash_is_threefry(key, high, low):
    pair, counters = np.asarray(key, np.uint32), np.asarray([high, low, low, high], np.uint32)
    expected = threefry_2x32(pair, jnp.asarray(counters[[0, 2, 1, 3]]))
    x, y = _hash(jnp.asarray(pair), counters[[0, 2]], counters[[1, 3]])
    np.testing.assert_array_equal(np.concatenate([x, y]), expected)


def test_the_hash_broadcasts_its_counters():
    stream = run_stream(KEY)
    x, y = _hash(stream, np.arange(3)[:, None], np.arange(4)[None, :])
    for high, low in itertools.product(range(3), range(4)):
        np.testing.assert_array_equal([x[high, low], y[high, low]], threefry_2x32(stream, jnp.asarray([high, low], jnp.uint32)))


@small
@given(word=words, count=st.integers(1, 2**31 - 1))
def test_scaling_is_the_floor_of_the_product(word, count):
    assert int(_scaled(np.uint32(word), np.int32(count))) == word * count // 2**32


@pytest.mark.parametrize("count", [1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1])
def test_scaling_reaches_both_ends(count):
    scaled = _scaled(np.asarray([0, 2**32 - 1], np.uint32), np.int32(count))
    assert scaled.tolist() == [0, count - 1]


# what a batch depends on


def test_a_batch_is_a_function_of_its_names():
    names = {"key": KEY, "client": 2, "update": 3, "step": 4, "role": "adapt", "size": 16, "draw": 0}
    rows = lambda sampling, **changed: batch_indices(FEDERATION, **{**names, **changed}, sampling=sampling).tolist()
    changes = {"key": jax.random.key(12), "update": 4, "step": 5, "role": "outer", "draw": 1}
    for sampling in ("replacement", "shuffled"):
        seen = [rows(sampling)] + [rows(sampling, **{name: new}) for name, new in changes.items()]
        assert rows(sampling) == seen[0]
        assert len({tuple(batch) for batch in seen}) == len(changes) + 1


def test_the_id_decides_and_the_position_does_not():
    order = [3, 0, 4, 1, 2]
    moved = federation_of([COUNTS[i] for i in order], [IDS[i] for i in order])
    renamed = federation_of(COUNTS, [i + 100 for i in IDS])
    for sampling in ("replacement", "shuffled"):
        rows = lambda fed, i, s=sampling: np.asarray(batch_indices(fed, KEY, i, 1, 2, "outer", 12, sampling=s))
        for new, old in enumerate(order):
            here, there = rows(moved, new), rows(FEDERATION, old)
            np.testing.assert_array_equal(np.where(here < 0, -1, here - moved.offsets[new]), np.where(there < 0, -1, there - FEDERATION.offsets[old]))
        assert rows(renamed, 2).tolist() != rows(FEDERATION, 2).tolist()


def test_a_smaller_batch_is_the_beginning_of_a_larger_one():
    for sampling in ("replacement", "shuffled"):
        small, large = (rows_of(1000, size, 1, sampling) for size in (5, 30))
        np.testing.assert_array_equal(small[0], large[0, :5])


def test_a_step_does_not_depend_on_the_number_of_steps():
    for sampling in ("replacement", "shuffled"):
        np.testing.assert_array_equal(rows_of(50, 8, 3, sampling), rows_of(50, 8, 20, sampling)[:3])
        several = [batch_indices(FEDERATION, KEY, 2, 0, step, "outer", 8, sampling=sampling) for step in range(3)]
        np.testing.assert_array_equal(np.stack(several) - FEDERATION.offsets[2], rows_of(1000, 8, 3, sampling, ident=9))


def test_batches_are_the_same_in_single_precision():
    for sampling, share in itertools.product(("replacement", "shuffled"), (None, 0.3)):
        rows = lambda sampling=sampling, share=share: batch_indices(
            federation_of(COUNTS, IDS), KEY, 2, 1, 200, "outer", 9, sampling=sampling, query_share=share
        ).tolist()
        double = rows()
        with jax.enable_x64(False):
            assert rows() == double


def test_dropout_keys_are_all_different():
    keys = set()
    for draw, update, ident in itertools.product((Draw(r, i, 3) for r in ROLES for i in range(3)), range(2), range(2)):
        *_, key = _rows(KEY, np.int32(9), np.uint32(ident), np.int32(update), 4, draw, "replacement", 0.5, False)
        keys |= {tuple(pair) for pair in np.asarray(jax.random.key_data(key)).tolist()}
    assert len(keys) == 9 * 2 * 2 * 4


def test_a_model_is_not_initialised_from_the_words_of_batches():
    words = {tuple(np.asarray(w).tolist()) for w in (run_stream(KEY), jax.random.key_data(init_key(KEY)))}
    assert len(words) == 2 and tuple(np.asarray(jax.random.key_data(KEY)).tolist()) not in words


@pytest.mark.parametrize("num_draws", [20, pytest.param(90, marks=pytest.mark.xfail(strict=True, reason="256 batches a step"))])
def test_all_batches_of_a_step_are_different(num_draws):
    seen = [
        tuple(batch_indices(FEDERATION, KEY, 2, 0, 0, role, 12, draw=draw, sampling="shuffled").tolist())
        for draw in (*range(3), num_draws - 2, num_draws - 1)
        for role in ROLES
    ]
    assert len(set(seen)) == len(seen)


# which rows


@pytest.mark.parametrize("sampling", ["replacement", "shuffled"])
@pytest.mark.parametrize("client", range(len(COUNTS)))
def test_rows_are_the_clients_own(client, sampling):
    begin, end = FEDERATION.offsets[client : client + 2]
    for step in (0, 3, 50):
        rows = np.asarray(batch_indices(FEDERATION, KEY, client, 2, step, "outer", 20, sampling=sampling))
        assert np.all((rows >= begin) & (rows < end) | ((rows == -1) & (sampling == "shuffled")))
        assert np.all(FEDERATION.y[rows[rows >= 0]] == COUNTS[client])


@small
@given(count=st.integers(1, 30), size=st.sampled_from([1, 4, 7]), seed=st.integers(0, 2**31 - 1))
def test_shuffled_epochs_see_every_sample_once(count, size, seed):
    per_epoch = -(-count // size)
    batches = rows_of(count, size, 60, "shuffled", key=jax.random.key(seed))
    for begin in range(0, 60 - per_epoch + 1, per_epoch):
        epoch = batches[begin : begin + per_epoch].ravel().tolist()
        assert sorted(epoch[:count]) == list(range(count))
        assert epoch[count:] == [-1] * (per_epoch * size - count)


def test_each_epoch_has_its_own_order():
    orders = {tuple(epoch) for epoch in rows_of(12, 12, 50, "shuffled").tolist()}
    assert len(orders) == 50


def test_a_client_smaller_than_a_batch():
    drawn = rows_of(3, 8, 40)
    assert drawn.shape == (40, 8) and set(drawn.ravel().tolist()) == {0, 1, 2}
    shuffled = rows_of(3, 8, 40, "shuffled")
    assert np.all(np.sort(shuffled[:, :3], axis=1) == np.arange(3)) and np.all(shuffled[:, 3:] == -1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 25])
def test_support_and_query_part_a_clients_data(count, share):
    query = min(max(round(count * share), 1), max(count - 1, 1))
    part = {}
    for role in ROLES:
        rows = rows_of(count, 25, 1, "shuffled", role=role, share=share)[0]
        part[role] = sorted(rows[rows >= 0].tolist())
        drawn = rows_of(count, 25, 1, role=role, share=share)
        assert set(drawn.ravel().tolist()) <= set(part[role])
    assert part["outer"] == list(range(count - query, count))
    assert part["adapt"] == part["curvature"] == (list(range(count - query)) if count > 1 else [0])


# measured properties


@pytest.mark.parametrize("sampling", ["replacement", "shuffled"])
def test_samples_and_pairs_of_steps_are_uniform(sampling):
    """One row at a time; shuffled epochs of 4 samples are uniform over updates at every place."""
    rows = np.concatenate([rows_of(4, 1, 4, sampling, update=u) for u in range(800)], axis=1)
    for place in range(4):
        assert_uniform(np.bincount(rows[place], minlength=4))
    if sampling == "replacement":
        assert_uniform(np.bincount(4 * rows[0] + rows[1], minlength=16))
        assert_uniform(np.bincount(4 * rows[0, 1:] + rows[0, :-1], minlength=16))


def test_large_clients_are_covered_evenly():
    rows = rows_of(1_000_000, 500, 40)
    assert_uniform(np.bincount(rows.ravel() // 50_000, minlength=20))
    assert len(np.unique(rows)) > 0.97 * rows.size


permute_all = jax.jit(jax.vmap(permute, in_axes=(0, None, None)))


def round_keys(num, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (num, 6), dtype=np.uint32))


@pytest.mark.parametrize("count", [*range(1, 71)])
def test_small_permutations_are_bijections(count):
    places = np.minimum(np.arange(70), count - 1)
    images = np.asarray(permute_all(round_keys(4, count), places, np.int32(count)))
    assert np.all(np.sort(images[:, :count], axis=1) == np.arange(count))


@pytest.mark.parametrize("count", [1000, 1024, 65_536, 65_537, 250_007])
def test_large_permutations_are_bijections(count):
    images = np.asarray(jax.jit(permute)(round_keys(1, count)[0], np.arange(count), np.int32(count)))
    np.testing.assert_array_equal(np.sort(images), np.arange(count))
    # No place keeps company with its neighbour: steps between images are as long as between random places.
    assert abs(np.abs(np.diff(images)).mean() / (count / 3) - 1) < 0.1


@pytest.mark.parametrize("count", [2**30, 2**31 - 1])
def test_permutations_of_huge_ranges_stay_inside(count):
    places = np.r_[np.arange(50), count - 1 - np.arange(20)].astype(np.int32)
    images = np.asarray(permute_all(round_keys(4), places, np.int32(count)))
    assert images.min() >= 0 and images.max() < count
    assert all(len(set(row)) == 70 for row in images.tolist())


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_permutations_are_uniform(count):
    num = 100 * math.factorial(count)
    images = np.asarray(permute_all(round_keys(num, count), np.arange(count), np.int32(count)))
    seen = {order: 0 for order in itertools.permutations(range(count))}
    for row in images.tolist():
        seen[tuple(row)] += 1
    assert_uniform(list(seen.values()))


def test_every_place_goes_everywhere():
    images = np.asarray(permute_all(round_keys(20 * 23), np.arange(23), np.int32(23)))
    for place in range(23):
        assert_uniform(np.bincount(images[:, place], minlength=23))


# batch sizes by role


def test_batch_sizes_default_to_the_outer_one():
    assert [BatchSizes(8).of(role) for role in ROLES] == [8, 8, 8]
    assert [BatchSizes(8, adapt=3, curvature=5).of(role) for role in ROLES] == [8, 3, 5]
    assert jax.tree.leaves(BatchSizes(8, 3)) == []


@pytest.mark.parametrize(("sizes", "role"), [((0,), "outer"), ((2, 0), "adapt"), ((2, 1, 1.5), "curvature")])
def test_batch_sizes_are_whole_numbers(sizes, role):
    with pytest.raises(ValueError, match=f"`batch_size.{role}` must be a whole number of at least 1, got {sizes[-1]}"):
        BatchSizes(*sizes)
