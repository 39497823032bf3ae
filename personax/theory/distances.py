"""Distances between each client's data and the average client's: total variation, L1 and 1-Wasserstein.

The average p = (1/n) sum_i p_i weights all clients equally, as in Fallah section 4.1 and APFL section 2, and not all
samples.
"""

import math
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise

import numpy as np

from personax.data.describe import label_counts
from personax.data.federation import Federation
from personax.keys import HostStream, host_generator
from personax.typing import Array
from personax.values import require, require_count, require_nonnegative


def label_distributions(federation: Federation) -> np.ndarray:
    """Return the label distribution of each client, [clients, classes].

    >>> import numpy as np, personax as px
    >>> fed = px.Federation.from_clients([(np.zeros((2, 1)), np.array([0, 1])), (np.zeros((2, 1)), np.array([1, 1]))])
    >>> px.theory.label_distributions(fed).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    if not np.issubdtype(federation.y.dtype, np.integer):
        raise ValueError(
            f"Label distributions need integer labels (got {federation.y.dtype}). Use `cell_distributions(...)`."
        )
    per_sample = int(np.prod(federation.y.shape[1:]))
    return _shares(federation.y.reshape(-1), np.asarray(federation.offsets) * per_sample)


def cell_distributions(federation: Federation, num_bins: int, *, with_labels: bool = True) -> np.ndarray:
    """Return the distribution of each client's samples over the cells of a grid, [clients, occupied cells].

    Each feature's range over all clients is cut into `num_bins` equal parts; labels, or real targets cut likewise, are
    an additional coordinate. The distance over cells is a lower bound on the distance over the features. With many
    features, each sample has its own cell and every distance is close to its maximum: reduce the features first.

    >>> import personax as px
    >>> fed = px.Federation.from_clients([([[0.0], [1.0]], [0, 0]), ([[1.0], [1.0]], [0, 0])])
    >>> px.theory.cell_distributions(fed, num_bins=2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    require_count("num_bins", num_bins)
    columns = [_bins(federation.x.reshape(len(federation.x), -1).astype(float), num_bins)]
    if with_labels:
        targets = federation.y.reshape(len(federation.y), -1)
        whole = np.issubdtype(targets.dtype, np.integer)
        columns.append(targets.astype(np.int64) if whole else _bins(targets, num_bins))
    cells = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)[1]
    return _shares(cells.reshape(-1), np.asarray(federation.offsets))


def total_variation(distributions: np.ndarray) -> np.ndarray:
    """`|p_i - p|_TV = (1/2) sum_z |p_i(z) - p(z)|` of each client, p the mean over clients: Fallah section 4.1.

    >>> total_variation(np.array([[1.0, 0.0], [0.0, 1.0]]))
    array([0.5, 0.5])
    """
    rows = np.asarray(distributions, float)
    sums_to_one = lambda table: (table >= 0).all() and np.allclose(table.sum(axis=1), 1)
    require(sums_to_one, "distributions", rows, "have rows that are probabilities and sum to 1")
    return np.abs(rows - rows.mean(axis=0)).sum(axis=1) / 2


def l1_distance(distributions: np.ndarray) -> np.ndarray:
    """`|D - D_i|_1`, the integral of |p - p_i|, of each client: APFL Theorem 1; twice the total variation.

    >>> import numpy as np, personax as px
    >>> px.theory.l1_distance(np.array([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [1.0, 1.0]
    """
    return 2 * total_variation(distributions)


def points(federation: Federation, *, label_cost: float = 0.0) -> np.ndarray:
    """Convert samples to points whose Euclidean distance is the metric d of Fallah (15), [samples, coordinates].

    Features are flattened, and images scaled to [0, 1]. Different labels are `label_cost` apart, and real targets are
    scaled by it: d(z, z')^2 = |x - x'|^2 + label_cost^2 (1 if the labels differ, or |y - y'|^2). With 0, only features
    count.
    """
    require_nonnegative("label_cost", label_cost)
    scale = 255.0 if federation.x.dtype == np.uint8 else 1.0
    features = federation.x.reshape(len(federation.x), -1) / scale
    if label_cost == 0:
        return features
    targets = federation.y.reshape(len(federation.y), -1)
    if np.issubdtype(targets.dtype, np.integer):
        corners = [np.eye(column.max() + 1)[column] for column in np.unique(targets, return_inverse=True)[1].T]
        targets = np.concatenate(corners, axis=1) / np.sqrt(2)
    return np.concatenate([features, label_cost * targets], axis=1)


def wasserstein(
    federation: Federation, *, label_cost: float = 0.0, num_samples: int | None = None, key: Array | None = None
) -> np.ndarray:
    """`W_1(p_i, p)` of each client, exactly for the given samples: Fallah section 4.1, before (15).

    At most `num_samples` random samples of each client are used; distances between random subsets are too large on
    average. With POT (`personax[theory]`) it is solved by a network simplex, otherwise by SciPy's linear programming,
    which is far slower beyond a few hundred samples.

    >>> import personax as px
    >>> fed = px.Federation.from_clients([([[0.0]], [0]), ([[2.0]], [0])])
    >>> px.theory.wasserstein(fed).round(6).tolist()
    [1.0, 1.0]
    """
    return _against_average(federation, points(federation, label_cost=label_cost), num_samples, key, _solver())


def sliced_wasserstein(
    federation: Federation,
    *,
    label_cost: float = 0.0,
    num_directions: int = 200,
    num_samples: int | None = None,
    key: Array,
) -> np.ndarray:
    """Return a lower bound on `W_1(p_i, p)` of each client from random projections, for many features.

    It is the mean over directions u of W_1 between the projections u . z, divided by E|u_1|: no transport plan can cost
    less, and for shifted copies of a distribution it equals W_1.

    >>> import jax, personax as px
    >>> fed = px.Federation.from_clients([([[0.0]], [0]), ([[2.0]], [0])])
    >>> px.theory.sliced_wasserstein(fed, key=jax.random.key(0)).round(6).tolist()
    [1.0, 1.0]
    """
    from scipy.stats import wasserstein_distance  # takes half a second to import

    require_count("num_directions", num_directions)
    coordinates = points(federation, label_cost=label_cost)
    directions = host_generator(key, HostStream.DIRECTIONS).normal(size=(coordinates.shape[1], num_directions))
    directions /= np.linalg.norm(directions, axis=0)

    def distance(own: np.ndarray, everyone: np.ndarray, weights: np.ndarray) -> float:
        pairs = zip((own @ directions).T, (everyone @ directions).T, strict=True)
        slices = [wasserstein_distance(mine, theirs, v_weights=weights) for mine, theirs in pairs]
        return float(np.mean(slices)) / mean_projection(len(directions))

    return _against_average(federation, coordinates, num_samples, key, distance)


def mean_projection(dimension: int) -> float:
    """Return `E|u_1|` for u uniform on the unit sphere: Gamma(d / 2) / (sqrt(pi) Gamma((d + 1) / 2)).

    >>> round(mean_projection(1), 6), round(mean_projection(2), 6)
    (1.0, 0.63662)
    """
    return math.exp(math.lgamma(dimension / 2) - math.lgamma((dimension + 1) / 2)) / math.sqrt(math.pi)


Distance = Callable[[np.ndarray, np.ndarray, np.ndarray], float]  # between points and weighted points


def _against_average(
    federation: Federation, coordinates: np.ndarray, num_samples: int | None, key: Array | None, distance: Distance
) -> np.ndarray:
    """Compute the distance between each client's points and the average client's."""
    require_count("num_samples", num_samples)
    parts = [coordinates[start:end] for start, end in pairwise(np.asarray(federation.offsets))]
    if num_samples is not None and max(map(len, parts)) > num_samples:
        if key is None:
            raise ValueError(
                f"Drawing {num_samples} samples of each client needs a `key`. Omit the number to use all samples."
            )
        drawn = host_generator(key, HostStream.SUBSETS)
        parts = [part[drawn.permutation(len(part))[:num_samples]] for part in parts]
    everyone = np.concatenate(parts)
    weights = np.concatenate([np.full(len(part), 1 / (len(part) * len(parts))) for part in parts])
    return np.array([distance(part, everyone, weights) for part in parts])


def _solver() -> Distance:
    if find_spec("ot") is None:
        from scipy.stats import wasserstein_distance_nd

        return lambda own, everyone, weights: float(wasserstein_distance_nd(own, everyone, v_weights=weights))
    import ot

    def distance(own: np.ndarray, everyone: np.ndarray, weights: np.ndarray) -> float:
        cost = ot.dist(own, everyone, metric="euclidean")
        spread = np.full(len(own), 1 / len(own))
        return np.asarray(ot.emd2(spread, weights / weights.sum(), cost, numItermax=10_000_000)).item()

    return distance


def _shares(outcomes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the share of each outcome for each client, [clients, outcomes]."""
    found = label_counts(outcomes, offsets)
    table = np.zeros((len(offsets) - 1, len(found.classes)))
    table[found.client, found.label] = found.num
    return table / np.diff(offsets)[:, None]


def _bins(columns: np.ndarray, num_bins: int) -> np.ndarray:
    """Return the bin of each entry among `num_bins` equal parts of its column's range."""
    low, high = columns.min(axis=0), columns.max(axis=0)
    width = np.where(high > low, high - low, 1)
    return np.minimum((num_bins * (columns - low) / width).astype(np.int64), num_bins - 1)
