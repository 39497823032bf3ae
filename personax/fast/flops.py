"""Count the arithmetic of a traced program, and measure its arrays."""

import math
from typing import Any

from jax.extend import core


def operations_of(jaxpr: Any) -> int:
    """Count multiplications and additions of all matrix products and convolutions; a loop body counts once."""
    inner = (program for equation in jaxpr.eqns for program in core.jaxprs_in_params(equation.params))
    return sum(map(operations_of_equation, jaxpr.eqns)) + sum(map(operations_of, inner))


def operations_of_equation(equation: Any) -> int:
    """Count multiplications and additions of a matrix product or a convolution; 0 for other equations."""
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * depth * math.prod(equation.outvars[0].aval.shape)
    if equation.primitive.name == "conv_general_dilated":
        kernel, outputs = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
        num_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(outputs) * math.prod(kernel) // num_features
    return 0


def largest_array(jaxpr: Any) -> int:
    """Return the size in bytes of the largest array that a program computes, including calls and loops."""
    inner = (program for equation in jaxpr.eqns for program in core.jaxprs_in_params(equation.params))
    shapes = (atom.aval for equation in jaxpr.eqns for atom in equation.outvars)
    own = (aval.size * aval.dtype.itemsize for aval in shapes if hasattr(aval, "shape"))
    return max((*own, *map(largest_array, inner)), default=0)
