"""Objectives: the mathematics of a single client, one module per family."""

from personax.objectives.aruba import Aruba
from personax.objectives.ditto import Ditto
from personax.objectives.erm import Erm, LocalOnly
from personax.objectives.meta import Meta
from personax.objectives.mixture import Mixture
from personax.objectives.moreau import Moreau
from personax.objectives.objective import Objective, Visit
from personax.objectives.proximal import Proximal
from personax.objectives.scaffold import Scaffold

__all__ = [
    "Aruba",
    "Ditto",
    "Erm",
    "LocalOnly",
    "Meta",
    "Mixture",
    "Moreau",
    "Objective",
    "Proximal",
    "Scaffold",
    "Visit",
]
