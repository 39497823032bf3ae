"""Loggers and callbacks: events in order, each round once even after interruptions, and errors that end no run."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from personax.cli import app
from personax.experiment.build import resolve
from personax.experiment.config import ConfigError, parse
from personax.experiment.loggers import ADAPTERS, Evaluated, Logger, TrainingEnded, TrainingStarted, open_loggers
from personax.experiment.loggers.events import announced, values_of
from personax.experiment.records import EvaluationRecord
from personax.experiment.runs import execute, start
from personax.values import NotInstalled
from tests.experiment.test_divergence import scalars_of
from tests.experiment.test_runs import TINY


def evaluation(round, *seeds, worst=None):
    """The record of a made-up evaluation: the mean error of each seed."""
    mean = {"error": [*seeds]}
    return EvaluationRecord(
        round, [round] * len(seeds), [0.0] * len(seeds), 0.0, mean, mean, {"error": worst or [*seeds]}, mean
    )


def started(folder, *history):
    return TrainingStarted(folder, "run", "A", {"local": {"lr": 0.1}}, {"A/s": history})


def told(logger, *events):
    for event in events:
        logger(event)


def rounds_of(folder):
    """The scalars of the only score, in the order in which they were written."""
    return scalars_of(folder / "tensorboard" / "A-s")


def small():
    """One algorithm with one score."""
    only = {"APFL": TINY["algorithms"]["APFL"]}
    return resolve(parse({**TINY, "algorithms": only}), baselines=False)


def test_a_callback_is_called_with_each_event(tmp_path):
    events = []
    record = execute(start(small(), tmp_path / "run"), listeners=[events.append])
    assert [type(event) for event in events] == [TrainingStarted, *[Evaluated] * 5, TrainingEnded]
    assert [event.record for event in events[1:-1]] == record.algorithms[0].scores[0].evaluations
    assert events[0].settings["algorithms"]["APFL"]["mix"] == 0.5
    assert events[0].history == {"APFL": ()} and events[0].folder == tmp_path / "run"
    assert events[-1] == TrainingEnded("APFL", "finished")


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")])
def test_a_callback_may_stop_a_run_and_all_listeners_are_notified(error, status, tmp_path):
    events, folder = [], start(small(), tmp_path / "run")

    def stop(event):
        if isinstance(event, Evaluated) and event.record.round == 2:
            raise error

    with pytest.raises(error):
        execute(folder, listeners=[events.append, stop])
    assert events[-1] == TrainingEnded("APFL", status)
    execute(folder, listeners=[events.append])  # a `ValueError` loses what came after the last checkpoint
    resumed = [event for event in events if isinstance(event, TrainingStarted)][1]
    assert len(resumed.history["APFL"]) == (3 if status == "interrupted" else 0)


def test_values_are_means_over_the_seeds_that_are_left():
    nan = float("nan")
    assert values_of(evaluation(0, 1.0, nan, 2.0, worst=[3.0, nan, 5.0])) == {"error": 1.5, "worst_decile/error": 4.0}
    assert values_of(evaluation(0, nan)) == {}


def test_a_resumed_run_repeats_only_what_its_checkpoint_may_lack(tmp_path):
    made = [evaluation(i, i / 10) for i in range(5)]
    (logger,) = open_loggers(["tensorboard"])
    told(logger, started(tmp_path), *(Evaluated("A", "A/s", one) for one in made[:4]))
    logger.writers["A/s"].close("")  # the process is killed
    (again,) = open_loggers(["tensorboard"])
    told(again, started(tmp_path, *made[:3]), *(Evaluated("A", "A/s", one) for one in made[3:]))
    told(again, TrainingEnded("A", "finished"))
    np.testing.assert_allclose(rounds_of(tmp_path)["error"], [0, 0.1, 0.2, 0.3, 0.2, 0.3, 0.4], rtol=1e-6)
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"tensorboard": {"A/s": ""}}


def test_a_logger_that_joins_late_gets_the_history(tmp_path):
    made = [evaluation(i, i / 10) for i in range(3)]
    (logger,) = open_loggers(["tensorboard"])
    told(logger, started(tmp_path, *made[:2]), Evaluated("A", "A/s", made[2]), TrainingEnded("A", "finished"))
    np.testing.assert_allclose(rounds_of(tmp_path)["error"], [0, 0.1, 0.2], rtol=1e-6)


class Failing:
    """A tracking library that works for a while."""

    id, next_round = "x", 0

    def __init__(self, num):
        self.left = num

    def write(self, round, values):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the server is gone")

    def close(self, status):
        raise AssertionError("a failed logger is left alone")


def test_a_logger_that_fails_ends_no_run_unless_it_fails_at_the_start(tmp_path):
    notes, made = [], [evaluation(i, 0.0) for i in range(4)]
    logger = Logger("mine", lambda series: Failing(2), notes.append)
    told(logger, started(tmp_path), *(Evaluated("A", "A/s", one) for one in made), TrainingEnded("A", "finished"))
    assert notes == ["Warning: mine failed and receives no further events: the server is gone"]
    with pytest.raises(ValueError, match="Cannot log to mine: the server is gone"):
        told(Logger("mine", lambda series: Failing(0)), started(tmp_path, *made))


def test_listeners_that_started_also_end(tmp_path):
    events = []

    def refuse(event):
        if isinstance(event, TrainingStarted):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"), announced([events.append, refuse], started(tmp_path)):
        pass
    assert events == [started(tmp_path), TrainingEnded("A", "failed")]


def test_names_of_loggers_are_checked_and_missing_libraries_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"`--log` has no logger `wandbb`. Did you mean `wandb`\?"):
        open_loggers(["tensorboard,wandbb"])
    assert open_loggers(["builtins:print", "builtins:print"]) == [print]
    for name, module in {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(NotInstalled, match=rf"`--log {name}` needs {module}, .*personax\[{name}\]"):
            open_loggers([name])


def test_a_missing_library_ends_a_command_before_it_does_anything(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    ended = CliRunner().invoke(app, ["compare", "missing.toml", "--log", "tensorboard", "--log", "wandb"])
    assert ended.exit_code == 1 and 'Run `pip install "personax[wandb]"`' in ended.stderr
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_unless_it_is_requested():
    code = (
        "import sys, personax.cli; print([name for name in ('wandb', 'mlflow', 'tensorboardX') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n" and set(ADAPTERS) == {"tensorboard", "wandb", "mlflow"}
