"""Adapters over a frozen base against each paper's client, under every kind of server."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import personax
from personax.models import dual_lora, lora, mlp
from tests.reference import adapters, network
from tests.reference.problem import FEDERATION, NUM_CLASSES, N, Samples
from tests.test_reference import KEYS, assert_agree
from tests.test_reference_sharing import SERVERS, with_servers

ETA, MIX = 0.2, 0.3
NETWORK = mlp((network.NUM_UNITS,), NUM_CLASSES, "tanh")


class AdapterCase(NamedTuple):
    """An algorithm of a server, its network, the start of its adapters, and its twin."""

    algorithm: Callable[[personax.Server], personax.Algorithm]
    model: personax.Model
    start: dict
    twin: Callable[[], tuple]


CASES = {
    "FedSA-LoRA": AdapterCase(
        lambda server: personax.fedsa_lora(lr=ETA, num_steps=3, batch_size=4, server=server),
        lora(NETWORK, adapters.RANK),
        {"lora": adapters.tree(adapters.START)},
        lambda: adapters.fedsa_lora(ETA, 3),
    ),
    "FedDPA": AdapterCase(
        lambda server: personax.feddpa(lr=ETA, num_personal_steps=2, num_steps=3, batch_size=4, server=server),
        dual_lora(NETWORK, adapters.RANK, mix=MIX),
        {"global": adapters.tree(adapters.START), "local": adapters.tree(adapters.LOCAL_START)},
        lambda: adapters.feddpa(MIX, ETA, 2, 3),
    ),
}


@with_servers(CASES, {("FedSA-LoRA", "asynchronous")})
def test_each_method_agrees_with_its_twin_under_every_server(name, server):
    case, (given, make_schedule, run_server) = CASES[name], SERVERS[server]
    key, algorithm = KEYS[0], case.algorithm(given)
    schedule = make_schedule(key)
    params = {"base": network.tree(network.W0), **case.start}
    task = personax.classification(case.model)
    result = personax.simulate(algorithm, task, FEDERATION, schedule, key=key, params=params)
    start, client, kept = case.twin()
    w = run_server(start, schedule, Samples(key, algorithm.local), client)
    shared = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.snapshot.state.server.params)])
    personal = [leaf.reshape(N, -1) for leaf in jax.tree.leaves(result.personal)]
    found = {"w": shared, "kept": np.concatenate(personal, axis=1)}
    assert_agree(found, {"w": w, "kept": np.stack(kept)})
    assert np.linalg.norm(w - start) > 0.1 and np.linalg.norm(kept[0] - kept[1]) > 0.1
    base = result.params["base"]
    jax.tree.map(np.testing.assert_array_equal, base, network.tree(network.W0))
