"""Hessian-vector products: `(loss, params, vector, batch) -> H(w) v`."""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import optax

from personax.typing import Batch, LossFn, Params, Scalar
from personax.values import CURVATURES, require_positive, value

__all__ = [
    "Exact",
    "FiniteDifference",
    "FirstOrder",
    "Hvp",
    "RelativeDifference",
    "exact",
    "finite_difference",
    "first_order",
    "norm_unused",
    "relative_difference",
    "require_hvp",
]

HvpT = TypeVar("HvpT")


@CURVATURES.describes
class Hvp(Protocol):
    """A Hessian-vector product, exact or approximate.

    `needs_batch` is False for a product that does not look at data: objectives then draw no curvature batches.
    `is_coordinate_free` is True for a product that can be computed in other coordinates (as in `fast.near`):
    one that depends on the vector linearly or through its norm, which `given_norm` passes in.

    >>> import jax, personax as px
    >>> @px.value
    ... class Doubled:
    ...     needs_batch = True
    ...     is_coordinate_free = True
    ...     given_norm = px.curvature.norm_unused
    ...     def __call__(self, loss, params, vector, batch):
    ...         return jax.tree.map(lambda v: 2 * v, px.curvature.exact(loss, params, vector, batch))
    >>> px.Meta(0.1, hvp=Doubled()).hvp
    Doubled()
    """

    @property
    def needs_batch(self) -> bool: ...

    @property
    def is_coordinate_free(self) -> bool: ...

    def given_norm(self, norm: Scalar) -> "Hvp": ...

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params: ...


def require_hvp(given: Any) -> None:
    """Raise unless `given` has the attributes that objectives require of a Hessian-vector product.

    >>> import personax as px
    >>> px.curvature.require_hvp(px.curvature.exact)
    """
    missing = [name for name in ("needs_batch", "is_coordinate_free", "given_norm") if name not in dir(given)]
    if missing or not callable(given):
        lacks = ", ".join(f"`{name}`" for name in missing) or "`__call__`"
        hint = "`is_coordinate_free = False` and `given_norm = px.curvature.norm_unused` are always right."
        raise ValueError(f"The Hessian-vector product {type(given).__name__} lacks {lacks}. {hint}")


def norm_unused(self: HvpT, norm: Scalar) -> HvpT:
    """The product itself: it does not depend on the norm of the vector.

    >>> import personax as px
    >>> px.curvature.norm_unused(px.curvature.first_order, 3.0) is px.curvature.first_order
    True
    """
    return self


@CURVATURES.register()
@value
class Exact:
    """The exact product, as the directional derivative of the gradient: no Hessian is formed.

    Fallah (5), gMeta (8). Departures from the paper: none.

    >>> import jax.numpy as jnp, personax as px
    >>> loss = lambda w, batch: jnp.sum(w**3)
    >>> px.curvature.Exact()(loss, jnp.array([1.0, 2.0]), jnp.array([1.0, 1.0]), None)
    Array([ 6., 12.], dtype=float64)
    """

    needs_batch = True
    is_coordinate_free = True
    given_norm = norm_unused

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return jax.jvp(lambda w: jax.grad(loss)(w, batch), (params,), (vector,))[1]


@CURVATURES.register()
@value
class FirstOrder:
    """Zero: the Hessian is dropped. Fallah (112), gMeta (31). Departures from the paper: none.

    >>> import jax.numpy as jnp, personax as px
    >>> px.curvature.FirstOrder()(lambda w, batch: jnp.sum(w**3), jnp.ones(2), jnp.ones(2), None)
    Array([0., 0.], dtype=float64)
    """

    needs_batch = False
    is_coordinate_free = True
    given_norm = norm_unused

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return optax.tree.zeros_like(vector)


@CURVATURES.register()
@value
class FiniteDifference:
    """`[g(w + r v) - g(w - r v)] / 2r` with a fixed radius r: Fallah (119), gMeta (34).

    Departures from the paper: none from these equations. Fallah section 5 and PersA-FL (D1) print the same
    difference without the 2, which would double the Hessian.

    >>> import jax.numpy as jnp, personax as px
    >>> loss = lambda w, batch: jnp.sum(w**2)  # its Hessian is 2
    >>> px.curvature.FiniteDifference(0.5)(loss, jnp.array([1.0]), jnp.array([3.0]), None)
    Array([6.], dtype=float64)
    """

    radius: float
    needs_batch = True
    is_coordinate_free = True
    given_norm = norm_unused

    def __post_init__(self) -> None:
        require_positive("radius", self.radius, "To drop the Hessian, use `first_order`.")

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return _central_difference(loss, params, vector, batch, self.radius)


@CURVATURES.register()
@value
class RelativeDifference:
    """`FiniteDifference` with the radius `r / |v|`, and zero for v = 0.

    Departures from the paper: the step `r v / |v|` has length r whatever the length of v. With the papers' fixed
    radius, the difference for a short v is lost in float32 rounding, and a long v is outside of the region in which the
    difference approximates the derivative.

    >>> import jax.numpy as jnp, personax as px
    >>> loss = lambda w, batch: jnp.sum(w**2)  # its Hessian is 2
    >>> px.curvature.RelativeDifference(0.5)(loss, jnp.array([1.0]), jnp.array([3.0]), None)
    Array([6.], dtype=float64)
    """

    radius: float
    needs_batch = True
    is_coordinate_free = True

    def __post_init__(self) -> None:
        require_positive("radius", self.radius, "To drop the Hessian, use `first_order`.")

    def given_norm(self, norm: Scalar) -> FiniteDifference:
        """The difference with the radius for a vector of this norm, which may be given in other coordinates."""
        radius = jnp.where(norm > 0, self.radius / jnp.where(norm > 0, norm, 1), 1)
        return jax.tree.unflatten(jax.tree.structure(FiniteDifference(1.0)), [radius])

    def __call__(self, loss: LossFn, params: Params, vector: Params, batch: Batch) -> Params:
        return self.given_norm(optax.tree.norm(vector))(loss, params, vector, batch)


def _central_difference(loss: LossFn, params: Params, vector: Params, batch: Batch, radius: Scalar) -> Params:
    ends = [jax.tree.map(lambda w, v, r=r: w + r * v, params, vector) for r in (radius, -radius)]
    ahead, behind = (jax.grad(loss)(end, batch) for end in ends)
    return jax.tree.map(lambda a, b: (a - b) / (2 * radius), ahead, behind)


exact = Exact()
first_order = FirstOrder()
CURVATURES.register("exact")(lambda: exact)
CURVATURES.register("first_order")(lambda: first_order)


def finite_difference(radius: float) -> FiniteDifference:
    """The papers' central difference with a fixed radius.

    >>> import personax as px
    >>> px.curvature.finite_difference(0.01)
    FiniteDifference(radius=0.01)
    """
    return FiniteDifference(radius)


def relative_difference(radius: float) -> RelativeDifference:
    """The central difference with a radius relative to the vector's norm, recommended for float32.

    >>> import personax as px
    >>> px.per_fedavg(adapt_lr=0.1, lr=0.1, hvp=px.curvature.relative_difference(0.01), num_steps=5).objective.hvp
    RelativeDifference(radius=0.01)
    """
    return RelativeDifference(radius)
