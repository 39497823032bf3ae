"""Controllers in runs: from TOML, through kills, into results; and the cost of reaching a target."""

import dataclasses
import os
import signal
import subprocess
import sys
import tomllib

import numpy as np
import pytest

from personax.evaluation.scores import Interval
from personax.experiment.config import ConfigError, dump, parse
from personax.experiment.control import controller_citations, endings
from personax.experiment.provenance import provenance_of
from personax.experiment.records import AlgorithmRecord, EvaluationRecord, ScoreRecord
from personax.experiment.runs import execute, prepare, start
from personax.experiment.targets import describe, target_of
from personax.report.figures import learning_curves
from personax.report.runs import read_runs, scores_of
from personax.report.tables import targets
from tests.experiment.test_runs import TINY, tiny

pytestmark = pytest.mark.xdist_group("runs")

SYNC = {"FedAvg": TINY["algorithms"]["FedAvg"] | {"scores": {"FedAvg": {"model": "global"}}}}
SPLIT = {"num_held_out": 2, "validation_share": 0.25}
STOP = {"kind": "EarlyStopping", "patience": 1, "least_gain": 0.05}
LONG = {"num_rounds": 12, "cohort_size": 2, "delays": "persafl"}
SLOW = """
import os, signal, sys
from pathlib import Path
from personax.experiment import session
from personax.experiment.runs import execute
from personax.experiment.folders import Folder

save, num = session.Session.save, [0]

def stop_after(self, place):
    save(self, place)
    num[0] += 1
    if num[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)

session.Session.save = stop_after
execute(Folder(Path(sys.argv[1])), checkpoint_seconds=0.0)
"""


def run(root, **sections):
    return execute(start(tiny(**{"algorithms": SYNC, "schedule": LONG, "split": SPLIT, **sections}), root))


def comparable(record):
    """A record without what depends on the clock."""
    return [
        dataclasses.replace(
            one,
            seconds={},
            scores=[
                dataclasses.replace(s, evaluations=[dataclasses.replace(e, seconds=0.0) for e in s.evaluations])
                for s in one.scores
            ],
        )
        for one in record.algorithms
    ]


def test_a_run_ends_early_and_reports_it(tmp_path):
    record = run(tmp_path / "run", controller=STOP, evaluation={"every": 2})
    fedavg = record.algorithms[0]
    assert [one.seed for one in fedavg.ended] == [0, 1]
    rounds = [one.round for one in fedavg.ended]
    assert max(rounds) < 12 and fedavg.num_rounds == max(rounds)
    last = fedavg.scores[0].evaluations[-1]
    assert last.events == [2 * num for num in rounds] and last.round == max(rounds)
    assert np.mean(last.bytes_down) == fedavg.bytes_down and np.mean(last.bytes_up) == fedavg.bytes_up > 0
    (sentence,) = [text for text in endings(record) if text.startswith("FedAvg ended early")]
    assert "the validation score has not improved for 1 decision." in sentence
    whole = run(tmp_path / "whole", evaluation={"every": 2})
    same = [one for one in whole.algorithms[0].scores[0].evaluations if one.round <= min(rounds)]
    for mine, its in zip(fedavg.scores[0].evaluations, same, strict=False):
        assert mine.mean == its.mean and mine.time == its.time
    assert not whole.algorithms[0].ended and not endings(whole)


@pytest.mark.parametrize(
    "controller",
    [{"kind": "Oort", "every": 2}, pytest.param(STOP, marks=pytest.mark.slow)],
    ids=lambda one: one["kind"],
)
def test_a_killed_run_with_a_controller_ends_in_the_same_results(controller, tmp_path):
    options = {"controller": controller, "split": SPLIT | {"num_held_out": 0}, "evaluation": {"every": 2}}
    expected = run(tmp_path / "whole", **options)
    folder = start(tiny(algorithms=SYNC, schedule=LONG, **options), tmp_path / "killed")
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-c", SLOW, str(folder.root)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert comparable(execute(folder)) == comparable(expected)
    cohorts = prepare(tiny(algorithms=SYNC, schedule=LONG, **options)).runs["FedAvg"].schedules[0].client
    assert cohorts.shape == (24,)


def test_an_algorithm_may_have_its_own_controller(tmp_path):
    both = {
        "FedAvg": SYNC["FedAvg"],
        "Chosen": {
            "recipe": "fedavg",
            "scores": {"Chosen": {"model": "global"}},
            "controller": {"kind": "PowerOfChoice", "num_candidates": 6, "every": 1},
        },
    }
    config = tiny(algorithms=both, schedule=LONG)
    assert parse(tomllib.loads(dump(config))) == config
    record = execute(start(config, tmp_path / "run"))
    first, second = (one.scores[0].evaluations for one in record.algorithms[:2])
    assert first[0].mean == second[0].mean and first[-1].mean != second[-1].mean
    assert "cho2020" in record.algorithms[1].citations and "cho2020" not in record.algorithms[0].citations
    assert np.mean(second[-1].bytes_down) == record.algorithms[1].bytes_down > record.algorithms[0].bytes_down
    nested = {"kind": "Together", "controllers": [{"kind": "Oort"}, {"kind": "RunBudget", "time": 9.0}]}
    assert controller_citations(tiny(algorithms=SYNC, controller=nested), "FedAvg") == ["lai2021"]


@pytest.mark.parametrize(
    "sections, match",
    [
        ({"controller": STOP}, "there is no validation data. Set `split.validation_share`"),
        ({"controller": {"kind": "EarlyStoping"}}, "`controller` has no kind `EarlyStoping`. Did you mean"),
        ({"controller": {"kind": "EarlyStopping", "patient": 3}}, "`controller` has no setting `patient`"),
        ({"controller": {"kind": "PowerOfChoice"}}, "`controller` needs `num_candidates`"),
        ({"controller": {"kind": "Oort"}, "algorithms": TINY["algorithms"]}, "`PersA-FL` is asynchronous"),
        (
            {"algorithms": {"FedAvg": SYNC["FedAvg"] | {"controller": {"every": 2}}}},
            "`algorithms.FedAvg.controller` needs `kind`",
        ),
        (
            {"algorithms": {"FedAvg": SYNC["FedAvg"] | {"controller": {"kind": "Oort", "every": 0}}}},
            "`algorithms.FedAvg.controller.every`: .*greater than or equal to 1, got 0",
        ),
        (
            {"algorithms": {"FedAvg": SYNC["FedAvg"] | {"controller": {"kind": "Oort", "clop": 0.5}}}},
            "`algorithms.FedAvg.controller` has no setting `clop`. Did you mean `clip`",
        ),
        (
            {"controller": {"kind": "PowerOfChoice", "num_candidates": 600}},
            "`controller`: `num_candidates` must be between the cohort size, 2, and the number of clients",
        ),
        ({"algorithms": {"FedAvg": SYNC["FedAvg"] | {"schedule": {"deadlin": 2.0}}}}, "Did you mean `deadline`"),
        (
            {"algorithms": {"FedAvg": SYNC["FedAvg"] | {"schedule": {"num_aggregated": 9}}}},
            "`schedule.num_aggregated` must be at most the cohort's 2, got 9",
        ),
    ],
)
def test_wrong_controllers_are_refused_before_the_run(sections, match):
    with pytest.raises(ConfigError, match=match):
        prepare(tiny(**{"algorithms": SYNC, **sections}))


def test_a_changed_trace_is_noticed(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("device,samples_per_second,upload,download\na,10,1e4,1e4\nb,20,1e4,1e4\n")
    schedule = LONG | {"delays": {"kind": "traces", "devices": str(path)}}
    config = tiny(algorithms=SYNC, schedule=schedule)
    before, again = (provenance_of(config, "FedAvg", {}) for _ in range(2))
    assert before.changes_to(again) == []
    path.write_text(path.read_text().replace("20", "30"))
    assert before.changes_to(provenance_of(config, "FedAvg", {})) == ["the file devices.csv has changed"]


# targets


def algorithm(name, means, flag=""):
    """A record of one score whose seeds have these means, [evaluations][seeds]."""
    evaluations = [
        EvaluationRecord(
            round=10 * at,
            events=[20 * at] * len(of),
            time=[1.5 * at, 2.5 * at],
            seconds=0.0,
            mean={"accuracy": of},
            std={},
            worst_decile={},
            best_decile={},
            bytes_up=[100.0 * at] * len(of),
            bytes_down=[200.0 * at] * len(of),
        )
        for at, of in enumerate(means)
    ]
    score = ScoreRecord(name, {}, "", flag, evaluations, {})
    return AlgorithmRecord(name, "fedavg", {}, [], "synchronous", 10, 20, {}, 0.0, 0.0, [0, 0], [0, 0], [score])


def test_the_cost_of_a_target_is_that_of_the_first_evaluations_that_reach_it():
    fast = algorithm("fast", [[0.1, 0.1], [0.6, 0.4], [0.8, 0.7]])
    slow = algorithm("slow", [[0.1, 0.1], [0.2, 0.1], [0.5, 0.3], [0.6, 0.45]])
    flagged = algorithm("flagged", [[0.2, 0.2]], flag="adapted on the data that is scored")
    found = target_of([fast, slow, flagged], "accuracy", 0.5)
    assert found.value == 0.5 and [one.num_reached for one in found.scores] == [2, 1, 0]
    mean = lambda interval: None if interval is None else interval.mean
    table = [[mean(one.rounds), mean(one.time), mean(one.bytes)] for one in found.scores]
    assert table == [[15.0, (1.5 + 5.0) / 2, 450.0], [20.0, 3.0, 600.0], [None, None, None]]
    assert isinstance(found.scores[0].rounds, Interval) and found.scores[0].rounds.num_seeds == 2
    assert describe(found) == "accuracy of 50.0 %, the target of the configuration"


def test_without_a_target_it_is_the_best_that_all_scores_reach():
    fast = algorithm("fast", [[0.1, 0.1], [0.8, 0.6], [0.7, 0.5]])
    slow = algorithm("slow", [[0.1, 0.1], [0.5, 0.3], [0.4, np.nan]])
    found = target_of([fast, slow, algorithm("flagged", [[0.0, 0.0]], flag="a leak")], "accuracy", None)
    assert found.value == 0.4 and "all scores reach" in describe(found)
    assert [one.num_reached for one in found.scores] == [2, 1, 0]
    assert target_of([], "accuracy", None) is None


def test_one_study_compares_servers_with_schedules_of_their_own(tmp_path):
    plain = {"recipe": "fedavg"}
    scored = lambda name, entry: entry | {"scores": {name: {"model": "global"}}}
    algorithms = {
        "waits for all": plain,
        "over-selection": plain | {"schedule": {"cohort_size": 5, "num_aggregated": 3, "aggregate": "first"}},
        "deadline": plain | {"schedule": {"deadline": 2.0}},
        "buffered": {"recipe": "fedbuff", "buffer_size": 3, "schedule": {"concurrency": 4}},
        "asynchronous": {"recipe": "fedasync", "server": {"kind": "asynchronous", "lr": 0.3}},
    }
    devices = {"kind": "devices", "num_devices": 30, "always_online": True, "mean_speed": 8.0}
    schedule = {"num_rounds": 8, "cohort_size": 3, "delays": devices}
    config = tiny(
        algorithms={name: scored(name, entry) for name, entry in algorithms.items()},
        schedule=schedule,
        evaluation={"every": 2},
    )
    assert parse(tomllib.loads(dump(config))) == config
    runs = prepare(config).runs
    first = {name: run.schedules[0] for name, run in runs.items()}
    assert [first[name].round_size for name in list(algorithms)[:3]] == [3, 5, 3]
    assert (~first["over-selection"].aggregated).sum() == 2 * 8 and first["waits for all"].aggregated.all()
    assert np.max(np.diff(np.r_[0, first["deadline"].time.reshape(8, 3).max(axis=1)])) <= 2.0 + 1e-9
    assert not first["deadline"].reported.all()
    record = execute(start(config, tmp_path / "run"))
    reached = {one.score: one for one in record.target.scores}
    assert set(reached) >= set(algorithms)
    for one in reached.values():
        assert one.num_reached == 0 or None not in (one.rounds, one.time, one.bytes)
    assert sum(one.num_reached for one in reached.values()) >= len(record.seeds)
    assert {one.name: one.num_rounds for one in record.algorithms}["buffered"] == 8
    assert {"wang2023", "toghani2023"} <= set(record.federation.citations)


def test_a_study_compares_servers_by_time_and_bytes(tmp_path):
    devices = {"kind": "devices", "num_devices": 9, "always_online": True}
    schedule = LONG | {"num_aggregated": 1, "aggregate": "first", "delays": devices}
    buffered = {"recipe": "fedbuff", "buffer_size": 2, "server_lr": 1.0, "scores": {"FedBuff": {"model": "global"}}}
    record = run(tmp_path / "run", algorithms={**SYNC, "FedBuff": buffered}, schedule=schedule, split={})
    reached = {one.score: one for one in record.target.scores}
    assert set(reached) >= {"FedAvg", "FedBuff"} and record.target.metric == record.headline
    for one in record.algorithms:
        last = one.scores[0].evaluations[-1]
        assert last.bytes_up[0] == one.bytes_up and last.bytes_down[0] == one.bytes_down
    by_name = {one.name: one for one in record.algorithms}
    assert by_name["FedAvg"].bytes_down == 2 * by_name["FedAvg"].bytes_up == 2 * by_name["FedBuff"].bytes_up
    runs = read_runs([tmp_path / "run"])
    curves = learning_curves(scores_of(runs), [record.headline])
    assert curves.choices["against"] == ["rounds", "virtual time", "seconds", "bytes"]
    drawn = [trace for trace in curves.views[3].data if trace.name == "FedAvg"]
    assert max(drawn[-1].x) == pytest.approx((by_name["FedAvg"].bytes_up + by_name["FedAvg"].bytes_down) / 1e6)
    assert "all scores reach" in targets(runs).caption
