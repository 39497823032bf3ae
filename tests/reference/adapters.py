"""Adapters over the frozen network of `network`: each paper's client, for the servers of `sharing`.

Kernels are W + A B here, in one matrix: the derivative G there gives G B^T for A and A^T G for B. A shared or a
personal part is one flat vector: for FedSA-LoRA the two A or the two B, for FedDPA A and B of both kernels.
"""

import numpy as np

from tests.reference.network import NUM_UNITS, SHAPES, W0, grad
from tests.reference.problem import NUM_CLASSES, NUM_FEATURES, N

RANK = 2
SIDES = ((NUM_FEATURES, NUM_UNITS), (NUM_UNITS, NUM_CLASSES))
_rng = np.random.default_rng(5)


def _pair():
    """A and B of both kernels, none of them zero."""
    return [(_rng.normal(size=(i, RANK)) / 2, _rng.normal(size=(RANK, o)) / 2) for i, o in SIDES]


START, LOCAL_START = _pair(), _pair()  # of one adapter, and of a second


def tree(pairs):
    """Pairs A, B as the parameters of an adapter."""
    return {f"dense_{at}": {"kernel": {"a": a, "b": b}} for at, (a, b) in enumerate(pairs)}


def of_both(pairs):
    return [matrix for pair in pairs for matrix in pair]


def flat(matrices):
    return np.concatenate([np.ravel(matrix) for matrix in matrices])


def unflat(vector, like):
    ends = np.cumsum([matrix.size for matrix in like])[:-1]
    return [part.reshape(matrix.shape) for part, matrix in zip(np.split(vector, ends), like, strict=True)]


def slopes(changes, D):
    """The derivative of the loss in both kernels W + changes."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
    A, b, C, d = np.split(W0, ends)
    merged = [A + changes[0].ravel(), b, C + changes[1].ravel(), d]
    found = np.split(grad(np.concatenate(merged), D), ends)
    return [found[0].reshape(SIDES[0]), found[2].reshape(SIDES[1])]


def fedsa_lora(eta, s):
    """Guo 2025: A and B take the same s steps; the client uploads A and keeps B."""
    first_A, first_B = ([pair[at] for pair in START] for at in (0, 1))
    kept = [flat(first_B)] * N

    def client(i, a, batch):
        A, B = unflat(a, first_A), unflat(kept[i], first_B)
        for q in range(s):
            G = slopes([a @ b for a, b in zip(A, B, strict=True)], batch(q))
            A, B = (
                [a - eta * g @ b.T for a, b, g in zip(A, B, G, strict=True)],
                [b - eta * a.T @ g for a, b, g in zip(A, B, G, strict=True)],
            )
        kept[i] = flat(B)
        return flat(A)

    return flat(first_A), client, kept


def feddpa(m, eta, s_local, s_global):
    """Yang 2024, FedDPA-T: the local pair takes its steps, then the global one, with weights m and 1 - m."""
    kept = [flat(of_both(LOCAL_START))] * N

    def moved(pairs, others, weight, D):
        changes = [weight * a @ b + (1 - weight) * c @ d for (a, b), (c, d) in zip(pairs, others, strict=True)]
        G = [weight * g for g in slopes(changes, D)]
        return [(a - eta * g @ b.T, b - eta * a.T @ g) for (a, b), g in zip(pairs, G, strict=True)]

    def pairs_of(vector):
        matrices = unflat(vector, of_both(START))
        return list(zip(matrices[::2], matrices[1::2], strict=True))

    def client(i, w, batch):
        shared, own = pairs_of(w), pairs_of(kept[i])
        for q in range(s_local):
            own = moved(own, shared, m, batch(q))
        for q in range(s_local, s_local + s_global):
            shared = moved(shared, own, 1 - m, batch(q))
        kept[i] = flat(of_both(own))
        return flat(of_both(shared))

    return flat(of_both(START)), client, kept
