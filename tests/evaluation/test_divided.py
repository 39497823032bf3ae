"""Scores of divided models: their descriptions, and no scores of untrained parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.objectives.divided import Divided, split
from personax.sharing import join

rng = np.random.default_rng(0)
KEY = jax.random.key(0)


def data(position):
    return rng.normal(size=(12 + position, 4)), rng.integers(0, 3, 12 + position)


FED = px.Federation.from_clients([data(i) for i in range(6)], test=[data(i) for i in range(6)]).hold_out(2, key=KEY)
TASK = px.classification(px.mlp((5,), 3))
HEAD, STEPS = px.Sharing(personal="dense_1"), px.Local(0.1, num_steps=3, batch_size=4)
ALGORITHM = px.Algorithm(px.Erm(), STEPS, px.synchronous(), HEAD)
RESULT = px.simulate(ALGORITHM, TASK, FED, px.rounds(4, 4, 2, key=KEY), key=KEY)


def evaluate(scoring, algorithm=ALGORITHM, result=RESULT):
    return px.evaluate(algorithm, TASK, FED, result, scoring, key=KEY)


def models(scoring, clients=(0, 1, 2, 3), algorithm=ALGORITHM, result=RESULT):
    return px.client_models(algorithm, TASK, FED, result, scoring, clients, key=KEY)


def assert_close(a, b):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9), a, b)


def all_moved(found, start):
    """True if no client has the layer that all of them started with."""
    return np.all(np.any(np.asarray(found["kernel"]) != np.asarray(start["kernel"]), axis=(1, 2)))


def test_a_client_is_scored_by_the_shared_part_with_its_own():
    found = models(px.Scoring("personal"))
    part = split(RESULT.personal)[0]
    assert_close(found, jax.vmap(lambda own: join(own, RESULT.params))(part))
    scores = evaluate(px.Scoring("personal"))
    expected = [
        TASK.metrics(
            jax.tree.map(lambda leaf, i=i: leaf[i], found),
            px.Batch(*map(jnp.asarray, FED.client_test(i)), jnp.ones(len(FED.client_test(i)[1])), KEY),
        )["accuracy"]
        for i in range(4)
    ]
    np.testing.assert_allclose(scores.of("accuracy"), expected, rtol=1e-6)
    assert "the shared part with the client's own `dense_1` (at its initial value for a client that" in scores.words


def test_no_steps_of_adaptation_leave_the_clients_own_model():
    assert_close(models(px.Scoring("adapted", num_steps=0)), models(px.Scoring("personal")))


def test_steps_move_what_tunes_names_and_nothing_else():
    before, tuned = models(px.Scoring("personal")), models(px.Scoring("adapted", lr=0.3, tunes="dense_1"))
    assert_close(tuned["dense_0"], before["dense_0"])
    assert np.any(tuned["dense_1"]["kernel"] != before["dense_1"]["kernel"])
    whole = models(px.Scoring("adapted", lr=0.3))
    assert np.any(whole["dense_0"]["kernel"] != before["dense_0"]["kernel"])


def test_the_next_visit_is_localized_with_the_own_part():
    local, again = (
        models(px.Scoring("localized")),
        px.simulate(ALGORITHM, TASK, FED, px.rounds(4, 4, 2, key=KEY), key=KEY),
    )
    before = models(px.Scoring("personal"), result=again)
    assert np.all(np.any(local["dense_1"]["kernel"] != before["dense_1"]["kernel"], axis=(1, 2)))


def test_the_shared_part_alone_is_no_model():
    with pytest.raises(ValueError, match="dense_1 is personal, so the shared part alone is not a complete model"):
        evaluate(px.Scoring("global"))


@pytest.mark.parametrize("scoring", [px.Scoring(clients="held_out"), px.Scoring("recomputed", 0, clients="held_out")])
def test_newcomers_are_never_scored_with_an_untrained_part(scoring):
    with pytest.raises(ValueError, match="A newcomer's dense_1 is at its initial value and must be trained first"):
        evaluate(scoring)


def test_newcomers_train_their_part_with_the_shared_one_fixed():
    scoring = px.Scoring("recomputed", num_steps=3, lr=0.2, batch_size=4, clients="held_out")
    found = models(scoring, clients=(0, 1))
    start = RESULT.params
    for i in range(2):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], found)
        assert_close(own["dense_0"], start["dense_0"])
        assert np.any(own["dense_1"]["kernel"] != start["dense_1"]["kernel"])
        alone = px.personalize(
            ALGORITHM, TASK, start, FED.newcomers.client(i), scoring, id=int(FED.newcomers.ids[i]), key=KEY
        )
        assert_close(alone, own)
    assert (
        "the newcomer's `dense_1`, which starts at the common initial value, after that is trained in 3"
        in evaluate(scoring).words
    )


def test_the_adapted_model_of_meta_follows_the_training_of_the_part():
    algorithm = px.Algorithm(px.Meta(0.1), STEPS, px.synchronous(), HEAD)
    scoring = px.Scoring("recomputed", num_steps=2, lr=0.2, batch_size=4, clients="held_out")
    found = models(scoring, clients=(0,), algorithm=algorithm)
    assert np.any(found["dense_0"]["kernel"][0] != RESULT.params["dense_0"]["kernel"])


def test_the_words_of_a_model_that_the_objective_computes():
    """A client's own score is of theta for a Moreau envelope, and of its iterate for Meta."""
    of = lambda objective: Divided(objective, HEAD)
    moreau, meta = of(px.Moreau(1.0, 0.1, 2)), of(px.Meta(0.1))
    theta = "the personal model that the client computed at its last step, from the shared part with the client's own"
    assert px.Scoring("personal").describe(moreau).startswith(theta)
    assert px.Scoring("personal").describe(meta).startswith("the shared part with the client's own `dense_1`")
    then = "with the shared part fixed, and the objective's personal model is then computed from there"
    assert all(then in px.Scoring("recomputed").describe(divided) for divided in (moreau, meta))
    assert then not in px.Scoring("recomputed").describe(of(px.Erm()))


BABU = px.fedbabu(head="dense_1", lr=0.1, num_steps=3, batch_size=4)
OF_BABU = {"algorithm": BABU, "result": px.simulate(BABU, TASK, FED, px.rounds(4, 4, 2, key=KEY), key=KEY)}


def test_a_frozen_part_is_described_and_changes_only_if_a_scoring_tunes_it():
    shared = OF_BABU["result"].params
    fixed = px.Algorithm(BABU.objective, BABU.local, BABU.server, px.Sharing(frozen="dense_1"))
    assert "`dense_1` at its initial value;" in evaluate(px.Scoring("global"), **OF_BABU).words
    body = models(px.Scoring("adapted", lr=0.3), **{**OF_BABU, "algorithm": fixed})
    assert_close(body["dense_1"]["kernel"], jnp.stack([shared["dense_1"]["kernel"]] * 4))
    assert all_moved(body["dense_0"], shared["dense_0"])
    head = models(px.Scoring("adapted", lr=0.3, tunes="dense_1"), **OF_BABU)
    assert_close(head["dense_0"]["kernel"], jnp.stack([shared["dense_0"]["kernel"]] * 4))
    assert all_moved(head["dense_1"], shared["dense_1"])


def test_fedbabu_is_scored_after_tuning_head_and_body():
    scoring = px.Scoring(**BABU.default_scoring())
    assert (scoring.model, scoring.num_steps, scoring.lr) == ("adapted", 3, 0.1)
    found = models(scoring, **OF_BABU)
    assert_close(found, models(px.Scoring("adapted", 3, 0.1, tunes="*"), **OF_BABU))
    shared = OF_BABU["result"].params
    assert all_moved(found["dense_1"], shared["dense_1"])
    words = evaluate(scoring, **OF_BABU).words
    assert "after 3 gradient steps of all parameters of size 0.1" in words
    assert "; before these steps, `dense_1` at its initial value;" in words


@pytest.mark.parametrize("scoring", [px.Scoring("global"), px.Scoring("adapted", 0), px.Scoring("localized")])
def test_newcomers_are_never_scored_with_a_tuned_part_at_its_start(scoring):
    with pytest.raises(ValueError, match="A newcomer's dense_1 is at its initial value and must be trained first"):
        evaluate(dataclasses.replace(scoring, clients="held_out"), **OF_BABU)
    with pytest.raises(ValueError, match="'recomputed' model has dense_1 at its initial value"):
        evaluate(px.Scoring("recomputed"), **OF_BABU)


def test_tunes_names_parameters_of_models_that_adapt():
    with pytest.raises(ValueError, match="`tunes` has 'head', which matches no parameter"):
        evaluate(px.Scoring("adapted", tunes="head"))
    with pytest.raises(ValueError, match="`tunes` applies only to 'adapted' models"):
        px.Scoring("personal", tunes="dense_1")


def test_anil_adapts_the_head_alone():
    algorithm = px.anil(head="dense_1", adapt_lr=0.1, lr=0.1, num_steps=2, batch_size=4)
    scoring = px.Scoring(**algorithm.objective.default_scoring())
    result = px.simulate(algorithm, TASK, FED, px.rounds(4, 2, 2, key=KEY), key=KEY)
    found = models(scoring, algorithm=algorithm, result=result)
    assert_close(found["dense_0"]["kernel"], jnp.stack([result.params["dense_0"]["kernel"]] * 4))
    with pytest.raises(ValueError, match="`adapts` has 'head', which matches no parameter"):
        px.simulate(
            px.anil(head="head", adapt_lr=0.1, lr=0.1, num_steps=2), TASK, FED, px.rounds(4, 2, 2, key=KEY), key=KEY
        )
