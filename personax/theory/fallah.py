"""Bounds of Fallah 2020 (Per-FedAvg, one adaptation step) as functions of its constants.

Batches by role: D is `adapt`, D' is `outer`, D'' is `curvature`. All need adapt_lr <= 1/L.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from personax.client.sampling import BatchSizes
from personax.theory.quantities import Constants, EstimatorError, NotCovered, require_small_adapt_lr
from personax.values import require, require_count, require_nonnegative, require_positive

_ANY_STEP = "The lemmas of gMeta (`theory.gmeta`) hold for any adaptation step."


def meta_smoothness(constants: Constants, adapt_lr: float) -> float:
    """`L_F = 4 L + alpha rho B`: Lemma 4.2. Loose: `gmeta.meta_smoothness` has L (1 + alpha L)^2 instead of 4 L.

    >>> import personax as px
    >>> px.theory.fallah.meta_smoothness(px.theory.Constants(gradient_bound=1.0, smoothness=2.0), adapt_lr=0.1)
    8.0
    """
    _check(constants, adapt_lr)
    c = constants
    return 4 * c.smoothness + adapt_lr * c.hessian_lipschitz * c.gradient_bound


def exact_error(constants: Constants, adapt_lr: float, sizes: BatchSizes) -> EstimatorError:
    """The error of (8) with exact Hessian products: Lemma 4.3.

        bias         2 alpha L sigma_G / sqrt(D)
        mean square  12 [B^2 + sigma_G^2 (1/D' + (alpha L)^2/D)] [1 + sigma_H^2 alpha^2/(4 D'')] - 12 B^2

    In its proof, (30b), E|mean of D'' Hessians - Hess f|^2 <= sigma_H^2/D'', is true in the Frobenius norm but false in
    the spectral norm: for Hessians drawn from I, -I, diag(1, -1), diag(-1, 1), the mean of two has 3/4 where (30b) has
    1/2. The lemma still holds, because the Hessians are applied only to vectors that are independent of them. The bias
    is loose in D: measured, it falls as 1/D if f is smooth, whereas the bound falls as 1/sqrt(D).
    """
    _check(constants, adapt_lr)
    c = constants
    steps = adapt_lr * c.smoothness
    noise = c.gradient_noise**2 * (1 / sizes.of("outer") + steps**2 / sizes.of("adapt"))
    hessian = (c.hessian_noise * adapt_lr) ** 2 / (4 * sizes.of("curvature"))
    # 12 (B^2 + noise)(1 + hessian) - 12 B^2, without the cancellation
    mean_square = 12 * (noise + hessian * (c.gradient_bound**2 + noise))
    return EstimatorError(2 * steps * c.gradient_noise / np.sqrt(sizes.of("adapt")), mean_square)


def first_order_error(constants: Constants, adapt_lr: float, sizes: BatchSizes) -> EstimatorError:
    """The error of (112), which drops the Hessian: Lemma H.1.

        bias         alpha L (sigma_G / sqrt(D) + B)
        mean square  2 sigma_G^2 (1/D' + (alpha L)^2/D) + 2 (alpha L B)^2

    Both have a part that remains for any batch size.
    """
    _check(constants, adapt_lr)
    c = constants
    steps, adapt = adapt_lr * c.smoothness, sizes.of("adapt")
    noise = c.gradient_noise**2 * (1 / sizes.of("outer") + steps**2 / adapt)
    bias = steps * (c.gradient_noise / np.sqrt(adapt) + c.gradient_bound)
    return EstimatorError(bias, 2 * noise + 2 * (steps * c.gradient_bound) ** 2)


def hessian_free_error(constants: Constants, adapt_lr: float, sizes: BatchSizes, radius: float) -> EstimatorError:
    """The error of (120) with the difference (121) of radius delta: Lemma H.2.

        bias         alpha (2 L sigma_G / sqrt(D) + L sigma_G / sqrt(D') + rho delta B^2)
        mean square  6 sigma_G^2 (2 (alpha L)^2/D + 2/D' + alpha^2/(2 delta^2 D'')) + 2 (alpha rho delta)^2 B^4

    Loose in delta in both directions: the true error falls as delta^2 if the third derivative is Lipschitz, and the
    error of (119) is rho delta |v|^2 / 2, half of the printed one; and as delta goes to 0, the bound goes to infinity
    but the true error does not, because both ends of the difference use the same batch.
    """
    _check(constants, adapt_lr)
    require_positive("radius", radius)
    c = constants
    steps, sigma = adapt_lr * c.smoothness, c.gradient_noise
    adapt, outer, curvature = (sizes.of(role) for role in ("adapt", "outer", "curvature"))
    difference = adapt_lr * c.hessian_lipschitz * radius * c.gradient_bound**2
    bias = steps * sigma * (2 / np.sqrt(adapt) + 1 / np.sqrt(outer)) + difference
    noise = 2 * steps**2 / adapt + 2 / outer + adapt_lr**2 / (2 * radius**2 * curvature)
    return EstimatorError(bias, 6 * sigma**2 * noise + 2 * difference**2)


def meta_spread(constants: Constants, adapt_lr: float) -> float:
    """`gamma_F` with gamma_F^2 = 3 B^2 alpha^2 gamma_H^2 + 192 gamma_G^2: Lemma 4.4.

    Loose: `gmeta.meta_spread` shows gamma_F <= (1 + alpha L)^2 gamma_G + alpha B gamma_H, whose first term is at most
    4 gamma_G; here it is 13.9 gamma_G.
    """
    _check(constants, adapt_lr)
    c = constants
    return float(np.sqrt(3 * (c.gradient_bound * adapt_lr * c.hessian_spread) ** 2 + 192 * c.gradient_spread**2))


def spread_from_total_variation(bound: float, distances: np.ndarray) -> float:
    """`gamma = 2 b sqrt((1/n) sum_i |p_i - p|_TV^2)`: (14a).

    Returns gamma_G if `bound` is B, the largest gradient of a single loss l(w; z), and gamma_H if it is L, the largest
    Hessian of one (`by_example` measures them). The distances are over z = (x, y), not over labels alone.
    """
    require_nonnegative("bound", bound)
    return 2 * bound * _root_mean_square(distances)


def spread_from_wasserstein(lipschitz: float, distances: np.ndarray) -> float:
    """`gamma = l sqrt((1/n) sum_i W_1(p_i, p)^2)`: (16).

    Returns gamma_G if `lipschitz` is L_Z and gamma_H if it is rho_Z: the Lipschitz constants (15) of a single loss's
    gradient or Hessian in its sample, in the metric of the distances.
    """
    require_nonnegative("lipschitz", lipschitz)
    return lipschitz * _root_mean_square(distances)


@dataclass(frozen=True)
class RoundTraining:
    """A run of Algorithm 1: beta is `local_lr`, tau `num_local_steps`, K `num_rounds`, r n `cohort_size`, n clients."""

    local_lr: float
    num_local_steps: int
    num_rounds: int
    cohort_size: int
    num_clients: int

    def __post_init__(self) -> None:
        require_positive("local_lr", self.local_lr)
        for name in ("num_local_steps", "num_rounds", "cohort_size", "num_clients"):
            require_count(name, getattr(self, name))
        must = f"be at most the {self.num_clients} clients"
        require(lambda v: v <= self.num_clients, "cohort_size", self.cohort_size, must)

    @property
    def sampling_share(self) -> float:
        """Return `(1 - r) / (r (n - 1))`, the share of a variance that remains when sampling a cohort: (93)."""
        others = self.num_clients - self.cohort_size
        return 0.0 if others == 0 else others / (self.cohort_size * (self.num_clients - 1))


def largest_adapt_lr(smoothness: float) -> float:
    """Return `1 / L`, the largest adaptation step of Lemmas 4.2 to 4.4."""
    require_positive("smoothness", smoothness)
    return 1 / smoothness


def largest_local_lr(meta_smoothness: float, num_local_steps: int) -> float:
    """Return `1 / (10 tau L_F)`, the largest local step of Theorem 4.5 and gMeta Theorem 8."""
    require_positive("meta_smoothness", meta_smoothness)
    require_count("num_local_steps", num_local_steps)
    return 1 / (10 * num_local_steps * meta_smoothness)


class Drift(NamedTuple):
    """Bounds on E|w_i - w| and E|w_i - w|^2, averaged over clients; w is the mean of their iterates w_i."""

    first: float
    second: float


def client_drift(
    training: RoundTraining,
    step: int,
    meta_smoothness: float,
    estimator: EstimatorError,
    meta_spread: float,
    split: float | None = None,
) -> Drift:
    """Bound the distance between clients after `step` local steps t from one start, for any beta: Proposition F.1.

        first   2 beta t (1 + 2 beta L_F)^(t-1) (sigma_F + gamma_F)
        second  4 beta^2 (1 + 1/phi) t (1 + phi + 16 (1 + 1/phi) beta^2 L_F^2)^(t-1) (2 sigma_F^2 + gamma_F^2)

    (57a), (57b), for any phi = `split` > 0; by default 1 / (2 tau), as in Corollary F.2. Departures from the paper:
    none.
    """
    require_count("step", step, least=0)
    require_positive("split", split)
    if step == 0:
        return Drift(0.0, 0.0)
    lr, phi = training.local_lr, 1 / (2 * training.num_local_steps) if split is None else split
    noise, spread = estimator.mean_square, meta_spread
    first = 2 * lr * step * (1 + 2 * lr * meta_smoothness) ** (step - 1) * (np.sqrt(noise) + spread)
    growth = 1 + phi + 16 * (1 + 1 / phi) * (lr * meta_smoothness) ** 2
    second = 4 * lr**2 * (1 + 1 / phi) * step * growth ** (step - 1) * (2 * noise + spread**2)
    return Drift(float(first), float(second))


def client_drift_of_small_steps(
    training: RoundTraining, step: int, meta_smoothness: float, estimator: EstimatorError, meta_spread: float
) -> Drift:
    """Return `4 beta t (sigma_F + gamma_F)` and `35 beta^2 t tau (2 sigma_F^2 + gamma_F^2)`: Corollary F.2, (58).

    For t <= tau and beta <= 1 / (10 tau L_F). Departures from the paper: none.
    """
    require_count("step", step, least=0)
    _check_local_lr(training, meta_smoothness)
    tau = training.num_local_steps
    require(lambda v: v <= tau, "step", step, f"be at most the {tau} local steps", error=NotCovered)
    first = 4 * training.local_lr * step * (np.sqrt(estimator.mean_square) + meta_spread)
    second = 35 * training.local_lr**2 * step * tau * (2 * estimator.mean_square + meta_spread**2)
    return Drift(float(first), second)


def training_for(accuracy: float, cohort_size: int, num_clients: int) -> RoundTraining:
    """Return `tau = epsilon^(-1/2)`, `K = epsilon^(-3/2)`, `beta = epsilon`, rounded up: Corollary 4.6, gMeta Remark 9.

    Apart from the bias, E|grad F|^2 is then O(epsilon) with all clients in every round (`stationarity_bound`).

    Departures from the paper: with sampled clients it is O(sqrt(epsilon)), where both papers have O(epsilon):
    the counterexample of `noise_floor` keeps about beta tau / 2 = sqrt(epsilon) / 2.
    """
    require(lambda v: (v > 0) & (v < 1), "accuracy", accuracy, "lie strictly between 0 and 1")
    tau, rounds = (int(np.ceil(accuracy**power * (1 - 1e-9))) for power in (-0.5, -1.5))
    return RoundTraining(accuracy, tau, rounds, cohort_size, num_clients)


def noise_floor(
    training: RoundTraining, meta_smoothness: float, estimator: EstimatorError, meta_spread: float
) -> float:
    """Return `sigma_T^2`, the part of (111) that does not fall with more rounds: (108), corrected.

        280 (beta L_F)^2 tau (tau - 1) (2 sigma_F^2 + gamma_F^2) + beta L_F (2 sigma_F^2 + q gamma_F^2) + m_F^2
        + 1.2 q beta L_F gamma_F sqrt(35 tau (tau - 1) (2 sigma_F^2 + gamma_F^2)),     q = (1 - r) / (r (n - 1)).

    m_F is the estimator's bias: m_F^2 = 4 alpha^2 L^2 sigma_G^2 / D for Lemma 4.3, and other estimators are used in the
    same way (appendix H).

    Departures from the paper: the last term, which is missing in (108). (99) and (105) treat the mean iterate of a
    cohort as independent of the cohort, which is true only at t = 0. Counterexample, with every assumption of Theorem
    4.5: two clients, one per round, f_i(w) = sqrt(1 + w^2) + w and - w, exact gradients, w_0 = 0, so that F(w_0) = F*.
    B = 2, L = gamma_G = 1, gamma_H = 0. In the long run E|grad F|^2 is about beta tau F''(0) F_i'(0)^2 / 2; (111) has 4
    beta L_F gamma_F^2 (1 + 280 beta L_F tau (tau - 1)), which is too small at tau = 20000, beta = 5e-13 for alpha =
    0.01 and 0.1 with the paper's L_F and gamma_F. The ratio grows with tau at constant beta tau^2, so no constant
    factor helps. Hence with sampled clients beta tau must be O(epsilon), which takes K = O(epsilon^(-2)) rounds:
    Corollary 4.6 and gMeta Remark 9 leave O(sqrt(epsilon)), see `training_for`. With all clients in every round (q = 0)
    or one local step, the theorem holds as printed.

    Proof: write S for the cohort's mean gradient minus grad F, both at the mean iterate w of all clients, and v for
    the cohort's. Given the iterates S has mean 0 and mean square at most q gamma_F^2, and E<grad F(v), S> =
    E<grad F(v) - grad F(w), S> <= L_F sqrt(E|v - w|^2 E|S|^2), with E|v - w|^2 from (95). (99) takes it for 0.
    """
    _check_local_lr(training, meta_smoothness)
    t, share = training, training.sampling_share
    step = t.local_lr * meta_smoothness
    drift = t.num_local_steps * (t.num_local_steps - 1) * (2 * estimator.mean_square + meta_spread**2)
    printed = 280 * step**2 * drift + step * (2 * estimator.mean_square + share * meta_spread**2) + estimator.bias**2
    return printed + 1.2 * share * step * meta_spread * float(np.sqrt(35 * drift))


def stationarity_bound(
    training: RoundTraining, initial_gap: float, meta_smoothness: float, estimator: EstimatorError, meta_spread: float
) -> float:
    """Bound the mean over rounds and local steps of E|grad F|^2 at the cohort's mean iterate: (111).

        4 (F(w_0) - F*) / (beta tau K) + 4 sigma_T^2

    `initial_gap` is F(w_0) - F*. By Remark 4.7 it also bounds the randomly chosen iterates. It holds for any F_i
    that are `meta_smoothness`-smooth with spread `meta_spread` and any estimator with these errors: gMeta Theorem 8
    with `gmeta`'s, where the paper gives only the order. Departures from the paper: `noise_floor`.
    """
    require_nonnegative("initial_gap", initial_gap)
    t = training
    optimisation = 4 * initial_gap / (t.local_lr * t.num_local_steps * t.num_rounds)
    return optimisation + 4 * noise_floor(t, meta_smoothness, estimator, meta_spread)


def stationarity_terms(
    training: RoundTraining, initial_gap: float, meta_smoothness: float, estimator: EstimatorError, meta_spread: float
) -> dict[str, float]:
    """Return the terms of Theorem 4.5 and gMeta (30), up to constant factors except for the first.

    Departures from the paper: `sampling_drift`, the order of the term that `noise_floor` adds.
    """
    _check_local_lr(training, meta_smoothness)
    t, share = training, training.sampling_share
    step, noise, spread = t.local_lr * meta_smoothness, estimator.mean_square, meta_spread**2
    drift = step * t.num_local_steps * (t.num_local_steps - 1)
    return {
        "optimisation": 4 * initial_gap / (t.local_lr * t.num_local_steps * t.num_rounds),
        "noise": step * (1 + drift) * noise,
        "sampling": step * spread * share,
        "local_drift": step * spread * drift,
        "bias": estimator.bias**2,
        "sampling_drift": share * meta_spread * float(np.sqrt(step * drift * (noise + spread))),
    }


def _check(constants: Constants, adapt_lr: float) -> None:
    require_small_adapt_lr(adapt_lr, constants.smoothness, _ANY_STEP)


def _check_local_lr(training: RoundTraining, meta_smoothness: float) -> None:
    most = largest_local_lr(meta_smoothness, training.num_local_steps)
    allowed = lambda v: v <= most * (1 + 1e-9)
    must = f"be at most 1 / (10 tau L_F) = {most:.4g}"
    require(allowed, "local_lr", training.local_lr, must, error=NotCovered)


def _root_mean_square(distances: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(distances))))
