"""Adapter for MLflow: an MLflow run for each score.

The variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME (otherwise "personax") work as always. A resumed run
continues its MLflow runs by their ids.
"""

import os
import re
import time
from collections.abc import Mapping

from personax.experiment.loggers.logger import Series
from personax.values import optional_import
from personax.values.notebook import settings

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST = 500  # characters of a parameter's value, and parameters per call


def adapter():
    """Import MLflow, and return the function that opens a series."""
    library = optional_import("mlflow", "`--log mlflow`", "mlflow")
    return lambda series: _MlflowRun(library, series)


class _MlflowRun:
    """An MLflow run."""

    def __init__(self, library, series: Series) -> None:
        self.entities, self.client = library.entities, library.MlflowClient()
        self.id = series.id or self._create(series)
        if series.id:
            self.client.update_run(self.id, status="RUNNING")
        known = self.client.get_run(self.id).data.metrics
        steps = [point.step for metric in known for point in self.client.get_metric_history(self.id, metric)]
        self.next_round = max(steps, default=-1) + 1

    def _create(self, series: Series) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "personax")
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        tags = {"personax.run": series.run, "personax.algorithm": series.algorithm}
        id = self.client.create_run(experiment, run_name=series.score, tags=tags).info.run_id
        params = [self.entities.Param(_allowed(key), text[:_MOST]) for key, text in settings(series.settings)]
        for begin in range(0, len(params), 100):
            self.client.log_batch(id, params=params[begin : begin + 100])
        return id

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one round."""
        now = int(1000 * time.time())
        metrics = [self.entities.Metric(_allowed(name), value, now, round) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)
        self.next_round = round + 1

    def close(self, status: str) -> None:
        """End the run with this status."""
        self.client.set_terminated(self.id, _STATUS[status])


def _allowed(name: str) -> str:
    """Replace the characters of a name that MLflow rejects."""
    return re.sub(r"[^\w\-./ ]", "_", name)
