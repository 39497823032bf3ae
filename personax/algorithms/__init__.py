"""The named recipes. Each combines an objective, local training, a server and a division of the model.

Pass step sizes and other options by keyword. Every recipe also accepts the options of `Local`.
"""

from personax.algorithms.algorithm import Algorithm
from personax.algorithms.averaging import (
    aruba,
    fedasync,
    fedasync_mixing,
    fedavg,
    fedbuff,
    fedprox,
    local_only,
    scaffold,
)
from personax.algorithms.divided_models import (
    fedalt,
    fedbabu,
    fedbn,
    feddpa,
    fedper,
    fedrep,
    fedsa_lora,
    fedsim,
    lg_fedavg,
)
from personax.algorithms.personal_models import HESSIAN_FREE, anil, apfl, ditto, per_fedavg, persafl, pfedme

__all__ = [
    "HESSIAN_FREE",
    "Algorithm",
    "anil",
    "apfl",
    "aruba",
    "ditto",
    "fedalt",
    "fedasync",
    "fedasync_mixing",
    "fedavg",
    "fedbabu",
    "fedbn",
    "fedbuff",
    "feddpa",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsa_lora",
    "fedsim",
    "lg_fedavg",
    "local_only",
    "per_fedavg",
    "persafl",
    "pfedme",
    "scaffold",
]
