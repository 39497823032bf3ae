"""Tests of the scored model, the data and the adaptation of an evaluation."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.client.local import Start
from personax.evaluation.evaluate import evaluate_client, personalize_one
from tests import closed_forms
from tests.closed_forms import TASK
from tests.recipes import SYNCHRONOUS

KEY = jax.random.key(0)
W = np.random.default_rng(3).normal(size=closed_forms.DIMENSION)
WHOLE = {"num_steps": 1, "batch_size": 16}


def losses(fed, models):
    """Each client's mean loss on its own test data."""
    data = [fed.client_test(i) for i in range(fed.num_clients)]
    return np.array([0.5 * np.mean((x @ model - y) ** 2) for (x, y), model in zip(data, models, strict=True)])


def setting(algorithm, seeds=None):
    """A short run of clients whose test data is not their training data."""
    train, test = closed_forms.clients(seed=0), closed_forms.clients(seed=1, sizes=(70, 3, 140, 64))
    fed = personax.Federation.from_clients(train, test=test)
    schedule = personax.rounds(4, 2, key=KEY)
    key = KEY if seeds is None else jax.random.split(KEY, seeds)
    return fed, personax.simulate(algorithm, TASK, fed, schedule, key=key, params={"w": jnp.asarray(W)})


LOCAL = {"num_steps": 2, "batch_size": 4}


def score(algorithm, fed, result, scoring):
    return personax.evaluate(algorithm, TASK, fed, result, scoring, key=jax.random.key(9)).metrics["loss"]


def test_the_global_model_is_scored_unchanged():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    found = score(algorithm, fed, result, personax.Scoring("global"))
    np.testing.assert_allclose(found, losses(fed, [result.params["w"]] * 4), rtol=1e-10)


def test_adaptation_uses_each_clients_own_training_data_and_never_what_is_scored():
    """The traps of CharlieDinh/pFedMe (test batches) and FedBABU (one client's data for all)."""
    algorithm = personax.per_fedavg(adapt_lr=0.1, lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    problems = [closed_forms.quadratic(*fed.client(i)) for i in range(4)]
    found = score(algorithm, fed, result, personax.Scoring("adapted", lr=0.2, **WHOLE))
    adapted = [problem.descend(np.asarray(result.params["w"]), 0.2, 1) for problem in problems]
    np.testing.assert_allclose(found, losses(fed, adapted), rtol=1e-10)


def test_the_personal_model_of_pfedme_is_theta():
    """The trap of pFedMe and PFLlib: scoring w instead of theta, or parameters that never change."""
    algorithm = personax.pfedme(strength=2.0, lr=0.1, prox_lr=0.1, num_prox_steps=50, **LOCAL)
    fed, result = setting(algorithm)
    stored = score(algorithm, fed, result, personax.Scoring("personal"))
    np.testing.assert_allclose(stored, losses(fed, result.personal["w"]), rtol=1e-10)
    problems = [closed_forms.quadratic(*fed.client(i)) for i in range(4)]
    recomputed = score(algorithm, fed, result, personax.Scoring("recomputed", **WHOLE))
    thetas = [problem.prox(np.asarray(result.params["w"]), 2.0) for problem in problems]
    np.testing.assert_allclose(recomputed, losses(fed, thetas), rtol=1e-4)
    assert np.all(stored != losses(fed, [result.params["w"]] * 4))


def test_the_personal_model_of_apfl_is_the_mixture():
    algorithm = personax.apfl(lr=0.1, mix=0.4, **LOCAL)
    fed, result = setting(algorithm)
    mix, v, w = result.personal.mix[:, None], result.personal.model["w"], np.asarray(result.params["w"])[None]
    found = score(algorithm, fed, result, personax.Scoring("personal"))
    np.testing.assert_allclose(found, losses(fed, mix * v + (1 - mix) * w), rtol=1e-10)


def test_seeds_are_scored_together():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm, seeds=3)
    found = score(algorithm, fed, result, personax.Scoring("global"))
    for seed in range(3):
        np.testing.assert_allclose(found[seed], losses(fed, [result.params["w"][seed]] * 4), rtol=1e-10)


def test_a_newcomer_gets_the_model_that_evaluation_scores():
    recipes = (
        personax.per_fedavg(adapt_lr=0.1, lr=0.1, **LOCAL),
        personax.pfedme(strength=2.0, lr=0.1, prox_lr=0.1, num_prox_steps=50, **LOCAL),
    )
    for algorithm, model in itertools.product(recipes, ("adapted", "recomputed")):
        fed, result = setting(algorithm)
        scoring = personax.Scoring(model, lr=0.2, **WHOLE)
        newcomer = partial(personax.personalize, algorithm, TASK, result.params, scoring=scoring, key=KEY)
        models = [newcomer(fed.client(i))["w"] for i in range(4)]
        np.testing.assert_allclose(score(algorithm, fed, result, scoring), losses(fed, models), rtol=1e-9)


def test_newcomers_of_similar_sizes_share_a_program():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    result = setting(algorithm)[1]
    x, y = closed_forms.clients(seed=2, sizes=(17,) * 4)[0]
    scoring, compiled = personax.Scoring("adapted", lr=0.2, num_steps=3, batch_size=5), personalize_one._cache_size()
    for size, num_programs in ((9, 1), (16, 1), (17, 2)):
        data = (x[:size], y[:size])
        found = personax.personalize(algorithm, TASK, result.params, data, scoring, id=7, key=KEY)
        assert personalize_one._cache_size() == compiled + num_programs
        same = personax.Federation.from_clients([data], test=[data], ids=[7])
        scored = losses(same, [found["w"]])
        alone = evaluate_client(algorithm, TASK, same, Start(result.params, (), (), 0), scoring, update=0, key=KEY)
        np.testing.assert_allclose(alone["loss"], scored[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("model", "seeds"),
    [("global", None), ("localized", 2), ("adapted", None), ("personal", 2), ("recomputed", 2)],
)
def test_the_models_of_clients_are_those_that_are_scored(model, seeds):
    algorithm = personax.apfl(lr=0.1, mix=0.4, **LOCAL)
    fed, result = setting(algorithm, seeds=seeds)
    scoring = personax.Scoring(model, lr=0.2, num_steps=2, batch_size=4)
    scored, key = score(algorithm, fed, result, scoring), jax.random.key(9)
    for clients in ([2], [3, 0, 2, 1]):
        found = personax.client_models(algorithm, TASK, fed, result, scoring, clients, key=key)["w"]
        for seed in range(seeds or 1):
            of_seed = np.zeros((4, closed_forms.DIMENSION))
            of_seed[clients] = found if seeds is None else found[seed]
            wanted = scored if seeds is None else scored[seed]
            np.testing.assert_allclose(losses(fed, of_seed)[clients], wanted[clients], rtol=1e-10)
    with pytest.raises(ValueError, match=r"`clients` must be positions in 0\.\.3, got \[4\]"):
        personax.client_models(algorithm, TASK, fed, result, scoring, [4], key=key)


# localized models


def test_a_localized_model_is_the_clients_own_iterate_before_averaging():
    algorithm = personax.fedavg(lr=0.1, num_steps=3, **closed_forms.FULL_BATCH)
    fed, result = setting(algorithm)
    problems = [closed_forms.quadratic(*fed.client(i)) for i in range(4)]
    iterates = [problem.descend(np.asarray(result.params["w"]), 0.1, 3) for problem in problems]
    found = score(algorithm, fed, result, personax.Scoring("localized"))
    np.testing.assert_allclose(found, losses(fed, iterates), rtol=1e-10)


def test_a_localized_scaffold_model_has_its_corrections():
    algorithm = personax.scaffold(lr=0.1, num_steps=2, **closed_forms.FULL_BATCH)
    fed, result = setting(algorithm)
    iterates = []
    for i in range(4):
        w, problem = np.asarray(result.params["w"]), closed_forms.quadratic(*fed.client(i))
        for _ in range(2):
            w = w - 0.1 * (problem.gradient(w) - result.personal["w"][i] + result.shared["w"])
        iterates.append(w)
    assert np.abs(result.personal["w"]).min() > 1e-3
    found = score(algorithm, fed, result, personax.Scoring("localized"))
    np.testing.assert_allclose(found, losses(fed, iterates), rtol=1e-10)


def test_with_the_runs_key_a_localized_model_is_what_the_next_visit_uploads():
    """One client, so that the average is its iterate: its localized model now is the shared model a round later."""
    lr = personax.step_sizes.Decay(0.3, 0.2)
    algorithm = personax.fedavg(lr=lr, num_steps=3, batch_size=2)
    fed = personax.Federation.from_clients(closed_forms.clients(1), test=closed_forms.clients(1, seed=1))
    run = lambda num: personax.simulate(algorithm, TASK, fed, personax.rounds(1, num, key=KEY), key=KEY)
    evaluated = partial(personax.evaluate, algorithm, TASK, fed, scoring=personax.Scoring("localized"))
    now = evaluated(run(2), key=KEY).metrics["loss"]
    np.testing.assert_allclose(now, losses(fed, [run(3).params["w"]]), rtol=1e-10)
    assert evaluated(run(2), key=jax.random.key(5)).metrics["loss"] != now


# clients


def test_the_cohort_is_that_of_the_last_round_of_each_seed():
    algorithm, keys = personax.fedavg(lr=0.1, **LOCAL), jax.random.split(KEY, 3)
    fed = personax.Federation.from_clients(
        closed_forms.clients(), test=closed_forms.clients(seed=1), ids=[10, 11, 12, 13]
    )
    schedules = [personax.rounds(4, 5, 2, key=key) for key in keys]
    result = personax.simulate(algorithm, TASK, fed, schedules, key=keys)
    run = lambda who: personax.evaluate(algorithm, TASK, fed, result, personax.Scoring("global", clients=who), key=KEY)
    everyone, cohort = run("all"), run("cohort")
    expected = np.stack([np.sort(schedule.client[-2:]) for schedule in schedules])
    np.testing.assert_array_equal(cohort.clients, 10 + expected)
    assert len({tuple(row) for row in expected.tolist()}) > 1
    at = np.take_along_axis(everyone.metrics["loss"], expected, axis=1)
    np.testing.assert_allclose(cohort.metrics["loss"], at, rtol=1e-12)


def test_arrivals_have_no_cohort():
    algorithm = personax.fedasync(lr=0.1, **LOCAL)
    fed, _ = closed_forms.federation()
    schedule = personax.uniform_arrivals(4, 6, max_staleness=1, key=KEY)
    result = personax.simulate(algorithm, TASK, fed, schedule, key=KEY)
    with pytest.raises(ValueError, match="has no rounds and therefore no cohort"):
        score(algorithm, fed, result, personax.Scoring("global", clients="cohort"))


def newcomers_setting(algorithm):
    fed, _ = setting(algorithm)
    fed = fed.hold_out([1, 3])
    result = personax.simulate(algorithm, TASK, fed, personax.rounds(2, 2, key=KEY), key=KEY)
    return fed, fed.newcomers, result, np.asarray(result.params["w"])


def test_newcomers_adapt_in_a_few_steps():
    """Fallah: a few gradient steps from the shared model, each on the newcomer's own data."""
    algorithm = personax.per_fedavg(adapt_lr=0.1, lr=0.1, **LOCAL)
    fed, new, result, w = newcomers_setting(algorithm)
    scoring = personax.Scoring(clients="held_out", lr=0.2, batch_size=16)
    curve = personax.adaptation_curve(algorithm, TASK, fed, result, scoring, (0, 1, 4), key=KEY)
    problems = [closed_forms.quadratic(*new.client(i)) for i in range(2)]
    for num, found in curve.items():
        expected = losses(new, [problem.descend(w, 0.2, num) for problem in problems])
        np.testing.assert_allclose(found.metrics["loss"], expected, rtol=1e-10)
    assert curve[4].scoring.num_steps == 4 and "held out" in curve[4].scoring.describe()


def test_newcomers_of_apfl_step_their_own_part_of_the_mixture():
    """APFL (7): v starts at the shared model, the gradient has the mixing weight as a factor, and w is fixed."""
    algorithm = personax.apfl(lr=0.1, mix=0.4, update_mix="never", **LOCAL)
    fed, new, result, w = newcomers_setting(algorithm)
    scoring = personax.Scoring("recomputed", 3, lr=0.2, batch_size=16, clients="held_out")
    models = []
    for i in range(2):
        v, problem = w, closed_forms.quadratic(*new.client(i))
        for _ in range(3):
            v = v - 0.2 * 0.4 * problem.gradient(0.4 * v + 0.6 * w)
        models.append(0.4 * v + 0.6 * w)
    np.testing.assert_allclose(score(algorithm, fed, result, scoring), losses(new, models), rtol=1e-10)


# data


def test_adaptation_by_default_never_sees_what_is_scored():
    """Different test data gives different scores but the same adapted model, with the same training scores."""
    algorithm = personax.per_fedavg(adapt_lr=0.1, lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    other = personax.Federation.from_clients(closed_forms.clients(), test=closed_forms.clients(seed=7))
    for model in ("adapted", "recomputed", "localized"):
        scoring = personax.Scoring(model, 3, 0.2, 4, score_on="both")
        run = lambda fed, scoring=scoring: personax.evaluate(algorithm, TASK, fed, result, scoring, key=KEY).metrics
        np.testing.assert_array_equal(run(fed)["train_loss"], run(other)["train_loss"])
        assert np.all(run(fed)["loss"] != run(other)["loss"])


def test_fallahs_scoring_adapts_on_the_scored_data_and_is_flagged():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    scoring = personax.fallah_scoring(lr=0.2, batch_size=140)
    w = np.asarray(result.params["w"])
    adapted = [closed_forms.quadratic(*fed.client_test(i)).descend(w, 0.2, 1) for i in (0, 2, 3)]
    found = personax.evaluate(algorithm, TASK, fed, result, scoring, key=KEY)
    np.testing.assert_allclose(found.metrics["loss"][[0, 2, 3]], losses(fed.select([0, 2, 3]), adapted), rtol=1e-9)
    assert "adapted on the scored data" in str(found) and scoring.flag
    assert not personax.Scoring().flag and "NOTE" not in personax.Scoring().describe()


def test_training_data_is_scored_under_its_own_name():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    run = lambda on: personax.evaluate(algorithm, TASK, fed, result, personax.Scoring("global", score_on=on), key=KEY)
    both, train, test = run("both"), run("training"), run("test")
    as_test = personax.Federation.from_clients(closed_forms.clients(), test=closed_forms.clients())
    np.testing.assert_allclose(both.metrics["train_loss"], losses(as_test, [result.params["w"]] * 4), rtol=1e-10)
    np.testing.assert_array_equal(both.metrics["train_loss"], train.metrics["train_loss"])
    np.testing.assert_array_equal(both.metrics["loss"], test.metrics["loss"])
    assert set(train.metrics) == {"train_loss"} and set(test.metrics) == {"loss"}
    assert train.num_samples.tolist() == fed.counts.tolist() and test.num_samples.tolist() == [70, 3, 140, 64]


def test_training_scores_need_no_test_data():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    bare = personax.Federation.from_clients(closed_forms.clients())
    on_training = personax.Scoring(lr=0.2, score_on="training")
    evaluated = partial(personax.evaluate, algorithm, TASK, result=result, scoring=on_training, key=KEY)
    np.testing.assert_array_equal(
        evaluated(federation=bare).metrics["train_loss"], evaluated(federation=fed).metrics["train_loss"]
    )


# side effects of evaluation


@pytest.mark.parametrize("name", ["scaffold_1", "apfl", "per_fedavg_hf"])
def test_evaluating_never_moves_the_run(name):
    """The trap of PFLlib: measuring changes the model. A monitored run must end like an unmonitored one."""
    algorithm = SYNCHRONOUS[name](1.0)
    fed, alone = setting(algorithm)
    before = jax.tree.map(np.array, alone.snapshot.state)
    for model in ("adapted", "recomputed"):  # and the observer scores localized models
        score(algorithm, fed, alone, personax.Scoring(model, 2, 0.2, 3, score_on="both"))
    jax.tree.map(np.testing.assert_array_equal, before, alone.snapshot.state)
    watch = personax.observer(algorithm, TASK, fed, personax.Scoring("localized"), key=KEY)
    schedule, first = personax.rounds(4, 2, key=KEY), {"w": jnp.asarray(W)}
    watched = personax.simulate(
        algorithm, TASK, fed, schedule, key=KEY, params=first, monitor=personax.Monitor(every=1, observe=watch)
    )
    jax.tree.map(np.testing.assert_array_equal, alone.snapshot.state, watched.snapshot.state)
    assert len(watched.history) == 3 and all("loss" in one.metrics for one in watched.history)


def test_a_key_for_each_seed_or_one_for_all():
    algorithm, keys = personax.fedavg(lr=0.1, **LOCAL), jax.random.split(KEY, 2)
    fed, result = setting(algorithm, seeds=2)
    evaluated = partial(personax.evaluate, algorithm, TASK, fed, result, personax.Scoring(lr=0.2, batch_size=2))
    each = evaluated(key=keys).metrics["loss"]
    for seed in range(2):
        np.testing.assert_allclose(each[seed], evaluated(key=keys[seed]).metrics["loss"][seed], rtol=1e-12)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: personax.Scoring("mine"), "`model` must be one of 'global', 'localized'"),
        (lambda: personax.Scoring(num_steps=-1), "`num_steps` must be a whole number of at least 0, got -1"),
        (lambda: personax.Scoring("global", adapt_on="test"), "`adapt_on` applies only to adapted models"),
        (lambda: personax.Scoring("personal", clients="held_out"), "have no 'personal' model. Score an"),
        (lambda: personax.Scoring(weighting="size"), "`weighting` must be one of 'uniform', 'samples'"),
    ],
)
def test_invalid_scorings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_zero_steps_leave_a_client_at_its_start():
    """With zero steps, the model is the client's personal state, or the initial state for a newcomer."""
    for algorithm in (personax.apfl(lr=0.1, mix=0.4, **LOCAL), personax.local_only(lr=0.1, **LOCAL)):
        fed, result = setting(algorithm)
        begins = score(algorithm, fed, result, personax.Scoring("recomputed", 0))
        np.testing.assert_allclose(begins, score(algorithm, fed, result, personax.Scoring("personal")), rtol=1e-12)
    algorithm = personax.pfedme(strength=2.0, lr=0.1, prox_lr=0.1, num_prox_steps=50, **LOCAL)
    fed, result = setting(algorithm)
    begins = score(algorithm, fed, result, personax.Scoring("recomputed", 0))
    np.testing.assert_allclose(begins, losses(fed, [result.params["w"]] * 4), rtol=1e-10)


def test_the_batches_of_a_newcomer_follow_its_id():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    scoring = personax.Scoring(num_steps=3, lr=0.2, batch_size=2)
    make = partial(personax.personalize, algorithm, TASK, result.params, scoring=scoring, key=jax.random.key(9))
    models = [make(fed.client(i), id=i)["w"] for i in range(4)]
    np.testing.assert_allclose(score(algorithm, fed, result, scoring), losses(fed, models), rtol=1e-9)


def test_a_run_is_scored_on_the_clients_that_it_trained():
    """Personal states belong to clients, not positions: a reordered federation would score the wrong model."""
    algorithm = personax.apfl(lr=0.1, mix=0.4, **LOCAL)
    fed, result = setting(algorithm)
    for model in ("personal", "recomputed", "localized"):
        with pytest.raises(ValueError, match="Score the run on the federation that it was trained on"):
            score(algorithm, fed.select([3, 2, 1, 0]), result, personax.Scoring(model))
    shared = score(algorithm, fed.select([3, 2, 1, 0]), result, personax.Scoring("global"))
    np.testing.assert_allclose(shared[::-1], score(algorithm, fed, result, personax.Scoring("global")), rtol=1e-12)


def test_labels_of_newcomers_are_checked_before_anything_runs():
    task = personax.classification(personax.mlp((3,), 2))
    good, bad = (np.ones((4, 2)), np.array([0, 1, 0, 1])), (np.ones((4, 2)), np.array([0, 7, 0, 1]))
    fed = personax.Federation.from_clients([good, bad], test=[good, good]).hold_out([1])
    algorithm, schedule = personax.fedavg(lr=0.1, **LOCAL), personax.rounds(1, 1, key=KEY)
    with pytest.raises(ValueError, match=r"client 1: the training labels must be in 0\.\.1, got 7"):
        personax.simulate(algorithm, task, fed, schedule, key=KEY)
    params = task.model.init(KEY, jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.1, got 7"):
        personax.personalize(algorithm, task, params, bad, personax.Scoring(), key=KEY)


def test_errors_explain_what_cannot_be_evaluated():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    with pytest.raises(ValueError, match="has no 'personal' model"):
        score(algorithm, fed, result, personax.Scoring("personal"))
    with pytest.raises(ValueError, match="has no held-out clients"):
        score(algorithm, fed, result, personax.Scoring(clients="held_out"))
    with pytest.raises(ValueError, match="Only 'adapted' or 'recomputed' models"):
        personax.adaptation_curve(algorithm, TASK, fed, result, personax.Scoring("global"), key=KEY)
    with pytest.raises(ValueError, match="got the shared model, unchanged"):
        personax.personalize(algorithm, TASK, result.params, fed.client(0), personax.Scoring("global"), key=KEY)
    bare = personax.Federation.from_clients(closed_forms.clients())
    with pytest.raises(ValueError, match="no test data"):
        score(algorithm, bare, result, personax.Scoring("global"))
    for key, message in ((0, "must be a JAX key"), (jax.random.split(KEY, 2), "one per seed of the run")):
        with pytest.raises(ValueError, match=message):
            personax.evaluate(algorithm, TASK, fed, result, personax.Scoring(), key=key)


# one client from its own state


@pytest.mark.parametrize("model", ["global", "adapted", "localized", "personal", "recomputed", "local"])
def test_a_single_client_is_scored_as_among_others(model):
    algorithm = personax.apfl(lr=0.1, mix=0.4, **LOCAL)
    fed, result = setting(algorithm)
    scoring = personax.Scoring(model, num_steps=2, batch_size=4, score_on="both")
    among = personax.evaluate(algorithm, TASK, fed, result, scoring, key=KEY)
    version = result.snapshot.state.server.version
    for i, id in enumerate(fed.ids[:2]):
        data = personax.Federation.from_clients([fed.client(i)], [fed.client_test(i)], ids=[id])
        start = Start(result.params, result.shared, jax.tree.map(lambda leaf, i=i: leaf[i], result.personal), version)
        alone = partial(evaluate_client, algorithm, TASK, data, start, scoring, key=KEY)
        found = alone(update=int(result.snapshot.visits[i]))
        assert set(found) == set(among.metrics) == {"loss", "train_loss"}
        for metric, number in found.items():
            np.testing.assert_allclose(number, among.metrics[metric][i], rtol=1e-12)
        if model == "localized":
            assert alone(update=77) != found


def test_a_client_alone_is_one_client_with_a_model_that_it_keeps():
    algorithm = personax.fedavg(lr=0.1, **LOCAL)
    fed, result = setting(algorithm)
    start = Start(result.params, (), (), 0)
    score_one = partial(evaluate_client, algorithm, TASK, update=0, key=KEY)
    with pytest.raises(ValueError, match=r"must have one client, got 4\. Score several with `evaluate`"):
        score_one(fed, start, personax.Scoring("global"))
    data = personax.Federation.from_clients([fed.client(0)], [fed.client_test(0)])
    with pytest.raises(ValueError, match="has no 'personal' model"):
        score_one(data, start, personax.Scoring("personal"))
