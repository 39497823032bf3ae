"""Networks, adapters for other libraries, and training tasks."""

from personax.models.adapters import from_equinox, from_flax, from_nnx
from personax.models.low_rank import dual_lora, lora
from personax.models.networks import cnn, cnn2, cnn3, logistic_regression, mlp, standardized

__all__ = [
    "cnn",
    "cnn2",
    "cnn3",
    "dual_lora",
    "from_equinox",
    "from_flax",
    "from_nnx",
    "logistic_regression",
    "lora",
    "mlp",
    "standardized",
]
