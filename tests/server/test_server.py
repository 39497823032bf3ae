"""The server: discounts and steps against their formulas, what must have no effect, and the traps others fell into."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personax.algorithms import Algorithm, fedasync_mixing
from personax.client.local import Local
from personax.client.optimizers import optimizer
from personax.data.federation import Federation
from personax.models import logistic_regression
from personax.models.tasks import classification
from personax.objectives import Erm, Scaffold
from personax.schedules import Delays, arrivals
from personax.schedules.delays import Exponential
from personax.server import Server, Upload, asynchronous, buffered, synchronous
from personax.server.discounts import Constant, Hinge, Polynomial
from personax.simulation.simulate import simulate

DISCOUNTS = [Constant(), Polynomial(0.5), Polynomial(2.0), Hinge(0.1, 3.0), Hinge(10.0, 0.0)]
SHAPES = {"matrix": (2, 3), "scalar": ()}
PARAMS = {name: np.random.default_rng(0).normal(size=shape) for name, shape in SHAPES.items()}
each_discount = pytest.mark.parametrize("discount", DISCOUNTS, ids=str)


def uploads_of(num, seed=1, version=0, accepted=True, extra=(), **replaced):
    rng = np.random.default_rng(seed)
    tree = lambda: {name: rng.normal(size=(num, *shape)) for name, shape in SHAPES.items()}
    weight, version = rng.integers(1, 50, num).astype(float), np.broadcast_to(np.asarray(version, np.int32), num)
    uploads = Upload(tree(), tree(), extra, version, weight, np.broadcast_to(np.asarray(accepted), num))
    return uploads._replace(**replaced)


def start(server, objective=Erm(), extra=(), version=0):
    state = server.init(objective, jax.tree.map(jnp.asarray, PARAMS), extra)
    return state._replace(version=jnp.asarray(version, jnp.int32))


def at(uploads, index):
    return jax.tree.map(lambda leaf: leaf[index], uploads)


@partial(jax.jit, static_argnames=("num_clients",))
def one_by_one(server, state, uploads, num_clients=9, objective=Erm()):
    """Arrivals as the simulator hands them over."""

    def arrive(state, upload):
        state = server.receive(state, jax.tree.map(lambda leaf: leaf[None], upload))
        state = server.step_if_full(state, objective, num_clients)
        return state, ()

    return jax.lax.scan(arrive, state, uploads)[0]


@partial(jax.jit, static_argnames=("num_clients",))
def whole_round(server, state, uploads, num_clients=9, objective=Erm()):
    return server.step(server.receive(state, uploads), objective, num_clients)


receive = jax.jit(lambda server, state, uploads: server.receive(state, uploads))


def weighted(factors, tree):
    return jax.tree.map(lambda leaf: np.tensordot(np.asarray(factors, float), np.asarray(leaf), axes=1), tree)


def spoilt(tree, rows):
    bad = lambda leaf: np.isin(np.arange(len(leaf)), rows).reshape(-1, *[1] * (leaf.ndim - 1))
    return jax.tree.map(lambda leaf: np.where(bad(leaf), np.nan, leaf), tree)


def assert_close(left, right, rtol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14), left, right)


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


# discounts: formulas


@pytest.mark.parametrize(
    ("discount", "formula"),
    [
        (Constant(), lambda s: 1.0),
        (Polynomial(0.5), lambda s: 1 / np.sqrt(1 + s)),
        (Polynomial(2.0), lambda s: (1 + s) ** -2.0),
        (Polynomial(0.0), lambda s: 1.0),
        (Hinge(10.0, 4.0), lambda s: 1.0 if s <= 4 else 1 / (10 * (s - 4) + 1)),
        (Hinge(0.5, 0.0), lambda s: 1 / (0.5 * s + 1)),
    ],
)
def test_discounts_are_their_formulas(discount, formula):
    ages = np.arange(12)
    np.testing.assert_allclose(discount(jnp.asarray(ages)), [formula(float(s)) for s in ages], rtol=1e-12)


@each_discount
def test_trap_nvflare_a_fresh_update_is_not_discounted(discount):
    assert float(discount(jnp.asarray(0))) == 1.0
    server = asynchronous(0.5, discount=discount)
    uploads = uploads_of(1, version=6)
    new = one_by_one(server, start(server, version=6), uploads)
    assert_close(new.params, jax.tree.map(lambda w, d: w - 0.5 * d[0], PARAMS, uploads.delta))


def test_trap_nvflare_the_root_is_of_one_plus_the_staleness():
    ages = np.arange(1, 20)
    values = np.asarray(Polynomial(0.5)(jnp.asarray(ages)))
    np.testing.assert_allclose(values, 1 / np.sqrt(1 + ages), rtol=1e-12)
    assert np.all(values > 1 / (1 + np.sqrt(ages)))


@pytest.mark.parametrize("slope", [0.1, 1.0, 10.0])
def test_trap_fedlab_flgo_the_hinge_is_continuous_and_never_above_one(slope):
    ages = jnp.linspace(0, 12, 1201)
    values = np.asarray(Hinge(slope, 4.0)(ages))
    assert np.all(values[ages <= 4] == 1) and np.all(np.diff(values) <= 0) and values.max() == 1
    beyond = np.asarray(ages[ages > 4])
    np.testing.assert_allclose(values[ages > 4], 1 / (slope * (beyond - 4) + 1), rtol=1e-12)
    assert np.abs(np.diff(values)).max() <= 1.01 * slope * 0.01  # no jump at the hinge


# steps: formulas


@pytest.mark.parametrize("lr", [1.0, 0.3])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_round_steps_along_the_weighted_mean(lr, weighting):
    server, uploads = synchronous(lr, weighting=weighting), uploads_of(4)
    weight = np.asarray(uploads.weight) if weighting == "samples" else np.ones(4)
    new = whole_round(server, start(server), uploads)
    assert_close(
        new.params, jax.tree.map(lambda w, d: w - lr * d, PARAMS, weighted(weight / weight.sum(), uploads.delta))
    )
    assert (int(new.version), int(new.num_pending), float(new.pending_weight)) == (1, 0, 0.0)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@each_discount
def test_a_buffer_divides_by_weights_and_not_by_discounts(discount, weighting):
    server = buffered(3, 0.7, discount=discount, weighting=weighting)
    uploads = uploads_of(3, version=[9, 2, 5])
    weight = np.asarray(uploads.weight) if weighting == "samples" else np.ones(3)
    factors = weight * np.asarray(discount(9 - uploads.version)) / weight.sum()
    new = one_by_one(server, start(server, version=9), uploads)
    assert_close(new.params, jax.tree.map(lambda w, d: w - 0.7 * d, PARAMS, weighted(factors, uploads.delta)))


def test_a_buffer_steps_only_when_it_is_full():
    server, uploads = buffered(3), uploads_of(7)
    states = [start(server)]
    for index in range(7):
        states.append(one_by_one(server, states[-1], at(uploads, slice(index, index + 1))))
    assert [int(state.version) for state in states] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [int(state.num_pending) for state in states] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert_same(states[2].params, states[0].params)
    assert_same(states[5].params, states[3].params)


def test_persafl_adds_each_delta_on_arrival():
    server, uploads = asynchronous(0.2), uploads_of(5, version=[0, 0, 1, 0, 3])
    new = one_by_one(server, start(server), uploads)
    assert_close(new.params, jax.tree.map(lambda w, d: w - 0.2 * d.sum(axis=0), PARAMS, uploads.delta))
    assert int(new.version) == 5


@each_discount
def test_applied_models_are_mixed(discount):
    """`w <- (1 - a_s) w + a_s w_i`, a_s = mixing x discount(staleness)."""
    server, uploads = asynchronous(0.6, discount=discount, applies="models"), uploads_of(4, version=[0, 0, 2, 1])
    expected = PARAMS
    for event in range(4):  # each makes a version
        a = 0.6 * float(discount(event - uploads.version[event]))
        expected = jax.tree.map(lambda w, end, i=event, a=a: (1 - a) * w + a * end[i], expected, uploads.end)
    assert_close(one_by_one(server, start(server), uploads).params, expected)


def test_a_buffer_of_models_mixes_their_mean():
    server, uploads = buffered(4, 0.25, applies="models"), uploads_of(4)
    expected = jax.tree.map(lambda w, end: 0.75 * w + 0.25 * end.mean(axis=0), PARAMS, uploads.end)
    assert_close(one_by_one(server, start(server), uploads).params, expected)


def momentum_by_hand(gradients, lr):
    w, trace = PARAMS, jax.tree.map(np.zeros_like, PARAMS)
    for g in gradients:
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, g)
        w = jax.tree.map(lambda w, t: w - lr * t, w, trace)
    return w


def adam_by_hand(gradients, lr, b1=0.8, b2=0.99, eps=1e-3):
    w, m, v = PARAMS, jax.tree.map(np.zeros_like, PARAMS), jax.tree.map(np.zeros_like, PARAMS)
    for k, g in enumerate(gradients, 1):
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, v, g)
        step = lambda w, m, v, k=k: w - lr * (m / (1 - b1**k)) / (np.sqrt(v / (1 - b2**k)) + eps)
        w = jax.tree.map(step, w, m, v)
    return w


@pytest.mark.parametrize(
    ("chosen", "by_hand"),
    [(optimizer("sgd", momentum=0.9), momentum_by_hand), (optimizer("adam", b1=0.8, b2=0.99, eps=1e-3), adam_by_hand)],
    ids=["momentum", "adam"],
)
def test_server_optimizers_see_means_as_gradients(chosen, by_hand):
    server = synchronous(0.05, optimizer=chosen)
    rounds_of_uploads = [uploads_of(3, seed) for seed in range(4)]
    state = start(server)
    for uploads in rounds_of_uploads:
        state = whole_round(server, state, uploads)
    means = [weighted(np.ones(3) / 3, uploads.delta) for uploads in rounds_of_uploads]
    assert_close(state.params, by_hand(means, 0.05), rtol=1e-9)


def test_extras_are_summed_and_absorbed_by_the_number_of_all_clients():
    """SCAFFOLD: c <- c + (|S| / N) mean of the uploads, whatever their weights and discounts."""
    extra = uploads_of(3, seed=8).delta
    server = buffered(3, discount=Polynomial(1.0), weighting="samples")
    state = start(server, Scaffold(), at(extra, 0), version=4)
    new = one_by_one(server, state, uploads_of(3, version=[4, 1, 2], extra=extra), 10, Scaffold())
    assert_close(new.shared, jax.tree.map(lambda e: np.asarray(e).sum(axis=0) / 10, extra))
    assert_same(new.pending_extra, jax.tree.map(np.zeros_like, PARAMS))


# what has no effect


@pytest.mark.parametrize("applies", ["deltas", "models"])
def test_what_is_not_accepted_has_no_effect_even_if_it_is_nan(applies):
    server, accepted = synchronous(weighting="samples", applies=applies), [True, False, True, False]
    uploads = uploads_of(4, accepted=accepted, extra=uploads_of(4, seed=5).delta)
    bad = uploads._replace(
        delta=spoilt(uploads.delta, [1, 3]),
        end=spoilt(uploads.end, [1, 3]),
        extra=spoilt(uploads.extra, [1, 3]),
        weight=spoilt(uploads.weight, [1]),
    )
    kept = at(uploads, np.asarray([0, 2]))
    state = start(server, Scaffold(), at(uploads.extra, 0))
    new, expected = (whole_round(server, state, u, objective=Scaffold()) for u in (bad, kept))
    assert_close(new, expected)
    assert int(new.num_dropped) == 0


@pytest.mark.parametrize("bound", [0, 2])
def test_updates_beyond_the_bound_are_dropped_and_counted(bound):
    server, version = buffered(2, max_staleness=bound), np.array([7, 7 - bound, 7 - bound - 1, 0])
    uploads = uploads_of(4, version=version)
    bad = uploads._replace(delta=spoilt(uploads.delta, [2, 3]), end=spoilt(uploads.end, [2, 3]))
    received = receive(server, start(server, version=7), bad)
    assert (int(received.num_pending), int(received.num_dropped)) == (2, 2)
    new = server.step(received, Erm(), 9)
    assert_close(new.params, jax.tree.map(lambda w, d: w - (d[0] + d[1]) / 2, PARAMS, uploads.delta))
    assert int(new.num_dropped) == 2


def test_the_staleness_of_a_dropped_update_counts_server_steps():
    """Dropped updates make no version: with a bound of 1 and downloads of version 0, only two are applied."""
    server = asynchronous(max_staleness=1)
    new = one_by_one(server, start(server), uploads_of(6))
    assert (int(new.version), int(new.num_dropped)) == (2, 4)


def test_what_is_neither_accepted_nor_fresh_is_not_counted_as_dropped():
    server = asynchronous(max_staleness=0)
    new = receive(server, start(server, version=5), uploads_of(2, version=0, accepted=[True, False]))
    assert (int(new.num_pending), int(new.num_dropped)) == (0, 1)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("empty", ["nothing received", "nothing accepted"])
def test_with_nothing_pending_a_step_changes_nothing(name, empty):
    server = synchronous(0.1, optimizer=optimizer(name, **({"momentum": 0.9} if name == "sgd" else {})))
    extra = uploads_of(3, seed=4).delta
    state = whole_round(
        server, start(server, Scaffold(), at(extra, 0)), uploads_of(3, extra=extra), objective=Scaffold()
    )
    if empty == "nothing accepted":
        state = server.receive(state, uploads_of(3, accepted=False, extra=spoilt(extra, [0])))
    assert_same(server.step(state, Scaffold(), 9), state)


def test_an_asynchronous_server_does_not_step_for_a_rejected_update():
    server = asynchronous(optimizer=optimizer("sgd", momentum=0.9))
    state = one_by_one(server, start(server), uploads_of(1))
    assert_same(one_by_one(server, state, uploads_of(2, accepted=False)), state)


# traps of asynchronous servers


def test_trap_plato_the_mixing_weight_does_not_shrink():
    """n fresh arrivals of the model 1 move the model 0 to 1 - (1 - a)^n."""
    server = asynchronous(0.1, discount=Polynomial(0.5), applies="models")
    ones = jax.tree.map(lambda leaf: np.ones((1, *leaf.shape)), PARAMS)
    state = start(server)._replace(params=jax.tree.map(np.zeros_like, PARAMS))
    for num in range(1, 61):
        state = one_by_one(server, state, uploads_of(1, version=num - 1, end=ones))
        np.testing.assert_allclose(state.params["scalar"], 1 - (1 - 0.1) ** num, rtol=1e-10)


@pytest.mark.parametrize(
    "server", [synchronous(0.4), buffered(3, 0.4), asynchronous(0.4)], ids=["sync", "buffer", "async"]
)
def test_trap_fedscale_deltas_are_applied_and_models_are_not(server):
    uploads = uploads_of(3)
    run = whole_round if server.buffer_size is None else one_by_one
    new, blind = (
        run(server, start(server), u).params for u in (uploads, uploads._replace(end=spoilt(uploads.end, [0, 1, 2])))
    )
    assert_same(new, blind)
    factors = np.full(3, 0.4 / 3 if server.buffer_size != 1 else 0.4)
    assert_close(new, jax.tree.map(lambda w, d: w - d, PARAMS, weighted(factors, uploads.delta)))


@pytest.mark.parametrize("applies", ["deltas", "models"])
def test_trap_fedml_whole_client_weights_are_never_added(applies):
    """A client that did not move leaves the model where it is, however many arrive."""
    server = asynchronous(1.0, applies=applies)
    stay = uploads_of(1)._replace(
        delta=jax.tree.map(lambda w: np.zeros((1, *w.shape)), PARAMS),
        end=jax.tree.map(lambda w: w[None], PARAMS),
    )
    state = start(server)
    for _ in range(5):
        state = one_by_one(server, state, stay._replace(version=state.version[None]))
    assert_same(state.params, PARAMS)


def test_trap_nvflare_a_lone_client_is_never_stale():
    """In a whole run: with one client every update is fresh, so neither a discount nor a bound has an effect."""
    rng = np.random.default_rng(2)
    federation = Federation.from_clients([(rng.normal(size=(20, 3)), rng.integers(0, 2, 20))])
    schedule = arrivals(1, 6, delays=Delays(Exponential(1.0), upload=Exponential(5.0)), key=jax.random.key(0))
    task, local = classification(logistic_regression(2)), Local(0.1, num_steps=2, batch_size=4)
    ends = []
    for begin in (0.0, 1e6):
        server = asynchronous(discount=Hinge(5.0, begin), max_staleness=0)
        result = simulate(Algorithm(Erm(), local, server), task, federation, schedule, key=jax.random.key(1))
        assert result.num_dropped == 0
        ends.append(result.params)
    assert_same(*ends)


# identities


@settings(max_examples=25, deadline=None)
@given(
    cut=st.integers(1, 3),
    seed=st.integers(0, 99),
    options=st.sampled_from([("uniform", "models"), ("samples", "deltas")]),
)
def test_one_batch_equals_one_after_another(cut, seed, options):
    rng = np.random.default_rng(seed)
    weighting, applies = options
    server = buffered(9, discount=Polynomial(0.5), max_staleness=3, weighting=weighting, applies=applies)
    version, accepted = rng.integers(0, 6, 4), rng.random(4) < 0.7
    uploads, state = uploads_of(4, seed, version, accepted), start(server, version=5)
    parts = receive(server, receive(server, state, at(uploads, slice(0, cut))), at(uploads, slice(cut, 4)))
    assert_close(receive(server, state, uploads), parts)
    assert int(parts.num_pending) == np.sum(accepted & (5 - version <= 3))
    assert int(parts.num_dropped) == np.sum(accepted & (5 - version > 3))


def test_a_buffer_of_the_cohort_equals_a_round():
    uploads = uploads_of(5)
    sync, buffer = synchronous(0.3, weighting="samples"), buffered(5, 0.3, weighting="samples")
    assert_close(whole_round(sync, start(sync), uploads).params, one_by_one(buffer, start(buffer), uploads).params)


def test_the_order_of_uploads_does_not_matter():
    server, uploads = synchronous(discount=Polynomial(0.5), weighting="samples"), uploads_of(5, version=[0, 1, 2, 3, 3])
    order = np.asarray([3, 0, 4, 2, 1])
    one, other = (whole_round(server, start(server, version=3), u) for u in (uploads, at(uploads, order)))
    assert_close(one, other)


def test_step_sizes_can_be_swept():
    lrs, uploads = jnp.asarray([0.1, 0.5, 2.0]), uploads_of(3)
    run = lambda server: whole_round(server, start(server), uploads).params
    apart = [run(asynchronous(lr)) for lr in lrs]
    assert_close(jax.vmap(run)(asynchronous(lrs)), jax.tree.map(lambda *leaves: np.stack(leaves), *apart))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_parameters_keep_their_type(dtype):
    server = buffered(2, 0.5, optimizer=optimizer("adam"), discount=Polynomial(0.5), weighting="samples")
    params, uploads = jax.tree.map(lambda w: jnp.asarray(w, dtype), PARAMS), uploads_of(2)
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    state = server.init(Erm(), params, ())
    new = one_by_one(server, state, uploads._replace(delta=cast(uploads.delta), end=cast(uploads.end)))
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert types(new) == types(state)


# names and errors


def test_three_names_for_one_server():
    assert synchronous(0.5) == Server(0.5, buffer_size=None)
    assert buffered(4, 0.5) == Server(0.5, buffer_size=4)
    assert asynchronous(0.5) == Server(0.5, buffer_size=1)
    assert fedasync_mixing(lr=0.1, mixing=0.6, num_steps=1).server == Server(
        0.6, 1, discount=Polynomial(0.5), applies="models"
    )


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: synchronous(0.0),
            "`lr` must be positive, got 0.0. To train without a shared model.*local_only",
        ),
        (lambda: synchronous(-1.0), "`lr` must be positive, got -1.0"),
        (lambda: synchronous(float("nan")), "`lr` must be positive, got nan"),
        (lambda: buffered(0), "`buffer_size` must be a whole number of at least 1, got 0"),
        (lambda: buffered(2.5), "`buffer_size` must be a whole number of at least 1, got 2.5"),
        (lambda: asynchronous(max_staleness=-1), "`max_staleness` must be a whole number of at least 0, got -1"),
        (lambda: asynchronous(weighting="sample"), "`weighting` must be one of 'uniform', 'samples', got 'sample'"),
        (lambda: asynchronous(applies="delta"), "`applies` must be one of 'deltas', 'models', got 'delta'"),
        (lambda: Polynomial(-1.0), "`power` must not be negative, got -1.0"),
        (lambda: Hinge(0.0, 1.0), "`slope` must be positive, got 0.0"),
        (lambda: Hinge(1.0, -1.0), "`start` must not be negative, got -1.0"),
    ],
)
def test_errors_name_the_problem(make, match):
    with pytest.raises(ValueError, match=match):
        make()
