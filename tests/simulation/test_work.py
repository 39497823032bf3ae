"""The work of visits, and runs on devices: clients that are stopped, limited arrivals, streamed runs."""

import jax
import numpy as np
import pytest

import personax as px
from tests import closed_forms
from tests.closed_forms import TASK, federation

KEY = jax.random.key(2)
START = {"w": np.random.default_rng(3).normal(size=closed_forms.DIMENSION)}
STEPS = {"num_steps": 3, "batch_size": 4}


def test_work_counts_samples_gradients_and_bytes():
    fed, _ = federation()
    size = 8 * closed_forms.DIMENSION
    plain = px.work_of(px.fedavg(lr=0.1, **STEPS), TASK, fed)
    assert plain.samples.tolist() == [12.0] * fed.num_clients
    assert (plain.upload, plain.download) == (size, size) and plain.ids.tolist() == fed.ids.tolist()
    epochs = px.work_of(px.fedavg(lr=0.1, num_epochs=2, batch_size=4, sampling="shuffled"), TASK, fed)
    assert epochs.samples.tolist() == (2.0 * fed.counts).tolist()
    meta = px.work_of(px.per_fedavg(adapt_lr=0.1, lr=0.1, **STEPS), TASK, fed)
    assert meta.samples.tolist() == [24.0] * fed.num_clients
    control = px.work_of(px.scaffold(lr=0.1, **STEPS), TASK, fed)
    assert (control.upload, control.download) == (2 * size, 2 * size)
    alone = px.work_of(px.local_only(lr=0.1, **STEPS), TASK, fed)
    assert (alone.upload, alone.download) == (0.0, 0.0)


@pytest.mark.parametrize("recipe", ["apfl", "fedavg"])
def test_clients_that_are_stopped_change_nothing(recipe):
    """A round of six clients, of which two report, is a round of these two."""
    fed, _ = federation()
    algorithm = getattr(px, recipe)(lr=0.1, **STEPS)
    speed = np.array([1.0, 5.0, 2.0, 4.0])
    delays = px.traces.Devices(speed, speed, speed).delays(px.work_of(algorithm, TASK, fed), key=KEY, assign="in_order")
    over = px.rounds(4, 5, 4, key=KEY, delays=delays, num_aggregated=2, aggregate="first")
    few = px.rounds(4, 5, 2, key=KEY, cohorts=over.client[over.aggregated].reshape(5, 2))
    assert sorted(set(few.client)) == [1, 3]
    results = [px.simulate(algorithm, TASK, fed, schedule, key=KEY, params=START) for schedule in (over, few)]
    for one, other in zip(*(jax.tree.leaves((r.params, r.personal)) for r in results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
    moved = 8 * closed_forms.DIMENSION
    assert results[0].bytes_up.sum() == 5 * 2 * moved and results[0].bytes_down.sum() == 5 * 4 * moved


def test_a_limited_asynchronous_run_is_the_same_from_files(tmp_path):
    fed = px.datasets.synthetic(0.5, 0.5, num_clients=40, num_samples=12, key=KEY)
    fed.save(tmp_path / "data")
    task = px.classification(px.logistic_regression(10))
    algorithm = px.fedbuff(lr=0.1, buffer_size=3, **STEPS)
    delays = px.traces.generate(15, key=KEY).delays(px.work_of(algorithm, task, fed), key=KEY)
    schedule = px.arrivals(40, 90, delays=delays, key=KEY, concurrency=6)
    assert schedule.staleness().max() < 90
    results = [
        px.simulate(algorithm, task, one, schedule, key=KEY) for one in (fed, px.Federation.open(tmp_path / "data"))
    ]
    for one, other in zip(*(jax.tree.leaves(result.params) for result in results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)
