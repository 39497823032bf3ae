"""The papers' tables and figures, each reproduced by one command, with the papers' numbers beside ours."""

from collections.abc import Callable

from personax.reproduce import apfl, fallah, fallah_causes, gmeta, persafl, persafl_small
from personax.reproduce.experiment import Experiment

EXPERIMENTS: dict[str, Callable[[bool], Experiment]] = {
    "fallah-table1": fallah.table1,
    "fallah-causes": fallah_causes.causes,
    "fallah-appendix": fallah.appendix,
    "fallah-tuned": fallah.tuned,
    "gmeta-figure1": gmeta.figure1,
    "apfl-figure1": apfl.figure1,
    "apfl-figure2": apfl.figure2,
    "apfl-figure3": apfl.figure3,
    "apfl-table1": apfl.table1,
    "apfl-table1-causes": apfl.table1_causes,
    "apfl-table2": apfl.table2,
    "apfl-table2-causes": apfl.table2_causes,
    "apfl-table3": apfl.table3,
    "apfl-figure4": apfl.figure4,
    "apfl-figure5": apfl.figure5,
    "apfl-figure6": apfl.figure6,
    "persafl-figure2a": persafl_small.figure2a,
    "persafl-figure2": persafl.figure2,
    "persafl-figure2-small": persafl_small.figure2_small,
    "persafl-figure2-spread": persafl_small.figure2_spread,
    "persafl-figure2c-small": persafl_small.figure2c_small,
    "persafl-figure2c": persafl.figure2c,
}
