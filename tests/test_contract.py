"""Every recipe, every invariant."""

import dataclasses
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w

import personax
from personax import simulate as run
from personax.client import optimizers
from personax.simulation import engine
from personax.simulation.engine import advance
from personax.simulation.results import State
from personax.simulation.waves import plan_arrivals
from personax.values import OBJECTIVES, construct, to_dict
from tests.recipes import ASYNCHRONOUS, NORMALIZED, RECIPES
from tests.simulation.options import grouped

# Seeds and chunks wrap the visit of an objective, whatever its options: one recipe for each objective.
ONE_OF_EACH = list({type(make(1.0).objective): name for name, make in RECIPES.items()}.values())
# These combine an objective with a server or with a division of the parameters, all of which others here have, too.
COMBINED = {"ditto_async", "aruba_async", "persafl_maml_personal_head", "persafl_me_personal_head", "lg_fedavg"}


def each(names, fast=None):
    """Every name; those outside `fast` are slow. Tests of one recipe share its compiled program: one process."""
    marks = lambda name: [pytest.mark.slow] * (name in COMBINED or name not in (fast or names))
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks(name)]) for name in names]
    )


MODULES = (personax, personax.step_sizes, personax.curvature, personax.discounts, optimizers)
NAMES = {name: item for module in MODULES for name, item in vars(module).items()}
TASK = personax.classification(personax.mlp((4,), 3))
NORMALIZED_TASK = personax.classification(personax.mlp((4,), 3, norm="batch"))
NUM = 5


def data(position, seed=0):
    rng = np.random.default_rng([seed, position])
    size = 4 + 3 * position
    return rng.integers(0, 256, (size, 6)).astype(np.uint8), rng.integers(0, 3, size)


FED = personax.Federation.from_clients([data(i) for i in range(NUM)], test=[data(i, 1) for i in range(NUM)])


def task_of(name):
    return NORMALIZED_TASK if name in NORMALIZED else TASK


def schedule_for(name, seed=0, num=24):
    key = jax.random.key(seed)
    if name in ASYNCHRONOUS:
        return personax.arrivals(NUM, num, delays=personax.delays.persafl_delays(NUM, key=key), key=key)
    return personax.rounds(NUM, num // 3, 3, key=key, num_aggregated=2 if name == "pfedme" else None)


def simulate(name, scale=1.0, seed=0, fed=FED, schedule=None, **options):
    options.setdefault("wave_width", 4)
    schedule = schedule_for(name, seed) if schedule is None else schedule
    return run(RECIPES[name](scale), task_of(name), fed, schedule, key=jax.random.key(seed), **grouped(**options))


def end(result):
    return result.params, result.personal, result.shared


def assert_same_bits(a, b):
    for leaf, other in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_array_equal(leaf, other)


def assert_close(a, b, rtol=1e-7, atol=1e-11):
    for leaf, other in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=rtol, atol=atol)


@each(RECIPES)
def test_same_key_same_bits_and_other_numbers_without_compiling(name):
    first = simulate(name)
    compiled = advance._cache_size()
    assert_same_bits(end(first), end(simulate(name)))
    other = simulate(name, 0.7, seed=1)
    shorter = simulate(name, schedule=schedule_for(name, num=18))
    assert advance._cache_size() == compiled, "another seed, step size or length compiled a second program"
    for result in (other, shorter):
        assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (end(first), end(result))), strict=True))


@each(RECIPES)
def test_float32_stays_float32_and_trees_keep_their_shape(name, monkeypatch):
    params = task_of(name).model.init(jax.random.key(0), jnp.asarray(FED.x[:1]))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    shapes, shared = [], RECIPES[name](1.0).sharing.shared(params)

    def trace_only(program, *arguments):
        shapes.append(advance.eval_shape(program, *arguments))
        *_, personal, others = arguments[: 1 + next(i for i, one in enumerate(arguments) if isinstance(one, State))]
        return others._replace(personal=personal)

    monkeypatch.setattr(engine, "advance", trace_only)
    before = simulate(name, params=params).snapshot.state
    kinds = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert kinds(before) == kinds(shapes[0]) and kinds(before.server.params) == kinds(shared)
    kept = jax.tree.leaves((before.server.params, before.server.shared, before.personal, before.server.pending))
    assert {leaf.dtype for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.floating)} == {jnp.dtype("float32")}


@each(RECIPES)
def test_the_order_of_clients_does_not_matter(name):
    order = np.array([3, 0, 4, 1, 2])
    fed = personax.Federation.from_clients([data(i) for i in order], ids=order.tolist())
    schedule = schedule_for(name)
    moved = dataclasses.replace(schedule, client=np.argsort(order)[schedule.client].astype(np.int32))
    here, there = simulate(name), simulate(name, fed=fed, schedule=moved)
    assert_close((here.params, here.shared), (there.params, there.shared))
    assert_close(jax.tree.map(lambda leaf: leaf[order], here.personal), there.personal)


@each(RECIPES)
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(name, tmp_path):
    snapshots = []
    whole = simulate(name, every=6, observe=snapshots.append)
    cut = snapshots[1]
    leaves, structure = jax.tree.flatten(cut.state)
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as stored:
        state = jax.tree.unflatten(structure, [stored[f"arr_{i}"] for i in range(len(leaves))])
    resumed = simulate(name, start=dataclasses.replace(cut, state=state))
    assert 0 < cut.num_events < whole.snapshot.num_events
    assert_same_bits(end(whole), end(resumed))


# tests/test_reference.py has seeds together for each objective; these have, in chunks, states shared and personal.
@each(ONE_OF_EACH, ("local_only", "scaffold_async", "apfl_buffered_adam"))
def test_seeds_together_in_chunks_of_a_cohort_equal_seeds_apart(name):
    seeds = [0, 1]
    together = run(
        RECIPES[name](1.0),
        TASK,
        FED,
        [schedule_for(name, seed) for seed in seeds],
        key=jnp.stack([jax.random.key(seed) for seed in seeds]),
        **grouped(wave_width=4, cohort_chunk=2),
    )
    for seed in seeds:
        assert_close(jax.tree.map(lambda leaf, s=seed: leaf[s], end(together)), end(simulate(name, seed=seed)))


# What waits: models of clients, states shared and personal, updates for a buffer, and parts of models.
@each(ASYNCHRONOUS, ("fedasync_mixing", "scaffold_async", "apfl_buffered_adam", "fedrep_async"))
def test_updates_that_are_trained_ahead_wait_for_their_turn(name):
    """At every pause, models and personal states are those of one-by-one execution; a run may pause while some wait."""
    every_event = {}
    simulate(name, wave_width=1, every=1, observe=lambda now: every_event.update({now.num_events: now.state}))
    pauses = []
    whole = simulate(name, every=1, observe=pauses.append)
    plan = plan_arrivals(schedule_for(name), 4)
    waiting = plan.waves.valid.sum(axis=1).cumsum() - plan.num_arrived
    for now in pauses:
        expected = every_event[now.num_events]
        assert_close((now.state.server, now.state.personal), (expected.server, expected.personal))
    assert pauses[-1].num_events == max(every_event)  # the ends are among them
    full = next(now for now in pauses if now.wave and waiting[now.wave - 1] > 0)
    assert_same_bits(end(whole), end(simulate(name, start=full)))


@each(RECIPES)
def test_a_recipe_is_its_configuration(name):
    recipe = RECIPES[name](1.0)
    assert recipe == RECIPES[name](1.0) and hash(recipe) == hash(RECIPES[name](1.0))
    assert recipe != RECIPES[name](0.5)
    assert construct(personax.Algorithm, tomllib.loads(tomli_w.dumps(to_dict(recipe))), "algorithm") == recipe
    assert eval(repr(recipe), NAMES) == recipe


@each(RECIPES)
def test_evaluation_does_not_touch_the_run(name):
    """PFLlib's trap: measuring changes the model."""
    result = simulate(name)
    before = jax.tree.map(np.array, end(result))
    scoring = personax.Scoring("adapted", num_steps=2)
    scores = personax.evaluate(RECIPES[name](1.0), task_of(name), FED, result, scoring, key=jax.random.key(5))
    assert scores.metrics["accuracy"].shape == (NUM,) and scores.scoring == scoring
    assert_same_bits(before, end(result))


@pytest.mark.parametrize("name", OBJECTIVES.kinds)
def test_every_objective_has_a_row_above(name):
    """A new objective is added to the table of recipes, so that every test of this file is a test of it."""
    assert name in {type(make(1.0).objective).__name__ for make in RECIPES.values()}
