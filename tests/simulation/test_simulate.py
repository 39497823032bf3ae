"""Runs against closed forms and against each other; what a run reports; what it refuses."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax import Federation, simulate
from personax.simulation import engine
from personax.simulation.engine import initial_params
from personax.simulation.waves import plan_arrivals
from tests import closed_forms
from tests.closed_forms import FULL_BATCH, TASK, federation
from tests.simulation.options import grouped
from tests.test_contract import assert_close

KEY = jax.random.key(0)
W = np.random.default_rng(3).normal(size=closed_forms.DIMENSION)
START = {"w": jnp.asarray(W)}
STEPS = {"num_steps": 3, "batch_size": 4}


def run(algorithm, num_rounds=4, cohort_size=2, fed=None, schedule=None, **options):
    fed = federation()[0] if fed is None else fed
    schedule = personax.rounds(fed.num_clients, num_rounds, cohort_size, key=KEY) if schedule is None else schedule
    return simulate(algorithm, TASK, fed, schedule, key=KEY, params=START, **grouped(**options))


# Closed forms


def test_one_round_of_fedavg_is_the_mean_of_the_clients_iterates():
    fed, problems = federation()
    for weighting in ("uniform", "samples"):
        server = personax.synchronous(0.5, weighting=weighting)
        result = run(personax.fedavg(lr=0.1, server=server, num_steps=5, **FULL_BATCH), 1, 4)
        ends = np.stack([problem.descend(W, 0.1, 5) for problem in problems])
        mean = np.average(ends, axis=0, weights=None if weighting == "uniform" else fed.counts)
        np.testing.assert_allclose(result.params["w"], W + 0.5 * (mean - W), rtol=1e-10)


def hessian_of(problems, factor):
    return sum(factor(p).T @ p.hessian @ factor(p) for p in problems)


def test_fedavg_with_one_step_converges_to_the_minimizer_of_the_mean():
    _, problems = federation()
    result = run(personax.fedavg(lr=0.3, num_steps=1, **FULL_BATCH), 400, 4)
    total = sum(p.hessian for p in problems)
    optimum = np.linalg.solve(total, sum(p.hessian @ p.minimizer for p in problems))
    np.testing.assert_allclose(result.params["w"], optimum, rtol=1e-8)


@pytest.mark.parametrize(
    ("hvp", "num_adapt_steps"),
    [(personax.curvature.exact, 3), (personax.curvature.relative_difference(1e-3), 1)],
    ids=str,
)
def test_per_fedavg_with_one_step_converges_to_the_minimizer_of_the_meta_function(hvp, num_adapt_steps):
    _, problems = federation()
    result = run(
        personax.per_fedavg(adapt_lr=0.2, lr=0.3, hvp=hvp, num_adapt_steps=num_adapt_steps, num_steps=1, **FULL_BATCH),
        600,
        4,
    )
    factor = lambda p: np.linalg.matrix_power(np.eye(3) - 0.2 * p.hessian, num_adapt_steps)
    total = hessian_of(problems, factor)
    pull = sum(factor(p) @ p.hessian @ factor(p) @ p.minimizer for p in problems)
    np.testing.assert_allclose(result.params["w"], np.linalg.solve(total, pull), rtol=1e-6)


def test_pfedme_converges_to_the_minimizer_of_the_mean_envelope_and_keeps_theta():
    _, problems = federation()
    result = run(
        personax.pfedme(strength=2.0, lr=0.3, prox_lr=0.15, num_prox_steps=100, num_steps=1, **FULL_BATCH), 300, 4
    )
    # grad F_i(w) = strength (w - theta_i(w)) with theta_i linear in w.
    shrink = [np.linalg.inv(p.hessian + 2.0 * np.eye(3)) @ p.hessian for p in problems]
    optimum = np.linalg.solve(sum(shrink), sum(s @ p.minimizer for s, p in zip(shrink, problems, strict=True)))
    np.testing.assert_allclose(result.params["w"], optimum, rtol=1e-6)
    np.testing.assert_allclose(result.personal["w"], [p.prox(optimum, 2.0) for p in problems], rtol=1e-5)


def test_scaffold_removes_client_drift_where_fedavg_keeps_it():
    """With several local steps FedAvg stops beside the optimum of the mean; SCAFFOLD reaches it."""
    _, problems = federation()
    total = sum(p.hessian for p in problems)
    optimum = np.linalg.solve(total, sum(p.hessian @ p.minimizer for p in problems))
    drifted = run(personax.fedavg(lr=0.1, num_steps=5, **FULL_BATCH), 400, 4).params["w"]
    corrected = run(personax.scaffold(lr=0.1, num_steps=5, **FULL_BATCH), 400, 4).params["w"]
    np.testing.assert_allclose(corrected, optimum, rtol=1e-6)
    assert np.linalg.norm(drifted - optimum) > 1e-3


# Identities

SAME_SHARED_MODEL = {
    "meta without adaptation step size": lambda: personax.per_fedavg(
        adapt_lr=0.0, lr=0.1, hvp=personax.curvature.exact, **STEPS
    ),
    "meta without adaptation steps": lambda: personax.per_fedavg(adapt_lr=0.3, lr=0.1, num_adapt_steps=0, **STEPS),
    "proximal of strength 0": lambda: personax.fedprox(strength=0.0, lr=0.1, **STEPS),
    "the shared model of a mixture": lambda: personax.apfl(lr=0.1, mix=0.0, **STEPS),
    "the shared model of any mixture": lambda: personax.apfl(lr=0.1, mix=0.7, update_mix="step", **STEPS),
    "clipping that never clips": lambda: personax.fedavg(lr=0.1, clip_norm=1e9, **STEPS),
    "momentum of 0": lambda: personax.fedavg(lr=0.1, optimizer=personax.optimizer("sgd", momentum=0.0), **STEPS),
}


@pytest.mark.parametrize("name", SAME_SHARED_MODEL)
def test_what_reduces_to_fedavg(name):
    np.testing.assert_allclose(
        run(SAME_SHARED_MODEL[name]()).params["w"], run(personax.fedavg(lr=0.1, **STEPS)).params["w"], rtol=1e-12
    )


def test_a_mixture_of_weight_1_is_local_training():
    local = run(personax.local_only(lr=0.1, **STEPS))
    mixture = run(personax.apfl(lr=0.1, mix=1.0, update_mix="never", **STEPS))
    np.testing.assert_allclose(mixture.personal.model["w"], local.personal["w"], rtol=1e-12)
    np.testing.assert_array_equal(local.params["w"], W)


def test_one_client_is_centralised_sgd():
    fed = Federation.from_clients(closed_forms.clients(1))
    result = run(personax.fedavg(lr=0.1, **STEPS), 5, 1, fed)
    w = W
    for update in range(5):
        for step in range(3):
            rows = np.asarray(personax.batch_indices(fed, KEY, 0, update, step, "outer", 4))
            x, y = fed.x[rows], fed.y[rows]
            w = w - 0.1 * x.T @ (x @ w - y) / 4
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-12)


def test_arrivals_without_delay_and_a_buffer_of_all_clients_are_rounds():
    for objective in (personax.Moreau(2.0, 0.1, 5), personax.Scaffold()):
        local = personax.Local(0.1, **STEPS)
        synchronous = run(personax.Algorithm(objective, local, personax.synchronous(0.8)), 5, 4)
        schedule = personax.arrivals(4, 20, delays=personax.delays.Delays(), key=KEY)
        buffered = run(personax.Algorithm(objective, local, personax.buffered(4, 0.8)), schedule=schedule)
        assert_close((synchronous.params, synchronous.personal), (buffered.params, buffered.personal), rtol=1e-10)


@pytest.fixture(params=[True, False], ids=["one_by_one", "together"])
def seeds_in_order(request, monkeypatch):
    """Seeds one after another, as with large models on a CPU, or all at once."""
    if request.param:  # a new function, because programs of `engine.advance` are compiled already
        advance = engine.advance.__wrapped__
        monkeypatch.setattr(engine, "seeds_run_in_order", lambda *_: True)
        monkeypatch.setattr(engine, "advance", jax.jit(lambda *given: advance(*given), static_argnums=0))


def test_long_visits_have_another_program(monkeypatch):
    """On a GPU the loop of their steps is not written out."""
    algorithm, before = personax.fedavg(lr=0.1, **STEPS), engine.advance_long._cache_size()
    short = run(algorithm)
    assert engine.advance_long._cache_size() == before
    monkeypatch.setattr(engine, "LONG_VISIT", STEPS["num_steps"] - 1)
    assert_close(run(algorithm).params, short.params, rtol=0, atol=0)
    assert engine.advance_long._cache_size() == before + 1


@pytest.mark.usefixtures("seeds_in_order")
def test_seeds_of_a_run_are_runs_of_their_own():
    algorithm, fed, keys = (
        personax.apfl(lr=0.1, mix=0.5, update_mix="step", **STEPS),
        federation()[0],
        jax.random.split(KEY, 3),
    )
    schedules = [personax.rounds(4, 5, 2, key=key) for key in keys]
    many = simulate(algorithm, TASK, fed, schedules, key=keys, params=START)
    for at, (key, schedule) in enumerate(zip(keys, schedules, strict=True)):
        alone = simulate(algorithm, TASK, fed, schedule, key=key, params=START)
        one = jax.tree.map(lambda leaf, at=at: leaf[at], (many.params, many.personal))
        assert_close(one, (alone.params, alone.personal), rtol=1e-10)


@pytest.mark.usefixtures("seeds_in_order")
@pytest.mark.parametrize("waits", [True, False])
def test_a_sweep_is_each_of_its_runs(waits):
    """Numbers of the objective, of the clients' descent and of the server, each algorithm with its own seed."""
    server = personax.synchronous if waits else personax.asynchronous
    algorithms = [
        personax.Algorithm(personax.Mixture(mix), personax.Local(lr, **STEPS), server(server_lr))
        for mix, lr, server_lr in ((0.2, 0.1, 1.0), (0.5, 0.2, 0.5), (0.9, 0.05, 0.8))
    ]
    keys = jax.random.split(KEY, 3)
    make = personax.rounds if waits else personax.arrivals
    schedules = [make(4, 6, delays=personax.delays.persafl_delays(4, key=key), key=key) for key in keys]
    fed = federation()[0]
    swept = simulate(algorithms, TASK, fed, schedules, key=keys, params=START)
    for at, (algorithm, key, schedule) in enumerate(zip(algorithms, keys, schedules, strict=True)):
        alone = simulate(algorithm, TASK, fed, schedule, key=key, params=START)
        one = swept.snapshot.of_seeds(at, at + 1)
        state = jax.tree.map(lambda leaf: leaf[0], (one.params, one.personal, one.state.server.version))
        assert_close(state, (alone.params, alone.personal, alone.snapshot.state.server.version), rtol=1e-10)
        assert (one.num_events, one.time) == (alone.snapshot.num_events, alone.snapshot.time)


def test_persafl_is_per_fedavg_with_another_server():
    assert personax.persafl(personax.Meta(0.1), lr=0.2, **STEPS) == dataclasses.replace(
        personax.per_fedavg(adapt_lr=0.1, lr=0.2, hvp=personax.curvature.exact, **STEPS), server=personax.asynchronous()
    )


def test_a_constant_delay_gives_the_staleness_that_the_server_counts():
    """Of updates that arrive together, each is stale by its place among them; beyond the bound they are dropped."""
    schedule = personax.arrivals(4, 12, delays=personax.delays.Delays(upload=personax.delays.Fixed(1.0)), key=KEY)
    np.testing.assert_array_equal(schedule.staleness(), np.tile(np.arange(4), 3))
    result = run(personax.fedasync(lr=0.1, server=personax.asynchronous(max_staleness=1), **STEPS), schedule=schedule)
    # A dropped update is no new version, so that only the first two of each wave count.
    assert result.num_dropped == 6 and result.snapshot.state.server.version == 6


def test_clients_that_are_not_selected_keep_their_state():
    result = run(personax.apfl(lr=0.1, mix=0.5, **STEPS), 1, 2)
    chosen = personax.rounds(4, 1, 2, key=KEY).client
    untouched = np.setdiff1d(np.arange(4), chosen)
    np.testing.assert_array_equal(result.personal.model["w"][untouched], np.stack([W, W]))
    np.testing.assert_array_equal(result.personal.mix[untouched], 0.5)
    assert np.all(np.asarray(result.personal.model["w"])[chosen] != W)


def test_short_epochs_skip_steps_with_a_stateful_optimizer():
    """A client with fewer batches than the longest takes exactly its own steps, momentum and all."""
    data = closed_forms.clients()
    local = {
        "num_epochs": 2,
        "batch_size": 4,
        "sampling": "shuffled",
        "optimizer": personax.optimizer("sgd", momentum=0.9),
    }
    together = run(personax.local_only(lr=0.05, **local), 1, 4)
    for position, client in enumerate(data[:2]):
        alone = Federation.from_clients([client], ids=[position])
        result = run(personax.local_only(lr=0.05, **local), 1, 1, alone)
        np.testing.assert_allclose(together.personal["w"][position], result.personal["w"][0], rtol=1e-12)


def test_keys_of_the_old_style_are_keys():
    algorithm, fed = personax.fedavg(lr=0.1, **STEPS), federation()[0]
    schedules = [personax.rounds(4, 2, key=key) for key in (jax.random.PRNGKey(7), jax.random.key(7))]
    ends = [
        simulate(algorithm, TASK, fed, schedule, key=key).params["w"]
        for schedule, key in zip(schedules, (jax.random.PRNGKey(7), jax.random.key(7)), strict=True)
    ]
    np.testing.assert_array_equal(*ends)


class Network(eqx.Module):
    """A convolution that takes floats and nothing else."""

    conv: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __call__(self, x):
        return self.head(jnp.ravel(self.conv(x[None])))


def network(key):
    keys = jax.random.split(key)
    return Network(eqx.nn.Conv2d(1, 2, 3, key=keys[0]), eqx.nn.Linear(2 * 4 * 4, 3, key=keys[1]))


def test_images_kept_as_bytes_reach_any_model_as_floats():
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 256, (5, 6, 6)).astype(np.uint8), rng.integers(0, 3, 5)) for _ in range(2)]
    task, schedule = personax.classification(personax.from_equinox(network)), personax.rounds(2, 1, key=KEY)
    algorithm = personax.fedavg(lr=0.1, num_steps=1, **FULL_BATCH)
    found, same = (
        simulate(algorithm, task, Federation.from_clients([(scale(x), y) for x, y in data]), schedule, key=KEY)
        for scale in (lambda x: x, lambda x: x / 255)
    )
    assert_close(found.params, same.params)


def test_precision_is_that_of_the_clients_products():
    fed = personax.data.datasets.synthetic(0.5, 0.5, num_clients=4, num_samples=20, key=KEY)
    task = personax.classification(personax.mlp((8,), 10))
    schedule = personax.rounds(4, 3, 2, key=KEY)
    end = lambda precision: simulate(
        personax.fedavg(lr=0.1, **STEPS), task, fed, schedule, key=KEY, **grouped(precision=precision)
    ).params["dense_0"]["kernel"]
    exact, rounded = end("float32"), end("bf16")
    np.testing.assert_array_equal(end("default"), exact)
    start = initial_params(task, fed, key=KEY)["dense_0"]["kernel"]
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact - start).max()  # 8 bits of the factors
    assert jax.config.jax_default_matmul_precision is None


# What a run reports


def test_observations_come_at_the_start_at_every_mark_and_at_the_end():
    seen = run(personax.fedavg(lr=0.1, **STEPS), 7, every=3, observe=lambda s: (s.num_events, float(s.time))).history
    assert [events for events, _ in seen] == [0, 6, 12, 14]
    schedule = personax.arrivals(4, 30, delays=personax.delays.persafl_delays(4, key=KEY), key=KEY)
    seen = run(personax.fedasync(lr=0.1, **STEPS), schedule=schedule, every=10, observe=lambda s: s).history
    assert seen[0].num_events == 0 and seen[-1].num_events == 30 and np.all(np.diff([s.num_events for s in seen]) > 0)
    assert all(s.time == schedule.time[: s.num_events].max(initial=0) for s in seen)


def test_bytes_count_what_moves():
    float_bytes = 8 * closed_forms.DIMENSION
    fedavg = run(personax.fedavg(lr=0.1, **STEPS))
    assert np.all(fedavg.bytes_up == float_bytes) and np.all(fedavg.bytes_down == float_bytes)
    scaffold = run(personax.scaffold(lr=0.1, **STEPS))
    assert np.all(scaffold.bytes_up == 2 * float_bytes) and np.all(scaffold.bytes_down == 2 * float_bytes)
    assert np.all(run(personax.local_only(lr=0.1, **STEPS)).bytes_up == 0)
    schedule = personax.rounds(4, 3, 4, key=KEY, num_aggregated=1)
    pfedme = run(personax.pfedme(strength=2.0, lr=0.1, prox_lr=0.1, **STEPS), schedule=schedule)
    assert pfedme.bytes_up.sum() == 3 * float_bytes and pfedme.bytes_down.sum() == 12 * float_bytes


def poisoned(position):
    """A federation of which one client's loss is not finite; its data is."""
    data = closed_forms.clients()
    data[position] = (data[position][0] * 1e200, data[position][1])
    return Federation.from_clients(data, names=["ada", "bob", "cyd", "dan"])


@pytest.mark.parametrize("server", [personax.synchronous(), personax.asynchronous()], ids=["rounds", "arrivals"])
def test_an_update_that_is_not_finite_names_client_event_and_stage(server):
    schedule = personax.rounds(4, 3, 4, key=KEY)
    event = int(np.flatnonzero(schedule.client == 2)[0])
    algorithm = personax.Algorithm(personax.Erm(), personax.Local(0.1, **STEPS), server)
    with pytest.raises(
        personax.NonFiniteUpdate, match=rf"The update of cyd at event {event} is not finite: local steps"
    ) as raised:
        run(algorithm, fed=poisoned(2), schedule=schedule)
    mode = "synchronous" if server.is_synchronous else "asynchronous"
    for part in (f"The algorithm (Erm, {mode})", "clip_norm", "`Execution(on_nonfinite='skip')`"):
        assert part in str(raised.value)
    assert raised.value.fault == (0, event, 2, "local steps")


def test_faults_are_the_first_of_each_seed_and_end_a_run_if_asked_to():
    visits = lambda seed: personax.rounds(4, 6, 1, key=jax.random.key(seed))
    schedules = [one for one in map(visits, range(99)) if 2 in one.client[:5]][:2]
    algorithm, keys = personax.fedavg(lr=0.1, **STEPS), jax.random.split(KEY, 2)
    both = lambda snapshot: len(snapshot.faults) == 2
    options = {"execution": personax.Execution(on_nonfinite="skip"), "key": keys, "params": START}
    monitor = personax.Monitor(lambda snapshot: None, every=1, until=both)
    given = (algorithm, TASK, poisoned(2), schedules)
    first = [int(np.flatnonzero(schedule.client == 2)[0]) for schedule in schedules]
    result = simulate(*given, monitor=monitor, **options)
    assert result.snapshot.faults == [(seed, event, 2, "local steps") for seed, event in enumerate(first)]
    assert result.snapshot.num_events.tolist() == [max(first) + 1] * 2
    assert np.count_nonzero(result.bytes_up, axis=1).tolist() == [max(first) + 1] * 2
    again = simulate(*given, start=result.snapshot, monitor=monitor, **options)
    assert again.snapshot.num_events.tolist() == [max(first) + 1] * 2 and again.history == []
    whole = simulate(*given, **options)
    assert whole.snapshot.num_events.tolist() == [6, 6] and np.all(whole.bytes_up > 0)


def test_an_update_that_was_trained_ahead_is_at_fault_when_it_arrives():
    """The slow client's update is trained in the first wave; it arrives behind ten others."""
    slow = personax.delays.Delays(compute=personax.delays.Given(np.array([[1.0, 1.1, 4.05, 1.2]])))
    schedule = personax.arrivals(4, 16, delays=slow, key=KEY)
    event = int(np.flatnonzero(schedule.client == 2)[0])
    assert plan_arrivals(schedule, 12).waves.valid[0].sum() == 4 and event == 10
    algorithm = personax.Algorithm(personax.Erm(), personax.Local(0.1, **STEPS), personax.asynchronous(0.3))
    with pytest.raises(personax.NonFiniteUpdate, match=f"cyd at event {event} is"):
        run(algorithm, fed=poisoned(2), schedule=schedule, wave_width=12)
    snapshots = []
    skip = {"on_nonfinite": "skip", "every": 1, "observe": snapshots.append, "wave_width": 12}
    result = run(algorithm, fed=poisoned(2), schedule=schedule, **skip)
    faults = [int(now.state.faults.num) for now in snapshots if now.num_events <= event]
    assert len(faults) > 2 and not any(faults) and result.num_skipped == 1


@pytest.mark.parametrize("server", [personax.synchronous(), personax.asynchronous(0.3)], ids=["rounds", "arrivals"])
def test_updates_that_are_not_finite_can_be_skipped_and_counted(server):
    schedule = personax.rounds(4, 3, 4, key=KEY)
    algorithm = personax.Algorithm(personax.Mixture(0.5), personax.Local(0.05, **STEPS), server)
    result = run(algorithm, fed=poisoned(2), schedule=schedule, on_nonfinite="skip")
    assert result.num_skipped == 3
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((result.params, result.personal)))
    np.testing.assert_array_equal(result.personal.model["w"][2], W)
    without = dataclasses.replace(schedule, aggregated=schedule.client != 2)
    clean = run(algorithm, fed=federation()[0], schedule=without)
    np.testing.assert_allclose(result.params["w"], clean.params["w"], rtol=1e-10)


def test_trackers_leave_out_what_is_skipped():
    schedule, algorithm = personax.rounds(4, 3, 2, key=KEY), personax.apfl(lr=0.05, mix=0.5, **STEPS)
    for tracker in (personax.RandomIterate(), personax.WeightedAverage(1.0)):
        result = run(algorithm, fed=poisoned(2), schedule=schedule, on_nonfinite="skip", tracker=tracker)
        assert result.num_skipped > 0 and all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result.tracked))


# What a run refuses


def refused(message, algorithm=None, **options):
    with pytest.raises(ValueError, match=message):
        run(personax.fedavg(lr=0.1, **STEPS) if algorithm is None else algorithm, **options)


def test_mismatches_are_refused_before_anything_is_compiled():
    arrivals = personax.arrivals(4, 8, delays=personax.delays.Delays(), key=KEY)
    refused("The schedule has 3 clients, but the federation has 4", schedule=personax.rounds(3, 2, key=KEY))
    refused("A synchronous server needs rounds, and this schedule has none", schedule=arrivals)
    refused(
        "A tracker needs a synchronous server", personax.fedasync(lr=0.1, **STEPS), schedule=arrivals, tracker=TRACKER
    )
    refused("`WeightedAverage` is for `Mixture` objectives", tracker=TRACKER)
    refused("`on_nonfinite` must be one of", on_nonfinite="ignore")
    refused(
        "`query_share` reserves a part of the data for the outer batches",
        personax.fedavg(lr=0.1, query_share=0.2, **STEPS),
    )
    refused(r"Got 2 algorithms for keys of shape \(\)", [personax.fedavg(lr=lr, **STEPS) for lr in (0.1, 0.2)])
    with pytest.raises(ValueError, match="must differ only in numbers, got Algorithm"):
        mixed = [personax.fedavg(lr=0.1, num_steps=num, batch_size=4) for num in (1, 2)]
        schedule = personax.rounds(4, 2, key=KEY)
        simulate(mixed, TASK, federation()[0], schedule, key=jax.random.split(KEY), params=START)
    refused("`wave_width` must be a whole number of at least 1, got 0", wave_width=0)
    refused("`every` must be a whole number of at least 1, got 0", every=0)
    with pytest.raises(ValueError, match="`cohort_size` must be at most the 4 clients of the federation, got 9"):
        personax.rounds(4, 2, 9, key=KEY)


TRACKER = personax.WeightedAverage(1.0)


def test_a_precision_that_is_not_there_is_refused():
    for precision, message in (("half", "one of"), ("tf32", "is not available on a CPU")):
        with pytest.raises(ValueError, match=message):
            run(personax.fedavg(lr=0.1, **STEPS), precision=precision)


def test_a_snapshot_of_another_run_is_refused():
    schedules = [
        personax.arrivals(4, num, delays=personax.delays.persafl_delays(4, key=KEY), key=KEY) for num in (20, 40)
    ]
    algorithm, snapshots = personax.fedasync(lr=0.1, **STEPS), []
    run(algorithm, schedule=schedules[0], every=10, observe=snapshots.append, wave_width=4)
    refused("`start` is a snapshot after", algorithm, schedule=schedules[1], start=snapshots[-1], wave_width=1)


def test_bad_labels_and_shapes_name_the_client():
    task = personax.classification(personax.mlp((4,), 3))
    good = (np.ones((3, 2)), np.array([0, 1, 2]))
    schedule = personax.rounds(2, 1, key=KEY)

    def attempt(second, **options):
        fed = Federation.from_clients([good, second], names=["ada", "bob"], **options)
        return simulate(personax.fedavg(lr=0.1, **STEPS), task, fed, schedule, key=KEY)

    with pytest.raises(ValueError, match=r"bob: the training labels must be in 0\.\.2, got 7"):
        attempt((np.ones((2, 2)), np.array([1, 7])))
    with pytest.raises(ValueError, match=r"bob: the test labels must be in 0\.\.2, got -1"):
        attempt(good, test=[good, (np.ones((1, 2)), np.array([-1]))])
    with pytest.raises(ValueError, match="bob: the training data must be finite, got x with a NaN"):
        attempt((np.array([[1.0, np.nan]]), np.array([1])))
    with pytest.raises(ValueError, match="bob has no training samples"):
        attempt((np.ones((0, 2)), np.zeros(0, int)))


def test_parameters_with_a_different_shape_are_refused():
    with pytest.raises(ValueError, match="The model and its parameters must take the clients' data"):
        simulate(
            personax.fedavg(lr=0.1, **STEPS),
            TASK,
            federation()[0],
            personax.rounds(4, 1, key=KEY),
            key=KEY,
            params={"w": jnp.ones(5)},
        )


BAD_LOCALS = [
    ({"lr": -0.1, "num_steps": 1}, "`lr` must be positive, got -0.1"),
    ({"lr": 0.1}, "either `num_steps` or `num_epochs`"),
    ({"lr": 0.1, "num_steps": 1, "num_epochs": 1}, "either `num_steps` or `num_epochs`"),
    ({"lr": 0.1, "num_steps": 0}, "`num_steps` must be a whole number of at least 1, got 0"),
    ({"lr": 0.1, "num_steps": 1, "batch_size": 0}, "`batch_size` must be a whole number of at least 1, got 0"),
    ({"lr": 0.1, "num_steps": 1, "clip_norm": 0.0}, "`clip_norm` must be positive"),
    ({"lr": 0.1, "num_steps": 1, "query_share": 1.0}, "`query_share` must lie strictly between 0 and 1"),
    ({"lr": 0.1, "num_steps": 1, "sampling": "sorted"}, "`sampling` must be one of 'replacement', 'shuffled'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_LOCALS)
def test_bad_local_options_name_the_value_and_the_remedy(options, message):
    with pytest.raises(ValueError, match=message):
        personax.Local(**options)
