"""Personal models and parts of models against each paper's client, under every kind of server."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

import personax
from personax import LocalOptions, asynchronous, buffered, synchronous
from personax.sharing import join
from tests.reference import sharing
from tests.reference.network import TASK, W0, flat, tree
from tests.reference.problem import FEDERATION, N, Samples
from tests.reference.sharing import BODY, each_flat, in_buffer, in_rounds, on_arrival
from tests.test_reference import KEYS, arrivals, assert_agree, rounds

BETA, K = 0.7, 3
SERVERS = {
    "synchronous": (synchronous(), rounds, in_rounds),
    "buffered": (buffered(K, discount=personax.discounts.Constant()), arrivals, partial(in_buffer, K=K)),
    "asynchronous": (asynchronous(BETA), arrivals, partial(on_arrival, beta=BETA)),
}


def with_servers(names, repeated):
    """Each name with each server; those that repeat are slow, as are all with a buffer."""
    pairs = [(name, server) for name in names for server in SERVERS]
    is_slow = lambda pair: pair[1] == "buffered" or pair in repeated
    marked = [pytest.param(*pair, marks=[pytest.mark.slow] * is_slow(pair)) for pair in pairs]
    return pytest.mark.parametrize(("name", "server"), marked)


class Case(NamedTuple):
    """An algorithm of a server, its twin (a client, and what the clients keep), and how to read what they keep."""

    algorithm: Callable[[personax.Server], personax.Algorithm]
    twin: Callable[[], tuple[Callable, list]]
    read: Callable[[personax.Result], np.ndarray]
    own: np.ndarray = np.ones(len(W0), bool)  # what the clients keep


def own_part(result, own):
    """The personal parts of all clients as flat vectors."""
    models = jax.vmap(lambda part: join(part, result.params))(result.personal.part)
    return each_flat(models)[:, own]


BIASES = flat(
    jax.tree_util.tree_map_with_path(lambda path, leaf: np.full(leaf.shape, path[-1].key == "bias"), tree(W0))
)
ETA = 0.3
STEPS: LocalOptions = {"num_steps": 3, "batch_size": 4}


def with_own_head(objective, server):
    """PersA-FL with a personal head."""
    algorithm = personax.persafl(objective, lr=ETA, server=server, **STEPS)
    return replace(algorithm, sharing=personax.Sharing("dense_1"))


CASES = {
    "Ditto": Case(
        lambda server: personax.ditto(strength=0.8, lr=ETA, local_lr=0.2, server=server, **STEPS),
        lambda: sharing.ditto(0.8, ETA, 0.2, 3),
        lambda result: each_flat(result.personal),
    ),
    "FedPer": Case(
        lambda server: personax.fedper(personal="dense_1", lr=ETA, server=server, **STEPS),
        lambda: sharing.fedper(~BODY, ETA, 3),
        lambda result: own_part(result, ~BODY),
        ~BODY,
    ),
    "FedSim": Case(
        lambda server: personax.fedsim(personal="*.bias", lr=ETA, server=server, **STEPS),
        lambda: sharing.fedper(BIASES, ETA, 3),
        lambda result: own_part(result, BIASES),
        BIASES,
    ),
    "LG-FedAvg": Case(
        lambda server: personax.lg_fedavg(personal="dense_0", lr=ETA, server=server, **STEPS),
        lambda: sharing.fedper(BODY, ETA, 3),
        lambda result: own_part(result, BODY),
        BODY,
    ),
    "FedRep": Case(
        lambda server: personax.fedrep(
            personal="dense_1", lr=ETA, personal_lr=0.2, num_personal_steps=4, server=server, **STEPS
        ),
        lambda: sharing.fedrep(~BODY, ETA, 0.2, 4, 3),
        lambda result: own_part(result, ~BODY),
        ~BODY,
    ),
    "FedAlt": Case(
        lambda server: personax.fedalt(personal="*.bias", lr=ETA, num_personal_steps=2, server=server, **STEPS),
        lambda: sharing.fedrep(BIASES, ETA, ETA, 2, 3),
        lambda result: own_part(result, BIASES),
        BIASES,
    ),
    "FedBABU": Case(
        lambda server: personax.fedbabu(head="dense_1", lr=ETA, server=server, **STEPS),
        lambda: sharing.fedbabu(~BODY, ETA, 3),
        lambda result: np.zeros((N, 0)),
        np.zeros(len(W0), bool),
    ),
    "ANIL": Case(
        lambda server: personax.anil(
            head="dense_1",
            adapt_lr=0.2,
            lr=ETA,
            hvp=personax.curvature.exact,
            num_adapt_steps=2,
            server=server,
            **STEPS,
        ),
        lambda: sharing.anil(~BODY, 0.2, ETA, 2, 3),
        lambda result: np.zeros((N, 0)),
        np.zeros(len(W0), bool),
    ),
    "PersA-FL-MAML, personal head": Case(
        lambda server: with_own_head(personax.Meta(0.2), server),
        lambda: sharing.persafl_maml(~BODY, 0.2, ETA, 3),
        lambda result: own_part(result, ~BODY),
        ~BODY,
    ),
    "PersA-FL-ME, personal head": Case(
        lambda server: with_own_head(personax.Moreau(2.0, 0.1, 4), server),
        lambda: sharing.persafl_me(~BODY, 2.0, 0.1, 4, ETA, 3),
        lambda result: own_part(result, ~BODY),
        ~BODY,
    ),
}


# FedPer, FedSim and LG-FedAvg are one client with other patterns, as are FedRep and FedAlt; PersA-FL is asynchronous.
REPEATED = {(name, "asynchronous") for name in ("FedSim", "LG-FedAvg", "FedAlt", "ANIL")} | {
    (f"PersA-FL-{name}, personal head", "synchronous") for name in ("MAML", "ME")
}


@with_servers(CASES, REPEATED)
def test_each_method_agrees_with_its_twin_under_every_server(name, server):
    case, (given, make_schedule, run_server) = CASES[name], SERVERS[server]
    key, algorithm = KEYS[0], case.algorithm(given)
    schedule = make_schedule(key)
    result = personax.simulate(algorithm, TASK, FEDERATION, schedule, key=key, params=tree(W0))
    client, kept = case.twin()
    w = run_server(W0, schedule, Samples(key, algorithm.local), client)
    assert_agree({"w": flat(result.params)}, {"w": w})
    if case.own.any():
        assert_agree({"kept": case.read(result)}, {"kept": np.stack(kept)[:, case.own]})
    assert np.linalg.norm(w - W0) > 0.1 and len(kept) == N
