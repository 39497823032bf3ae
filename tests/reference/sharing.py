"""Methods that train a personal model or part of one: each paper's client, and two servers for all of them.

The network and its federation are those of `network` and `problem`. A client is a function of its number, the model
that it downloaded and a visit's batches; it returns the model that it uploads, and keeps the rest in its own list.
"""

import numpy as np

from tests.reference.network import NUM_UNITS, W0, grad, hvp
from tests.reference.problem import NUM_FEATURES, N, cohorts, events, mean

BODY = np.arange(len(W0)) < (NUM_FEATURES + 1) * NUM_UNITS  # the first layer of the network; the second is its head


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


def fedper(own, eta, tau):
    """Arivazhagan 2019, Algorithm 1: W_B and W_P of client j move together, and W_B is uploaded.

    So does FedSim (Pillutla 2022), and LG-FedAvg (Liang 2020, Algorithm 1) with own the lower layers.
    """
    kept = [W0] * N

    def client(j, w, batch):
        w_j = np.where(own, kept[j], w)
        for s in range(tau):
            w_j = w_j - eta * grad(w_j, batch(s))
        kept[j] = w_j
        return np.where(own, w, w_j)

    return client, kept


def fedrep(own, alpha, alpha_own, tau_own, tau):
    """Collins 2021, Algorithm 1: tau_own steps of the head h_i, then tau of the representation phi_i.

    So does FedAlt (Pillutla 2022) with its v_i and u.
    """
    kept = [W0] * N

    def client(i, phi, batch):
        w_i = np.where(own, kept[i], phi)
        for s in range(tau_own):
            w_i = w_i - alpha_own * own * grad(w_i, batch(s))
        for s in range(tau_own, tau_own + tau):
            w_i = w_i - alpha * ~own * grad(w_i, batch(s))
        kept[i] = w_i
        return np.where(own, phi, w_i)

    return client, kept


def fedbabu(head, alpha, tau):
    """Oh 2022, Algorithm 1: the body moves, and the head stays at its initialization, for everyone."""

    def client(k, theta, batch):
        for s in range(tau):
            theta = theta - alpha * ~head * grad(theta, batch(s))
        return theta

    return client, [W0] * N


def anil(head, alpha, beta, nu, tau):
    """Raghu 2020 as gMeta's Algorithm 2: inner steps of the head alone, and their Jacobians I - alpha H P."""

    def client(i, w, batch):
        for s in range(tau):
            path = [w]
            for j in range(nu):
                path.append(path[j] - alpha * head * grad(path[j], batch(s, "adapt", j)))
            d = grad(path[nu], batch(s, "outer"))
            for j in reversed(range(nu)):
                d = d - alpha * hvp(path[j], batch(s, "curvature", j), head * d)
            w = w - beta * d
        return w

    return client, [W0] * N


def persafl_maml(own, alpha, eta, Q):
    """PersA-FL 2023, Algorithm 2, Option B, where (9) sees a model whose personal part stays with the client."""
    kept = [W0] * N

    def client(i, w, batch):
        w_i = np.where(own, kept[i], w)
        for q in range(Q):
            d = grad(w_i - alpha * grad(w_i, batch(q, "adapt")), batch(q, "outer"))
            w_i = w_i - eta * (d - alpha * hvp(w_i, batch(q, "curvature"), d))
        kept[i] = w_i
        return np.where(own, w, w_i)

    return client, kept


def persafl_me(own, lam, prox_lr, K, eta, Q):
    """PersA-FL 2023, Algorithm 2, Option C, with theta for the shared and the personal part together."""
    kept = [W0] * N

    def client(i, w, batch):
        w_i = np.where(own, kept[i], w)
        for q in range(Q):
            theta = w_i
            for _ in range(K):
                theta = theta - prox_lr * (grad(theta, batch(q)) + lam * (theta - w_i))
            w_i = w_i - eta * lam * (w_i - theta)
        kept[i] = w_i
        return np.where(own, w, w_i)

    return client, kept
