"""Results per class are counts of the predictions of the models that `evaluate` scores."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.evaluation.classes import count_classes

KEY = jax.random.key(0)
MODEL = personax.logistic_regression(3)
TASK = personax.classification(MODEL)
SIZES = (70, 3, 140, 64)  # of test data: below and above the number scored at once


def setting(seeds=None):
    """A short run of clients that have two of three classes each."""
    rng = np.random.default_rng(5)
    data = lambda sizes: [
        (rng.normal(size=(num, 4)), np.where(rng.random(num) < 0.3, i % 3, (i + 1) % 3).astype(np.int32))
        for i, num in enumerate(sizes)
    ]
    fed = personax.Federation.from_clients(data((20, 30, 25, 10)), test=data(SIZES))
    key = KEY if seeds is None else jax.random.split(KEY, seeds)
    algorithm = personax.fedavg(lr=0.3, num_steps=3, batch_size=8)
    return algorithm, fed, personax.simulate(algorithm, TASK, fed, personax.rounds(4, 3, key=KEY), key=key)


def predictions(fed, params):
    """Labels and predictions of all test samples."""
    tests = [fed.client_test(i) for i in range(fed.num_clients)]
    x, y = (np.concatenate(part) for part in zip(*tests, strict=True))
    return y, np.asarray(MODEL.apply(params, jnp.asarray(x))).argmax(axis=-1)


def test_counts_are_those_of_the_predictions():
    algorithm, fed, result = setting()
    found = count_classes(algorithm, TASK, fed, result, personax.Scoring("global"), key=KEY)
    y, predicted = predictions(fed, result.params)
    for c in range(3):
        assert found.actual[c] == np.sum(y == c) and found.predicted[c] == np.sum(predicted == c)
        assert found.hits[c] == np.sum((y == c) & (predicted == c))
    np.testing.assert_allclose(found.recall, [np.mean(predicted[y == c] == c) for c in range(3)])


def test_the_recalls_average_to_the_accuracy_by_samples():
    algorithm, fed, result = setting(seeds=2)
    scoring = personax.Scoring("adapted", num_steps=2, lr=0.1, weighting="samples")
    found = count_classes(algorithm, TASK, fed, result, scoring, key=KEY)
    score = personax.evaluate(algorithm, TASK, fed, result, scoring, key=KEY).mean("accuracy")
    assert found.hits.shape == (2, 3)
    np.testing.assert_allclose(found.hits.sum(axis=1) / found.actual.sum(axis=1), score, rtol=1e-10)
    np.testing.assert_array_equal(found.predicted.sum(axis=1), [sum(SIZES)] * 2)


def test_a_class_without_samples_or_predictions_has_no_share():
    always_first = lambda params, x, key=None: jnp.zeros((len(x), 3)).at[:, 0].set(params["scale"])
    model = personax.Model(lambda key, x: {"scale": jnp.ones(())}, always_first)
    data = [(np.ones((4, 2)), np.array([0, 2, 2, 0], np.int32))] * 2
    found = counted(model, data)
    np.testing.assert_array_equal(found.recall, [1, np.nan, 0])
    np.testing.assert_array_equal(found.precision, [0.5, np.nan, np.nan])


def counted(model, data):
    """The counts of an untrained model."""
    fed = personax.Federation.from_clients(data, test=data)
    task, algorithm = personax.classification(model), personax.fedavg(lr=1e-9, num_steps=1, batch_size=2)
    result = personax.simulate(algorithm, task, fed, personax.rounds(2, 1, key=KEY), key=KEY)
    return count_classes(algorithm, task, fed, result, personax.Scoring("global"), key=KEY)


def test_a_sequence_counts_each_of_its_labels():
    apply = lambda params, x, key=None: jax.nn.one_hot(x, 3) * params["scale"]
    model = personax.Model(lambda key, x: {"scale": jnp.ones(())}, apply)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (6, 5)).astype(np.int32)
    y = np.where(rng.random((6, 5)) < 0.5, x, (x + 1) % 3).astype(np.int32)
    found = counted(model, [(x, y)] * 2)
    assert found.actual.tolist() == [2 * np.sum(y == c) for c in range(3)]
    assert found.hits.tolist() == [2 * np.sum((y == c) & (x == c)) for c in range(3)]


def test_scores_without_classes_or_test_data_are_errors():
    algorithm, fed, result = setting()
    count = partial(count_classes, algorithm, TASK, key=KEY)
    with pytest.raises(ValueError, match="got training data and 3 classes"):
        count(fed, result, personax.Scoring("global", score_on="training"))
    targets = personax.Federation.from_clients([(np.ones((4, 4)), np.full(4, 0.5))] * 4)
    with pytest.raises(ValueError, match="got test data and 0 classes"):
        count(targets, result, personax.Scoring("global"))
