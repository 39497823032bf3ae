"""The adapters for Weights & Biases (offline) and MLflow, with the real libraries: `make test-loggers`."""

import json
import os
import subprocess
import sys

import mlflow
import pytest
from wandb.proto import wandb_internal_pb2

from personax.experiment.loggers import open_loggers
from personax.experiment.records import read_results
from personax.experiment.runs import execute, start
from tests.experiment.test_runs import TINY, tiny

BLOCK, FULL, FIRST, LAST = 1 << 15, 1, 2, 4  # of LevelDB
pytestmark = pytest.mark.filterwarnings("default")  # of other people's libraries


class Stop:
    """A callback that interrupts a run."""

    def __init__(self, round):
        self.round = round

    def __call__(self, event):
        if getattr(event, "record", None) is not None and event.record.round == self.round:
            raise KeyboardInterrupt


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run that was interrupted after round 2."""
    monkeypatch.chdir(tmp_path)
    algorithms = {name: TINY["algorithms"][name] for name in ("FedAvg", "APFL")}
    return start(tiny(algorithms=algorithms), tmp_path / "run")


def interrupted(folder, name):
    with pytest.raises(KeyboardInterrupt):
        execute(folder, listeners=[*open_loggers([name]), Stop(2)])


def means(folder):
    """The mean accuracy of each score in each round, and the same of the worst decile."""
    return {
        score.name: {
            (one.round, prefix + "accuracy"): sum(of["accuracy"]) / len(of["accuracy"])
            for one in score.evaluations
            for prefix, of in (("", one.mean), ("worst_decile/", one.worst_decile))
        }
        for algorithm in read_results(folder.root).algorithms
        for score in algorithm.scores
    }


@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_mlflow_has_every_round_once_and_continues_its_runs(store, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = {"file": (tmp_path / "mlruns").as_uri(), "sqlite": f"sqlite:///{tmp_path / 'mlflow.db'}"}[store]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    interrupted(folder, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("personax").experiment_id
    status = lambda: {run.info.run_name: run.info.status for run in client.search_runs([experiment])}
    assert status() == {"FedAvg": "KILLED", "FedAvg, tuned": "KILLED"}
    execute(folder, listeners=open_loggers(["mlflow"]))
    assert status() == dict.fromkeys(["FedAvg", "FedAvg, tuned", "APFL", "Local"], "FINISHED")
    expected = means(folder)
    for run in client.search_runs([experiment]):
        points = {
            (point.step, metric): point.value
            for metric in ("accuracy", "worst_decile/accuracy")
            for point in client.get_metric_history(run.info.run_id, metric)
        }
        assert points == pytest.approx(expected[run.info.run_name]) and len(points) == 10
        assert all(len(client.get_metric_history(run.info.run_id, metric)) == 5 for metric in run.data.metrics)
        assert run.data.params["schedule.num_rounds"] == "4" and run.data.tags["personax.run"] == "tiny"


def records_of(content):
    """The records of an offline run's file: LevelDB's log format after 7 bytes of header."""
    at, parts = 7, []
    while at < len(content):
        if (room := -at % BLOCK) and room < 7:  # too short for the header of a record
            at += room
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts = [*([] if kind in (FULL, FIRST) else parts), content[at + 7 : at + 7 + size]]
        at += 7 + size
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            yield record


def scanned(path):
    """The facts of an offline run, and the rows of its history."""
    rows, facts = [], {}
    for record in records_of(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({"_step": record.history.step.num, **items})
        elif kind == "run":
            facts |= {"id": record.run.run_id, "name": record.run.display_name, "group": record.run.run_group}
            facts["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "exit":
            facts["exit"] = record.exit.exit_code
    return facts, rows


def test_wandb_has_every_round_and_continues_its_runs_offline(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    interrupted(folder, "wandb")
    execute(folder, listeners=open_loggers(["wandb"]))
    found = [scanned(path) for path in sorted((folder.root / "wandb").glob("offline-run-*/run-*.wandb"))]
    assert len(found) == 6  # two scores were continued
    by_name = {}
    for facts, rows in found:
        by_name.setdefault(facts["name"], []).append((facts, rows))
        assert facts["group"] == "tiny" and facts["config"]["schedule"]["num_rounds"] == 4
    assert [facts["exit"] for facts, _ in by_name["FedAvg"]] == [1, 0]
    assert len({facts["id"] for facts, _ in by_name["FedAvg"]}) == 1
    for name, expected in means(folder).items():
        rows = [row for _, rows in by_name[name] for row in rows]
        found = {
            (row["_step"], metric): row[metric] for row in rows for metric in ("accuracy", "worst_decile/accuracy")
        }
        assert found == pytest.approx(expected) and len(rows) <= 6  # the last round before the end may be repeated


def test_wandb_without_a_login_is_an_error_before_anything_is_trained(folder):
    hidden = ("WANDB_MODE", "WANDB_API_KEY")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"HOME": str(folder.root), "NETRC": str(folder.root / "netrc")}
    command = [
        sys.executable,
        "-c",
        "from personax.cli import app; app()",
        "resume",
        str(folder.root),
        "--log",
        "wandb",
    ]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    assert ended.returncode == 1 and "Error: Cannot log to wandb: No API key configured" in ended.stderr, ended.stderr
    assert not folder.part("FedAvg").exists() and not folder.checkpoints("FedAvg").exists()
