"""A network in closed form: tanh units and softmax, whose loss is not convex; the federation is that of `problem`.

Models are flat vectors: the first kernel row by row, its bias, the second kernel and its bias. The Hessian-vector
product is a derivative by a complex step, `Im g(w + i h u) / h`, which has no difference and hence no rounding error.
"""

import numpy as np

import personax
from tests.reference.problem import NUM_CLASSES, NUM_FEATURES

NUM_UNITS = 16
TASK = personax.classification(personax.mlp((NUM_UNITS,), NUM_CLASSES, "tanh"))
SHAPES = ((NUM_FEATURES, NUM_UNITS), (NUM_UNITS,), (NUM_UNITS, NUM_CLASSES), (NUM_CLASSES,))
_ENDS = np.cumsum([np.prod(shape) for shape in SHAPES])
W0 = np.random.default_rng(8).normal(size=_ENDS[-1]) / 2


def _parts(w):
    return [part.reshape(shape) for part, shape in zip(np.split(w, _ENDS[:-1]), SHAPES, strict=True)]


def tree(w):
    """A flat vector as the parameters of the network."""
    a, b, c, d = _parts(np.asarray(w))
    return {"dense_0": {"kernel": a, "bias": b}, "dense_1": {"kernel": c, "bias": d}}


def flat(params):
    """Parameters as a flat vector."""
    return np.concatenate([np.ravel(params[layer][name]) for layer in sorted(params) for name in ("kernel", "bias")])


def grad(w, D):
    """Mean over the batch of the gradient of -log softmax(C^T tanh(A^T x + b) + d)_y."""
    (x, y), (A, b, C, d) = D, _parts(w)
    units = np.tanh(x @ A + b)
    odds = np.exp(units @ C + d)
    outer = (odds / odds.sum(axis=1, keepdims=True) - np.eye(NUM_CLASSES)[y]) / len(y)
    inner = (outer @ C.T) * (1 - units**2)
    return np.concatenate([part.ravel() for part in (x.T @ inner, inner.sum(0), units.T @ outer, outer.sum(0))])


def hvp(w, D, u):
    """The derivative of `grad` along u."""
    step = 1e-30
    return grad(w + 1j * step * u, D).imag / step
