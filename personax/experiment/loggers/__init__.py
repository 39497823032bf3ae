"""Listeners that write the scores of a run to TensorBoard, Weights & Biases or MLflow while it trains.

events       what `execute` sends to its listeners
logger       the listener that all adapters share
tensorboard, wandb, mlflow   one adapter each, which imports its library when it is opened
"""

from collections.abc import Callable, Sequence

from personax.experiment.loggers import mlflow, tensorboard, wandb
from personax.experiment.loggers.events import Evaluated, Event, Listener, TrainingEnded, TrainingStarted
from personax.experiment.loggers.logger import Logger, Series, Writer
from personax.values import check_names, imported

ADAPTERS = {"tensorboard": tensorboard.adapter, "wandb": wandb.adapter, "mlflow": mlflow.adapter}

__all__ = [
    "ADAPTERS",
    "Evaluated",
    "Event",
    "Listener",
    "Logger",
    "Series",
    "TrainingEnded",
    "TrainingStarted",
    "Writer",
    "open_loggers",
]


def open_loggers(names: Sequence[str], notify: Callable[[str], None] = lambda text: None) -> list[Listener]:
    """Make the listeners with these names: adapters, or your own callbacks as `module:name`.

    Their libraries are imported here, so a missing one raises `NotInstalled` before anything is trained.

    >>> [listener] = open_loggers(["builtins:print"])
    >>> listener(TrainingEnded("FedAvg", "finished"))
    TrainingEnded(algorithm='FedAvg', status='finished')
    """
    chosen = dict.fromkeys(part.strip() for name in names for part in name.split(","))
    check_names("--log", (name for name in chosen if ":" not in name), ADAPTERS, "logger")
    return [imported(name, "--log") if ":" in name else Logger(name, ADAPTERS[name](), notify) for name in chosen]
