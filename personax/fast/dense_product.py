"""Find the product of rows with a kernel in the program of a loss, and split the program there.

Such a kernel occurs in a single matrix product of the loss. With `rows`, which computes the other factor, and `head`,
which computes the loss from the product, gradients need no array of the kernel's size (`fast.near`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend import core

from personax.fast.precision import ambient_precision
from personax.fast.programs import bind, evaluate, inlined
from personax.typing import Array, Batch, LossFn, Params, Scalar

Rest = tuple[Array, ...]  # the leaves of the parameters without the kernel
Kernel = tuple[Any, bool]  # the variable of a parameter, and True if its transpose is used


class DenseProduct(NamedTuple):
    """A product in the program of a loss, for batches of one shape.

    `place` is the kernel's position among the leaves of the parameters; with `is_transposed` it is stored with outputs
    first. If the product `is_first`, the rows depend only on the batch.
    """

    program: core.ClosedJaxpr
    equation: Any
    place: int
    rows_atom: Any
    is_transposed: bool
    is_first: bool
    structure: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of inputs and outputs."""
        shape = self._params[self.place].aval.shape
        return shape[::-1] if self.is_transposed else shape

    @property
    def num_rows(self) -> int:
        """Return the number of rows of a batch."""
        return math.prod(self.rows_atom.aval.shape) // self.shape[0]

    @property
    def _params(self) -> list[Any]:
        return self.program.jaxpr.invars[: self.structure.num_leaves]

    def split(self, params: Params) -> tuple[Array, Rest]:
        """Split parameters into the kernel `[input, output]` and the other leaves."""
        leaves = jax.tree.leaves(params)
        kernel = leaves.pop(self.place)
        return (kernel.T if self.is_transposed else kernel), tuple(leaves)

    def join(self, kernel: Array, rest: Rest) -> Params:
        """Assemble parameters from a kernel and the other leaves."""
        own = kernel.T if self.is_transposed else kernel
        return jax.tree.unflatten(self.structure, [*rest[: self.place], own, *rest[self.place :]])

    def rows(self, rest: Rest, batch: Batch) -> Array:
        """Compute the factor that multiplies the kernel, one row for each row of the product."""
        return self._outputs(self._known(rest, batch), [self.rows_atom])[0].reshape(-1, self.shape[0])

    def head(self, at: tuple[Rest, Array], batch: Batch) -> Scalar:
        """Compute the loss from the other leaves and the product."""
        rest, products = at
        made = self.equation.outvars[0]
        shaped = (products.T if self._kernel_is_first else products).reshape(made.aval.shape)
        return self._outputs({**self._known(rest, batch), made: shaped}, self.program.jaxpr.outvars)[0]

    @property
    def _kernel_is_first(self) -> bool:
        return self.equation.invars[1] is self.rows_atom

    def _known(self, rest: Rest, batch: Batch) -> dict[Any, Any]:
        params = self._params
        given = params[: self.place] + params[self.place + 1 :] + self.program.jaxpr.invars[len(params) :]
        return dict(zip(given, (*rest, *jax.tree.leaves(batch)), strict=True))

    def _outputs(self, known: Mapping[Any, Any], wanted: list[Any]) -> list[Any]:
        return evaluate(self.program, known, wanted, bind)


def find_products(loss: LossFn, params: Params, batch: Batch) -> list[DenseProduct]:
    """Find the products with kernels that the loss uses once, in program order."""
    program = inlined(jax.make_jaxpr(loss)(params, batch))
    leaves, structure = jax.tree.flatten(params)
    owned = program.jaxpr.invars[: len(leaves)]
    kernels = {kernel: (kernel, False) for kernel in owned}
    uses = _uses(program.jaxpr)
    found, of_params = [], set(owned)  # including everything computed from them
    for equation in program.jaxpr.eqns:
        if equation.primitive.name == "transpose" and equation.invars[0] in owned:
            kernels[equation.outvars[0]] = (equation.invars[0], True)
        elif (parts := _factors(equation, kernels)) is not None:
            (kernel, is_turned), rows, is_transposed = parts
            is_first, layout = rows not in of_params, is_transposed != is_turned
            if uses[kernel] == 1 and all(uses[atom] == 1 for atom in equation.invars if atom in kernels):
                found.append(DenseProduct(program, equation, owned.index(kernel), rows, layout, is_first, structure))
        if any(atom in of_params for atom in equation.invars if not isinstance(atom, core.Literal)):
            of_params.update(equation.outvars)
    return found


def _uses(jaxpr: Any) -> dict[Any, int]:
    """Count how often each variable is read."""
    uses: dict[Any, int] = {}
    atoms: Iterable[Any] = (atom for equation in jaxpr.eqns for atom in equation.invars)
    for atom in (*atoms, *jaxpr.outvars):
        if not isinstance(atom, core.Literal):
            uses[atom] = uses.get(atom, 0) + 1
    return uses


def _factors(equation: Any, kernels: Mapping[Any, Kernel]) -> tuple[Kernel, Any, bool] | None:
    """Return the kernel, the rows, and True if the product contracts the rows' last axis; None for other equations."""
    if equation.primitive.name != "dot_general" or equation.params["precision"] != ambient_precision():
        return None
    (contracted, batched), made = equation.params["dimension_numbers"], equation.outvars[0].aval
    for at in (1, 0):
        kernel, rows = equation.invars[at], equation.invars[1 - at]
        if isinstance(kernel, core.Literal) or isinstance(rows, core.Literal) or kernel not in kernels:
            continue
        last = rows.aval.ndim - 1
        is_plain = (
            not batched[0] and kernel.aval.ndim == 2 and tuple(contracted[1 - at]) == (last,) and rows not in kernels
        )
        if is_plain and made.dtype == kernel.aval.dtype == rows.aval.dtype and (at == 1 or last == 1):
            return kernels[kernel], rows, contracted[at][0] == 1
    return None
