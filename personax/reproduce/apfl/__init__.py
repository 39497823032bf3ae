"""The tables and figures of APFL 2020."""

from personax.reproduce.apfl.causes import table1_causes, table2_causes
from personax.reproduce.apfl.figures import figure1, figure2, figure3, figure4, figure5, figure6
from personax.reproduce.apfl.tables import table1, table2, table3

__all__ = [
    "figure1",
    "figure2",
    "figure3",
    "figure4",
    "figure5",
    "figure6",
    "table1",
    "table1_causes",
    "table2",
    "table2_causes",
    "table3",
]
