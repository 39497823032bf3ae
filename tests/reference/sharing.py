"""Methods that train a personal model or part of one: each paper's client, and two servers for all of them.

The network and its federation are those of `network` and `problem`. A client is a function of its number, the model
that it downloaded and a visit's batches; it returns the model that it uploads, and keeps the rest in its own list.
"""

import numpy as np

from tests.reference.network import W0, grad
from tests.reference.problem import N, cohorts, events, mean


def in_rounds(w, schedule, samples, client):
    """McMahan 2017, Algorithm 1: the mean of a cohort, which downloads the same model."""
    for S_t in cohorts(schedule):
        w = mean([client(i, w, samples.visit(i)) for i in S_t])
    return w


def on_arrival(w, schedule, samples, client, beta):
    """PersA-FL 2023, Algorithm 1: `w <- w - beta delta_i`, with the delta of the model that client i downloaded."""
    models = [w]
    for i, downloaded in events(schedule):
        w_i = models[downloaded]
        models.append(models[-1] - beta * (w_i - client(i, w_i, samples.visit(i))))
    return models[-1]


def in_buffer(w, schedule, samples, client, K):
    """Nguyen 2022, Algorithm 1, without its discount: a step of the server along the mean of K deltas."""
    models, buffer = [w], 0.0
    for event, (i, downloaded) in enumerate(events(schedule), start=1):
        w_i = models[downloaded]
        buffer = buffer + w_i - client(i, w_i, samples.visit(i))
        if event % K == 0:
            w, buffer = w - buffer / K, 0.0
        models.append(w)
    return w


def each_flat(trees):
    """The rows of a tree with a leading axis, as flat vectors."""
    leaves = [trees[layer][name] for layer in sorted(trees) for name in ("kernel", "bias")]
    return np.concatenate([np.reshape(leaf, (len(leaf), -1)) for leaf in leaves], axis=1)


def ditto(lam, eta, local_eta, s):
    """Li 2021, Algorithm 1: v_k beside w_k, both with s steps on the same batches, as in the authors' code."""
    v = [W0] * N

    def client(k, w_t, batch):
        w_k = w_t
        for q in range(s):
            D = batch(q)
            w_k = w_k - eta * grad(w_k, D)
            v[k] = v[k] - local_eta * (grad(v[k], D) + lam * (v[k] - w_t))
        return w_k

    return client, v
