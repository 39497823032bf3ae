"""Runs write what they computed, and end in the same bits after any interruption."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import jax
import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

import personax as px
from personax.cli import FLAGS
from personax.data.schema import Schema
from personax.evaluation.scores import Comparison, Evaluation
from personax.evaluation.scoring import Scoring
from personax.experiment import session
from personax.experiment.build import resolve
from personax.experiment.checkpoint import read_model
from personax.experiment.citations import cite
from personax.experiment.config import ConfigError, dump, dump_run, load, load_run, parse
from personax.experiment.folders import Folder, readable_slug, slug, tidy
from personax.experiment.loggers import Evaluated, open_loggers
from personax.experiment.parts import execute_part
from personax.experiment.records import RUN, SCHEMA_VERSION, EvaluationRecord, read_results
from personax.experiment.results import federation_rows
from personax.experiment.runs import Silent, execute, prepare, start
from personax.experiment.summaries import score_record
from personax.simulation.results import NonFiniteUpdate
from personax.values import construct
from tests.experiment.test_config import refused

pytestmark = pytest.mark.xdist_group("runs")  # which share their compiled programs

DATA = {"kind": "synthetic", "num_clients": 8, "num_features": 3, "num_classes": 3, "num_samples": 20}
TINY = {
    "name": "tiny",
    "seeds": [0, 1],
    "data": DATA,
    "split": {"num_held_out": 2},
    "model": {"kind": "logistic_regression"},
    "schedule": {"num_rounds": 4, "cohort_size": 2, "delays": "persafl"},
    "evaluation": {"every": 1, "adaptation_steps": [0, 1]},
    "local": {"lr": 0.1, "num_steps": 2, "batch_size": 4},
    "algorithms": {
        "FedAvg": {
            "recipe": "fedavg",
            "scores": {"FedAvg": {"model": "global"}, "FedAvg, tuned": {"model": "adapted", "lr": 0.3}},
        },
        "APFL": {"recipe": "apfl", "mix": 0.5},
        "PersA-FL": {
            "recipe": "persafl",
            "objective": {"kind": "Meta", "adapt_lr": 0.1},
            "server": {"kind": "asynchronous", "lr": 0.2},
        },
    },
}
NAMES = ["FedAvg", "APFL", "PersA-FL", "Local"]
SCORES = ["FedAvg", "FedAvg, tuned", "APFL", "PersA-FL", "Local"]


def tiny(**sections):
    return resolve(parse({**TINY, **sections}), baselines=True)


def run(root, config=None, **options):
    folder = start(config or tiny(), root)
    return folder, execute(folder, **options)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder that keeps compiled programs, for the processes that a test starts; this one fills it."""
    place = tmp_path_factory.mktemp("programs")
    settings = {
        "jax_compilation_cache_dir": str(place),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    change = lambda values: [jax.config.update(name, item) for name, item in values.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join([os.environ["XLA_FLAGS"], *FLAGS]))  # as the command line
        compilation_cache.reset_cache()
        change(settings)
        yield place
        change(before)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, programs):
    """An uninterrupted run."""
    return run(tmp_path_factory.mktemp("whole") / "run", checkpoint_seconds=0.0)[0]


@pytest.fixture(scope="module")
def record(whole):
    return read_results(whole.root)


@pytest.fixture(scope="module")
def work(whole):
    return prepare(load(whole.config))


def timeless(item):
    """Return plain data without durations and dates."""
    if isinstance(item, dict):
        return {key: timeless(entry) for key, entry in item.items() if key not in ("seconds", "started")}
    return [timeless(entry) for entry in item] if isinstance(item, list) else item


def json_of(path):
    return json.loads(path.read_text())


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_end(folder, whole):
    """Check that all outputs of two runs are equal to the bit, and that no temporary files remain."""
    for name in NAMES:
        assert folder.model(name).read_bytes() == whole.model(name).read_bytes()
        newest, wanted = (max(one.checkpoints(name).glob("*.safetensors")) for one in (folder, whole))
        assert newest.name == wanted.name and newest.read_bytes() == wanted.read_bytes()
        told, all_told = (timeless(json_of(path.with_suffix(".json"))) for path in (newest, wanted))
        assert told["about"] == all_told["about"]
    assert timeless(json_of(folder.results)) == timeless(json_of(whole.results))
    assert timeless(lines_of(folder.metrics)) == timeless(lines_of(whole.metrics))
    for score in SCORES:
        seconds = [line["seconds"] for line in lines_of(folder.metrics) if line["score"] == score]
        assert seconds == sorted(seconds)  # of all sessions together
    assert pq.read_table(folder.clients).equals(pq.read_table(whole.clients))
    assert folder.config.read_bytes() == whole.config.read_bytes()
    known = {"config.toml", "results.json", "metrics.jsonl", "clients.parquet", "checkpoints", "models", "parts"}
    assert {path.name for path in folder.root.iterdir()} - {"report.html", "locks"} == known
    assert not [path for path in folder.root.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]


# Files of a run


def test_the_results_fit_their_schema(whole, record):
    content = json_of(whole.results)
    jsonschema.validate(content, RUN.json_schema())
    assert content["schema_version"] == SCHEMA_VERSION and RUN.validate_python(content) == record
    del content["table"][0]["mean"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, RUN.json_schema())


def test_the_record_describes_the_run(record, work):
    assert [algorithm.name for algorithm in record.algorithms] == NAMES
    assert [score.name for algorithm in record.algorithms for score in algorithm.scores] == SCORES
    assert (record.name, record.seeds, record.headline, record.local_baseline, record.global_baseline) == (
        "tiny",
        [0, 1],
        "accuracy",
        "Local",
        "FedAvg",
    )
    assert record.metrics == ["accuracy", "loss"]
    fed = record.federation
    assert (fed.num_clients, fed.num_held_out, fed.num_samples, fed.num_test_samples) == (6, 2, 6 * 16, 6 * 4)
    assert fed.summary == str(work.plan.federation)
    for algorithm, training in zip(record.algorithms, work.plan.trainings, strict=True):
        assert construct(px.Algorithm, algorithm.definition, "it") == training.algorithm
        assert [construct(px.Scoring, score.scoring, "it") for score in algorithm.scores] == list(
            training.scorings.values()
        )
        assert (algorithm.num_rounds, algorithm.num_events) == (4, 8)
        assert algorithm.num_dropped == algorithm.num_skipped == [0, 0]
        assert set(algorithm.seconds) == {"compile", "train", "evaluate"} and min(algorithm.seconds.values()) >= 0
    assert [algorithm.mode for algorithm in record.algorithms] == ["synchronous"] * 2 + ["asynchronous", "synchronous"]


def test_every_update_moves_the_model_up_and_down(record):
    size = (3 * 3 + 3) * 8  # a kernel and a bias of 64-bit floats
    moved = {algorithm.name: (algorithm.bytes_up, algorithm.bytes_down) for algorithm in record.algorithms}
    assert moved == {**{name: (8 * size, 8 * size) for name in NAMES}, "Local": (0, 0)}


def in_order(record):
    """All evaluations in the order in which they were made, with their algorithm and score."""
    for algorithm in record.algorithms:
        for together in zip(*(score.evaluations for score in algorithm.scores), strict=True):
            for score, one in zip(algorithm.scores, together, strict=True):
                yield algorithm.name, score.name, one


def of_clients(folder, score, column):
    """Numbers of clients.parquet, [seeds, clients]."""
    rows = pq.read_table(folder.clients).to_pylist()
    of_seed = lambda seed: [row[column] for row in rows if row["score"] == score and row["seed"] == seed]
    return np.array([of_seed(seed) for seed in (0, 1)])


def interval_by_hand(means):
    """The 95 % t-interval of two seeds: quantile p of Student's t with one degree of freedom is tan(pi (p - 1/2))."""
    mean, half = np.mean(means), np.tan(np.pi * 0.475) * abs(means[0] - means[1]) / 2
    return pytest.approx(mean), pytest.approx(mean - half), pytest.approx(mean + half)


def ends_of(found):
    return found.mean, found.low, found.high


def test_the_table_follows_from_the_clients_numbers(whole, record):
    assert [(row.score, row.metric) for row in record.table] == [(s, m) for m in record.metrics for s in SCORES]
    for row in record.table:
        own, local, together = (of_clients(whole, score, row.metric) for score in (row.score, "Local", "FedAvg"))
        sign = 1 if row.metric == "accuracy" else -1
        low, high = np.sort(sign * own, axis=1)[:, 0], np.sort(sign * own, axis=1)[:, -1]  # a tenth of six is one
        assert own.shape == (2, 6)
        assert ends_of(row.mean) == interval_by_hand(own.mean(axis=1))
        assert row.std == pytest.approx(own.std(axis=1).mean())
        assert row.worst_decile == pytest.approx((sign * low).mean())
        assert row.best_decile == pytest.approx((sign * high).mean())
        assert ends_of(row.over_local) == interval_by_hand((own - local).mean(axis=1))
        assert ends_of(row.over_global) == interval_by_hand((own - together).mean(axis=1))
        assert row.better_than_local == pytest.approx((sign * own > sign * local).mean())
        assert row.better_than_global == pytest.approx((sign * own > sign * together).mean())
        assert row.flag == ""


def test_the_last_evaluation_is_of_the_clients_numbers(whole, record):
    for algorithm in record.algorithms:
        for score in algorithm.scores:
            last = score.evaluations[-1]
            for metric in ("loss", "accuracy"):
                numbers = of_clients(whole, score.name, metric)
                assert last.mean[metric] == pytest.approx(numbers.mean(axis=1))
                assert last.std[metric] == pytest.approx(numbers.std(axis=1))
                ends = {last.worst_decile[metric][0], last.best_decile[metric][0]}
                assert ends == {numbers[0].min(), numbers[0].max()}


def test_metrics_are_streamed_as_the_results_have_them(whole, record):
    assert lines_of(whole.metrics) == [
        {"algorithm": algorithm, "score": score, **dataclasses.asdict(one)}
        for algorithm, score, one in in_order(record)
    ]


def test_evaluations_come_as_often_as_asked_for(record, work):
    for algorithm in record.algorithms:
        schedules = work.runs[algorithm.name].schedules
        for score in algorithm.scores:
            events = np.array([one.events for one in score.evaluations])
            assert [one.round for one in score.evaluations] == (events[:, 0] // 2).tolist()
            assert events[0].tolist() == [0, 0] and events[-1].tolist() == [8, 8]
            if algorithm.mode == "synchronous":
                assert events.tolist() == [[2 * i, 2 * i] for i in range(5)]
            for one in score.evaluations:
                time = [s.time[:num].max(initial=0.0) for s, num in zip(schedules, one.events, strict=True)]
                assert one.time == pytest.approx(time)
            seconds = [one.seconds for one in score.evaluations]
            assert seconds == sorted(seconds) and seconds[0] >= 0


def test_the_best_round_of_each_seed_stands_beside_the_last(record):
    for score in (score for algorithm in record.algorithms for score in algorithm.scores):
        for metric, pick in (("accuracy", np.argmax), ("loss", np.argmin)):
            means = np.array([one.mean[metric] for one in score.evaluations])
            at, best = pick(means, axis=0), score.best[metric]
            assert ends_of(best.mean) == interval_by_hand(means[at, [0, 1]])
            assert best.rounds == [score.evaluations[i].round for i in at]


def test_mixing_weights_are_reported_if_there_are_any(whole, record):
    weights = of_clients(whole, "APFL", "personal_number").astype(float)
    assert np.all((weights >= 0) & (weights <= 1)) and np.any(weights != 0.5)
    history = record.algorithms[1].scores[0].evaluations
    assert history[-1].personal_number == pytest.approx(weights.mean(axis=1)) and history[0].personal_number == [
        0.5,
        0.5,
    ]
    assert (
        set(of_clients(whole, "FedAvg", "personal_number").ravel()) == {None}
        and record.algorithms[0].scores[0].evaluations[0].personal_number is None
    )


def test_clients_are_named_by_their_stable_numbers(whole, work):
    federation = work.plan.federation
    assert of_clients(whole, "APFL", "client").tolist() == [federation.ids.tolist()] * 2
    assert of_clients(whole, "APFL", "name").tolist() == [list(federation.names)] * 2
    assert of_clients(whole, "APFL", "num_samples").tolist() == [[4] * 6] * 2


# By hand: softmax regression


def logits(params, x):
    return x @ params["dense_0"]["kernel"] + params["dense_0"]["bias"]


def by_hand(params, x, y):
    """The loss, the accuracy and the gradient of softmax regression."""
    outputs = logits(params, x)
    odds = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    wrong = odds - np.eye(odds.shape[1])[y]
    gradient = {"kernel": x.T @ wrong / len(y), "bias": wrong.mean(axis=0)}
    loss = -np.log(odds[np.arange(len(y)), y]).mean()
    return {"loss": loss, "accuracy": np.mean(outputs.argmax(axis=1) == y)}, gradient


def model_of(folder, name):
    arrays = load_file(folder.model(name))
    return {"dense_0": {leaf: arrays[f"params.dense_0.{leaf}"] for leaf in ("kernel", "bias")}}


def stepped(params, lr, x, y):
    gradient = by_hand(params, x, y)[1]
    return {"dense_0": {leaf: params["dense_0"][leaf] - lr * gradient[leaf] for leaf in gradient}}


def test_the_numbers_are_those_of_the_model_that_is_written(whole, work):
    federation, params = work.plan.federation, model_of(whole, "FedAvg")
    for metric in ("loss", "accuracy"):
        for score, adapt in (
            ("FedAvg", lambda i: params),
            ("FedAvg, tuned", lambda i: stepped(params, 0.3, *federation.client(i))),
        ):
            # A batch of 40 holds all 16 samples of a client.
            numbers = [by_hand(adapt(i), *federation.client_test(i))[0][metric] for i in range(6)]
            assert of_clients(whole, score, metric)[0] == pytest.approx(numbers, rel=1e-6)


def test_newcomers_adapt_the_model_that_is_written(whole, record, work):
    new, params = work.plan.federation.newcomers, model_of(whole, "FedAvg")
    plain, tuned = record.algorithms[0].scores
    assert plain.newcomers is None and tuned.newcomers.steps == [0, 1]
    for metric in ("loss", "accuracy"):
        for step, adapt in enumerate((lambda i: params, lambda i: stepped(params, 0.3, *new.client(i)))):
            numbers = [by_hand(adapt(i), *new.client_test(i))[0][metric] for i in range(2)]
            assert tuned.newcomers.mean[metric][step][0] == pytest.approx(np.mean(numbers), rel=1e-6)
    assert "clients held out of training" in tuned.newcomers.words
    assert {score.name for a in record.algorithms for score in a.scores if score.newcomers is None} == {"FedAvg"}


def test_models_are_written_with_what_they_are(whole):
    _, about = read_model(whole.model("APFL"))
    assert about["algorithm"] == "APFL" and about["seed"] == "0"
    schema = Schema.from_dict(json.loads(about["schema"]))
    assert (schema.classes, schema.shape, schema.dtype) == (("0", "1", "2"), (3,), "float32")
    assert read_results(whole.root).federation.schema == schema


# Asynchrony and citations


def test_staleness_and_activity_follow_from_the_schedule(record, work):
    schedule = work.runs["PersA-FL"].schedules[0]
    found = {algorithm.name: algorithm for algorithm in record.algorithms}
    ages = Counter(event - int(began) for event, began in enumerate(schedule.started_at))
    told = found["PersA-FL"].staleness
    assert dict(zip(told["staleness"], told["count"], strict=True)) == ages and sum(told["count"]) == 8
    assert all(found[name].staleness == {} for name in ("FedAvg", "APFL", "Local"))
    for name in NAMES:
        active, times = found[name].active, work.runs[name].schedules[0]
        assert (
            len(active["time"]) == len(active["share"]) == 200
            and 0 <= min(active["share"]) <= max(active["share"]) <= 1
        )
        at = active["time"][100]
        busy = np.sum((times.received <= at) & (times.time > at)) + np.sum(times.pending <= at)
        assert active["share"][100] == pytest.approx(busy / 6)


def test_citations_are_of_what_was_used(record):
    assert [algorithm.citations for algorithm in record.algorithms] == [
        ["mcmahan2017"],
        ["deng2020"],
        ["toghani2023", "fallah2020"],
        [],
    ]
    assert record.federation.citations == ["deng2020", "li2020", "toghani2023"]  # of the data and of the delays
    assert cite(record.federation.citations).count("@") == 3


# Reruns


def test_running_the_written_configuration_again_gives_the_same_numbers(whole, tmp_path):
    config = resolve(load(whole.config), baselines=True)
    assert dump_run(config).encode() == whole.config.read_bytes()
    folder, _ = run(tmp_path / "again", config)
    assert_same_end(folder, whole)


def test_a_folder_that_has_a_run_is_refused(whole):
    with refused(f"{whole.root} already has a run. Resume it with `personax resume {whole.root}`", kind=ValueError):
        start(tiny(), whole.root)


def test_a_finished_run_can_be_executed_again(whole, tmp_path):
    folder, _ = run(tmp_path / "run")
    execute(folder)
    assert_same_end(folder, whole)


def test_similar_names_have_different_folders():
    names = ["A b", "a-b", "A/b", "a b", "..", "", "é", "x" * 80]
    assert len({slug(name) for name in names}) == len(names)
    assert all(set(slug(name)) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)
    assert [readable_slug(name) for name in names[2:6]] == ["a-b", "a-b", "run", "run"]
    assert all(slug(name).startswith(readable_slug(name, "")) for name in names)


def test_less_is_evaluated_and_no_newcomers_adapt_unless_requested(tmp_path):
    only = {"FedAvg": TINY["algorithms"]["FedAvg"]}
    config = resolve(
        parse({**TINY, "algorithms": only, "evaluation": {"every": 3, "adaptation_steps": []}}), baselines=False
    )
    _, record = run(tmp_path / "run", config)
    (algorithm,) = record.algorithms
    assert [one.round for one in algorithm.scores[1].evaluations] == [0, 3, 4]
    assert (
        algorithm.scores[1].newcomers is None and record.local_baseline is None and record.global_baseline == "FedAvg"
    )
    assert {row.over_local for row in record.table} == {None} and None not in {row.over_global for row in record.table}


# Interruptions


class Stop(Silent):
    """A watch that interrupts at the n-th call of a method, and records the arguments."""

    def __init__(self, at=None, method="advance"):
        self.left, self.method, self.said, self.begun, self.num_advances = at, method, [], [], 0

    def _count(self, method):
        if method == self.method and self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    def begin(self, name, num_rounds, done):
        self.begun.append((name, num_rounds, done))
        self._count("begin")

    def advance(self, name, done, latest):
        self.num_advances += 1
        self._count("advance")

    def end(self, name, seconds):
        self._count("end")

    def note(self, text):
        self.said.append(text)


def interrupted(root, watch, **options):
    folder = start(tiny(), root)
    with pytest.raises(KeyboardInterrupt):
        execute(folder, watch, **options)
    return folder


def test_a_run_interrupted_at_every_advance_ends_in_the_same_bits(whole, tmp_path):
    folder, num_advances = start(tiny(), tmp_path / "run"), len(lines_of(whole.metrics)) - 5  # FedAvg has two scores
    for _ in range(num_advances):
        with pytest.raises(KeyboardInterrupt):
            execute(folder, Stop(1), checkpoint_seconds=np.inf)
        assert not folder.results.exists()
    watch = Stop()
    execute(folder, watch)
    assert watch.num_advances == 0  # the last algorithm was interrupted at its end
    assert_same_end(folder, whole)


@pytest.mark.parametrize(
    ("at", "method", "seconds"),
    [(1, "begin", 0), (2, "end", 0), (3, "advance", 0), (8, "advance", np.inf), (4, "end", 0)],
)
def test_a_run_interrupted_once_ends_in_the_same_bits(whole, tmp_path, at, method, seconds):
    folder = interrupted(tmp_path / "run", Stop(at, method), checkpoint_seconds=seconds)
    execute(folder)
    assert_same_end(folder, whole)


def test_what_has_ended_is_not_trained_again(whole, tmp_path):
    folder = interrupted(tmp_path / "run", Stop(5 + 5 + 3), checkpoint_seconds=np.inf)
    assert sorted(path.stem for path in folder.parts.glob("*.json")) == sorted(map(slug, NAMES[:2]))
    watch = Stop()
    execute(folder, watch)
    rounds = read_results(whole.root).algorithms[2].scores[0].evaluations[2].round
    assert watch.begun == [("PersA-FL", 4, rounds), ("Local", 4, 0)] and watch.said == []
    assert_same_end(folder, whole)


def test_an_evaluation_that_was_cut_short_is_not_counted_twice(whole, tmp_path, monkeypatch):
    """A signal can come between two scores of one evaluation."""
    calls, whole_record = [], session.evaluation_record

    def cut_short(*arguments, **of_run):
        calls.append(None)
        if len(calls) == 6:  # the second score of the third evaluation
            raise KeyboardInterrupt
        return whole_record(*arguments, **of_run)

    monkeypatch.setattr(session, "evaluation_record", cut_short)
    folder = interrupted(tmp_path / "run", Silent(), checkpoint_seconds=np.inf)
    execute(folder)
    assert_same_end(folder, whole)


def newest(folder, name, kind):
    return max(folder.checkpoints(name).glob(f"*.{kind}"))


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("safetensors", lambda content: content[:-5]),
        ("safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("json", lambda content: content[: len(content) // 2]),
        ("json", lambda content: content.replace(b'"wave": 2', b'"wave": 3')),
    ],
    ids=["cut off", "one bit", "half a JSON", "another number"],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(whole, tmp_path, kind, damage):
    folder = interrupted(tmp_path / "run", Stop(3), checkpoint_seconds=0.0)
    path, watch = newest(folder, "FedAvg", kind), Stop()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert path.read_bytes() != content and path.stem == "00000002"
    execute(folder, watch)
    assert watch.begun[0] == ("FedAvg", 4, 1)
    assert len(watch.said) == 1 and f"{path} is damaged" in watch.said[0]
    assert "Using checkpoint 1 instead" in watch.said[0]
    assert_same_end(folder, whole)


def test_a_run_with_only_damaged_checkpoints_is_an_error(tmp_path, whole):
    folder = interrupted(tmp_path / "run", Stop(3), checkpoint_seconds=0.0)
    for path in folder.checkpoints("FedAvg").glob("*.json"):
        path.write_text("{}")
    with refused("All 2 checkpoints", "empty the folder and start over", kind=ValueError):
        execute(folder)


def test_the_last_two_checkpoints_are_kept(whole):
    for name in NAMES:
        kept = sorted(path.name for path in whole.checkpoints(name).iterdir())
        assert len(kept) == 4 and {path.split(".")[1] for path in kept} == {"json", "safetensors"}


def test_what_is_cut_off_while_it_is_written_is_removed_at_the_end(whole, tmp_path):
    folder = interrupted(tmp_path / "run", Stop(7), checkpoint_seconds=0.0)
    cut = [
        folder.root / ".results.json.0a1b2c3d.tmp",
        folder.root / ".report.html.89abcdef.tmp",
        folder.models / ".fedavg-56be1dc7.safetensors.01234567.tmp",
        folder.parts / ".x.json.01234567.tmp",
        folder.checkpoints("APFL") / ".00000001.json.01234567.tmp",
    ]
    for path in cut:
        path.write_text("{")
    (folder.root / ".hidden").write_text("somebody's own")
    execute(folder)
    (folder.root / ".hidden").unlink()
    assert_same_end(folder, whole)
    tidy(folder)


def test_a_run_that_diverges_can_be_an_error_that_names_algorithm_and_client(tmp_path, whole):
    diverging = {**TINY["algorithms"]["APFL"], "lr": 1.7e308}
    algorithms = {"FedAvg": TINY["algorithms"]["FedAvg"], "APFL": diverging}
    folder = start(tiny(algorithms=algorithms, on_nonfinite="raise"), tmp_path / "run")
    with refused("APFL diverged at round 1 (client ", "is not finite", kind=NonFiniteUpdate):
        execute(folder)
    assert folder.part("FedAvg").exists() and not folder.results.exists()


def test_listeners_are_given_each_new_evaluation(tmp_path, whole, record):
    events = []
    run(tmp_path / "run", listeners=[events.append])
    heard = [(event.algorithm, event.score, event.record) for event in events if isinstance(event, Evaluated)]
    told = lambda rows: [(algorithm, score, timeless(dataclasses.asdict(one))) for algorithm, score, one in rows]
    assert told(heard) == told(in_order(record))


def test_tensorboard_gets_a_run_for_each_score(tmp_path, whole):
    folder, _ = run(tmp_path / "run", listeners=open_loggers(["tensorboard"]))
    place = folder.root / "tensorboard"
    assert sorted(path.name for path in place.iterdir()) == sorted(SCORES)
    assert all(list(path.glob("events.*")) for path in place.iterdir())


# Parts of a run, without training


def evaluation(scoring, ids=(0, 1, 2), **metrics):
    """Made-up numbers of clients of these ids, two seeds."""
    given = {name: np.asarray(values, float) for name, values in metrics.items()}
    counts = np.full((2, len(ids)), 4)
    return Evaluation(scoring, given, np.tile(ids, (2, 1)), counts, counts, np.zeros(2), np.zeros(2))


def test_a_score_of_other_metrics_does_not_empty_the_table():
    test = evaluation(Scoring("personal"), accuracy=[[0.5, 0.6, 0.7]] * 2)
    train = evaluation(Scoring("global", score_on="training"), train_accuracy=[[0.9, 0.8, 0.9]] * 2)
    compared = Comparison({"a": test, "b": test, "c": train}, "a", None)
    rows = [row for metric in compared.metrics for row in compared.rows(metric)]
    assert [(row.score, row.metric) for row in rows] == [("a", "accuracy"), ("b", "accuracy"), ("c", "train_accuracy")]
    assert rows[1].over_local.mean == 0 and rows[2].over_local is None and rows[2].over_global is None


def test_newcomers_have_no_mixing_weight(work):
    federation, mix = work.plan.federation, np.arange(12.0).reshape(2, 6) / 12
    rows = lambda scoring, ids: federation_rows(
        ("A", "S"), [0, 1], federation, evaluation(scoring, ids, accuracy=np.ones((2, 2))), mix
    )
    assert rows(Scoring("recomputed", clients="held_out"), federation.newcomers.ids)["personal_number"].null_count == 4
    cohort = rows(Scoring("personal", clients="cohort"), federation.ids[[4, 1]])
    assert cohort["personal_number"].to_pylist() == [mix[0, 4], mix[0, 1], mix[1, 4], mix[1, 1]]
    assert cohort["name"].to_pylist() == [federation.names[i] for i in (4, 1, 4, 1)]


def test_the_best_is_a_number_where_there_is_one():
    zero = {"accuracy": [0.0, 0.0]}
    made = lambda at, *means: EvaluationRecord(at, [at, at], [0.0, 0.0], 0.0, {"accuracy": [*means]}, zero, zero, zero)
    history = [made(0, 0.5, np.nan), made(1, np.nan, np.nan), made(2, 0.4, 0.1)]
    best = score_record("S", Scoring(), history, None).best["accuracy"]
    assert best.mean.mean == pytest.approx((0.5 + 0.1) / 2) and best.rounds == [0, 2]


def test_results_that_cannot_be_read_are_errors(tmp_path, whole):
    with refused("Give the folder of a finished run, or finish it: personax resume", kind=ValueError):
        read_results(tmp_path)
    content = json_of(whole.results)
    old = {"schema_version": 1, "personax": "0.1.0"}
    (tmp_path / "results.json").write_text(json.dumps({**content, **old}))
    with refused("was written by personax 0.1.0", "Rerun the experiment, or install personax 0.1.0.", kind=ValueError):
        read_results(tmp_path)
    for change in ({"schema_version": 99}, {"extra": 1}, {"seeds": "x"}):
        (tmp_path / "results.json").write_text(json.dumps({**content, **change}))
        with refused("Invalid results in", *change, kind=ValueError):
            read_results(tmp_path)


def test_invalid_runs_are_reported_during_preparation():
    with refused("`schedule.cohort_size` must be at most the 6 training clients"):
        prepare(tiny(schedule={"cohort_size": 7}))
    assert isinstance(ConfigError(""), ValueError)


# Separate processes

COMMAND = """
import functools, sys
import personax.cli
from personax.cli import runs
runs.execute = functools.partial(runs.execute, checkpoint_seconds=0.0)
personax.cli.app()
"""


@contextlib.contextmanager
def process(programs, *words):
    """The command line in a separate process, which saves at every evaluation and finds its programs compiled."""
    environment = os.environ | {
        "JAX_ENABLE_X64": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else -1


def wait_for(started, folder, num, seconds=120):
    """Wait until a run has written this many evaluations, or has ended."""
    end = time.monotonic() + seconds
    while num_lines(folder.metrics) < num and started.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    assert time.monotonic() < end, "the run did not come so far"


def assert_whole_files(folder):
    """Check that every file except the stream of metrics is complete."""
    for path in folder.root.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        if path.suffix == ".parquet":
            pq.read_table(path)
        if path.suffix == ".safetensors":
            load_file(path)
    assert load_run(folder.config) == tiny()


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(dump(parse(TINY)))
    return path


@pytest.mark.parametrize(
    ("number", "num"),
    [pytest.param(signal.SIGTERM, 3, marks=pytest.mark.slow), (signal.SIGINT, 14)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_leaves_a_run_that_can_be_resumed(whole, programs, config_file, tmp_path, number, num):
    folder = Folder(tmp_path / "run")
    with process(programs, "compare", config_file, "--out", folder.root) as started:
        wait_for(started, folder, num)
        started.send_signal(number)
        _, err = started.communicate(timeout=60)
    assert started.returncode == 130 and "Traceback" not in err
    assert err.splitlines()[-1] == f"Interrupted. To continue, run: personax resume {folder.root}"
    assert_whole_files(folder)
    execute(folder)
    assert_same_end(folder, whole)


def killed(programs, folder, first, rng):
    """Start or resume a run, and kill it at a random moment."""
    with process(programs, *first) as started:
        done = max(num_lines(folder.metrics), 0)
        wait_for(started, folder, rng.randint(done, 25))
        time.sleep(rng.uniform(0, 0.3))
    if folder.config.exists():
        assert_whole_files(folder)


def test_a_run_killed_twice_ends_in_the_same_bits(whole, programs, config_file, tmp_path):
    folder, rng = Folder(tmp_path / "run"), random.Random(2)
    killed(programs, folder, ("compare", config_file, "--out", folder.root), rng)
    killed(programs, folder, ("resume", folder.root), rng)
    if not folder.results.exists():
        execute(folder)
    tidy(folder)
    assert_same_end(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_run_killed_at_a_random_moment_ends_in_the_same_bits(whole, programs, config_file, tmp_path, seed):
    folder, rng = Folder(tmp_path / "run"), random.Random(seed)
    killed(programs, folder, ("compare", config_file, "--out", folder.root), rng)
    with process(programs, "resume", folder.root) as started:
        out, err = started.communicate(timeout=120)
    assert started.returncode == 0 and "The results are in" in out and "Traceback" not in err
    assert (folder.root / "report.html").exists()
    assert_same_end(folder, whole)


def test_jobs_of_single_algorithms_equal_the_whole_run(tmp_path, whole):
    folder = start(tiny(), tmp_path / "run")
    records = [execute_part(folder, name, "2026", checkpoint_seconds=0.0) for name in reversed(NAMES)]
    assert records[:-1] == [None] * 3 and records[-1] is not None  # the last one merges
    assert execute_part(folder, "APFL", "2026") == records[-1]  # nothing is left to do
    folder.jobs.rmdir()  # their streams of metrics are merged
    assert_same_end(folder, whole)
