"""Gradients of a loss at models near a starting point, by plain autodiff or with shared products.

`near` computes the gradients of one local step, `along` the steps of a visit. Both return one interface (`Near`,
`Steps`): code that uses it reads like the equations, and the program of the loss determines how it is computed.

If a loss uses the inputs x of a dense layer only in the product x W, its gradient in W is x' d, where d is the
derivative with respect to the product. Gradient steps from W on batches x_1, x_2, ... therefore lead to W + sum_j x_j'
a_j, where another batch x gives x W + sum_j (x x_j') a_j. W and its gradients, the largest arrays of most such
networks, are not touched in between: the steps update the small a_j and multiply inputs with inputs.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from personax.curvature import Hvp
from personax.fast.backends import unroll_length
from personax.fast.dense_product import DenseProduct, Rest, find_products
from personax.sharing import Patterns, is_none, names_of, only, selects
from personax.typing import Array, Batch, Batches, LossFn, Params, PyTree, Scalar

Point = PyTree  # a model, or a vector such as a gradient, in the coordinates of a `Near`
Seen = Any  # a batch, in the naming of a `Near`
Body = Callable[
    ..., tuple[PyTree, PyTree]
]  # maps the carry and an entry of each sequence to the next carry and an output
WIDE = 2**20  # entries of a kernel beyond which caches cannot hold one for each client


class Steps(Protocol):
    """The models along a sequence of steps, and the gradients there.

    `step` returns `at + scale * vector` in the dtypes of `at`, or `at` if the step is not taken. `loop(body, carry,
    *sequences)` is `jax.lax.scan`. `start(*seen)` is the initial model; a loop with a fixed carry structure, such as
    `fori_loop`, needs the batches of its steps.
    """

    def start(self, *seen: Seen) -> Point: ...
    def gradient(self, at: Point, seen: Seen) -> Point: ...
    def step(self, at: Point, scale: Scalar, vector: Point, is_taken: Scalar = True) -> Point: ...
    def loop(self, body: Body, carry: PyTree, *sequences: Any, reverse: bool = False) -> tuple[PyTree, Any]: ...
    def params(self, at: Point) -> Params: ...


class Near(Steps, Protocol):
    """The gradients of one local step on known batches, and its Hessian-vector products.

    `batches(role)` names the batches of a role, as a sequence for `loop`; `batch(role)` names its only one. `part` is a
    vector that is zero outside the parameters that the patterns select; a step along it leaves the others unchanged.
    """

    def batches(self, role: str) -> Any: ...
    def batch(self, role: str) -> Seen: ...
    def hvp(self, product: Hvp, at: Point, vector: Point, seen: Seen) -> Point: ...
    def part(self, vector: Point, patterns: Patterns) -> Point: ...
    def vector(self, vector: Point) -> Params: ...


def near(loss: LossFn, start: Params, batches: Batches, num_gradients: int, product: Hvp | None = None) -> Near:
    """Return the gradients of one local step, given their number and the Hessian-vector product if one is used.

    Shared products need less arithmetic for a meta-gradient with batches of equal size, and for at least three
    gradients on one batch, unless the batches have many rows relative to the kernel.
    """
    plain = Plain(loss, start, batches)
    num_batches = sum(len(of_role.weight) for of_role in batches.values())
    is_short = all(unroll_length(len(of_role.weight)) == len(of_role.weight) for of_role in batches.values())
    is_known = product is None or product.is_coordinate_free
    if num_gradients + num_batches <= 3 or not is_short or not is_known:
        return plain
    found = {
        role: shared_product(loss, start, jax.tree.map(lambda leaf: leaf[0], own)) for role, own in batches.items()
    }
    products = {role: one for role, one in found.items() if one is not None}
    num_rows = sum(one.num_rows * len(batches[role].weight) for role, one in products.items())
    is_one = len(products) == len(batches) and len({one.place for one in products.values()}) == 1
    return SharedProducts(products, start, batches) if is_one and saves(products["outer"], num_rows) else plain


def shared_product(loss: LossFn, params: Params, batch: Batch) -> DenseProduct | None:
    """Find the first product of a loss whose rows depend only on the samples."""
    return next((one for one in find_products(loss, params, batch) if one.is_first), None)


def saves(one: DenseProduct, num_rows: int) -> bool:
    """Return True if sharing this product needs less arithmetic, given the total number of rows in all batches."""
    num_inputs, num_outputs = one.shape
    return num_rows * (num_inputs + num_outputs) <= 2 * num_inputs * num_outputs


def along(loss: LossFn, start: Params, batch: Batch, num_steps: int, is_plain: bool = False) -> Steps:
    """Return the steps of a visit on batches of this shape, with any optimizer if `is_plain`, else gradient descent.

    Unrolled steps cause less memory traffic if there are few of them and the kernel is far larger than all their rows.
    They need slightly more arithmetic, and each is compiled separately.
    """
    plain = Plain(loss, start, {}, unrolls=False)
    if is_plain or unroll_length(num_steps) < num_steps:
        return plain
    wide = [one for one in find_products(loss, start, batch) if _is_wide(one, num_steps)]
    return UnrolledSteps(max(wide, key=lambda one: math.prod(one.shape)), start) if wide else plain


def _is_wide(one: DenseProduct, num_steps: int) -> bool:
    return math.prod(one.shape) >= WIDE and num_steps * one.num_rows <= one.shape[1]


class Plain(NamedTuple):
    """Plain autodiff: points are trees like the parameters, and batches are used directly."""

    loss: LossFn
    origin: Params
    of_roles: Batches
    unrolls: bool = True  # unroll short loops

    def batches(self, role: str) -> Batch:
        return self.of_roles[role]

    def batch(self, role: str) -> Batch:
        return jax.tree.map(lambda leaf: leaf[0], self.of_roles[role])

    def start(self, *seen: Batch) -> Params:
        return self.origin

    def gradient(self, at: Params, seen: Batch) -> Params:
        return jax.grad(self.loss)(at, seen)

    def hvp(self, product: Hvp, at: Params, vector: Params, seen: Batch) -> Params:
        return product(self.loss, at, _filled(vector, at), seen)

    def part(self, vector: Params, patterns: Patterns) -> Params:
        return only(vector, patterns)

    def step(self, at: Params, scale: Scalar, vector: Params, is_taken: Scalar = True) -> Params:
        return _step(at, scale, vector, is_taken)

    def loop(self, body: Body, carry: PyTree, *sequences: Any, reverse: bool = False) -> tuple[PyTree, Any]:
        unroll = unroll_length(len(jax.tree.leaves(sequences)[0])) if self.unrolls else 1
        return jax.lax.scan(lambda carry, own: body(carry, *own), carry, sequences, reverse=reverse, unroll=unroll)

    def params(self, at: Params) -> Params:
        return at

    def vector(self, vector: Params) -> Params:
        return vector


def _step(at: PyTree, scale: Scalar, vector: PyTree, is_taken: Scalar = True) -> PyTree:
    """Return `at + scale * vector` in the dtypes of `at`."""
    if is_taken is True:
        added = lambda v, a: (a + scale * v).astype(a.dtype)
    else:
        # Select the change, which is free when it is added; selecting between models would copy them. Do not multiply
        # by zero: a client that has finished may have nonfinite numbers here.
        added = lambda v, a: (a + jnp.where(is_taken, scale * v, 0)).astype(a.dtype)
    return jax.tree.map(lambda v, a: a if v is None else added(v, a), vector, at, is_leaf=is_none)


def _filled(vector: PyTree, at: PyTree) -> PyTree:
    """Fill the missing leaves of a vector with zeros."""
    zeros = lambda a: None if a is None else jnp.zeros_like(a)
    return jax.tree.map(lambda v, a: zeros(a) if v is None else v, vector, at, is_leaf=is_none)


Name = tuple[str, int]  # the role and index of a batch


class Place(NamedTuple):
    """A vector with the kernel `sum_j x_j' along[j]`, or a model whose kernel differs from the start by this.

    A vector has None instead of other leaves that are zero.
    """

    rest: Rest
    along: dict[Name, Array]


class SharedProducts:
    """Steps on known batches for a layer whose inputs do not depend on the model."""

    def __init__(self, products: dict[str, DenseProduct], start: Params, batches: Batches):
        self._layers = products
        self._layer = next(iter(products.values()))
        self._kernel, self._rest = self._layer.split(start)
        self._batches = {
            (role, index): jax.tree.map(lambda leaf, index=index: leaf[index], of_role)
            for role, of_role in batches.items()
            for index in range(len(of_role.weight))
        }
        self._rows = {name: products[name[0]].rows(self._rest, batch) for name, batch in self._batches.items()}
        self._products = {name: rows @ self._kernel for name, rows in self._rows.items()}
        # Under `jit`, unused products are not computed.
        self._inner = {(a, b): x @ y.T for a, x in self._rows.items() for b, y in self._rows.items()}

    def batches(self, role: str) -> list[Name]:
        return [name for name in self._batches if name[0] == role]

    def batch(self, role: str) -> Name:
        return role, 0

    def start(self, *seen: Name) -> Place:
        return Place(self._rest, {name: jnp.zeros_like(self._products[name]) for name in seen})

    def gradient(self, at: Place, seen: Name) -> Place:
        rest, along = jax.grad(self._layers[seen[0]].head)(self._values(at, seen), self._batches[seen])
        return Place(rest, {seen: along})

    def hvp(self, product: Hvp, at: Place, vector: Place, seen: Name) -> Place:
        along = self._change(vector, seen) if vector.along else jnp.zeros_like(self._products[seen])
        changes = _filled(vector.rest, at.rest), along
        known = product.given_norm(self._norm(vector))
        rest, along = known(self._layers[seen[0]].head, self._values(at, seen), changes, self._batches[seen])
        return Place(rest, {seen: along.astype(self._kernel.dtype)})

    def step(self, at: Place, scale: Scalar, vector: Place, is_taken: Scalar = True) -> Place:
        own = {name: at.along.get(name, jnp.zeros_like(along)) for name, along in vector.along.items()}
        rest, along = _step((at.rest, own), scale, tuple(vector), is_taken)
        return Place(rest, at.along | along)

    def part(self, vector: Place, patterns: Patterns) -> Place:
        names = names_of(self._layer.join(self._kernel, self._rest))
        kernel = names.pop(self._layer.place)
        rest: Any = tuple(
            own if selects(patterns, name) else None for name, own in zip(names, vector.rest, strict=True)
        )
        return Place(rest, vector.along if selects(patterns, kernel) else {})

    def _norm(self, vector: Place) -> Array:
        """Compute the Euclidean norm, for a radius; if rows nearly cancel, it has half the digits of a float.

        Products of rows with rows may use TF32, which rounds only the rows. Their sums do not: with rounded products,
        the norm would have half the digits of TF32.
        """
        names = tuple(vector.along)
        if not names:
            return optax.tree.norm(vector.rest)
        inner = jnp.block([[self._inner[name, other] for other in names] for name in names])
        along = jnp.concatenate([vector.along[name] for name in names])
        squared = jnp.vdot(along, jnp.matmul(inner, along, precision="highest"), precision="highest")
        return jnp.sqrt(optax.tree.norm(vector.rest, squared=True) + jnp.maximum(squared, 0))

    def loop(self, body: Body, carry: PyTree, *sequences: Any, reverse: bool = False) -> tuple[PyTree, Any]:
        return _unrolled(body, carry, [list(entries) for entries in zip(*sequences, strict=True)], reverse)

    def params(self, at: Place) -> Params:
        kernel = sum((self._rows[name].T @ along for name, along in at.along.items()), self._kernel)
        return self._layer.join(kernel, at.rest)

    def vector(self, vector: Place) -> Params:
        kernel: Any = sum(self._rows[name].T @ along for name, along in vector.along.items())
        return self._layer.join(kernel, vector.rest)

    def _values(self, at: Place, seen: Name) -> tuple[Rest, Array]:
        return at.rest, self._products[seen] + self._change(at, seen)

    def _change(self, vector: Place, seen: Name) -> Any:
        """Compute the products of a batch with a vector; 0 if it has no component along the kernel."""
        return sum(self._inner[seen, other] @ along for other, along in vector.along.items())


def _unrolled(body: Body, carry: PyTree, entries: list[Any], reverse: bool) -> tuple[PyTree, list[Any]]:
    """Run `jax.lax.scan` over a list in Python, so that the carry may grow."""
    outputs = []
    for entry in reversed(entries) if reverse else entries:
        carry, output = body(carry, *entry)
        outputs.append(output)
    return carry, outputs[::-1] if reverse else outputs


class Track(NamedTuple):
    """A model after some steps, or a gradient: the other parameters, and x_j with a_j for each step."""

    rest: Rest
    steps: tuple[tuple[Array, Array], ...]


class UnrolledSteps(NamedTuple):
    """Gradient steps through a layer whose inputs depend on the model; the kernel is assembled only at the end."""

    layer: DenseProduct
    origin: Params

    def start(self, *seen: Batch) -> Track:
        return Track(self.layer.split(self.origin)[1], ())

    def gradient(self, at: Track, seen: Batch) -> Track:
        kernel = self.layer.split(self.origin)[0]

        def head(rest: Rest, change: Array) -> tuple[Scalar, Array]:
            rows = self.layer.rows(rest, seen)
            products = sum(((rows @ other.T) @ along for other, along in at.steps), rows @ kernel)
            return self.layer.head((rest, products + change), seen), rows

        unchanged = jnp.zeros((self.layer.num_rows, kernel.shape[1]), kernel.dtype)
        (slope, along), rows = jax.grad(head, argnums=(0, 1), has_aux=True)(at.rest, unchanged)
        return Track(slope, ((rows, along),))

    def step(self, at: Track, scale: Scalar, vector: Track, is_taken: Scalar = True) -> Track:
        ((rows, along),) = vector.steps
        rest, scaled = _step((at.rest, jnp.zeros_like(along)), scale, (vector.rest, along), is_taken)
        return Track(rest, (*at.steps, (jnp.where(is_taken, rows, 0), scaled)))

    def loop(self, body: Body, carry: PyTree, *sequences: Any, reverse: bool = False) -> tuple[PyTree, Any]:
        num = len(jax.tree.leaves(sequences)[0])
        entries = [jax.tree.map(lambda leaf, at=at: leaf[at], sequences) for at in range(num)]
        return _unrolled(body, carry, entries, reverse)

    def params(self, at: Track) -> Params:
        kernel = self.layer.split(self.origin)[0]
        rows, alongs = (jnp.concatenate(parts) for parts in zip(*at.steps, strict=True))
        # Without the barrier, XLA adds the kernel inside the product, which takes twice as long on a GPU.
        return self.layer.join(kernel + jax.lax.optimization_barrier(rows.T @ alongs), at.rest)
