"""Waves: small problems with known constants, and the exact moments of gradient estimates on them."""

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from personax.client.sampling import BatchSizes
from personax.client.step_sizes import Clock
from personax.objectives import Visit
from personax.theory import Constants
from personax.typing import Batch

ROLES = ("adapt", "outer", "curvature")


def wave_loss(params, batch):
    """The mean of cos(x . w + y): bounded with all its derivatives, and neither convex nor quadratic."""
    return (batch.weight * jnp.cos(batch.x @ params["w"] + batch.y)).sum() / batch.weight.sum()


def wave_constants(x, **given):
    """Valid constants, over all of space, of clients that hold rows of `x`, [clients, samples, features].

    Each follows from |cos|, |sin| <= 1; second moments bound variances, and in the Frobenius norm spectral ones.
    """
    sizes = np.linalg.norm(x, axis=2)
    num = x.shape[1]
    gram = np.einsum("csi,csj->cij", x, x) / num
    # |g_j - mean| <= (1 - 2/m) |x_j| + mean |x|, and so for Hessians
    fourth = lambda powers: (((1 - 2 / num) * powers + powers.mean(axis=1, keepdims=True)) ** 4).mean(axis=1).max()
    return Constants(
        gradient_bound=sizes.mean(axis=1).max(),
        smoothness=np.linalg.norm(gram, 2, axis=(1, 2)).max(),
        hessian_lipschitz=(sizes**3).mean(axis=1).max(),
        gradient_noise=np.sqrt((sizes**2).mean(axis=1).max()),
        hessian_noise=np.sqrt((sizes**4).mean(axis=1).max()),
        gradient_kurtosis=fourth(sizes),
        hessian_kurtosis=fourth(sizes**2),
        **given,
    )


def whole(x, y):
    """All samples as one batch; with a leading axis of clients, one for each."""
    keys = jax.random.key(0) if y.ndim == 1 else jax.random.split(jax.random.key(0), len(y))
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(y.shape), keys)


class Draws(NamedTuple):
    """Every outcome of a step's batches from a client with two samples: how often each sample is in each batch.

    `weights` by role is [outcomes, batches of the role, 2]; `probability` is [outcomes].
    """

    weights: dict
    probability: np.ndarray


def every_draw(num_adapt_steps, sizes):
    """All outcomes of the batches of one meta gradient, and their probabilities."""
    counts = {"adapt": num_adapt_steps, "outer": 1, "curvature": num_adapt_steps}
    shape = [(role, size) for role in ROLES for size in sizes.each(role, counts[role])]
    firsts = np.array(list(itertools.product(*(range(size + 1) for _, size in shape))))
    probability = np.prod([binom.pmf(firsts[:, i], size, 0.5) for i, (_, size) in enumerate(shape)], axis=0)
    pairs = np.stack([firsts, np.array([size for _, size in shape]) - firsts], axis=-1).astype(float)
    roles = np.array([role for role, _ in shape])
    return Draws({role: pairs[:, roles == role] for role in ROLES}, probability)


@partial(jax.jit, static_argnames="loss")
def estimates(objective, w, x, y, weights, loss=wave_loss):
    """The objective's gradient estimate for each outcome, [outcomes, features]."""

    def one(weights):
        repeat = lambda leaf, num: jnp.broadcast_to(leaf, (num, *jnp.shape(leaf)))
        batch = lambda own: Batch(
            *(repeat(leaf, len(own)) for leaf in (x, y)), own, repeat(jax.random.key(0), len(own))
        )
        batches = {role: batch(own) for role, own in weights.items()}
        visit = Visit({"w": w}, (), Clock(0, 0, 1), 0.0)
        return objective.gradient(loss, {"w": w}, {"w": w}, visit, batches)[0]["w"]

    return jax.vmap(one)(weights)


@partial(jax.jit, static_argnames=("num_adapt_steps", "loss"))
def meta_gradient(w, x, y, adapt_lr, num_adapt_steps, loss=wave_loss):
    """The gradient of f(w_nu) by differentiating the composition itself."""

    def adapted(w):
        for _ in range(num_adapt_steps):
            w = w - adapt_lr * jax.grad(lambda w: loss({"w": w}, whole(x, y)))(w)
        return loss({"w": w}, whole(x, y))

    return jax.grad(adapted)(w)


class Moments(NamedTuple):
    """The norm of the bias and the mean squared error of an estimator, exactly."""

    bias: float
    mean_square: float


def moments(objective, w, x, y, draws, truth, loss=wave_loss):
    found = np.asarray(estimates(objective, w, x, y, draws.weights, loss)) - np.asarray(truth)
    bias = np.linalg.norm(draws.probability @ found)
    return Moments(bias, draws.probability @ (found**2).sum(axis=1))


def random_waves(seed, num_clients=1, num_samples=2, dimension=2):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_clients, num_samples, dimension))
    return x, rng.uniform(0, 2 * np.pi, (num_clients, num_samples)), rng.normal(size=dimension)


SIZES = {1: BatchSizes(2, adapt=3, curvature=1), 2: BatchSizes(3, adapt=1, curvature=2), 3: BatchSizes(1)}


def spreads_along(x, y, w, adapt_lr, num_steps):
    """gamma_G and gamma_H over the path of the mean loss, at which the similarity lemmas use them."""
    gradients, hessians = [], []
    for _ in range(num_steps + 1):
        phase = np.einsum("csd,d->cs", x, w) + y
        grads = -np.einsum("cs,csd->cd", np.sin(phase), x) / x.shape[1]
        hess = -np.einsum("cs,csd,cse->cde", np.cos(phase), x, x) / x.shape[1]
        gradients.append(np.sqrt(((grads - grads.mean(axis=0)) ** 2).sum(axis=1).mean()))
        hessians.append(np.sqrt((np.linalg.norm(hess - hess.mean(axis=0), 2, axis=(1, 2)) ** 2).mean()))
        w = w - adapt_lr * grads.mean(axis=0)
    return max(gradients), max(hessians)
