"""Quadratic federations: least squares, whose gradients, Hessians, iterates and fixed points have closed forms."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import personax
from personax.typing import Batch, Model, Task

DIMENSION = 3


def _apply(params, x, key=None):
    return x @ params["w"]


def _loss(params, batch):
    residual = _apply(params, batch.x) - batch.y
    return 0.5 * (batch.weight * residual**2).sum() / batch.weight.sum()


MODEL = Model(lambda key, x: {"w": jax.random.normal(key, (x.shape[-1],))}, _apply)
TASK = Task(MODEL, _loss, lambda params, batch: {"loss": _loss(params, batch)})


class Quadratic(NamedTuple):
    """`f(w) = (w - minimizer)^T H (w - minimizer) / 2 + constant`."""

    hessian: np.ndarray
    minimizer: np.ndarray

    def gradient(self, w):
        return self.hessian @ (w - self.minimizer)

    def descend(self, w, lr, num_steps):
        """The iterate after gradient steps: the error is multiplied by (I - lr H) at each."""
        contraction = np.linalg.matrix_power(np.eye(len(w)) - lr * self.hessian, num_steps)
        return self.minimizer + contraction @ (w - self.minimizer)

    def meta_gradient(self, w, lr, num_steps):
        """(I - lr H)^nu grad f(w_nu)."""
        contraction = np.linalg.matrix_power(np.eye(len(w)) - lr * self.hessian, num_steps)
        return contraction @ self.gradient(self.descend(w, lr, num_steps))

    def prox(self, w, strength):
        """argmin f(theta) + strength/2 |theta - w|^2."""
        identity = np.eye(len(w))
        return np.linalg.solve(self.hessian + strength * identity, self.hessian @ self.minimizer + strength * w)


def clients(num=4, seed=0, sizes=(6, 9, 5, 8)):
    """Data of clients whose problems differ."""
    rng = np.random.default_rng(seed)
    truths = rng.normal(size=(num, DIMENSION))
    xs = [rng.normal(size=(sizes[i % len(sizes)], DIMENSION)) for i in range(num)]
    return [(x, x @ truth + 0.1 * rng.normal(size=len(x))) for x, truth in zip(xs, truths, strict=True)]


def quadratic(x, y):
    """A client's mean loss over all its data."""
    hessian = x.T @ x / len(x)
    return Quadratic(hessian, np.linalg.solve(hessian, x.T @ y / len(x)))


def federation(num=4, seed=0):
    data = clients(num, seed)
    return personax.Federation.from_clients(data, test=data), [quadratic(x, y) for x, y in data]


def whole(x, y):
    """All of a client's data as one batch."""
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(x)), jax.random.key(0))


# Shuffled epochs in batches of at least a client's size: every step sees all its data.
FULL_BATCH = {"batch_size": 16, "sampling": "shuffled"}
