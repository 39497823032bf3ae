"""Larger runs: `make test-slow`."""

import jax
import numpy as np
import pytest

import personax
from tests.test_contract import assert_close

pytestmark = pytest.mark.slow


def many(num_clients):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, num_clients)
    data = [(rng.normal(size=(n, 8)), rng.integers(0, 4, n)) for n in sizes]
    return personax.Federation.from_clients(data)


@pytest.mark.parametrize("num_clients", [30, 300])
def test_waves_equal_one_by_one_with_hundreds_of_clients(num_clients):
    key, fed = jax.random.key(0), many(num_clients)
    task = personax.classification(personax.mlp((16,), 4))
    schedule = personax.arrivals(num_clients, 3000, delays=personax.persafl_delays(num_clients, key=key), key=key)
    algorithm = personax.persafl(personax.Moreau(20.0, 0.02, 10), 0.02, num_steps=5, batch_size=8)
    results = [personax.simulate(algorithm, task, fed, schedule, key=key, wave_width=w) for w in (None, 1)]
    assert_close(*((r.params, r.personal) for r in results), rtol=1e-6, atol=1e-9)


def test_a_hundred_thousand_clients_cost_what_their_cohorts_cost():
    key, fed = jax.random.key(0), many(100_000)
    task = personax.classification(personax.mlp((16,), 4))
    schedule = personax.rounds(fed.num_clients, 50, 20, key=key)
    result = personax.simulate(personax.per_fedavg(0.01, 0.05, num_steps=5), task, fed, schedule, key=key)
    small = {position: fed.client(position) for position in np.unique(schedule.client).tolist()}
    part = personax.Federation.from_clients(list(small.values()), ids=list(small))
    moved = np.searchsorted(list(small), schedule.client).astype(np.int32)
    fields = {**vars(schedule), "client": moved, "num_clients": part.num_clients}
    same = personax.simulate(
        personax.per_fedavg(0.01, 0.05, num_steps=5), task, part, personax.Schedule(**fields), key=key
    )
    assert_close(result.params, same.params)
