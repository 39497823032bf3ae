"""FedBN against the paper's client in NumPy, with the batch statistics written out, under every kind of server."""

import numpy as np

import personax
from tests.reference import batch_norm
from tests.reference.problem import COUNTS, FEDERATION, Samples
from tests.test_reference import KEYS, assert_agree
from tests.test_reference_sharing import SERVERS, with_servers

ETA, E, B = 0.3, 2, 4
LENGTHS = {
    "steps": ({"num_steps": 3, "batch_size": B}, lambda k: 3),
    "epochs": ({"num_epochs": E, "batch_size": B, "sampling": "shuffled"}, lambda k: E * -(-COUNTS[k] // B)),
}


@with_servers(LENGTHS, {("steps", "asynchronous")})
def test_fedbn_agrees_with_its_twin_under_every_server(name, server):
    (options, num_steps), (given, make_schedule, run_server) = LENGTHS[name], SERVERS[server]
    key, algorithm = KEYS[0], personax.fedbn(lr=ETA, server=given, **options)
    schedule, start = make_schedule(key), batch_norm.tree(batch_norm.W0, batch_norm.V0)
    result = personax.simulate(algorithm, batch_norm.TASK, FEDERATION, schedule, key=key, params=start)
    client, kept = batch_norm.fedbn(ETA, num_steps)
    w = run_server(batch_norm.W0, schedule, Samples(key, algorithm.local), client)
    found = {"w": batch_norm.flat_shared(result.params), "v": batch_norm.flat_own(result.personal.part["norm_0"])}
    assert_agree(found, {"w": w, "v": np.stack(kept)})
    assert np.linalg.norm(w - batch_norm.W0) > 0.1 and np.linalg.norm(kept[0] - kept[1]) > 0.1
    num_shared = sum(np.size(leaf) for leaf in batch_norm.parts(batch_norm.W0, batch_norm.SHARED))
    assert result.bytes_up.max() == 8 * num_shared
