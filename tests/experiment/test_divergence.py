"""Divergence costs one row, which reports when and where; everything else is as if it had not happened."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import personax as px
from personax.evaluation.scores import Comparison, Evaluation
from personax.evaluation.scoring import Scoring
from personax.experiment.build import make_training, resolve
from personax.experiment.checkpoint import read_model
from personax.experiment.config import load_run, parse
from personax.experiment.divergence import warnings
from personax.experiment.newcomers import choose, personalize_newcomer
from personax.experiment.records import read_results
from personax.experiment.runs import execute, start
from personax.report import write_report
from personax.simulation.results import NonFiniteUpdate
from tests.experiment.test_config import refused
from tests.experiment.test_runs import Stop, json_of, lines_of, timeless
from tests.report.fake_runs import edit_results
from tests.report.test_report import figures_of, rows_of, verdicts_of, words_of

pytestmark = pytest.mark.xdist_group("small runs")

NUM_CLIENTS, NUM_ROUNDS, POISONED = 8, 4, 3
NAMES = ["Plain", "Clipped", "Local"]
ADAPTED = {"model": "adapted", "num_steps": 1, "lr": 1e-35, "batch_size": 4}


def visits(seed):
    """The client of each round."""
    return px.rounds(NUM_CLIENTS, NUM_ROUNDS, 1, key=jax.random.key(seed)).client.tolist()


LATE = next(seed for seed in range(100) if POISONED in visits(seed) and visits(seed).index(POISONED) == 2)
HEALTHY = [seed for seed in range(100) if POISONED not in visits(seed)][:3]
SEEDS = [HEALTHY[0], LATE, HEALTHY[1]]  # the second diverges in round 3


def write_data(path):
    """Targets of two classes; those of one client are large enough that 15 local steps overflow, and 1 does not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20 * NUM_CLIENTS, 2))
    client = np.repeat(np.arange(NUM_CLIENTS), 20)
    y = x @ [1.0, -1.0] + client / 8
    np.savez(path, x=np.where(client[:, None] == POISONED, 1e15 * x, x), y=y, client=client)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def config_of(data, seeds=SEEDS, only=(), **sections):
    local = {"lr": 0.1, "num_steps": 15, "batch_size": 4}
    algorithms = {
        "Plain": {"recipe": "fedavg", **local, "scores": {"Plain": {"model": "global"}}},
        "Clipped": {"recipe": "fedavg", "clip_norm": 1.0, **local, "scores": {"Clipped": ADAPTED}},
        "Local": {"recipe": "local_only", "clip_norm": 1.0, **local},
    }
    table = {
        "seeds": seeds,
        "data": {"kind": "file", "path": str(data), "label": "y"},
        "split": {"num_held_out": 0},
        "model": {"kind": "logistic_regression"},
        "schedule": {"num_rounds": NUM_ROUNDS, "cohort_size": 1},
        "evaluation": {"every": 1},
        "algorithms": {name: algorithms[name] for name in only or algorithms},
    }
    return resolve(parse({**table, **sections}), baselines=False)


def run(root, config, **options):
    folder = start(config, root)
    return folder, execute(folder, **options)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run in which one of three seeds of one algorithm diverges."""
    return run(tmp_path_factory.mktemp("partly") / "run", config_of(data))[0]


@pytest.fixture(scope="module")
def gone(data, tmp_path_factory):
    """A run in which all seeds of one algorithm diverge at different times."""
    seeds = [seed for seed in range(100) if POISONED in visits(seed)[:3]][:2]
    return run(tmp_path_factory.mktemp("gone") / "run", config_of(data, seeds))[0]


def text_of(item):
    """Plain data as text, in which NaN equals NaN."""
    return json.dumps(timeless(item), sort_keys=True)


def states_of(folder, name):
    newest = max(folder.checkpoints(name).glob("*.safetensors"))
    return newest.name, newest.read_bytes()


def assert_same_end(folder, whole):
    assert text_of(json_of(folder.results)) == text_of(json_of(whole.results))
    assert text_of(lines_of(folder.metrics)) == text_of(lines_of(whole.metrics))
    assert pq.read_table(folder.clients).equals(pq.read_table(whole.clients))
    for name in NAMES:
        assert states_of(folder, name) == states_of(whole, name)
    assert {path.name for path in folder.models.iterdir()} == {path.name for path in whole.models.iterdir()}


def plain_of(folder):
    return read_results(folder.root).algorithms[0]


def test_a_divergence_is_a_record_with_seed_round_event_client_and_stage(whole):
    (found,) = plain_of(whole).divergences
    assert dataclasses.asdict(found) == {
        "seed": LATE,
        "round": 3,
        "event": 2,
        "client": f"client {POISONED}",
        "stage": "local steps",
    }
    assert [algorithm.divergences for algorithm in read_results(whole.root).algorithms[1:]] == [[], []]


def test_the_curve_of_a_seed_ends_where_it_diverged(whole):
    for one in plain_of(whole).scores[0].evaluations:
        for numbers in (one.mean, one.std, one.worst_decile, one.best_decile):
            assert np.isfinite(numbers["error"]).tolist() == [True, one.round < 3, True]
    lines = [line for line in lines_of(whole.metrics) if line["algorithm"] == "Plain"]
    assert [np.isnan(line["mean"]["error"]).tolist() for line in lines] == [[False] * 3] * 3 + [[0, 1, 0]] * 2


def test_the_other_seeds_are_bit_for_bit_as_if_none_had_diverged(data, whole, tmp_path):
    other, record = run(tmp_path / "run", config_of(data, [HEALTHY[0], HEALTHY[2], HEALTHY[1]]))
    assert [algorithm.divergences for algorithm in record.algorithms] == [[], [], []]
    for mine, theirs in zip(read_results(whole.root).algorithms, record.algorithms, strict=True):
        for one, two in zip(mine.scores[0].evaluations, theirs.scores[0].evaluations, strict=True):
            for name in ("mean", "std", "worst_decile", "best_decile"):
                for metric, numbers in getattr(one, name).items():
                    theirs_of_metric = getattr(two, name)[metric]
                    assert [numbers[0], numbers[2]] == [theirs_of_metric[0], theirs_of_metric[2]]
    rows = lambda folder: [row for row in pq.read_table(folder.clients).to_pylist() if row["seed"] in HEALTHY[:2]]
    assert len(rows(whole)) == 3 * 2 * NUM_CLIENTS and rows(whole) == rows(other)


def test_a_row_is_of_the_seeds_that_are_left_and_is_not_ranked(whole):
    record = read_results(whole.root)
    rows = [row for row in pq.read_table(whole.clients).to_pylist() if row["seed"] != LATE]
    error = {name: np.array([row["error"] for row in rows if row["score"] == name]).reshape(2, -1) for name in NAMES}
    row = next(row for row in record.table if row.score == "Plain" and row.metric == "error")
    assert (row.mean.num_seeds, row.num_lost, row.seeds_left, row.is_ranked) == (2, 1, "2 of 3 seeds", False)
    assert row.mean.mean == pytest.approx(error["Plain"].mean(axis=1).mean())
    assert row.over_local.num_seeds == 2
    assert row.over_local.mean == pytest.approx((error["Plain"] - error["Local"]).mean())
    assert row.better_than_local == pytest.approx((error["Plain"] < error["Local"]).mean())
    assert row.cells()[""] == "Plain (2 of 3 seeds)"
    clipped = next(row for row in record.table if row.score == "Clipped" and row.metric == "error")
    assert (clipped.mean.num_seeds, clipped.over_local.num_seeds, clipped.over_global.num_seeds) == (3, 3, 2)
    assert clipped.is_ranked and clipped.seeds_left == ""


def test_the_best_evaluation_is_of_the_seeds_that_are_left(whole, gone):
    score = plain_of(whole).scores[0]
    assert score.best["error"].mean.num_seeds == len(score.best["error"].rounds) == 2
    means = np.array([one.mean["error"] for one in score.evaluations])[:, [0, 2]]
    assert score.best["error"].mean.mean == pytest.approx(means.min(axis=0).mean())
    assert plain_of(gone).scores[0].best == {}


def test_clients_of_a_seed_that_diverged_have_rows_without_numbers(whole):
    rows = pq.read_table(whole.clients).to_pylist()
    assert len(rows) == 3 * 3 * NUM_CLIENTS
    for row in rows:
        assert (row["error"] is None) == (row["score"] == "Plain" and row["seed"] == LATE)
        assert row["num_samples"] > 0 and row["error"] == row["error"]


def test_an_algorithm_stops_when_all_its_seeds_have_diverged(gone):
    record = read_results(gone.root)
    plain, clipped, _ = record.algorithms
    last = max(one.round for one in plain.divergences)
    assert last < NUM_ROUNDS and plain.num_rounds == plain.num_events == last and clipped.num_rounds == NUM_ROUNDS
    evaluations = plain.scores[0].evaluations
    assert [one.round for one in evaluations] == list(range(last))
    assert any(np.isfinite(number) for number in evaluations[-1].mean["error"])
    row = next(row for row in record.table if row.score == "Plain" and row.metric == "error")
    assert (row.mean.num_seeds, row.num_lost, row.over_local) == (0, 2, None) and row.cells()["error"] == "not finite"
    clipped_row = next(row for row in record.table if row.score == "Clipped" and row.metric == "error")
    assert clipped_row.over_global is None and clipped_row.over_local.num_seeds == 2
    assert plain.bytes_up == last * plain.bytes_up / plain.num_events > 0
    assert not gone.model("Plain").exists() and gone.model("Clipped").exists()


def test_the_model_is_of_the_first_seed_that_is_left(data, tmp_path):
    folder, _ = run(tmp_path / "run", config_of(data, [LATE, HEALTHY[0]], ["Plain"]))
    alone, _ = run(tmp_path / "alone", config_of(data, [HEALTHY[0]], ["Plain"]))
    (model, about), (expected, _) = read_model(folder.model("Plain")), read_model(alone.model("Plain"))
    assert about["seed"] == str(HEALTHY[0])
    jax.tree.map(np.testing.assert_allclose, model, expected)


@pytest.mark.parametrize("kind", ["whole", "gone"])
def test_a_run_interrupted_at_every_advance_ends_in_the_same_bits(kind, request, tmp_path):
    whole = request.getfixturevalue(kind)
    folder = start(load_run(whole.config), tmp_path / "run")
    interrupts = 0
    while not folder.results.exists():
        try:
            execute(folder, Stop(1), checkpoint_seconds=np.inf)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts >= 3 * NUM_ROUNDS - 2
    assert_same_end(folder, whole)


@pytest.mark.parametrize("kind", ["whole", "gone"])
@pytest.mark.parametrize("method", ["begin", "end"])
def test_a_part_that_diverged_is_finished(kind, method, request, tmp_path):
    """A resumed run neither retrains it nor raises an error."""
    whole = request.getfixturevalue(kind)
    folder = start(load_run(whole.config), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        execute(folder, Stop(2, method), checkpoint_seconds=0.0)
    assert folder.part("Plain").exists()
    watch = Stop()
    execute(folder, watch)
    assert [name for name, *_ in watch.begun] == NAMES[1:]
    assert_same_end(folder, whole)


def test_the_report_names_diverged_algorithms_and_ranks_the_others(whole, gone):
    page = write_report([whole.root], whole.report).read_text()
    assert f"diverged at round 3 (client {POISONED}, seed {LATE})" in words_of(page)
    cells = {cells[0].split(" ")[0]: cells for _, cells in rows_of(page)}
    assert "2 of 3 seeds" in cells["Plain"][1] and "2 of 3" not in cells["Clipped"][1]
    assert "Plain" not in verdicts_of(page)[0] and verdicts_of(page)[0].startswith(("Clipped", "Local"))
    best = [kinds for kinds, cells in rows_of(page) if "Plain" in cells[0]]
    assert all("best" not in kinds for kinds in best)
    page = write_report([gone.root], gone.report).read_text()
    cells = {cells[0].split(" ")[0]: cells for _, cells in rows_of(page)}
    assert cells["Plain"][1] == "diverged" and "not finite" not in " ".join(cells["Plain"])


def test_a_row_with_lost_seeds_is_not_the_best_whatever_its_mean(whole, tmp_path):
    shutil.copytree(whole.root, tmp_path / "run")

    def win(run):
        for row in run["table"]:
            if row["score"] == "Plain":
                row["mean"] |= {"mean": 1e-9, "low": 0.9e-9, "high": 1.1e-9}

    edit_results(tmp_path / "run", win)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    (verdict,) = verdicts_of(page)
    assert verdict.startswith(("Clipped", "Local")) and "Plain" not in verdict
    assert next("best" in kinds for kinds, cells in rows_of(page) if cells[0].startswith("Plain")) is False


def test_lines_are_of_the_seeds_that_are_left(whole, gone):
    drawn = lambda folder: {
        trace["name"]: trace["y"]
        for trace in figures_of(write_report([folder.root], folder.report).read_text())["curves"][0]["data"]
        if "name" in trace
    }
    metric = read_results(whole.root).metrics[0]
    for folder in (whole, gone):
        means = np.array([one.mean[metric] for one in plain_of(folder).scores[0].evaluations])
        left = np.isfinite(means[-1])
        assert left.any() and not left.all()
        np.testing.assert_allclose(drawn(folder)["Plain"], means[:, left].mean(axis=1), rtol=1e-5)


def test_personalize_takes_an_algorithm_that_did_not_diverge(gone, whole, data, tmp_path):
    for folder in (gone, whole):
        config, record = load_run(folder.config), read_results(folder.root)
        entries = {
            name: dataclasses.replace(entry, scores={name: ADAPTED}) for name, entry in config.algorithms.items()
        }
        trainings = [make_training(name, entry) for name, entry in entries.items()]
        best = dataclasses.replace(  # were it ranked, the one that diverged would be the best
            record,
            table=[
                dataclasses.replace(row, mean=dataclasses.replace(row.mean, mean=row.mean.mean * 1e-99))
                if row.score == "Plain"
                else row
                for row in record.table
            ],
        )
        assert choose(best, trainings)[0] == "Clipped"
    assert choose(read_results(whole.root), trainings, "Plain")[0] == "Plain"
    with refused("Plain diverged at round", "and has no model. Choose another algorithm."):
        personalize_newcomer(gone, data, "Plain")


def scalars_of(folder):
    """The scalars of a folder of TensorBoard events, by tag."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + size])
            for item in event.summary.value:
                found.setdefault(item.tag, []).append(item.simple_value)
            content = content[16 + size :]
    return found


def test_skipped_updates_are_counted_and_do_not_end_a_curve(data, tmp_path):
    _, record = run(tmp_path / "run", config_of(data, only=["Plain"], on_nonfinite="skip"))
    (plain,) = record.algorithms
    assert plain.divergences == [] and plain.num_skipped == [visits(seed).count(POISONED) for seed in SEEDS]
    assert np.all(np.isfinite([one.mean["error"] for one in plain.scores[0].evaluations]))
    assert record.table[0].num_lost == 0


def test_an_update_that_is_not_finite_can_be_an_error(data, tmp_path):
    folder = start(config_of(data, on_nonfinite="raise"), tmp_path / "run")
    with refused(
        f"Plain diverged at round 3 (client {POISONED}, seed {LATE})",
        'set `on_nonfinite = "diverge"` or "skip"',
        kind=NonFiniteUpdate,
    ):
        execute(folder)
    with refused("`on_nonfinite`"):
        config_of(data, on_nonfinite="ignore")


def test_a_regression_with_a_mean_of_100_costs_the_rows_that_diverge(tmp_path):
    """The default step size is too large for unscaled targets."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    np.savez(tmp_path / "r.npz", x=x, y=100 + x @ [1.0, 2.0, 3.0], client=np.repeat(np.arange(12), 20))
    local = {"lr": 0.1, "num_steps": 5, "batch_size": 10}
    config = parse(
        {
            "seeds": 2,
            "data": {"kind": "file", "path": str(tmp_path / "r.npz"), "label": "y"},
            "model": {"kind": "mlp", "widths": [32]},
            "schedule": {"num_rounds": 12, "cohort_size": 4},
            "evaluation": {"every": 4},
            "algorithms": {
                "FedAvg": {"recipe": "fedavg", **local},
                "Per-FedAvg": {"recipe": "per_fedavg", "adapt_lr": 0.1, **local},
                "Careful": {"recipe": "fedavg", **local, "lr": 1e-4},
                "Local": {"recipe": "local_only", **local, "lr": 1e-4},
            },
        }
    )
    folder, record = run(tmp_path / "run", resolve(config, baselines=True))
    lost = {algorithm.name: len(algorithm.divergences) for algorithm in record.algorithms}
    assert lost == {"FedAvg": 2, "Per-FedAvg": 2, "Careful": 0, "Local": 0}
    rows = {row.score: row.mean.mean for row in record.table if row.metric == record.headline}
    assert np.isfinite([rows["Careful"], rows["Local"]]).all() and np.isnan(rows["FedAvg"])
    first, second, remedy = warnings(record)
    assert first.startswith("FedAvg diverged at round ") and second.startswith("Per-FedAvg diverged at round ")
    assert "(client " in first and "seed" in first and "clip_norm" in remedy and "on_nonfinite" in remedy
    assert write_report([folder.root], folder.report).exists()
    execute(folder, watch := Stop())
    assert not watch.begun  # diverged algorithms are finished too
    assert read_results(folder.root).algorithms[0].divergences == record.algorithms[0].divergences


# Without training


def evaluation(means, model="global"):
    metrics = {"error": np.asarray(means, float)[:, None] + np.array([0.0, 1.0])}
    counts = np.ones((len(means), 2))
    return Evaluation(Scoring(model), metrics, np.tile([0, 1], (len(means), 1)), counts, counts, 0, 0.0)


def test_differences_are_paired_over_the_seeds_that_both_have():
    one, two = evaluation([1, 2, 3, 4]).without_seeds([0]), evaluation([0, 0, 0, 7], "personal").without_seeds([2])
    assert one.interval("error").num_seeds == 3 and one.interval("error").mean == 3.5
    change = one.difference(two, "error")
    assert (change.mean, change.num_seeds) == ((2 - 3) / 2, 2)
    np.testing.assert_array_equal(one.share_better(two, "error"), [np.nan, 0, np.nan, 1])
    row = Comparison({"one": one, "two": two}, "two", "one").rows("error")[0]
    assert (row.num_lost, row.over_local, row.better_than_local) == (1, change, 0.5)
    assert "one (3 of 4 seeds)" in Comparison({"one": one, "two": two}, "two", "one").table("error")


def test_seeds_without_a_pair_have_no_difference():
    one, two = evaluation([1, 2]).without_seeds([0]), evaluation([1, 2], "personal").without_seeds([1])
    row = Comparison({"one": one, "two": two}, "two", None).rows("error")[0]
    assert row.over_local is None and row.better_than_local is None and row.mean.num_seeds == 1
