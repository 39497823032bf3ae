"""Norms of Hessians and of their differences from products with vectors: no Hessian is formed."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from personax.typing import Array

Product = Callable[[Array], Array]  # a symmetric matrix times a vector


class Extremes(NamedTuple):
    """The smallest and the largest eigenvalue found, each with the distance within which there is a true one."""

    smallest: Array
    largest: Array
    smallest_error: Array
    largest_error: Array

    @property
    def norm(self) -> Array:
        """The spectral norm, from below."""
        return jnp.maximum(jnp.abs(self.smallest), jnp.abs(self.largest))

    @property
    def norm_error(self) -> Array:
        """The error of the eigenvalue that is the norm."""
        upper = jnp.abs(self.largest) >= jnp.abs(self.smallest)
        return jnp.where(upper, self.largest_error, self.smallest_error)


def extremes(product: Product, start: Array, num_steps: int) -> Extremes:
    """Extreme eigenvalues of a symmetric matrix by `num_steps` steps of Lanczos, reorthogonalised in full.

    With as many steps as dimensions they are exact; with fewer they lie inside the spectrum, so the largest comes out
    too small and the smallest too large, and converge fast where the spectrum has outliers.
    """
    num_steps = min(num_steps, start.size)
    diagonal, off_diagonal = _lanczos(product, start, num_steps)
    tridiagonal = jnp.diag(diagonal) + jnp.diag(off_diagonal[:-1], 1) + jnp.diag(off_diagonal[:-1], -1)
    values, vectors = jnp.linalg.eigh(tridiagonal)
    residuals = jnp.abs(off_diagonal[-1] * vectors[-1])
    return Extremes(values[0], values[-1], residuals[0], residuals[-1])


def _lanczos(product: Product, start: Array, num_steps: int) -> tuple[Array, Array]:
    """Diagonal and off-diagonal of the projection on the Krylov space; the last off-diagonal entry is the residual."""

    def step(basis: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
        vector = basis[index]
        image = product(vector)
        on_diagonal = vector @ image
        rest = image
        for _ in range(2):  # once is not enough in floating point
            rest = rest - basis.T @ (basis @ rest)
        norm, scale = jnp.linalg.norm(rest), jnp.linalg.norm(image)
        # A space that the matrix maps into itself: what is left is rounding, and no direction.
        norm = jnp.where(norm > 100 * jnp.finfo(norm.dtype).eps * scale, norm, 0)
        following = jnp.where(norm > 0, rest / jnp.where(norm > 0, norm, 1), 0)
        return basis.at[index + 1].set(following), (on_diagonal, norm)

    first = jnp.zeros((num_steps + 1, start.size), start.dtype).at[0].set(start / jnp.linalg.norm(start))
    basis, (diagonal, off_diagonal) = jax.lax.scan(step, first, jnp.arange(num_steps))
    # Steps after that space was found add a value that lies in the spectrum anyway.
    ended = jnp.linalg.norm(basis[:num_steps], axis=1) < 0.5
    return jnp.where(ended, diagonal[0], diagonal), off_diagonal


def cubic_norm(cubic: Product, starts: Array, num_steps: int) -> Array:
    """`max |T[v, v, v]|` over unit vectors v, from below: the norm of a symmetric form of order three.

    `cubic(v)` is T[v, v, .]; v <- cubic(v) / |cubic(v)| from each start, and the largest value that was met.
    """

    def step(vector: Array, _: None) -> tuple[Array, Array]:
        image = cubic(vector)
        norm = jnp.linalg.norm(image)
        following = jnp.where(norm > 0, image / jnp.where(norm > 0, norm, 1), vector)
        return following, jnp.abs(vector @ image)

    def climb(start: Array) -> Array:
        return jax.lax.scan(step, start / jnp.linalg.norm(start), None, length=num_steps)[1].max()

    return jax.vmap(climb)(starts).max()
