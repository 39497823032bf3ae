"""Adapter for TensorBoard: event files in `tensorboard/` of the run folder, with a TensorBoard run for each score."""

import secrets
from collections.abc import Mapping

from personax.experiment.loggers.logger import Series
from personax.values import optional_import

PLACE = "tensorboard"


def adapter():
    """Import tensorboardX, and return the function that opens a series."""
    library = optional_import("tensorboardX", "`--log tensorboard`", "tensorboard")
    return lambda series: _Events(library, series)


class _Events:
    """The event files of one score."""

    id = ""  # the folder identifies them

    def __init__(self, library, series: Series) -> None:
        place = series.folder / PLACE / series.score.replace("/", "-")
        self.next_round = series.last_round if place.exists() else 0
        # TensorBoard drops what an interrupted run wrote from this round on, because it is repeated.
        purge = {"purge_step": self.next_round} if place.exists() else {}
        self.writer = library.SummaryWriter(str(place), filename_suffix=f".{secrets.token_hex(4)}", **purge)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one round."""
        for metric, value in values.items():
            self.writer.add_scalar(metric, value, round)
        self.writer.flush()

    def close(self, status: str) -> None:
        """Close the files. TensorBoard shows no status."""
        self.writer.close()
