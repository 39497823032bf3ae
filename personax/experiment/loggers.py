"""Write scores as TensorBoard events: `pip install personax[tensorboard]`."""

from pathlib import Path
from typing import Any

import numpy as np

from personax.experiment.records import EvaluationRecord


class Events:
    """Writes each evaluation's means over the seeds that have not diverged, one run of TensorBoard for each score."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ValueError(
                "TensorBoard events need tensorboardX, which is not installed. `pip install personax[tensorboard]`."
            ) from None
        self.folder, self.open, self.writers = folder, SummaryWriter, {}

    def __call__(self, algorithm: str, score: str, record: EvaluationRecord) -> None:
        """Write one evaluation."""
        writer: Any = self.writers.get(score)
        if writer is None:
            writer = self.writers[score] = self.open(str(self.folder / score.replace("/", "-")))
        for metric, of_seeds in record.mean.items():
            left = [mean for mean in of_seeds if np.isfinite(mean)]
            if left:
                writer.add_scalar(metric, float(np.mean(left)), record.round)
        writer.flush()
