"""Norms of Hessians and of their differences, computed from matrix-vector products without forming a Hessian."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from personax.typing import Array

Product = Callable[[Array], Array]  # a symmetric matrix times a vector


class Extremes(NamedTuple):
    """The smallest and the largest eigenvalue found, each with a bound on the distance to a true eigenvalue."""

    smallest: Array
    largest: Array
    smallest_error: Array
    largest_error: Array

    @property
    def norm(self) -> Array:
        """Return a lower estimate of the spectral norm."""
        return jnp.maximum(jnp.abs(self.smallest), jnp.abs(self.largest))

    @property
    def norm_error(self) -> Array:
        """Return the error of the eigenvalue that determines the norm."""
        upper = jnp.abs(self.largest) >= jnp.abs(self.smallest)
        return jnp.where(upper, self.largest_error, self.smallest_error)


def extremes(product: Product, start: Array, num_steps: int) -> Extremes:
    """Find extreme eigenvalues of a symmetric matrix by `num_steps` Lanczos steps with full reorthogonalization.

    With as many steps as dimensions they are exact; with fewer they lie inside the spectrum, so the largest is too
    small and the smallest too large, and they converge fast if the spectrum has outliers.
    """
    num_steps = min(num_steps, start.size)
    diagonal, off_diagonal = _lanczos(product, start, num_steps)
    tridiagonal = jnp.diag(diagonal) + jnp.diag(off_diagonal[:-1], 1) + jnp.diag(off_diagonal[:-1], -1)
    values, vectors = jnp.linalg.eigh(tridiagonal)
    residuals = jnp.abs(off_diagonal[-1] * vectors[-1])
    return Extremes(values[0], values[-1], residuals[0], residuals[-1])


def _lanczos(product: Product, start: Array, num_steps: int) -> tuple[Array, Array]:
    """Return the diagonal and off-diagonal of the projection on the Krylov space; the last entry is the residual."""

    def step(basis: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
        vector = basis[index]
        image = product(vector)
        on_diagonal = vector @ image
        rest = image
        for _ in range(2):  # one pass is not enough in floating point
            rest = rest - basis.T @ (basis @ rest)
        norm, scale = jnp.linalg.norm(rest), jnp.linalg.norm(image)
        # In an invariant subspace, the remainder is rounding error and not a new direction.
        norm = jnp.where(norm > 100 * jnp.finfo(norm.dtype).eps * scale, norm, 0)
        following = jnp.where(norm > 0, rest / jnp.where(norm > 0, norm, 1), 0)
        return basis.at[index + 1].set(following), (on_diagonal, norm)

    first = jnp.zeros((num_steps + 1, start.size), start.dtype).at[0].set(start / jnp.linalg.norm(start))
    basis, (diagonal, off_diagonal) = jax.lax.scan(step, first, jnp.arange(num_steps))
    # Further steps add a value that lies inside the spectrum and thus change nothing.
    ended = jnp.linalg.norm(basis[:num_steps], axis=1) < 0.5
    return jnp.where(ended, diagonal[0], diagonal), off_diagonal


def cubic_norm(cubic: Product, starts: Array, num_steps: int) -> Array:
    """Return a lower estimate of `max |T[v, v, v]|` over unit vectors v, the norm of a symmetric cubic form.

    `cubic(v)` is T[v, v, .]. Iterates v <- cubic(v) / |cubic(v)| from each start and returns the largest value found.
    """

    def step(vector: Array, _: None) -> tuple[Array, Array]:
        image = cubic(vector)
        norm = jnp.linalg.norm(image)
        following = jnp.where(norm > 0, image / jnp.where(norm > 0, norm, 1), vector)
        return following, jnp.abs(vector @ image)

    def climb(start: Array) -> Array:
        return jax.lax.scan(step, start / jnp.linalg.norm(start), None, length=num_steps)[1].max()

    return jax.vmap(climb)(starts).max()
