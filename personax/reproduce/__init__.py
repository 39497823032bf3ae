"""The papers' tables and figures, one command each, with the papers' own numbers beside ours."""

from collections.abc import Callable

from personax.reproduce import fallah, gmeta
from personax.reproduce.experiment import Experiment

EXPERIMENTS: dict[str, Callable[[bool], Experiment]] = {
    "fallah-table1": fallah.table1,
    "fallah-initialisation": fallah.initialisation,
    "fallah-appendix": fallah.appendix,
    "fallah-tuned": fallah.tuned,
    "gmeta-figure1": gmeta.figure1,
}
