"""Products with kernels inside a loop over time, as in recurrent networks.

`jax.lax.scan` multiplies by the same kernel at each step, and its derivative accumulates the kernel's gradient step by
step, each time with a sum of the kernel's size. Here, products with the loop's inputs are computed before the loop, for
all steps at once; for products with the carry, the derivative stores both factors of all steps and multiplies them
after the loop.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from personax.fast.programs import bind, evaluate, inlined
from personax.typing import Array, PyTree

Values = list[Any]


class Products(NamedTuple):
    """The body of a loop, the part that depends only on the loop's constants, and the products with such kernels."""

    body: core.ClosedJaxpr
    num_consts: int
    num_carry: int
    hoisted: list[Any]  # variables that depend only on constants and are read by the rest of the body
    of_inputs: list[Any]  # products of rows that depend only on inputs and constants
    of_carry: list[Any]  # products of rows that depend on the carry

    @property
    def consts(self) -> list[Any]:
        """Return the variables of the loop's constants."""
        return self.body.jaxpr.invars[: self.num_consts]

    @property
    def carried(self) -> list[Any]:
        """Return the variables of the carry."""
        return self.body.jaxpr.invars[self.num_consts : self.num_consts + self.num_carry]

    @property
    def inputs(self) -> list[Any]:
        """Return the variables of a step's inputs."""
        return self.body.jaxpr.invars[self.num_consts + self.num_carry :]


def find_loop_products(equation: Any) -> Products | None:
    """Find the products in the body of a `scan`; None if there are none."""
    params = equation.params
    if params["length"] < 2 or params["jaxpr"].effects:
        return None
    body = inlined(params["jaxpr"])
    num_consts, num_carry = num_consts_and_carry(equation, body)
    variables = body.jaxpr.invars
    fixed = {*body.jaxpr.constvars, *variables[:num_consts]}
    of_inputs = {*fixed, *variables[num_consts + num_carry :]}
    before, products = [], []
    for one in body.jaxpr.eqns:
        atoms = {atom for atom in one.invars if not isinstance(atom, core.Literal)}
        if _is_product(one) and one.invars[1] in fixed and one.invars[0] not in fixed:
            (before if one.invars[0] in of_inputs else products).append(one)
        for known in (fixed, of_inputs):
            if atoms <= known and not one.effects:
                known.update(one.outvars)
    if not before and not products:
        return None
    read = {atom for one in body.jaxpr.eqns for atom in one.invars if not isinstance(atom, core.Literal)}
    hoisted = [variable for one in body.jaxpr.eqns for variable in one.outvars if variable in fixed & read]
    return Products(body, num_consts, num_carry, hoisted, before, products)


def num_consts_and_carry(equation: Any, body: core.ClosedJaxpr) -> tuple[int, int]:
    """Return the numbers of constants and of carried arrays, which have the same axes inside the loop."""
    has_same_axes = lambda outer, inner: len(getattr(outer.aval, "shape", ())) == len(getattr(inner.aval, "shape", ()))
    num_both = sum(map(has_same_axes, equation.invars, body.jaxpr.invars))
    num_carry = sum(map(has_same_axes, equation.outvars, body.jaxpr.outvars))
    return num_both - num_carry, num_carry


def _is_product(equation: Any) -> bool:
    """Return True if an equation is `rows @ kernel`."""
    if equation.primitive.name != "dot_general" or any(isinstance(atom, core.Literal) for atom in equation.invars):
        return False
    rows, kernel = (atom.aval for atom in equation.invars)
    dimensions = (((rows.ndim - 1,), (0,)), ((), ()))
    given = tuple(tuple(map(tuple, pair)) for pair in equation.params["dimension_numbers"])
    return kernel.ndim == 2 and given == dimensions and equation.outvars[0].aval.dtype == rows.dtype == kernel.dtype


def scan_products(equation: Any, values: Values) -> Values:
    """Evaluate a `scan` with its products moved out of the loop."""
    found = find_loop_products(equation)
    assert found is not None
    length, reverse, unroll = (equation.params[name] for name in ("length", "reverse", "unroll"))
    consts, start, inputs = _cut(values, found.num_consts, found.num_carry)
    of_consts = dict(zip(found.consts, consts, strict=True))
    hoisted = evaluate(found.body, of_consts, found.hoisted, bind)
    known = {**of_consts, **dict(zip(found.hoisted, hoisted, strict=True))}
    rows_of = [one.invars[0] for one in found.of_inputs]
    of_step = lambda own: evaluate(found.body, {**known, **dict(zip(found.inputs, own, strict=True))}, rows_of, bind)
    rows = jax.vmap(of_step)(inputs) if rows_of else []
    before = [_product(one, own, _read(known, one.invars[1])) for one, own in zip(found.of_inputs, rows, strict=True)]
    kernels = tuple(_read(known, one.invars[1]) for one in found.of_carry)
    run = _loop(found, length, reverse, unroll)
    carry, outputs = run(kernels, list(known.values()), start, (inputs, before))
    return [*carry, *outputs]


def _read(known: dict[Any, Any], atom: Any) -> Any:
    return known[atom]


def _cut(values: Sequence[Any], num_consts: int, num_carry: int) -> tuple[Values, Values, Values]:
    cut = num_consts + num_carry
    return list(values[:num_consts]), list(values[num_consts:cut]), list(values[cut:])


def _product(equation: Any, rows: Array, kernel: Array) -> Array:
    """Compute `rows @ kernel` for rows with any number of leading axes, in the precision of the equation."""
    names = ("precision", "preferred_element_type")
    options = {name: equation.params[name] for name in names}
    return jax.lax.dot_general(rows, kernel, (((rows.ndim - 1,), (0,)), ((), ())), **options)


def _loop(found: Products, length: int, reverse: bool, unroll: int) -> Callable[..., tuple[Values, Values]]:
    """Return the loop as a function of the kernels that multiply the carry, and of everything else."""
    names = [*found.consts, *found.hoisted]
    made = [one.outvars[0] for one in found.of_inputs]
    ends = found.body.jaxpr.outvars

    def scan(kernels: Any, others: Values, start: Values, inputs: PyTree, shifts: Any) -> tuple[Any, Any]:
        """Run the loop, and also return the rows of all steps; products are shifted by zeros to obtain derivatives."""

        def step(carry: Values, own: PyTree) -> tuple[Values, tuple[Values, Values]]:
            (of_step, before), moved = own
            known = dict(zip(names, others, strict=True))
            known |= dict(zip([*found.carried, *found.inputs, *made], [*carry, *of_step, *before], strict=True))
            rows = []
            for one, kernel, shift in zip(found.of_carry, kernels, moved, strict=True):
                rows += evaluate(found.body, known, [one.invars[0]], bind)
                known[one.outvars[0]] = _shifted(_product(one, rows[-1], kernel), shift)
            results = evaluate(found.body, known, ends, bind)
            return results[: found.num_carry], (results[found.num_carry :], rows)

        carry, (outputs, rows) = jax.lax.scan(step, start, (inputs, shifts), length, reverse, unroll)
        return (carry, outputs), rows

    def zeros(kernels: Any) -> list[Array]:
        shapes = [(length, *one.outvars[0].aval.shape) for one in found.of_carry]
        return [jnp.zeros(shape, kernel.dtype) for shape, kernel in zip(shapes, kernels, strict=True)]

    @jax.custom_jvp
    def run(kernels: Any, others: Values, start: Values, inputs: PyTree) -> Any:
        return scan(kernels, others, start, inputs, zeros(kernels))[0]

    @run.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        kernels, *given = primals
        of_kernels, *changes = tangents
        rest = lambda *rest: scan(kernels, *rest)
        (ends, rows), push = jax.linearize(rest, *given, zeros(kernels))
        shifts = [_product(one, *pair) for one, *pair in zip(found.of_carry, rows, of_kernels, strict=True)]
        return ends, push(*changes, shifts)[0]

    return run


@jax.custom_jvp
def _shifted(product: Array, shift: Array) -> Array:
    """Return `product + shift` for a zero shift, which is not read but has a derivative."""
    return product


@_shifted.defjvp
def _shifted_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _shifted(*primals), tangents[0] + tangents[1]
