"""FedBN, Li 2021 (FedBN), Algorithm 1, with a network in closed form; the federation is that of `problem`.

The network is C^T tanh(g n + b) + d, where n is x A normalized by the mean and the variance of the batch. The shared
model is a flat vector of A, C and d; a client's own layer one of g, b, the running mean and the running variance.
"""

import numpy as np

import personax
from tests.reference.problem import NUM_CLASSES, NUM_FEATURES, N

NUM_UNITS = 5
FLOOR, MOMENTUM = 1e-5, 0.9
TASK = personax.classification(personax.mlp((NUM_UNITS,), NUM_CLASSES, "tanh", norm="batch"))
SHARED = ((NUM_FEATURES, NUM_UNITS), (NUM_UNITS, NUM_CLASSES), (NUM_CLASSES,))
OWN = ((NUM_UNITS,),) * 4
_rng = np.random.default_rng(8)
W0 = _rng.normal(size=sum(np.prod(shape) for shape in SHARED)) / 2
V0 = np.concatenate([_rng.normal(1, 0.3, NUM_UNITS), _rng.normal(0, 0.3, 2 * NUM_UNITS), _rng.uniform(1, 2, NUM_UNITS)])


def parts(w, shapes):
    """A flat vector as arrays of these shapes."""
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(w, ends[:-1]), shapes, strict=True)]


def tree(w, v):
    """Two flat vectors as the parameters of the network."""
    A, C, d = parts(w, SHARED)
    g, b, mean, var = parts(v, OWN)
    layer = {"scale": g, "bias": b, "mean": mean, "var": var}
    return {"dense_0": {"kernel": A}, "dense_1": {"kernel": C, "bias": d}, "norm_0": layer}


def flat_shared(params):
    """The shared parameters as a flat vector."""
    layers = params["dense_0"]["kernel"], params["dense_1"]["kernel"], params["dense_1"]["bias"]
    return np.concatenate([np.ravel(leaf) for leaf in layers])


def flat_own(layers):
    """Each client's own layer as a flat vector."""
    return np.concatenate([layers[name] for name in ("scale", "bias", "mean", "var")], axis=1)


def step(w, v, D, eta):
    """A step of gradient descent in w, g and b; the running statistics move to those of the batch."""
    (x, y), (A, C, d), (g, b, mean, var) = D, parts(w, SHARED), parts(v, OWN)
    z = x @ A
    m, s2 = z.mean(axis=0), z.var(axis=0)
    s = np.sqrt(s2 + FLOOR)
    n = (z - m) / s
    units = np.tanh(g * n + b)
    odds = np.exp(units @ C + d)
    outer = (odds / odds.sum(axis=1, keepdims=True) - np.eye(NUM_CLASSES)[y]) / len(y)
    inner = (outer @ C.T) * (1 - units**2)
    slope = inner * g  # in n; m and s depend on z, too
    of_z = (slope - slope.mean(axis=0) - n * (slope * n).mean(axis=0)) / s
    of_w = np.concatenate([part.ravel() for part in (x.T @ of_z, units.T @ outer, outer.sum(axis=0))])
    of_own = np.concatenate([(inner * n).sum(axis=0), inner.sum(axis=0)])
    moved = np.concatenate([g, b]) - eta * of_own
    running = [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in ((mean, m), (var, s2))]
    return w - eta * of_w, np.concatenate([moved, *running])


def fedbn(eta, num_steps):
    """Li 2021 (FedBN), Algorithm 1: every layer is updated; those of batch normalization are not averaged."""
    v = [V0] * N

    def client(k, w, batch):
        for t in range(num_steps(k)):
            w, v[k] = step(w, v[k], batch(t), eta)
        return w

    return client, v
