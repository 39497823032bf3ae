"""Sampling: what a batch depends on and what it does not, epochs, parts, permutations, uniformity."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from personax import Algorithm, Erm, Local, Meta, synchronous
from personax.client.sampling import (
    ROLES,
    BatchSizes,
    ClientRows,
    Draw,
    batch_indices,
    draw_rows,
    permute,
    scale_word,
)
from personax.data.federation import Federation
from personax.keys import RunStream, run_stream

KEY = jax.random.key(11)
COUNTS = [40, 1, 1000, 7, 300]
IDS = [5, 0, 9, 2, 31]
STEPS = 4000
SIGNIFICANCE = 1e-4
small = settings(max_examples=30, deadline=None)
each_sampling = pytest.mark.parametrize("sampling", ["replacement", "shuffled"])


def federation_of(counts, ids=None):
    """Row r of client i holds the number r in x and the client's count in y."""
    return Federation.from_clients([(np.arange(c)[:, None], np.full(c, c)) for c in counts], ids=ids)


FEDERATION = federation_of(COUNTS, IDS)


indices_of = jax.jit(partial(batch_indices, FEDERATION), static_argnames=("role", "size", "draw", "sampling"))


@partial(jax.jit, static_argnames=("draws", "sampling", "parted", "num_steps"))
def _rows(key, count, ident, update, draws, sampling, share, parted, num_steps):
    client = ClientRows(jnp.int32(0), count, ident, update)
    return draw_rows(run_stream(key), client, jnp.arange(num_steps), draws, sampling, share if parted else None)


def rows_of(
    count, size, sampling="replacement", *, key=KEY, ident=0, update=0, draws=None, share=None, num_steps=STEPS
):
    """The batches of the first steps of a visit, [steps, size]; -1 for filler. Few sizes: each compiles."""
    numbers = (np.int32(count), np.uint32(ident), np.int32(update))
    draws = (Draw("outer", 0, size),) if draws is None else draws
    rows, weight, _ = _rows(key, *numbers, draws, sampling, share or 0.5, share is not None, num_steps)
    return np.where(np.asarray(weight) > 0, np.asarray(rows), -1)


def orders_of(count, num):
    """Shuffled orders of up to 12 samples, one for each epoch: [num, count]."""
    orders = [rows_of(count, 12, "shuffled", update=update)[:, :count] for update in range(-(-num // STEPS))]
    return np.concatenate(orders)[:num]


def assert_uniform(counts):
    """Pearson's chi-square test at the level of `SIGNIFICANCE`; all keys are fixed."""
    counts = np.ravel(counts)
    assert counts.mean() >= 5 and stats.chisquare(counts).pvalue > SIGNIFICANCE


# closed forms


@small
@given(word=st.integers(0, 2**32 - 1), count=st.integers(1, 2**31 - 1))
def test_scaling_is_the_floor_of_the_product(word, count):
    assert int(scale_word(np.uint32(word), np.int32(count))) == word * count // 2**32


@pytest.mark.parametrize("count", [1, 2, 3, 2**16 - 1, 2**16, 2**16 + 1, 2**31 - 1])
def test_scaling_reaches_both_ends(count):
    scaled = scale_word(np.asarray([0, 2**32 - 1], np.uint32), np.int32(count))
    assert scaled.tolist() == [0, count - 1]


# what a batch depends on


@each_sampling
def test_a_batch_is_a_function_of_its_names(sampling):
    names = {"key": KEY, "client": 2, "update": 3, "step": 4, "role": "adapt", "size": 12, "draw": 0}
    rows = lambda **changed: tuple(indices_of(**{**names, **changed}, sampling=sampling).tolist())
    changes = {"key": jax.random.key(12), "update": 4, "step": 5, "role": "outer", "draw": 1}
    seen = {rows(), *(rows(**{name: new}) for name, new in changes.items())}
    assert rows() in seen and len(seen) == len(changes) + 1


@each_sampling
def test_the_id_decides_and_the_position_does_not(sampling):
    order = [3, 0, 4, 1, 2]
    moved = federation_of([COUNTS[i] for i in order], [IDS[i] for i in order])
    renamed = federation_of(COUNTS, [i + 100 for i in IDS])

    def places(fed):
        of_client = lambda client: batch_indices(fed, KEY, client, 1, 2, "outer", 12, sampling=sampling)
        rows = np.asarray(jax.jit(jax.vmap(of_client))(np.arange(5)))
        return np.where(rows < 0, -1, rows - fed.offsets[:5, None])

    own = places(FEDERATION)
    np.testing.assert_array_equal(places(moved), own[order])
    assert places(renamed)[2].tolist() != own[2].tolist()


@each_sampling
def test_steps_and_roles_drawn_together_are_those_drawn_alone(sampling):
    """A run draws all its batches at once, of the size of the largest; `batch_indices` tells each by itself."""
    draws = (Draw("adapt", 1, 4), Draw("outer", 0, 12), Draw("curvature", 0, 4))
    together = rows_of(COUNTS[2], None, sampling, ident=IDS[2], draws=draws)
    parts = np.split(together, np.cumsum([draw.size for draw in draws])[:-1], axis=1)
    for step, (draw, rows) in itertools.product((0, 260), zip(draws, parts, strict=True)):
        options = {"draw": draw.number, "sampling": sampling}
        alone = np.asarray(indices_of(KEY, 2, 0, step, role=draw.role, size=draw.size, **options))
        assert np.where(alone < 0, -1, alone - FEDERATION.offsets[2]).tolist() == rows[step].tolist()


@pytest.mark.parametrize(("sampling", "share"), [("replacement", None), ("shuffled", 0.3)])
def test_batches_are_the_same_in_single_precision(sampling, share):
    double = rows_of(1000, 12, sampling, share=share)
    with jax.enable_x64(False):
        np.testing.assert_array_equal(rows_of(1000, 12, sampling, share=share), double)


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_seeds_run_together_see_the_batches_of_seeds_run_alone(kind):
    keys = jnp.stack([jax.random.key(seed, impl=kind) for seed in range(3)])
    alone = [jax.random.key_data(run_stream(key)) for key in keys]
    np.testing.assert_array_equal(jax.random.key_data(jax.vmap(run_stream)(keys)), np.stack(alone))


def test_dropout_keys_are_all_different():
    keys, stream, (start, count) = [], run_stream(KEY), jnp.asarray([0, 9], jnp.int32)
    draws = tuple(Draw(role, index, 12) for role in ROLES for index in range(3))

    @jax.jit
    def keys_of(update, ident):
        *_, key = draw_rows(stream, ClientRows(start, count, ident, update), jnp.arange(4), draws, "replacement")
        assert key.shape == (4, 9)
        return jax.random.key_data(key)

    for update, ident in itertools.product(range(2), range(2)):
        found = np.asarray(keys_of(np.int64(update), np.uint32(ident)))
        keys += [tuple(pair) for pair in found.reshape(-1, 2).tolist()]
    assert len(set(keys)) == len(keys) == 2 * 2 * 4 * 9


def test_a_model_is_not_initialized_from_the_key_of_batches():
    keys = (KEY, run_stream(KEY), run_stream(KEY, RunStream.INIT))
    assert len({tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}) == 3


def test_all_batches_of_two_steps_are_different():
    """Also beyond 256 batches a step."""
    num_draws = 90
    draws = tuple(Draw(role, index, 12) for index in range(num_draws) for role in ROLES)
    client = ClientRows(jnp.int32(0), jnp.int32(10**6), jnp.uint32(0), jnp.int32(0))
    rows = jax.jit(lambda: draw_rows(run_stream(KEY), client, jnp.arange(2), draws, "replacement")[0])()
    batches = [tuple(batch) for batch in np.asarray(rows).reshape(-1, 12).tolist()]
    assert len(set(batches)) == len(batches) == 2 * 3 * num_draws


# which rows


@each_sampling
@pytest.mark.parametrize("client", range(len(COUNTS)))
def test_rows_are_the_clients_own(client, sampling):
    begin, end = FEDERATION.offsets[client : client + 2]
    for step in (0, 50):
        rows = np.asarray(indices_of(KEY, client, 2, step, role="outer", size=12, sampling=sampling))
        assert np.all((rows >= begin) & (rows < end) | ((rows == -1) & (sampling == "shuffled")))
        assert np.all(FEDERATION.y[rows[rows >= 0]] == COUNTS[client])


@small
@given(count=st.integers(1, 30), size=st.sampled_from([1, 4, 12]), seed=st.integers(0, 2**31 - 1))
def test_shuffled_epochs_see_every_sample_once(count, size, seed):
    per_epoch = -(-count // size)
    batches = rows_of(count, size, "shuffled", key=jax.random.key(seed), num_steps=90)
    for begin in range(0, 3 * per_epoch, per_epoch):
        epoch = batches[begin : begin + per_epoch].ravel().tolist()
        assert sorted(epoch[:count]) == list(range(count))
        assert epoch[count:] == [-1] * (per_epoch * size - count)


def test_each_epoch_has_its_own_order():
    assert len({tuple(order) for order in orders_of(12, 50).tolist()}) == 50


def test_a_client_smaller_than_a_batch():
    drawn, shuffled = rows_of(3, 12), rows_of(3, 12, "shuffled")
    assert set(drawn.ravel().tolist()) == {0, 1, 2}
    assert np.all(np.sort(shuffled[:, :3], axis=1) == np.arange(3)) and np.all(shuffled[:, 3:] == -1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 25])
def test_support_and_query_part_a_clients_data(count, share):
    query = min(max(round(count * share), 1), max(count - 1, 1))
    draws = tuple(Draw(role, 0, 12) for role in ROLES)
    for sampling in ("replacement", "shuffled"):
        parts = np.split(rows_of(count, None, sampling, draws=draws, share=share, num_steps=500), 3, axis=1)
        outer, adapt, curvature = (sorted(set(part.ravel().tolist()) - {-1}) for part in parts)
        assert outer == list(range(count - query, count))
        assert adapt == curvature == (list(range(count - query)) if count > 1 else [0])


# measured properties


def test_samples_and_pairs_of_samples_are_uniform():
    rows, other = rows_of(4, 12), rows_of(4, 12, update=1)
    for left, right in ((rows[:, 0], rows[:, 1]), (rows[:-1, 0], rows[1:, 0]), (rows[:, 0], other[:, 0])):
        assert_uniform(np.bincount(left, minlength=4))
        assert_uniform(np.bincount(4 * left + right, minlength=16))


def test_large_clients_are_covered_evenly():
    rows = rows_of(2_000_000_000, 12)
    assert_uniform(np.bincount(rows.ravel() // 100_000_000, minlength=20))
    assert len(np.unique(rows)) > 0.999 * rows.size


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_every_sample_of_an_epoch_comes_at_every_place(count):
    orders = orders_of(count, STEPS)
    for place in range(count):
        assert_uniform(np.bincount(orders[:, place], minlength=count))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_orders_of_few_samples_are_equally_likely(count):
    seen = [tuple(order) for order in orders_of(count, STEPS).tolist()]
    assert_uniform([seen.count(order) for order in itertools.permutations(range(count))])


def neighbours(count, num):
    """Count how often each pair of different samples is at the first two positions of an epoch."""
    left, right = orders_of(count, num)[:, :2].T
    pairs = np.bincount(count * left + right, minlength=count**2).reshape(count, count)
    return pairs[~np.eye(count, dtype=bool)]


@pytest.mark.parametrize("count", range(2, 13))
def test_all_pairs_of_neighbours_are_equally_likely(count):
    """Half as many rounds of the network give p-values below 1e-6 from five samples on."""
    assert_uniform(neighbours(count, 5 * STEPS))


permute_all = jax.jit(jax.vmap(permute, in_axes=(0, None, None)))


@pytest.mark.parametrize("count", range(1, 71))
def test_small_permutations_are_bijections(count):
    places = np.minimum(np.arange(70), count - 1)
    images = np.asarray(permute_all(jax.random.split(KEY, 4), places, np.int32(count)))
    assert np.all(np.sort(images[:, :count], axis=1) == np.arange(count))


@pytest.mark.parametrize("count", [1024, 65_537, 250_007])
def test_large_permutations_are_bijections(count):
    images = np.asarray(jax.jit(permute)(KEY, np.arange(count), np.int32(count)))
    np.testing.assert_array_equal(np.sort(images), np.arange(count))
    # Neighbours do not stay together: their distance is that of random places, a third of the range on average.
    assert abs(np.abs(np.diff(images)).mean() / (count / 3) - 1) < 0.1


@pytest.mark.parametrize("count", [2**30, 2**31 - 1])
def test_permutations_of_huge_ranges_stay_inside(count):
    places = np.r_[np.arange(50), count - 1 - np.arange(20)].astype(np.int32)
    images = np.asarray(permute_all(jax.random.split(KEY, 4), places, np.int32(count)))
    assert images.min() >= 0 and images.max() < count
    assert all(len(set(row)) == 70 for row in images.tolist())


# batch sizes by role


def test_batch_sizes_default_to_the_outer_one():
    assert [BatchSizes(8).of(role) for role in ROLES] == [8, 8, 8]
    assert [BatchSizes(8, adapt=3, curvature=5).of(role) for role in ROLES] == [8, 3, 5]
    assert jax.tree.leaves(BatchSizes(8, 3)) == []


def test_batch_sizes_by_adaptation_step():
    """gMeta Remark 2: D_{i,0}, D_{i,1}, ... and D'_{i,0}, D'_{i,1}, ..."""
    sizes = BatchSizes(8, adapt=(3, 5), curvature=2)
    local, meta = Local(0.1, num_steps=1, batch_size=sizes), Meta(0.1, 2)
    draws = local.draws(meta)
    assert draws == (
        Draw("adapt", 0, 3),
        Draw("adapt", 1, 5),
        Draw("outer", 0, 8),
        Draw("curvature", 0, 2),
        Draw("curvature", 1, 2),
    )
    assert len(local.draws(Erm())) == 1  # sizes of roles that are not drawn do not matter
    for num in (1, 3):
        message = rf"`batch_size.adapt` has 2 sizes, but this role draws {num} batches. Give one size, or one"
        with pytest.raises(ValueError, match=message):
            Algorithm(Meta(0.1, num), local, synchronous())


@each_sampling
def test_rows_beyond_the_size_of_a_batch_are_filler(sampling):
    """Batches of a role have as many rows as its largest; the others see what they see alone."""
    draws = (Draw("adapt", 0, 4), Draw("adapt", 1, 12), Draw("outer", 0, 4))
    of_draws = lambda *draws: rows_of(7, None, sampling, draws=draws, num_steps=100)
    first, second, outer = np.split(of_draws(*draws), [12, 24], axis=1)
    assert outer.shape[1] == 4 and (first[:, 4:] == -1).all()
    for rows, draw in ((first[:, :4], draws[0]), (second, draws[1]), (outer, draws[2])):
        np.testing.assert_array_equal(rows, of_draws(draw))


@pytest.mark.parametrize(("sizes", "role"), [((0,), "outer"), ((2, 0), "adapt"), ((2, 1, 1.5), "curvature")])
def test_batch_sizes_are_whole_numbers(sizes, role):
    with pytest.raises(ValueError, match=f"`batch_size.{role}` must be a whole number of at least 1, got {sizes[-1]}"):
        BatchSizes(*sizes)


def test_batch_sizes_by_adaptation_step_are_a_tuple_of_whole_numbers():
    with pytest.raises(ValueError, match=r"`batch_size.adapt` must be a whole number of at least 1, got 0"):
        BatchSizes(4, (3, 0))
    for sizes in ((), [3, 2], ((1, 2),)):
        with pytest.raises(ValueError, match=r"`batch_size.curvature` must be one size, or a tuple with one for each"):
            BatchSizes(4, 3, sizes)
