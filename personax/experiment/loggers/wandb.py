"""Adapter for Weights & Biases: a wandb run for each score, in a group with the name of the personax run.

The variables WANDB_PROJECT (otherwise "personax"), WANDB_ENTITY, WANDB_DIR (otherwise the run folder) and WANDB_MODE
work as always. A resumed run continues its wandb runs by their ids. Offline, wandb writes another offline run with the
same id, and `wandb sync` joins them.
"""

import os
from collections.abc import Mapping

from personax.experiment.loggers.logger import Series
from personax.values import optional_import


def adapter():
    """Import wandb, and return the function that opens a series."""
    library = optional_import("wandb", "`--log wandb`", "wandb")
    return lambda series: _WandbRun(library, series)


class _WandbRun:
    """A wandb run."""

    def __init__(self, library, series: Series) -> None:
        self.run = library.init(
            project=os.environ.get("WANDB_PROJECT", "personax"),
            group=series.run,
            name=series.score,
            config={**series.settings, "algorithm": series.algorithm},
            dir=os.environ.get("WANDB_DIR", str(series.folder)),
            id=series.id,
            resume="allow" if series.id else None,
            reinit="create_new",  # the scores of an algorithm are open at the same time
            settings=library.Settings(silent=True, console="off"),
        )
        # A resumed run that is offline knows no earlier rounds. `wandb sync` ignores a repeated one.
        self.next_round = max(self.run.step, series.last_round if series.id else 0)

    @property
    def id(self) -> str:
        return self.run.id

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one round."""
        self.run.log(dict(values), step=round)
        self.next_round = round + 1

    def close(self, status: str) -> None:
        """Finish the run, as failed unless the training finished."""
        self.run.finish(exit_code=0 if status == "finished" else 1)
