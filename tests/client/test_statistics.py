"""Training with statistics that no gradient moves: Flax by hand, skipped steps, adaptation, seeds, resumed runs."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import personax as px
from personax.simulation.engine import initial_params
from tests.normalized import NETWORKS, NUM_INPUTS, RUNNING, Linen
from tests.simulation.options import grouped
from tests.test_contract import assert_close

KEY = jax.random.key(3)
SIZES = (11, 5, 8)


def samples(num, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, NUM_INPUTS)).astype(np.float32) * (1 + seed) + seed
    return x, (x[:, 0] > seed).astype(np.int32)


CLIENTS = [samples(num, seed) for seed, num in enumerate(SIZES)]
FEDERATION = px.Federation.from_clients(CLIENTS, CLIENTS)
ROUNDS = px.rounds(len(SIZES), 3, 2, key=KEY)
EPOCHS = {"num_epochs": 2, "batch_size": 4, "sampling": "shuffled"}
TASK = px.classification(NETWORKS["own"])


def train(algorithm, task=TASK, federation=FEDERATION, schedule=ROUNDS, key=KEY, **options):
    return px.simulate(algorithm, task, federation, schedule, key=key, **grouped(**options))


OPTIMIZERS = {
    "SGD": ({}, optax.sgd(0.1)),
    "weight decay": ({"optimizer": px.optimizer("adamw", weight_decay=0.3)}, optax.adamw(0.1, weight_decay=0.3)),
    "clipping": ({"clip_norm": 0.01}, optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.1))),
}


@partial(jax.jit, static_argnums=0)
@partial(jax.grad, argnums=1, has_aux=True)
def flax_gradient(module, params, statistics, x, y):
    given = {"params": params, "batch_stats": statistics}
    outputs, new = module.apply(given, x, train=True, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), new["batch_stats"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_client_is_centralized_training_of_the_flax_module(name):
    options, optimizer = OPTIMIZERS[name]
    (x, y), alone = CLIENTS[0], px.Federation.from_clients(CLIENTS[:1])
    algorithm = px.fedavg(lr=0.1, **EPOCHS, **options)
    task = px.classification(NETWORKS["linen"])
    variables = initial_params(task, alone, key=KEY)
    rows_of = jax.jit(partial(px.batch_indices, alone, KEY, 0, role="outer", size=4, sampling="shuffled"))
    for visit in range(2):
        params, statistics = variables["params"], variables["batch_stats"]
        state = optimizer.init(params)
        for step in range(6):
            rows = np.asarray(rows_of(update=visit, step=step))
            rows = rows[rows >= 0]
            gradient, statistics = flax_gradient(Linen(), params, statistics, x[rows], y[rows])
            change, state = jax.jit(optimizer.update)(gradient, state, params)
            params = optax.apply_updates(params, change)
        variables = {"params": params, "batch_stats": statistics}
    result = train(algorithm, task, alone, px.rounds(1, 2, key=KEY))
    assert_close(result.params, variables, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["own", "equinox"])  # a dictionary and a module
def test_a_client_with_few_steps_is_not_changed_by_one_with_many(name):
    task = px.classification(NETWORKS[name])
    algorithm = px.local_only(lr=0.1, optimizer=px.optimizer("sgd", momentum=0.5), **EPOCHS)
    alone = px.Federation.from_clients(CLIENTS[1:2], ids=[1])
    start = initial_params(task, FEDERATION, key=KEY)
    together = px.simulate(algorithm, task, FEDERATION, px.rounds(3, 2, key=KEY), key=KEY, params=start)
    one = px.simulate(algorithm, task, alone, px.rounds(1, 2, key=KEY), key=KEY, params=start)
    assert_close(
        jax.tree.map(lambda leaf: np.asarray(leaf)[1], together.personal),
        jax.tree.map(lambda leaf: np.asarray(leaf)[0], one.personal),
        rtol=1e-4,
        atol=1e-6,
    )
    assert not np.allclose(RUNNING[name](one.personal)[0], RUNNING[name](start)[0])


def test_shared_statistics_are_averaged_like_the_other_leaves():
    start = initial_params(TASK, FEDERATION, key=KEY)
    algorithm = px.fedavg(lr=0.1, num_steps=2, batch_size=4)
    ends = px.simulate(
        px.local_only(lr=0.1, num_steps=2, batch_size=4),
        TASK,
        FEDERATION,
        px.rounds(3, 1, key=KEY),
        key=KEY,
        params=start,
    ).personal
    result = px.simulate(algorithm, TASK, FEDERATION, px.rounds(3, 1, key=KEY), key=KEY, params=start)
    assert_close(result.params, jax.tree.map(lambda leaf: np.mean(leaf, axis=0), ends), rtol=1e-6)


ALGORITHMS = {
    "proximal": px.fedprox(strength=0.5, lr=0.1, **EPOCHS),
    "scaffold 1": px.scaffold(lr=0.05, option=1, num_steps=3, batch_size=4),
    "scaffold 2": px.scaffold(lr=0.05, option=2, num_steps=3, batch_size=4),
    "aruba": px.aruba(num_steps=3, batch_size=4),
}


@pytest.mark.parametrize(
    "name",
    # Both options of SCAFFOLD take the same steps.
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "scaffold 2")) for name in ALGORITHMS],
)
def test_no_objective_moves_the_statistics(name):
    """Their values after a step are those of the batch, whatever else the direction contains."""
    algorithm = dataclasses.replace(ALGORITHMS[name], local=dataclasses.replace(ALGORITHMS[name].local, lr=1e-30))
    plain = px.fedavg(lr=1e-30, **({"num_steps": 3, "batch_size": 4} if "prox" not in name else EPOCHS))
    assert_close(*(RUNNING["own"](train(one).params) for one in (algorithm, plain)), rtol=1e-9)


def test_only_statistics_of_the_part_that_moves_are_updated():
    start = initial_params(TASK, FEDERATION, key=KEY)
    head = px.Phase("dense_1", num_steps=2)
    body = px.Phase(("norm_0", "dense_0"), num_epochs=1)
    run = lambda sharing=px.Sharing(), **local: (
        px.simulate(
            px.Algorithm(px.Erm(), px.Local(0.1, batch_size=4, **local), px.synchronous(), sharing),
            TASK,
            FEDERATION,
            ROUNDS,
            key=KEY,
            params=start,
        ).params
    )
    for options in ({}, {"optimizer": px.optimizer("adam")}):
        of_head, of_both = run(phases=(head,), **options), run(phases=(head, body), **options)
        jax.tree.map(np.testing.assert_array_equal, of_head["norm_0"], start["norm_0"])
        assert not np.allclose(of_head["dense_1"]["kernel"], start["dense_1"]["kernel"])
        assert not any(map(np.allclose, RUNNING["own"](of_both), RUNNING["own"](start)))
        frozen = run(px.Sharing(frozen="norm_0"), num_steps=3, **options)
        jax.tree.map(np.testing.assert_array_equal, frozen["norm_0"], start["norm_0"])
        assert not np.allclose(frozen["dense_0"]["kernel"], start["dense_0"]["kernel"])


SEVERAL_MODELS = {
    "meta": px.per_fedavg(adapt_lr=0.1, lr=0.1, num_steps=2, batch_size=4),
    "envelope": px.pfedme(strength=1.0, lr=0.1, prox_lr=0.1, num_steps=2, batch_size=4),
    "mixture": px.apfl(lr=0.1, num_steps=2, batch_size=4),
    "two models": px.ditto(strength=1.0, lr=0.1, num_steps=2, batch_size=4),
}


@pytest.mark.parametrize("name", SEVERAL_MODELS)
@pytest.mark.parametrize("network", ["own", "linen"])
def test_objectives_with_gradients_at_several_models_are_refused(name, network):
    with pytest.raises(ValueError, match=r"computes gradients at several models.* Use layer or group normalization"):
        train(SEVERAL_MODELS[name], px.classification(NETWORKS[network]))


@jax.jit
def gradient_and_statistics(params, client):
    x, y = client
    batch = px.Batch(x, y, jnp.ones(len(x)), KEY)
    return jax.grad(TASK.loss)(params, batch), TASK.statistics(params, batch)


@pytest.mark.parametrize("model", ["adapted", "recomputed"])
def test_adaptation_updates_the_statistics_at_each_step(model):
    """One step is by hand; two are two times one, on other batches, so the running mean leaves the initial one."""
    start = initial_params(TASK, FEDERATION, key=KEY)
    algorithm = px.fedavg(lr=0.1, num_steps=1)
    scoring = px.Scoring(model, num_steps=1, lr=0.3, batch_size=20)
    gradient, statistics = gradient_and_statistics(start, CLIENTS[1])
    moved = jax.tree.map(lambda w, g: np.asarray(w) - np.float32(0.3) * g, start, gradient)
    moved["norm_0"] |= {name: statistics["norm_0"][name] for name in ("mean", "var")}
    found = px.personalize(algorithm, TASK, start, CLIENTS[1], scoring, key=KEY)
    assert_close(found, moved, rtol=1e-6)
    result = px.simulate(algorithm, TASK, FEDERATION, px.rounds(3, 1, key=KEY), key=KEY, params=start)
    models = px.client_models(algorithm, TASK, FEDERATION, result, scoring, [1], key=KEY)
    again = px.personalize(algorithm, TASK, result.params, CLIENTS[1], scoring, id=1, key=KEY)
    assert_close(jax.tree.map(lambda leaf: np.asarray(leaf)[0], models), again, rtol=1e-6)


@pytest.mark.parametrize(
    "algorithm", [px.local_only(lr=0.1, num_steps=1), px.aruba(num_steps=1)], ids=["local", "aruba"]
)
def test_objectives_own_personal_models_have_statistics_of_their_batches(algorithm):
    start = initial_params(TASK, FEDERATION, key=KEY)
    scoring = px.Scoring("recomputed", num_steps=1, lr=0.0, batch_size=20)
    shared = algorithm.objective.init_shared(start)
    found = px.personalize(algorithm, TASK, start, CLIENTS[2], scoring, shared=shared, key=KEY)
    assert_close(RUNNING["own"](found), RUNNING["own"](gradient_and_statistics(start, CLIENTS[2])[1]), rtol=1e-6)


def test_seeds_together_equal_the_seeds_in_sequence():
    keys = jax.random.split(KEY, 2)
    algorithm = px.fedavg(lr=0.1, clip_norm=1.0, **EPOCHS)
    together = train(algorithm, key=keys)
    for seed in range(2):
        assert_close(
            jax.tree.map(lambda leaf, seed=seed: np.asarray(leaf)[seed], together.params),
            train(algorithm, key=keys[seed]).params,
            rtol=1e-6,
        )


def test_a_resumed_run_is_the_uninterrupted_one():
    algorithm = px.fedavg(lr=0.1, server=px.asynchronous(0.5), **EPOCHS)
    schedule = px.arrivals(len(SIZES), 12, delays=px.delays.persafl_delays(len(SIZES), key=KEY), key=KEY)
    kept = []
    whole = train(algorithm, schedule=schedule, observe=lambda snapshot: kept.append(snapshot), every=4)
    again = train(algorithm, schedule=schedule, start=kept[1], observe=lambda snapshot: None, every=4)
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert not np.allclose(RUNNING["own"](kept[1].params)[0], RUNNING["own"](whole.params)[0])


def test_a_newcomer_of_fedbn_trains_its_own_normalization():
    """By hand: one step of its scale, offset and statistics on its whole data; the shared layers stay."""
    algorithm = px.fedbn(lr=0.1, num_steps=2, batch_size=4)
    result = train(algorithm)
    scoring = px.Scoring("recomputed", num_steps=1, lr=0.3, batch_size=20)
    found = px.personalize(algorithm, TASK, result.params, CLIENTS[2], scoring, key=KEY)
    gradient, new = (tree["norm_0"] for tree in gradient_and_statistics(result.params, CLIENTS[2]))
    old = jax.tree.map(np.asarray, result.params["norm_0"])
    layer = {name: old[name] - np.float32(0.3) * gradient[name] for name in ("scale", "bias")}
    assert_close(found["norm_0"], layer | {name: new[name] for name in ("mean", "var")}, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, found["dense_0"], result.params["dense_0"])


def shifted_digits(num_clients=10):
    """The embedded digits, divided evenly; each client has its own gain and offset."""
    pool = px.datasets.digits()
    parts = px.partition.iid(pool.y, num_clients, key=KEY).split(0.3, key=KEY)
    rng = np.random.default_rng(0)
    gains, offsets = np.exp(rng.uniform(-1.6, 1.6, num_clients)), rng.uniform(-2, 2, num_clients)

    def clients(part):
        rows = [part.rows[part.offsets[i] : part.offsets[i + 1]] for i in range(num_clients)]
        return [(gains[i] * pool.x[rows[i]] / 255 + offsets[i], pool.y[rows[i]]) for i in range(num_clients)]

    return px.Federation.from_clients(*map(clients, parts))


@pytest.mark.slow
def test_fedbn_is_far_above_averaged_statistics_where_features_are_shifted():
    fed, task = shifted_digits(), px.classification(px.mlp((32,), 10, "relu", norm="batch"))
    schedule, epoch = px.rounds(10, 40, key=KEY), {"num_epochs": 1, "batch_size": 16, "sampling": "shuffled"}

    def accuracy(algorithm, model):
        result = px.simulate(algorithm, task, fed, schedule, key=KEY)
        return px.evaluate(algorithm, task, fed, result, px.Scoring(model), key=KEY).metrics["accuracy"].mean()

    averaged, own = accuracy(px.fedavg(lr=0.1, **epoch), "global"), accuracy(px.fedbn(lr=0.1, **epoch), "personal")
    assert own > 0.9 and own > averaged + 0.2
