"""Means, spreads, intervals, pairs: each against its formula."""

import numpy as np
import pytest

from personax.evaluation.scores import Comparison, Evaluation, Trajectory, interval, is_share, show
from personax.evaluation.scoring import Scoring

ACCURACY = np.random.default_rng(0).uniform(0.2, 1.0, size=(5, 23))
T_OF_4 = 2.7764451051977987  # the 97.5 % quantile of Student's t with 4 degrees of freedom, from a table


def evaluation(numbers=ACCURACY, name="accuracy", num_events=7, counts=None, **scoring):
    numbers = np.asarray(numbers)
    clients = np.broadcast_to(np.arange(numbers.shape[-1]), numbers.shape)
    counts = np.arange(1, numbers.shape[-1] + 1) if counts is None else np.asarray(counts)
    events = np.full(numbers.shape[:-1], num_events)
    counts = np.broadcast_to(counts, numbers.shape)
    return Evaluation(Scoring(**scoring), {name: numbers}, clients, counts, 2 * counts[..., ::-1], events, 0.0)


def test_the_interval_is_students():
    found = evaluation().interval("accuracy")
    means = ACCURACY.mean(axis=1)
    half = T_OF_4 * np.sqrt(np.sum((means - means.mean()) ** 2) / 4 / 5)
    np.testing.assert_allclose(found[:3], (means.mean(), means.mean() - half, means.mean() + half), rtol=1e-12)
    assert found.num_seeds == 5


def test_an_interval_covers_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(1).normal(3.0, 2.0, size=(4000, 5))
    found = [interval(row) for row in draws]
    covered = np.mean([low <= 3.0 <= high for _, low, high, _ in found])
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 4000)


def test_one_seed_has_no_interval():
    found = evaluation(ACCURACY[0]).interval("accuracy")
    assert np.isnan(found.low) and np.isnan(found.high) and show(found, "loss") == f"{ACCURACY[0].mean():.4g}"


def test_clients_count_the_same_or_by_their_samples():
    counts = np.arange(1, 24)
    uniform, weighted = evaluation(), evaluation(weighting="samples")
    np.testing.assert_allclose(uniform.mean("accuracy"), ACCURACY.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(uniform.std("accuracy"), ACCURACY.std(axis=1), rtol=1e-12)
    by_sample = np.repeat(ACCURACY, counts, axis=1)
    np.testing.assert_allclose(weighted.mean("accuracy"), by_sample.mean(axis=1), rtol=1e-12)
    np.testing.assert_allclose(weighted.std("accuracy"), by_sample.std(axis=1), rtol=1e-12)


def test_deciles_know_which_end_is_worse():
    ascending = np.sort(ACCURACY, axis=1)  # 23 clients: a tenth, rounded up, is 3
    accuracy, loss = evaluation(), evaluation(name="loss")
    np.testing.assert_allclose(accuracy.worst_decile("accuracy"), ascending[:, :3].mean(axis=1))
    np.testing.assert_allclose(accuracy.best_decile("accuracy"), ascending[:, -3:].mean(axis=1))
    np.testing.assert_allclose(loss.worst_decile("loss"), ascending[:, -3:].mean(axis=1))
    np.testing.assert_allclose(evaluation(name="train_loss").best_decile("train_loss"), ascending[:, :3].mean(axis=1))


def test_differences_are_paired_by_seed():
    """Seeds that differ much, algorithms that differ little: the paired interval is narrow, the means' is not."""
    shift = np.arange(5)[:, None] / 10
    better, worse = evaluation(ACCURACY / 9 + shift), evaluation(ACCURACY / 9 + shift - 0.01)
    found = better.difference(worse, "accuracy")
    np.testing.assert_allclose(found[:3], (0.01, 0.01, 0.01), rtol=1e-9)
    assert better.interval("accuracy").high - better.interval("accuracy").low > 0.1


def test_better_off_is_strict_and_knows_losses():
    mine, other = np.array([[0.5, 0.7, 0.9, 0.4]]), np.array([[0.5, 0.6, 0.8, 0.6]])
    assert evaluation(mine).share_better(evaluation(other), "accuracy").tolist() == [0.5]
    assert evaluation(mine, "loss").share_better(evaluation(other, "loss"), "loss").tolist() == [0.25]


def test_training_metrics_count_by_training_samples():
    found = evaluation(name="train_accuracy", weighting="samples")
    by_sample = np.repeat(ACCURACY, 2 * np.arange(1, 24)[::-1], axis=1)
    np.testing.assert_allclose(found.mean("train_accuracy"), by_sample.mean(axis=1), rtol=1e-12)


def test_only_the_same_seeds_and_clients_are_compared():
    with pytest.raises(ValueError, match=r"same seeds can be paired, got \(5,\) and \(2,\)"):
        evaluation().difference(evaluation(ACCURACY[:2]), "accuracy")
    with pytest.raises(ValueError, match="same clients can be paired"):
        evaluation().share_better(evaluation(ACCURACY[:, :9]), "accuracy")


def test_the_best_round_stands_beside_the_last():
    rounds = [
        np.array([[0.2, 0.4], [0.1, 0.1]]),
        np.array([[0.8, 0.8], [0.2, 0.2]]),
        np.array([[0.5, 0.5], [0.6, 0.6]]),
    ]
    run = Trajectory([evaluation(numbers, num_events=10 * i) for i, numbers in enumerate(rounds)])
    best, events = run.best("accuracy")
    assert run.last.mean("accuracy").tolist() == [0.5, 0.6]
    np.testing.assert_allclose(best.mean, (0.8 + 0.6) / 2)
    assert events.tolist() == [10, 20] and run.means("accuracy").shape == (3, 2)
    lowest, events = Trajectory([evaluation(r, "loss", 10 * i) for i, r in enumerate(rounds)]).best("loss")
    np.testing.assert_allclose(lowest.mean, (0.3 + 0.1) / 2)
    assert events.tolist() == [0, 0]


def test_a_comparison_always_has_local_training_and_the_global_model():
    found = {"alone": evaluation(ACCURACY, model="personal"), "FedAvg": evaluation(ACCURACY - 0.1, model="global")}
    for wrong in ({"local": "Local", "shared": "FedAvg"}, {"local": "alone", "shared": "shared"}):
        with pytest.raises(ValueError, match=r"always has (local training|the global model) in it, got alone, FedAvg"):
            Comparison(found, **wrong)
    with pytest.raises(ValueError, match="got 'global' of FedAvg and 'global' of FedAvg"):
        Comparison(found, local="FedAvg", shared="FedAvg")


def test_a_comparison_says_what_each_row_measured():
    found = {
        "alone": evaluation(ACCURACY, model="personal"),
        "FedAvg": evaluation(ACCURACY - 0.1, model="global"),
        "Fallah": evaluation(ACCURACY + 0.1, model="adapted", adapt_on="test"),
    }
    comparison = Comparison(found, local="alone", shared="FedAvg")
    last = comparison.rows()[-1]
    np.testing.assert_allclose((last.over_local.mean, last.over_global.mean), (0.1, 0.2), rtol=1e-9)
    assert (last.better_than_local, last.better_than_global) == (1.0, 1.0) and last.flag
    table = comparison.table()
    assert table.count("! adapted on the data that is scored") == 1 and "FedAvg: the shared model as it is" in table
    assert f"{100 * ACCURACY.mean():.1f} ± " in table


def test_a_metric_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no metric 'acc'; there are accuracy"):
        evaluation().mean("acc")


@pytest.mark.parametrize(
    ("metric", "shown"),
    [("accuracy", "12.3"), ("train_accuracy", "12.3"), ("loss", "0.1234"), ("absolute_error", "0.1234")],
)
def test_shares_are_shown_in_percent(metric, shown):
    assert show(0.12341, metric) == shown
    assert is_share(metric) == (shown == "12.3")
