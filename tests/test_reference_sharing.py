"""Personal models and parts of models against each paper's client, under every kind of server."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import personax
from personax import LocalOptions, asynchronous, buffered, synchronous
from tests.reference import sharing
from tests.reference.network import TASK, W0, flat, tree
from tests.reference.problem import FEDERATION, N, Samples
from tests.reference.sharing import each_flat, in_buffer, in_rounds, on_arrival
from tests.test_reference import KEYS, arrivals, assert_agree, rounds

BETA, K = 0.7, 3
SERVERS = {
    "synchronous": (synchronous(), rounds, in_rounds),
    "buffered": (buffered(K, discount=personax.discounts.Constant()), arrivals, partial(in_buffer, K=K)),
    "asynchronous": (asynchronous(BETA), arrivals, partial(on_arrival, beta=BETA)),
}


class Case(NamedTuple):
    """An algorithm of a server, its twin (a client, and what the clients keep), and how to read what they keep."""

    algorithm: Callable[[personax.Server], personax.Algorithm]
    twin: Callable[[], tuple[Callable, list]]
    read: Callable[[personax.Result], np.ndarray]


ETA = 0.3
STEPS: LocalOptions = {"num_steps": 3, "batch_size": 4}

CASES = {
    "Ditto": Case(
        lambda server: personax.ditto(strength=0.8, lr=ETA, local_lr=0.2, server=server, **STEPS),
        lambda: sharing.ditto(0.8, ETA, 0.2, 3),
        lambda result: each_flat(result.personal),
    ),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", CASES)
def test_each_method_agrees_with_its_twin_under_every_server(name, server):
    case, (given, make_schedule, run_server) = CASES[name], SERVERS[server]
    key, algorithm = KEYS[0], case.algorithm(given)
    schedule = make_schedule(key)
    result = personax.simulate(algorithm, TASK, FEDERATION, schedule, key=key, params=tree(W0))
    client, kept = case.twin()
    w = run_server(W0, schedule, Samples(key, algorithm.local), client)
    assert_agree({"w": flat(result.params), "kept": case.read(result)}, {"w": w, "kept": np.stack(kept)})
    assert np.linalg.norm(w - W0) > 0.1 and len(kept) == N
