"""Tests of a compiled run's device memory, and of the number of clients that it trains at once."""

import dataclasses

import jax
import numpy as np
import pytest

import personax
from personax.fast import backends
from personax.simulation import engine
from personax.simulation.engine import advance
from personax.simulation.results import State

COHORT, BATCH = 8, 64


@pytest.fixture(scope="module")
def lowered():
    """The arguments of a run's compiled part, for a network whose activations are larger than itself."""
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 256, (BATCH, 16, 16)).astype(np.uint8), rng.integers(0, 3, BATCH)) for _ in range(COHORT)]
    fed, seen = personax.Federation.from_clients(data), []
    task = personax.classification(personax.cnn((8,), (8,), 3))

    def take(*arguments):
        seen.append(arguments)
        return next(one for one in arguments if isinstance(one, State))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "advance", take)
        key = jax.random.key(0)
        algorithm = personax.fedavg(lr=0.1, num_steps=2, batch_size=BATCH)
        personax.simulate(algorithm, task, fed, personax.rounds(COHORT, 1, key=key), key=key)
    return seen[0]


def temporary(lowered, cohort_chunk=None, slice_size=None):
    program, *arguments = lowered
    task = program.task if slice_size is None else personax.rematerialize(program.task, slice_size)
    program = dataclasses.replace(program, task=task, cohort_chunk=cohort_chunk)
    return advance.lower(program, *arguments).compile().memory_analysis().temp_size_in_bytes


def test_chunks_of_a_cohort_and_slices_of_a_batch_divide_the_memory_of_activations(lowered):
    whole = temporary(lowered, cohort_chunk=COHORT)
    assert temporary(lowered, cohort_chunk=2) < 0.35 * whole
    assert temporary(lowered, cohort_chunk=COHORT, slice_size=BATCH // 8) < 0.25 * whole
    assert temporary(lowered, cohort_chunk=2, slice_size=BATCH // 8) < 0.1 * whole


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU takes large models one after another")
def test_large_models_one_after_another_end_like_all_at_once(lowered, monkeypatch):
    program, *arguments = lowered

    def compiled():
        fresh = jax.jit(lambda *given: advance.__wrapped__(program, *given))  # the bound is read while tracing
        return fresh.lower(*arguments).compile()

    monkeypatch.setattr(backends, "LARGE_MODEL", 1 << 60)
    whole = compiled()
    monkeypatch.setattr(backends, "LARGE_MODEL", 0)
    divided = compiled()
    memory = lambda program: program.memory_analysis().temp_size_in_bytes
    assert memory(divided) < 0.35 * memory(whole)
    ends = [jax.tree.leaves(one(*arguments).server.params) for one in (whole, divided)]
    for all_at_once, one_by_one in zip(*ends, strict=True):
        np.testing.assert_allclose(one_by_one, all_at_once, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("largest", "is_sequential"), [(600_000, False), (600_008, True)])
def test_clients_with_a_large_array_train_sequentially(largest, is_sequential):
    assert backends.holds_one_model(100, lambda: largest) == is_sequential
    with backends.pretend("gpu"):
        assert not backends.holds_one_model(100, lambda: largest)


def retrace(monkeypatch):
    """Trace programs again, without the options of an accelerator."""
    # A function of its own: JAX remembers what it has traced by the function, and the backend is asked while tracing.
    fresh = lambda program, *given: advance.__wrapped__(program, *given)
    monkeypatch.setattr(engine, "advance", jax.jit(fresh, static_argnums=0))


def ends_on_each_backend(monkeypatch, *given, **options):
    """The models that a run ends at with the program for a CPU and with that for an accelerator."""
    ends = []
    for backend in ("cpu", "gpu"):
        retrace(monkeypatch)
        with backends.pretend(backend):
            ends.append(jax.tree.leaves(personax.simulate(*given, **options).params))
    return zip(*ends, strict=True)


def test_arrivals_are_applied_on_an_accelerator_as_on_a_cpu(monkeypatch):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(9, 4)), rng.integers(0, 3, 9)) for _ in range(12)]
    fed, key = personax.Federation.from_clients(clients), jax.random.key(0)
    task = personax.classification(personax.mlp((5,), 3))
    algorithm = personax.fedbuff(lr=0.1, buffer_size=3, num_steps=2, batch_size=4)
    schedule = personax.arrivals(12, 50, delays=personax.delays.persafl_delays(12, key=key), key=key)
    for plain, unrolled in ends_on_each_backend(monkeypatch, algorithm, task, fed, schedule, key=key):
        np.testing.assert_allclose(unrolled, plain, rtol=1e-10)


@pytest.mark.parametrize("sampling", ["replacement", "shuffled"])
def test_batches_are_read_on_an_accelerator_as_on_a_cpu(sampling, monkeypatch):
    rng = np.random.default_rng(0)
    clients = [(rng.integers(0, 256, (size, 4)).astype(np.uint8), rng.integers(0, 3, size)) for size in (9, 5, 7)]
    fed, key = personax.Federation.from_clients(clients), jax.random.key(0)
    task = personax.classification(personax.mlp((5,), 3))
    sizes = personax.BatchSizes(outer=4, adapt=3, curvature=2)
    algorithm = personax.per_fedavg(
        adapt_lr=0.1,
        lr=0.05,
        hvp=personax.curvature.exact,
        num_adapt_steps=3,
        num_steps=2,
        batch_size=sizes,
        sampling=sampling,
    )
    schedule = personax.rounds(3, 2, 2, key=key)
    for at_once, by_role in ends_on_each_backend(monkeypatch, algorithm, task, fed, schedule, key=key):
        np.testing.assert_allclose(by_role, at_once, rtol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_custom_loss_sees_samples_as_they_are_stored(backend, monkeypatch):
    seen = []
    model = personax.logistic_regression(3)

    def loss(params, batch):
        seen.append(batch.x.dtype)
        return personax.classification(model).loss(params, batch)

    task = personax.Task(model, loss, lambda params, batch: {})
    fed = personax.Federation.from_clients([(np.arange(8, dtype=np.uint8).reshape(4, 2), np.zeros(4, np.int32))])
    retrace(monkeypatch)
    key = jax.random.key(0)
    personax.simulate(personax.fedavg(lr=0.1, num_steps=1), task, fed, personax.rounds(1, 1, 1, key=key), key=key)
    assert set(seen) == {np.dtype(np.uint8)}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="counts the memory of a CPU program")
@pytest.mark.parametrize("server", [personax.synchronous(), personax.asynchronous()], ids=["rounds", "arrivals"])
def test_the_states_of_all_clients_exist_once(server, monkeypatch):
    """The compiled part returns them in the memory in which it got them, and never copies all of them."""
    seen, num = [], 400
    monkeypatch.setattr(engine, "advance", lambda *given: seen.append(given) or given[7]._replace(personal=given[6]))
    algorithm, key = personax.ditto(strength=0.1, lr=0.1, num_steps=1, batch_size=2, server=server), jax.random.key(0)
    schedule = personax.rounds(num, 2, 4, key=key)
    if not server.is_synchronous:
        delays = personax.delays.persafl_delays(num, key=key)
        schedule = personax.arrivals(num, 8, delays=delays, key=key, concurrency=4)
    personax.simulate(algorithm, DITTO_TASK, clients_of(num), schedule, key=key)
    (given,) = seen
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(given[6]))
    memory = advance.lower(*given).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size > 5 * memory.temp_size_in_bytes


DITTO_TASK = personax.classification(personax.logistic_regression(3))


def clients_of(num):
    rng = np.random.default_rng(0)
    return personax.Federation.from_clients([(rng.normal(size=(2, 5)), rng.integers(0, 3, 2)) for _ in range(num)])


@pytest.mark.parametrize("has_seeds", [False, True], ids=["one seed", "seeds"])
def test_snapshots_stay_as_they_were_while_the_run_continues(has_seeds):
    fed, key = clients_of(6), jax.random.key(0)
    keys = jax.random.split(key, 2) if has_seeds else key
    schedule = personax.rounds(6, 4, 3, key=key)
    algorithm = personax.ditto(strength=0.1, lr=0.1, num_steps=2, batch_size=2)
    go = lambda **options: personax.simulate(algorithm, DITTO_TASK, fed, schedule, key=keys, **options)
    arrays = lambda snapshot: jax.tree.map(np.array, (snapshot.state.server.params, snapshot.state.personal))
    kept = []
    keep = lambda snapshot: kept.append((snapshot, arrays(snapshot)))
    watched = go(monitor=personax.Monitor(observe=keep, every=1))
    alone = go(monitor=personax.Monitor(until=keep))
    plain = go()
    assert len(kept) == 6
    for snapshot, then in kept:
        jax.tree.map(np.testing.assert_array_equal, arrays(snapshot), then)
        end = go(start=snapshot) if snapshot.wave < 4 else watched
        again = go(start=snapshot) if snapshot.wave < 4 else watched
        for other in (end, again, watched, alone):
            jax.tree.map(np.testing.assert_array_equal, arrays(other.snapshot), arrays(plain.snapshot))
