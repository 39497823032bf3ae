"""Compare the algorithms of a configuration from Python, with callbacks."""

from collections.abc import Sequence
from pathlib import Path

from personax.experiment.build import resolve
from personax.experiment.config import choose_algorithm, load
from personax.experiment.loggers import Listener, open_loggers
from personax.experiment.records import RunRecord
from personax.experiment.runs import execute, prepare, start


def compare(
    config: str | Path | None,
    folder: str | Path,
    *,
    settings: Sequence[str] = (),
    algorithm: str | None = None,
    log: Sequence[str] = (),
    callbacks: Sequence[Listener] = (),
) -> RunRecord:
    """Train and score the algorithms of a configuration into a new run folder, as `personax compare` does.

    Return the contents of `results.json`. `personax report FOLDER` writes the page. An exception in a callback stops
    the run, and `personax resume FOLDER` continues it.

    Args:
        config: a TOML file, or None for the embedded digits.
        folder: the run folder, which must not contain a run.
        settings: changes of the configuration, such as `"seeds=5"`.
        algorithm: train only this algorithm and no baselines, as `personax run` does.
        log: names of loggers: `"tensorboard"`, `"wandb"`, `"mlflow"`, or `"module:name"` for a callback.
        callbacks: functions that are called with each event (see `px.events`).
    """
    listeners = [*callbacks, *open_loggers(log)]
    given = load(None if config is None else Path(config), settings)
    resolved = resolve(given if algorithm is None else choose_algorithm(given, algorithm), baselines=algorithm is None)
    work = prepare(resolved)  # before `start`: an invalid configuration leaves no folder
    return execute(start(resolved, Path(folder)), listeners=listeners, work=work)
