"""Phases of a visit: each moves its part of the model, with a fresh optimizer, and computes no other gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.client.local import Start, local_update
from personax.client.sampling import ClientRows, batch_indices
from personax.fast.flops import operations_of
from personax.keys import run_stream
from personax.sharing import join, only

rng = np.random.default_rng(0)
COUNTS = (7, 16, 11)
FED = px.Federation.from_clients([(rng.normal(size=(num, 5)), rng.integers(0, 3, num)) for num in COUNTS])
TASK = px.classification(px.mlp((6,), 3))
PARAMS = jax.jit(TASK.model.init)(jax.random.key(1), jnp.zeros((1, 5)))
KEY = jax.random.key(0)
GRADIENT = jax.jit(jax.grad(TASK.loss))
ROWS = jax.jit(partial(batch_indices, FED, KEY), static_argnames=("role", "size", "sampling"))


def visit(local, client, objective=px.Erm(), params=PARAMS):
    data = FED.train
    where = ClientRows(data.start[client], data.num_samples[client], data.ids[client], jnp.zeros((), jnp.int32))
    start = Start(params, objective.init_shared(params), objective.init_personal(params), jnp.zeros((), jnp.int32))
    update = jax.jit(local_update, static_argnums=(2, 4))
    return update(objective, local, TASK, data, max(COUNTS), where, start, run_stream(KEY))


def by_hand(local, client, lrs):
    """Run phase after phase, each with its own optimizer, on the batches of consecutive step numbers."""
    params, step, size = PARAMS, 0, local.size_of("outer")
    for phase, lr in zip(local.phases, lrs, strict=True):
        num = phase.num_steps or phase.num_epochs * -(-COUNTS[client] // size)
        optimizer = local.optimizer.at(lr)
        update = jax.jit(optimizer.update)
        state = optimizer.init(only(params, phase.trains))
        for _ in range(num):
            rows = np.asarray(ROWS(client, 0, step, role="outer", size=size, sampling=local.sampling))
            rows = rows[rows >= 0]
            batch = px.Batch(FED.x[rows], FED.y[rows], np.ones(len(rows)), KEY)
            gradient = only(GRADIENT(params, batch), phase.trains)
            moving = only(params, phase.trains)
            change, state = update(gradient, state, moving)
            params = join(jax.tree.map(np.add, moving, change), params)
            step += 1
    return params


@pytest.mark.parametrize("optimizer", [px.optimizer("sgd"), px.optimizer("adam")], ids=["sgd", "adam"])
def test_phases_in_steps_and_epochs_are_those_done_by_hand(optimizer):
    phases = (px.Phase("dense_1", num_epochs=2), px.Phase(("*", "!dense_1"), num_steps=3, lr=0.05))
    local = px.Local(0.1, batch_size=4, optimizer=optimizer, sampling="shuffled", phases=phases)
    for client in (0, 1):  # of different lengths, beside clients with more
        expected = by_hand(local, client, (0.1, 0.05))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), visit(local, client).end, expected)
    assert local.steps_of(7) == 2 * 2 + 3 and local.samples_of(7) == 2 * 7 + 3 * 4


def test_other_objectives_take_the_same_steps_in_phases():
    phases = (px.Phase("dense_1", num_steps=2), px.Phase("dense_0", num_steps=2))
    local = px.Local(0.1, batch_size=4, phases=phases)
    plain, proximal = visit(local, 1).end, visit(local, 1, px.Proximal(0.0)).end
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), plain, proximal)


def test_the_unused_backward_pass_is_not_computed():
    """A step of the head alone needs no gradient of the wide body: about a third of the operations are left."""
    wide, task = 512, px.classification(px.mlp((64, 64), 3))
    data = px.Federation.from_clients([(rng.normal(size=(8, wide)).astype("f4"), rng.integers(0, 3, 8))])
    params = task.model.init(jax.random.key(0), jnp.zeros((1, wide)))

    def operations(local, objective):
        def end(params):
            rows = ClientRows(*(leaf[0] for leaf in data.train[2:5]), jnp.zeros((), jnp.int32))
            start = Start(params, (), objective.init_personal(params), jnp.zeros((), jnp.int32))
            return local_update(objective, local, task, data.train, 8, rows, start, run_stream(KEY)).end

        if objective.is_plain:
            return operations_of(jax.make_jaxpr(end)(params).jaxpr)
        return jax.jit(end).lower(params).compile().cost_analysis()["flops"]  # after XLA has removed what is unused

    for objective in (px.Erm(), px.Proximal(0.1)):
        whole = operations(px.Local(0.1, num_steps=4, batch_size=8), objective)
        head = operations(px.Local(0.1, batch_size=8, phases=(px.Phase("dense_2", num_steps=4),)), objective)
        assert head < 0.6 * whole, (objective, head / whole)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: px.Phase("dense_1"), "Give either `num_steps` or `num_epochs`"),
        (lambda: px.Local(0.1, num_steps=3, phases=(px.Phase("dense_1", num_steps=3),)), "are those of its `phases`"),
        (lambda: px.Local(0.1), "Give either"),
    ],
)
def test_the_length_of_a_visit_is_given_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_phases_name_parameters_and_suit_the_objective():
    schedule = px.rounds(3, 2, 3, key=KEY)
    run = lambda objective, trains: px.simulate(
        px.Algorithm(objective, px.Local(0.1, phases=(px.Phase(trains, num_steps=1),)), px.synchronous()),
        TASK,
        FED,
        schedule,
        key=KEY,
    )
    with pytest.raises(ValueError, match="'head', which matches no parameter"):
        run(px.Erm(), "head")
    with pytest.raises(ValueError, match="requires that each step trains all of them"):
        run(px.Scaffold(), "dense_1")


@pytest.mark.parametrize("objective", [px.Ditto(0.5), px.Mixture(0.5), px.Moreau(1.0, 0.1, 2)])
def test_a_second_model_does_not_ignore_the_phases(objective):
    phases = px.Local(0.1, phases=(px.Phase("dense_1", num_steps=1),))
    with pytest.raises(ValueError, match="updates values for every parameter at each step, including those"):
        px.Algorithm(objective, phases, px.synchronous()).require_model(PARAMS)


@pytest.mark.parametrize("objective", [px.LocalOnly(), px.Meta(0.1), px.Proximal(0.1)])
def test_objectives_that_move_the_iterate_alone_have_phases(objective):
    phases = px.Local(0.1, phases=(px.Phase("dense_1", num_steps=1),))
    px.Algorithm(objective, phases, px.synchronous()).require_model(PARAMS)
