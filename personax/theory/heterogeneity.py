"""Differences between the clients' losses, at models and at optima, and the richness of a class of models."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from personax.theory.derivatives import gradient_of, mean_loss, product_of, starts
from personax.theory.quantities import Measured, largest
from personax.theory.region import Region
from personax.theory.spectrum import extremes
from personax.typing import Array, Batch, LossFn, Params
from personax.values import require, require_count, require_positive


def gradient_spread(loss: LossFn, region: Region, batches: Batch) -> Measured:
    """`gamma_G`, the largest over models of sqrt((1/n) sum_i |grad f_i(w) - grad f(w)|^2).

    Fallah (13), gMeta (18), PersA-FL (16). Departures from the paper: over the region's models.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> px.theory.gradient_spread(loss, px.theory.at(jnp.zeros(1)), px.theory.sample_clients(fed)).value
    2.0
    """
    spreads = np.sqrt(np.asarray(_gradient_distances(loss, region.models, batches)).mean(axis=1))
    return largest(spreads, np.zeros_like(spreads), region.description, over_clients=False)


def hessian_spread(loss: LossFn, region: Region, batches: Batch, *, key: Array, num_steps: int = 20) -> Measured:
    """`gamma_H`, the largest over models of sqrt((1/n) sum_i |Hess f_i(w) - Hess f(w)|^2), spectral norms.

    Fallah (13), gMeta (18), PersA-FL (19). Computed by Lanczos on differences of Hessian-vector products, each of which
    is a pass over all clients' samples. Departures from the paper: over the region's models.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # all clients have the same Hessian
    >>> batches, region = px.theory.sample_clients(fed), px.theory.at(jnp.zeros(1))
    >>> px.theory.hessian_spread(loss, region, batches, key=jax.random.key(0), num_steps=3).value
    0.0
    """
    require_count("num_steps", num_steps)
    norms, errors = _hessian_distances(loss, num_steps, region.models, batches, starts(region.models, 1, key)[0])
    spreads = np.sqrt(np.mean(np.square(norms), axis=1))
    return largest(spreads, np.asarray(errors).max(axis=1), region.description, over_clients=False)


def gradient_diversity(loss: LossFn, region: Region, batches: Batch) -> np.ndarray:
    """`zeta_i = max_w |grad F(w) - grad f_i(w)|^2` of each client; their sum is APFL's zeta: Definition 2.

    Unlike gamma_G, it is a squared norm. Departures from the paper: over the region's models.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # f_i(w) = |w - mean|^2 / 2 + constant
    >>> px.theory.gradient_diversity(loss, px.theory.at(jnp.zeros(1)), px.theory.sample_clients(fed)).tolist()
    [4.0, 4.0]
    """
    return np.asarray(_gradient_distances(loss, region.models, batches)).max(axis=0)


class Optima(NamedTuple):
    """The minimizers of the mean loss and of the clients' losses (leaves [clients, ...]), and their precision.

    `gradient_norms` has the mean's first, then the clients'. If the loss is mu-strongly convex, a model is within
    gradient norm / mu of the minimizer.

    >>> import jax.numpy as jnp, numpy as np, personax as px
    >>> optima = px.theory.Optima(jnp.array([3.0]), jnp.array([[1.0], [5.0]]), np.zeros(3))
    >>> px.theory.optimal_gap(optima).tolist()
    [4.0, 4.0]
    """

    shared: Params
    alone: Params
    gradient_norms: np.ndarray


def find_optima(loss: LossFn, params: Params, batches: Batch, *, tolerance: float = 1e-8) -> Optima:
    """Find `w* = argmin F` and `v_i* = argmin f_i`, APFL Definition 3, by L-BFGS from `params`.

    The losses must have unique minimizers, as logistic regression has with `l2 > 0`.

    >>> import jax.numpy as jnp, personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [2.0]], [0, 1]), ([[4.0], [6.0]], [0, 1])])
    >>> loss = lambda w, batch: jnp.mean((w[None] - batch.x) ** 2) / 2  # the minimum of f_i is at the client's mean
    >>> optima = px.theory.find_optima(loss, jnp.zeros(1), px.theory.sample_clients(fed))
    >>> optima.shared.round(6).tolist(), optima.alone.round(6).tolist()
    ([3.0], [[1.0], [5.0]])
    """
    from scipy.optimize import minimize  # takes a quarter of a second to import

    require_positive("tolerance", tolerance)
    flat, restore = ravel_pytree(params)
    clients = [jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in range(len(batches.weight))]
    slope = lambda loss: lambda point, batch: jax.value_and_grad(lambda w: loss(restore(w), batch))(point)
    shared, alone = jax.jit(slope(mean_loss(loss))), jax.jit(slope(loss))

    def solve(function: Callable[[Array, Batch], tuple[Array, Array]], batch: Batch) -> tuple[np.ndarray, float]:
        at = lambda point: tuple(np.asarray(v, float) for v in function(jnp.asarray(point, flat.dtype), batch))
        options = {"gtol": tolerance, "ftol": 0.0, "maxiter": 10_000, "maxfun": 100_000, "maxls": 50}
        found = minimize(at, np.asarray(flat, float), jac=True, method="L-BFGS-B", options=options)
        return found.x, float(np.linalg.norm(found.jac))

    solved = [solve(shared, batches), *(solve(alone, batch) for batch in clients)]
    models = [restore(jnp.asarray(point, flat.dtype)) for point, _ in solved]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models[1:])
    return Optima(models[0], stacked, np.array([norm for _, norm in solved]))


def optimal_gap(optima: Optima) -> np.ndarray:
    """`Delta_i = |v_i* - w*|^2` of each client: APFL Definition 3.

    >>> import jax.numpy as jnp, numpy as np, personax as px
    >>> optima = px.theory.Optima({"w": jnp.array([3.0])}, {"w": jnp.array([[1.0], [5.0]])}, np.zeros(3))
    >>> px.theory.optimal_gap(optima).tolist()
    [4.0, 4.0]
    """
    away = lambda alone, shared: jnp.sum(jnp.square(alone - shared[None]).reshape(len(alone), -1), axis=1)
    return np.asarray(sum(jax.tree.leaves(jax.tree.map(away, optima.alone, optima.shared))))


def disagreement(outputs: np.ndarray) -> float:
    """`lambda_H(S) = max_{h, h'} (1/|S|) sum_x |h(x) - h'(x)|` over finitely many models: APFL Definition 1.

    `outputs` are [models, samples]. For a richer class, the given models yield a lower bound.

    >>> disagreement(np.array([[0.0, 0.0], [1.0, 3.0], [1.0, -1.0]]))
    2.0
    """
    table = np.asarray(outputs, float)
    require(lambda v: v == 2, "number of axes of outputs", table.ndim, "be 2, [models, samples]")
    return float(max(np.abs(table - row).mean(axis=1).max() for row in table))


class Between(NamedTuple):
    """A number that is known to lie between two bounds.

    >>> import jax, numpy as np, personax as px
    >>> found = px.theory.linear_disagreement(np.array([[1.0], [-1.0]]), radius=2.0, key=jax.random.key(0))
    >>> found.low <= found.high
    True
    """

    low: float
    high: float


def linear_disagreement(x: np.ndarray, radius: float, *, num_starts: int = 16, key: Array) -> Between:
    """`lambda_H(S)` of linear models h(x) = w . x with |w| <= radius: APFL Definition 1.

    It is 2 radius max_{|u| = 1} (1/m) sum_j |u . x_j|, a maximum over signs s of |sum_j s_j x_j|, which is hard to
    compute exactly. The lower bound is the best of `num_starts` ascents u <- sum_j sign(u . x_j) x_j; the upper bound
    replaces the mean of absolute values by the root mean square: 2 radius sqrt(largest eigenvalue of X^T X / m).
    With one feature, they agree if all |x_j| are equal.

    >>> import jax, numpy as np, personax as px
    >>> px.theory.linear_disagreement(np.array([[1.0], [-1.0]]), radius=2.0, key=jax.random.key(0))
    Between(low=4.0, high=4.0)
    """
    require_positive("radius", radius)
    samples = np.asarray(x, float).reshape(len(x), -1)
    moments = samples.T @ samples / len(samples)
    _, vectors = np.linalg.eigh(moments)
    drawn = np.asarray(jax.random.normal(key, (num_starts, samples.shape[1])))
    best = max(_climb(samples, start) for start in [vectors[:, -1], *drawn])
    return Between(2 * radius * best, 2 * radius * float(np.sqrt(np.linalg.norm(moments, 2))))


def _climb(samples: np.ndarray, direction: np.ndarray) -> float:
    """A local maximum of (1/m) sum_j |u . x_j| over unit vectors u: the value never falls."""
    best = 0.0
    while True:
        direction = direction / max(np.linalg.norm(direction), np.finfo(float).tiny)
        value = float(np.abs(samples @ direction).mean())
        if value <= best * (1 + 1e-12):
            return max(value, best)
        best, direction = value, np.sign(samples @ direction) @ samples


@partial(jax.jit, static_argnums=0)
def _gradient_distances(loss: LossFn, models: Params, batches: Batch) -> Array:
    """`|grad f_i(w) - grad f(w)|^2`, [models, clients]."""

    def of_model(model: Params) -> Array:
        gradients = jax.vmap(partial(gradient_of, loss, model))(batches)
        return jnp.sum(jnp.square(gradients - gradients.mean(axis=0, keepdims=True)), axis=1)

    return jax.lax.map(of_model, models)


@partial(jax.jit, static_argnums=(0, 1))
def _hessian_distances(
    loss: LossFn, num_steps: int, models: Params, batches: Batch, start: Array
) -> tuple[Array, Array]:
    """`|Hess f_i(w) - Hess f(w)|` and the errors of these norms, [models, clients]."""

    def of_client(model: Params, batch: Batch) -> tuple[Array, Array]:
        own, shared = product_of(loss, model, batch), product_of(mean_loss(loss), model, batches)
        found = extremes(lambda vector: own(vector) - shared(vector), start, num_steps)
        return found.norm, found.norm_error

    return jax.lax.map(lambda model: jax.lax.map(partial(of_client, model), batches), models)
