"""Add low-rank terms to the products with kernels in a traced program: x W becomes x W + (x A) B.

W + A B is never formed. Where many clients have their own A and B, they all multiply by the one W, in one product, and
no client needs an array of the size of W.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from personax.fast.loops import num_consts_and_carry
from personax.fast.programs import INLINED, Values, bind, run_program
from personax.typing import Array


class KernelAxes(NamedTuple):
    """The axes of a kernel leaf: stacked layers, inputs (contracted) and outputs."""

    stacked: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def shapes(self, shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A, `[*stacked, *inputs, rank]`, and B, `[*stacked, rank, *outputs]`."""
        stacked, inputs, outputs = (tuple(shape[axis] for axis in axes) for axes in self)
        return (*stacked, *inputs, rank), (*stacked, rank, *outputs)

    def fits(self, other: "KernelAxes") -> bool:
        """Return True if both can share one pair A, B: they are equal, or one is the transpose, as in tied layers."""
        return other in (self, KernelAxes(self.stacked, self.outputs, self.inputs))


class Term(NamedTuple):
    """One low-rank term A B of a kernel."""

    a: Array
    b: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is traced through a program, with its terms.

    `axes` maps the axes of `w` to those of the leaf; `sliced` are the axes along which loops have taken slices.
    """

    w: Array
    terms: tuple[Term, ...]
    name: str = dataclasses.field(metadata={"static": True})
    axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    sliced: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def permuted(self, permutation: Sequence[int]) -> "Kernel":
        """Transpose the kernel; its terms stay in the layout of the leaf."""
        axes = tuple(self.axes[axis] for axis in permutation)
        return dataclasses.replace(self, w=jnp.transpose(self.w, permutation), axes=axes)

    def converted(self, dtype: Any) -> "Kernel":
        """Convert the kernel and its terms."""
        terms = tuple(Term(one.a.astype(dtype), one.b.astype(dtype)) for one in self.terms)
        return dataclasses.replace(self, w=self.w.astype(dtype), terms=terms)

    def slice_of_loop(self) -> "Kernel":
        """Return the kernel of one step of a loop over the first axis."""
        return dataclasses.replace(self, axes=self.axes[1:], sliced=(*self.sliced, self.axes[0]))


def find_dense(function: Callable[..., Any], params: Mapping[str, Any], *args: Any) -> dict[str, KernelAxes]:
    """Find the leaves that the program of `function(params, *args)` uses only as kernels of matrix products.

    `params` has the leaves by name. Arrays may be given as shapes.
    """
    return _find(jax.make_jaxpr(function)(params, *args), params, args)


def with_terms(
    function: Callable[..., Any], params: Mapping[str, Array], terms: Mapping[str, tuple[Term, ...]], *args: Any
) -> Any:
    """Compute `function(params, *args)` with the terms (x A) B of W added to each product x W."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *args)
    layouts = _find(closed, params, args)
    if missing := sorted(set(terms) - set(layouts)):
        raise ValueError(
            f"`{missing[0]}` is used here outside matrix products, unlike when its adapters were created. "
            "Remove it from `on`."
        )

    def add(equation: Any, rows: Array, kernel: Kernel, axes: _ProductAxes) -> Array:
        layout, product = layouts[kernel.name], _as_it_is(equation, rows, kernel, axes)
        return sum((_low_rank(equation, rows, kernel, one, layout, axes) for one in kernel.terms), product)

    kernels = {name: _kernel(name, leaf, terms[name]) if name in terms else leaf for name, leaf in params.items()}
    outputs = _run(closed, kernels, args, _Pass(add, lambda kernel: kernel.w))
    return jax.tree.unflatten(jax.tree.structure(shape), outputs)


def _find(closed: core.ClosedJaxpr, params: Mapping[str, Any], args: Sequence[Any]) -> dict[str, KernelAxes]:
    found: dict[str, KernelAxes | None] = {}

    def record(name: str, layout: KernelAxes | None) -> None:
        before = found.setdefault(name, layout)
        if before is not None and (layout is None or not before.fits(layout)):
            found[name] = None

    def product(equation: Any, rows: Array, kernel: Kernel, axes: _ProductAxes) -> Array:
        record(kernel.name, _layout(kernel, axes))
        return _as_it_is(equation, rows, kernel, axes)

    def other(kernel: Kernel) -> Array:
        record(kernel.name, None)
        return kernel.w

    def run(params: Mapping[str, Any], *args: Any) -> None:
        kernels = {name: _kernel(name, leaf, ()) for name, leaf in params.items()}
        _run(closed, kernels, args, _Pass(product, other))

    jax.eval_shape(run, params, *args)
    return {name: layout for name, layout in found.items() if layout is not None}


def _kernel(name: str, leaf: Any, terms: tuple[Term, ...]) -> Kernel:
    return Kernel(leaf, terms, name, tuple(range(jnp.ndim(leaf))))


def _run(closed: core.ClosedJaxpr, params: Mapping[str, Any], args: Sequence[Any], emit: "_Pass") -> Values:
    leaves = [params[name] for name in sorted(params)]  # the order in which JAX flattens a dictionary
    return emit.inside(closed, [*leaves, *jax.tree.leaves(args)])


class _Pass(NamedTuple):
    """An evaluation of a program with kernels among its values, given rules for their products and other uses."""

    product: Callable[[Any, Array, Kernel, "_ProductAxes"], Array]
    other: Callable[[Kernel], Array]

    def inside(self, closed: core.ClosedJaxpr, values: Sequence[Any]) -> Values:
        """Compute the outputs of a program, none of which is a kernel."""
        return self.arrays(run_program(closed, values, self))

    def arrays(self, values: Sequence[Any]) -> Values:
        """Replace kernels by the arrays that are read outside products."""
        return [self.other(value) if isinstance(value, Kernel) else value for value in values]

    def __call__(self, equation: Any, values: Values) -> Values:
        kernels = [at for at, value in enumerate(values) if isinstance(value, Kernel)]
        if not kernels:
            return bind(equation, values)
        name, params, kernel = equation.primitive.name, equation.params, values[kernels[0]]
        if name in INLINED:
            return run_program(params[INLINED[name]], values, self)
        if name == "dot_general" and len(kernels) == 1:
            axes = _axes(params["dimension_numbers"], kernels[0], kernel)
            return [self.product(equation, values[1 - kernels[0]], kernel, axes)]
        if name == "transpose":
            return [kernel.permuted(params["permutation"])]
        if name == "convert_element_type":
            return [kernel.converted(params["new_dtype"])]
        if name in _CALLS:
            return _CALLS[name](self, equation, values)
        return bind(equation, self.arrays(values))


class _ProductAxes(NamedTuple):
    """The axes of a product: those of the kernel refer to the leaf, those of the rows are positions."""

    contracted: tuple[int, ...]
    batch: tuple[int, ...]
    free: tuple[int, ...]
    rows_contracted: tuple[int, ...]
    rows_batch: tuple[int, ...]
    is_second: bool  # the kernel is the right factor


def _axes(numbers: Any, at: int, kernel: Kernel) -> _ProductAxes:
    (contracted, batch) = numbers
    own, of_batch = (tuple(kernel.axes[axis] for axis in axes[at]) for axes in (contracted, batch))
    free = tuple(axis for axis in kernel.axes if axis not in (*own, *of_batch))
    return _ProductAxes(own, of_batch, free, tuple(contracted[1 - at]), tuple(batch[1 - at]), at == 1)


def _layout(kernel: Kernel, axes: _ProductAxes) -> KernelAxes:
    return KernelAxes((*kernel.sliced, *axes.batch), tuple(sorted(axes.contracted)), tuple(sorted(axes.free)))


def _as_it_is(equation: Any, rows: Array, kernel: Kernel, axes: _ProductAxes) -> Array:
    return bind(equation, [rows, kernel.w] if axes.is_second else [kernel.w, rows])[0]


def _low_rank(equation: Any, rows: Array, kernel: Kernel, term: Term, layout: KernelAxes, axes: _ProductAxes) -> Array:
    """Compute (x A) B with the axes of x W, or (x B') A' if the outputs of W are contracted, as in a tied layer."""
    options = {name: equation.params[name] for name in ("precision", "preferred_element_type")}
    stacked = [axis for axis in layout.stacked if axis not in kernel.sliced]
    factors = [(term.a, [*stacked, *layout.inputs, None]), (term.b, [*stacked, None, *layout.outputs])]  # None: rank
    if set(axes.contracted) != set(layout.inputs):
        factors.reverse()
    (first, of_first), (second, of_second) = factors
    places = lambda names, axes: tuple(axes.index(name) for name in names)
    contracted = (axes.rows_contracted, places(axes.contracted, of_first))
    inner = jax.lax.dot_general(rows, first, (contracted, (axes.rows_batch, places(axes.batch, of_first))), **options)
    num_batch, rank = len(axes.batch), inner.ndim - 1
    batch = (tuple(range(num_batch)), places(axes.batch, of_second))
    numbers = (((rank,), places([None], of_second)), batch)
    outer = jax.lax.dot_general(inner.astype(rows.dtype), second, numbers, **options)
    made = [axis for axis in of_second if axis not in (*axes.batch, None)]  # the last axes of the product
    of_kernel = [rank + made.index(axis) for axis in axes.free]
    of_rows = list(range(num_batch, rank))
    return jnp.transpose(outer, [*batch[0], *(of_rows + of_kernel if axes.is_second else of_kernel + of_rows)])


def _scan(emit: _Pass, equation: Any, values: Values) -> Values:
    """Evaluate a loop whose body uses kernels: constants of the loop, or one of a stack at each step."""
    params, body = equation.params, equation.params["jaxpr"]
    num_consts, num_carry = num_consts_and_carry(equation, body)
    cut = num_consts + num_carry
    consts, start, inputs = values[:num_consts], values[num_consts:cut], values[cut:]
    start = emit.arrays(start)

    def step(carry: Values, own: Values) -> tuple[Values, Values]:
        own = [value.slice_of_loop() if isinstance(value, Kernel) else value for value in own]
        results = emit.inside(body, [*consts, *carry, *own])
        return results[:num_carry], results[num_carry:]

    carry, outputs = jax.lax.scan(step, start, inputs, params["length"], params["reverse"], params["unroll"])
    return [*carry, *outputs]


def _checkpoint(emit: _Pass, equation: Any, values: Values) -> Values:
    params, body = equation.params, core.ClosedJaxpr(equation.params["jaxpr"], ())
    run = lambda *values: emit.inside(body, values)
    return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])(*values)


def _cond(emit: _Pass, equation: Any, values: Values) -> Values:
    index, *operands = values
    branches = [lambda *given, branch=branch: emit.inside(branch, given) for branch in equation.params["branches"]]
    return jax.lax.switch(index, branches, *operands)


_CALLS = {"scan": _scan, "remat2": _checkpoint, "checkpoint": _checkpoint, "cond": _cond}
