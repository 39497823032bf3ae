"""Runs in which a part of the model is personal or frozen: what moves, what travels, and what is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.client.local import Start, local_update
from personax.client.sampling import ROLES, ClientRows
from personax.fast.flops import operations_of
from personax.fast.near import SharedProducts, near
from personax.keys import run_stream
from personax.objectives.divided import Divided, split
from personax.sharing import join, names_of, over
from personax.simulation.engine import Procedure, advance
from personax.simulation.simulate import plan_run
from tests.simulation.options import grouped

rng = np.random.default_rng(0)
NUM, KEY = 6, jax.random.key(0)
FED = px.Federation.from_clients([(rng.normal(size=(5 + i, 4)), rng.integers(0, 3, 5 + i)) for i in range(NUM)])
TASK = px.classification(px.mlp((6,), 3))
STEPS = px.Local(0.1, num_steps=2, batch_size=4)
HEAD = px.Sharing(personal="dense_1")
BOTH = px.Sharing(personal="dense_1", frozen="dense_0.bias")
SERVERS = {"synchronous": px.synchronous(), "buffered": px.buffered(2), "asynchronous": px.asynchronous(0.5)}


def schedule_for(server, seed=0):
    key = jax.random.key(seed)
    if server.is_synchronous:
        return px.rounds(NUM, 4, 3, key=key)
    return px.arrivals(NUM, 12, delays=px.delays.persafl_delays(NUM, key=key), key=key)


def run(sharing, server="synchronous", objective=px.Erm(), key=KEY, **options):
    algorithm = px.Algorithm(objective, STEPS, SERVERS[server], sharing)
    return px.simulate(algorithm, TASK, FED, schedule_for(algorithm.server), key=key, **grouped(**options))


def assert_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9), a, b)


@pytest.mark.parametrize("server", SERVERS)
def test_the_server_has_and_moves_the_shared_parameters_alone(server):
    result = run(BOTH, server)
    assert names_of(result.snapshot.state.server.params) == ["dense_0.kernel"]
    assert set(result.bytes_up) | set(result.bytes_down) == {8 * 4 * 6}
    start = px.simulate(
        px.fedavg(lr=0.1, num_steps=2, batch_size=4),
        TASK,
        FED,
        px.rounds(NUM, 1, 1, key=KEY),
        key=KEY,
        **grouped(observe=lambda snapshot: snapshot.params),
    ).history[0]
    assert_close(result.params["dense_1"], start["dense_1"])
    assert_close(result.params["dense_0"]["bias"], start["dense_0"]["bias"])
    assert np.any(result.params["dense_0"]["kernel"] != start["dense_0"]["kernel"])
    part = split(result.personal)[0]
    moved = np.any(part["dense_1"]["kernel"] != start["dense_1"]["kernel"][None], axis=(1, 2))
    np.testing.assert_array_equal(moved, result.snapshot.visits > 0)


@pytest.mark.parametrize("objective", [px.Erm(), px.Meta(0.1), px.Moreau(2.0, 0.05, 2)], ids=["erm", "maml", "me"])
def test_seeds_together_equal_seeds_apart(objective):
    keys = jnp.stack([KEY, jax.random.key(5)])
    together = run(BOTH, "asynchronous", objective, keys)
    for seed, key in enumerate(keys):
        alone = run(BOTH, "asynchronous", objective, key)
        of_seed = jax.tree.map(lambda leaf, seed=seed: leaf[seed], (together.params, together.personal))
        assert_close(of_seed, (alone.params, alone.personal))
        assert together.snapshot.of_seeds(seed, seed + 1).unshared.fingerprint


@pytest.mark.parametrize("server", SERVERS)
def test_a_streamed_run_equals_a_resident_one(server):
    resident, streamed = run(BOTH, server), run(BOTH, server, stream=px.Stream())
    assert_close((resident.params, resident.personal), (streamed.params, streamed.personal))


def test_devices_share_the_frozen_part():
    whole, divided = run(BOTH), run(BOTH, devices=jax.devices()[:1])
    assert_close((whole.params, whole.personal), (divided.params, divided.personal))


def test_a_run_that_continues_keeps_its_parts():
    pauses = []
    whole = run(BOTH, "asynchronous", every=3, observe=pauses.append)
    again = run(BOTH, "asynchronous", start=pauses[1])
    assert_close((whole.params, whole.personal), (again.params, again.personal))


def test_parts_are_arguments_of_the_program_and_never_constants():
    """Other values of the frozen part do not compile again, and the program holds no array of its size."""
    algorithm = px.Algorithm(px.Erm(), STEPS, px.synchronous(), BOTH)
    params = TASK.model.init(jax.random.key(7), jnp.zeros((1, 4)))
    schedule = schedule_for(algorithm.server)
    simulate = lambda params: px.simulate(algorithm, TASK, FED, schedule, key=KEY, params=params)
    first = simulate(params)
    compiled = advance._cache_size()
    second = simulate(jax.tree.map(lambda leaf: leaf + 1, params))
    assert advance._cache_size() == compiled
    assert first.snapshot.unshared.fingerprint != second.snapshot.unshared.fingerprint
    planned = plan_run(algorithm, TASK, FED, schedule, key=KEY)
    procedure = Procedure(algorithm, BOTH.base(params))
    state = first.snapshot.state
    waves = jax.tree.map(lambda leaf: leaf[0], planned.run.plan.waves)
    given = (procedure, FED.train, KEY, waves, None, state.personal, state._replace(personal=()), 0, 1, False)
    traced = advance.trace(planned.run.program, *given).jaxpr
    assert all(np.size(const) < 6 for const in traced.consts)


def test_sweeps_train_each_algorithm_over_its_own_start():
    algorithms = [
        px.Algorithm(px.Erm(), px.Local(lr, num_steps=2, batch_size=4), px.synchronous(), BOTH) for lr in (0.1, 0.3)
    ]
    keys = jnp.stack([KEY, KEY])
    schedule = schedule_for(algorithms[0].server)
    both = px.simulate(algorithms, TASK, FED, schedule, key=keys)
    alone = px.simulate(algorithms[1], TASK, FED, schedule, key=KEY)
    assert_close(jax.tree.map(lambda leaf: leaf[1], both.params), alone.params)


def test_one_client_with_a_personal_head_is_plain_training():
    """With a single client there is nothing to average: the joined parts are FedAvg's model."""
    alone = FED.select(np.array([3]))
    schedule = px.rounds(1, 5, 1, key=KEY)
    make = lambda sharing: px.Algorithm(px.Erm(), STEPS, px.synchronous(), sharing)
    whole = px.simulate(make(px.Sharing()), TASK, alone, schedule, key=KEY)
    divided = px.simulate(make(HEAD), TASK, alone, schedule, key=KEY)
    part = jax.tree.map(lambda leaf: leaf[0], split(divided.personal)[0])
    assert_close(join(part, divided.params), whole.params)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (px.Scaffold(), "uploads values for every trained parameter, including the personal dense_1.bias"),
        (px.Aruba(), "uploads values for every trained parameter"),
        (px.Ditto(1.0), "already keeps a personal copy of every parameter"),
        (px.Mixture(0.5), "already keeps a personal copy of every parameter"),
        (px.LocalOnly(), "already keeps a personal copy of every parameter"),
    ],
)
def test_objectives_that_cannot_have_a_personal_part_are_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        run(HEAD, objective=objective)


@pytest.mark.parametrize(
    "objective", [px.Scaffold(), px.Ditto(1.0), px.Mixture(0.5)], ids=["scaffold", "ditto", "apfl"]
)
def test_any_objective_can_have_a_frozen_part(objective):
    result = run(px.Sharing(frozen="dense_0"), objective=objective)
    assert names_of(result.snapshot.state.server.params) == ["dense_1.bias", "dense_1.kernel"]
    assert "dense_0" not in " ".join(names_of((result.personal, result.shared)))


def test_a_tracker_follows_whole_models():
    tracked = {"tracker": px.RandomIterate()}
    with pytest.raises(ValueError, match="follows whole models, and here `dense_1` personal"):
        run(HEAD, **tracked)


def test_a_recipe_takes_another_division():
    algorithm = dataclasses.replace(px.fedavg(lr=0.1, num_steps=2), sharing=HEAD)
    assert "sharing=Sharing(personal=('dense_1',))" in repr(algorithm) and "sharing" not in repr(
        px.fedavg(lr=0.1, num_steps=2)
    )


def test_a_personal_head_keeps_the_shared_products_of_the_meta_gradient():
    """The visit has the operations of an undivided one, which are fewer than without shared products."""
    task = px.classification(px.mlp((100,), 3))
    fed = px.Federation.from_clients([(rng.normal(size=(8, 400)), rng.integers(0, 3, 8))])
    params = task.model.init(jax.random.key(0), jnp.zeros((1, 400)))
    rows = ClientRows(*(leaf[0] for leaf in fed.train[2:5]), jnp.zeros((), jnp.int32))

    def operations(objective, sharing):
        def end(params):
            own = Divided(objective, sharing).init_personal(params)
            start = Start(sharing.shared(params), (), own, jnp.zeros((), jnp.int32), sharing.base(params))
            return local_update(objective, STEPS, task, fed.train, 8, rows, start, run_stream(KEY)).end

        return operations_of(jax.make_jaxpr(end)(params).jaxpr)

    whole = operations(px.Meta(0.1), px.Sharing())
    assert operations(px.Meta(0.1), HEAD) == whole
    assert operations(px.Meta(0.1), px.Sharing("dense_1", frozen="dense_0.bias")) == whole
    batch = jax.tree.map(lambda leaf: leaf[:4], (fed.train.x, fed.train.y))
    one = px.Batch(*(leaf[None] for leaf in batch), jnp.ones((1, 4)), jax.random.split(KEY, 1))
    batches = dict.fromkeys(ROLES, one)
    for base in (px.Sharing(), BOTH):
        loss = over(task, base.base(params)).loss
        assert isinstance(near(loss, base.trained(params), batches, 2, px.curvature.exact), SharedProducts)
