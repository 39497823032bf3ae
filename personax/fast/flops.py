"""Count the arithmetic of a traced program."""

import math
from typing import Any

import jax


def operations_of(jaxpr: Any) -> int:
    """Multiplications and additions of all matrix products and convolutions; the body of a loop counts once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        elif equation.primitive.name == "conv_general_dilated":
            kernel, outputs = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
            num_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * math.prod(outputs) * math.prod(kernel) // num_features
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                total += operations_of(inner)
    return total


def _is_program(value: object) -> bool:
    return hasattr(value, "eqns")  # the type is in `jax.extend`, which imports Pallas
