"""A small federation in closed form: softmax regression, its gradient and its Hessian-vector product, in NumPy.

Models are flat vectors, the kernel row by row and then the bias; `tree` and `flat` translate. `D` is a batch (x, y).
"""

from functools import partial

import jax
import numpy as np

import personax

L2 = 0.05
COUNTS = (5, 12, 7, 9, 6, 11)
N = len(COUNTS)
NUM_FEATURES, NUM_CLASSES = 4, 3


def _client(rng, count):
    x = rng.normal(rng.normal(size=NUM_FEATURES), 1.5, size=(count, NUM_FEATURES))
    y = np.argmax(x @ rng.normal(size=(NUM_FEATURES, NUM_CLASSES)) + rng.gumbel(size=(count, NUM_CLASSES)), axis=1)
    return x, y


_rng = np.random.default_rng(0)
FEDERATION = personax.Federation.from_clients([_client(_rng, c) for c in COUNTS], ids=(4, 0, 9, 2, 7, 1))
TASK = personax.classification(personax.logistic_regression(NUM_CLASSES), l2=L2)
W0 = _rng.normal(size=(NUM_FEATURES + 1) * NUM_CLASSES)


def tree(w):
    """A flat vector as the parameters of `logistic_regression`."""
    w = np.asarray(w).reshape(NUM_FEATURES + 1, NUM_CLASSES)
    return {"dense_0": {"kernel": w[:-1], "bias": w[-1]}}


def flat(params):
    """Parameters as flat vectors, whatever their leading axes."""
    kernel, bias = (np.asarray(params["dense_0"][name]) for name in ("kernel", "bias"))
    return np.concatenate([kernel.reshape(*kernel.shape[:-2], -1), bias], axis=-1)


def _inputs_and_probabilities(w, x):
    inputs = np.column_stack([x, np.ones(len(x))])
    odds = np.exp(inputs @ w.reshape(NUM_FEATURES + 1, NUM_CLASSES))
    return inputs, odds / odds.sum(axis=1, keepdims=True)


def grad(w, D):
    """Mean over the batch of x (p - e_y)^T, and the penalty's L2 w."""
    x, y = D
    inputs, p = _inputs_and_probabilities(w, x)
    return (inputs.T @ (p - np.eye(NUM_CLASSES)[y]) / len(y)).ravel() + L2 * w


def hvp(w, D, u):
    """Mean over the batch of x ((diag(p) - p p^T) U^T x)^T, and the penalty's L2 u."""
    x, y = D
    inputs, p = _inputs_and_probabilities(w, x)
    slopes = inputs @ u.reshape(NUM_FEATURES + 1, NUM_CLASSES)
    moved = p * slopes - p * (p * slopes).sum(axis=1, keepdims=True)
    return (inputs.T @ moved / len(y)).ravel() + L2 * u


def data(i):
    """All of a client's samples, as one batch."""
    return FEDERATION.client(i)


@partial(jax.jit, static_argnames=("role", "size", "sampling", "query_share"))
def _batch_indices(key, i, update, step, role, size, draw, sampling, query_share):
    options = {"draw": draw, "sampling": sampling, "query_share": query_share}
    return personax.batch_indices(FEDERATION, key, i, update, step, role, size, **options)


class Samples:
    """The samples that a run with this key drew, visit by visit."""

    def __init__(self, key, local):
        assert FEDERATION.train.x.shape == FEDERATION.x.shape  # on the device before anything is traced
        self.key, self.local, self.num_visits = key, local, [0] * N

    def visit(self, i):
        """Client i comes again: a function from a step (from 0), a role and a draw to the batch."""
        update, self.num_visits[i] = self.num_visits[i], self.num_visits[i] + 1

        def batch(step, role="outer", draw=0):
            rows = self.rows(i, update, step, role, draw)
            return FEDERATION.x[rows], FEDERATION.y[rows]

        return batch

    def rows(self, i, update, step, role="outer", draw=0):
        """The rows of `FEDERATION.x`, without the filler."""
        sizes, how = getattr(self.local.sizes, role), (self.local.sampling, self.local.query_share)
        size = sizes[draw] if isinstance(sizes, tuple) else self.local.size_of(role)
        rows = np.asarray(_batch_indices(self.key, i, update, step, role, size, draw, *how))
        return rows[rows >= 0]


def cohorts(schedule):
    """The clients of each round, in the order of the table."""
    ends = np.flatnonzero(schedule.round_ends) + 1
    return [cohort.tolist() for cohort in np.split(schedule.client, ends)[:-1]]


def events(schedule):
    """Each event's client, and the number of events that had arrived when it downloaded its model."""
    return list(zip(schedule.client.tolist(), schedule.started_at.tolist(), strict=True))


def mean(models):
    """The plain average of a list of models."""
    return sum(models) / len(models)
