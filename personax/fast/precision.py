"""The precision of matrix products in training, which trades accuracy for speed on devices that support it."""

from contextlib import AbstractContextManager
from typing import Any, Literal

import jax

from personax.fast.backends import has_tf32
from personax.values import require_one_of

Precision = Literal["default", "float32", "tf32", "bf16"]
_NAMES = {"default": None, "float32": "highest", "tf32": "TF32_TF32_F32", "bf16": "BF16_BF16_F32"}


def require_precision(precision: str) -> None:
    """Raise an error for an unknown precision, or one that this machine does not support."""
    require_one_of("precision", precision, tuple(_NAMES))
    if precision == "tf32" and not has_tf32():
        raise ValueError("`precision` 'tf32' is not available on a CPU. Use 'float32' or 'bf16', or omit it.")


def products_in(precision: Precision) -> AbstractContextManager[None]:
    """Multiply matrices with factors in this precision, and accumulate in float32.

    "default" is JAX's default: float32 on a CPU, TF32 on recent GPUs, unless `jax.default_matmul_precision` changes it.
    """
    name = _NAMES[precision]
    return jax.default_matmul_precision(name or jax.config.jax_default_matmul_precision)  # pyright: ignore[reportAttributeAccessIssue]


def ambient_precision() -> Any:
    """Return the current default precision of an equation without an explicit one."""
    row = jax.ShapeDtypeStruct((1,), "float32")
    return jax.make_jaxpr(jax.lax.dot)(row, row).eqns[0].params["precision"]
