"""The precision of matrix products in training, which trades digits for speed where the device supports it."""

from contextlib import AbstractContextManager
from typing import Any, Literal

import jax

from personax.fast.backends import has_tf32
from personax.values import require_one_of

Precision = Literal["default", "float32", "tf32", "bf16"]
_NAMES = {"default": None, "float32": "highest", "tf32": "TF32_TF32_F32", "bf16": "BF16_BF16_F32"}


def require_precision(precision: str) -> None:
    """Refuse a precision that is none, or that this machine has not."""
    require_one_of("precision", precision, tuple(_NAMES))
    if precision == "tf32" and not has_tf32():
        raise ValueError("`precision` is 'tf32', which a CPU does not have. Use 'float32' or 'bf16', or leave it out.")


def products_in(precision: Precision) -> AbstractContextManager[None]:
    """Matrix products take their factors in this precision, and add up in float32.

    "default" is JAX's own: float32 on a CPU, TF32 on recent GPUs, unless `jax.default_matmul_precision` says otherwise.
    """
    name = _NAMES[precision]
    return jax.default_matmul_precision(name or jax.config.jax_default_matmul_precision)  # pyright: ignore[reportAttributeAccessIssue]


def ambient_precision() -> Any:
    """The precision of an equation that does not ask for one, here and now."""
    row = jax.ShapeDtypeStruct((1,), "float32")
    return jax.make_jaxpr(jax.lax.dot)(row, row).eqns[0].params["precision"]
