"""Means, spreads, intervals, pairs: each against its formula."""

import numpy as np
import pytest

from personax.evaluation.scores import Comparison, Evaluation, Interval, best_evaluations, interval, is_share, show
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
    np.testing.assert_allclose((found.low, found.high), (means.mean() - half, means.mean() + half), rtol=1e-12)
    assert found.mean == means.mean()
    assert found.num_seeds == 5


def test_an_interval_has_its_nominal_coverage():
    draws = np.random.default_rng(1).normal(3.0, 2.0, size=(4000, 5))
    found = [interval(row) for row in draws]
    covered = np.mean([not (one.is_above(3.0) or one.is_below(3.0)) for one in found])
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 4000)


def test_one_seed_has_no_interval():
    found = evaluation(ACCURACY[0]).interval("accuracy")
    assert found.low is None and found.high is None and show(found, "loss") == f"{ACCURACY[0].mean():.4g}"


def test_clients_are_averaged_equally_or_by_samples():
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
    """If seeds differ much and algorithms little, the paired interval is narrow although the means' are wide."""
    shift = np.arange(5)[:, None] / 10
    better, worse = evaluation(ACCURACY / 9 + shift), evaluation(ACCURACY / 9 + shift - 0.01)
    found = better.difference(worse, "accuracy")
    np.testing.assert_allclose((found.mean, found.low, found.high), (0.01, 0.01, 0.01), rtol=1e-9)
    assert better.interval("accuracy").high - better.interval("accuracy").low > 0.1


def test_better_off_is_strict_and_reversed_for_losses():
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


def test_the_best_evaluation_of_each_seed():
    means = np.array([[0.3, 0.1], [0.8, 0.2], [0.5, 0.6]])
    assert best_evaluations(means, "accuracy").tolist() == [1, 2]
    assert best_evaluations(means, "loss").tolist() == [0, 0]
    means[1, 0] = np.nan
    assert best_evaluations(means, "accuracy").tolist() == [2, 2] and best_evaluations(means, "loss")[0] == 0


def test_the_ends_of_an_interval_may_be_zero():
    """A bound of exactly 0 is a bound."""
    found = Interval(0.5, 0.0, 1.0, 3)
    assert not found.is_above(0.0) and found.is_above(-0.1) and not found.is_below(1.0) and found.is_below(1.1)
    assert show(found, "loss") == "0.5 ± 0.5" and show(Interval(-0.5, -1.0, 0.0, 3), "accuracy") == "-50.0 ± 50.0"
    unknown = Interval(0.5, None, None, 1)
    assert not unknown.is_above(0.0) and not unknown.is_below(1.0) and unknown.half is None


def test_a_comparison_names_its_baselines():
    found = {"alone": evaluation(ACCURACY, model="personal"), "FedAvg": evaluation(ACCURACY - 0.1, model="global")}
    for wrong in ({"local": "Local", "shared": "FedAvg"}, {"local": "alone", "shared": "Local"}):
        with pytest.raises(ValueError, match=r"Unknown evaluation 'Local' in `.*`\. The evaluations are alone, FedAvg"):
            Comparison(found, **wrong)
    with pytest.raises(
        ValueError, match="`local` must name a score of the 'personal' model, but 'FedAvg' scores 'global'"
    ):
        Comparison(found, local="FedAvg", shared="FedAvg")
    with pytest.raises(ValueError, match=r"Unknown metric 'acc'\. The metrics are accuracy"):
        Comparison(found, local="alone", shared="FedAvg").table("acc")


def test_scores_are_compared_with_baselines_of_the_same_clients():
    found = {
        "alone": evaluation(ACCURACY, model="personal"),
        "newcomers": evaluation(ACCURACY[:, :9], model="adapted", clients="held_out"),
        "loss": evaluation(ACCURACY, name="loss", model="global"),
    }
    alone, newcomers = Comparison(found, local="alone", shared=None).rows()
    assert alone.over_local.mean == 0 and alone.over_global is None and alone.better_than_global is None
    assert newcomers.over_local is None and newcomers.better_than_local is None
    (row,) = Comparison(found, local="alone", shared="loss", algorithms={"loss": "FedAvg"}).rows("loss")
    assert (row.algorithm, row.score, row.over_local) == ("FedAvg", "loss", None)


def test_a_comparison_describes_what_each_row_measured():
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
    assert "Fallah (!)" in table and "FedAvg: the shared model, unchanged" in table
    assert f"{100 * ACCURACY.mean():.1f} ± " in table


@pytest.mark.parametrize(("num_seeds", "notes"), [(1, 0), (2, 1), (3, 0)])
def test_an_interval_of_two_seeds_comes_with_a_note(num_seeds, notes):
    found = {
        "a": evaluation(ACCURACY[:num_seeds], model="global"),
        "b": evaluation(ACCURACY[:num_seeds], model="global"),
    }
    table = Comparison(found, local=None, shared="a").table()
    assert table.count("NOTE: two seeds are too few for an interval") == notes
    assert ("± half of the 95 % interval over seeds" in table) == (num_seeds > 1)
    assert "a, b: the shared model, unchanged" in table


def test_columns_without_a_baseline_are_not_explained():
    alone = Comparison({"a": evaluation(model="global")}, local=None, shared=None).table()
    assert "worst, best: mean over the worst and the best tenth" in alone and "> local" not in alone.splitlines()[-2]


def test_an_unknown_metric_is_named():
    with pytest.raises(ValueError, match=r"Unknown metric 'acc'\. The metrics are accuracy"):
        evaluation().mean("acc")


@pytest.mark.parametrize(
    ("metric", "shown"),
    [("accuracy", "12.3"), ("train_accuracy", "12.3"), ("loss", "0.1234"), ("absolute_error", "0.1234")],
)
def test_shares_are_shown_in_percent(metric, shown):
    assert show(0.12341, metric) == shown
    assert is_share(metric) == (shown == "12.3")
