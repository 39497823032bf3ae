"""Bounds of APFL 2020: the risk of a mixture of a local and a global model, and the terms of its convergence.

The paper leaves the constants C of the generalization bounds open, and states the convergence theorems up to constant
factors; here, their terms are given without these factors. m is a client's mixing weight, alpha_i in the paper: 1 is
its own model.
"""

from dataclasses import dataclass

import numpy as np

from personax.client.step_sizes import StronglyConvex
from personax.theory.quantities import NotCovered
from personax.values import require, require_count, require_nonnegative, require_positive


@dataclass(frozen=True)
class Risk:
    """The quantities of a client that Theorem 1 needs.

    | field | symbol |
    |---|---|
    | `local_risk` | L_{D_i}(h_i*): the least true risk of any model on the client's distribution |
    | `global_risk` | the least empirical risk on the average distribution |
    | `distance` | the L1 distance between these distributions: `l1_distance` |
    | `loss_bound`, `loss_lipschitz` | B, G: the loss lies in [0, B] and is G-Lipschitz in the output |
    | `disagreement` | lambda_H(S_i): `disagreement`, `linear_disagreement` |
    | `num_samples`, `total_samples` | m_i, m |
    | `complexity` | d + log(1/delta): the VC dimension and the confidence |

    >>> import personax as px
    >>> risk = px.theory.apfl.Risk(
    ...     local_risk=0.1,
    ...     global_risk=0.1,
    ...     distance=0.5,
    ...     loss_bound=1.0,
    ...     loss_lipschitz=1.0,
    ...     disagreement=0.2,
    ...     num_samples=50,
    ...     total_samples=1000,
    ...     complexity=5.0,
    ... )
    >>> mix = px.theory.apfl.best_mix(risk, constant=1.0)  # the weight with the smallest bound
    >>> 0 <= mix <= 1
    np.True_
    """

    local_risk: float
    global_risk: float
    distance: float
    loss_bound: float
    loss_lipschitz: float
    disagreement: float
    num_samples: int
    total_samples: int
    complexity: float

    def __post_init__(self) -> None:
        names = ("local_risk", "global_risk", "distance", "loss_bound", "loss_lipschitz", "disagreement", "complexity")
        for name in names:
            require_nonnegative(name, getattr(self, name))
        require_count("num_samples", self.num_samples)
        require_count("total_samples", self.total_samples)

    def alone(self, constant: float) -> float:
        """Return the first bracket of (2): `L_{D_i}(h_i*) + 2 C sqrt((d + log(1/delta)) / m_i) + G lambda_H(S_i)`."""
        own = 2 * constant * np.sqrt(self.complexity / self.num_samples)
        return self.local_risk + own + self.loss_lipschitz * self.disagreement

    def shared(self, constant: float) -> float:
        """Return the second bracket of (2): `global_risk + B |D - D_i|_1 + C sqrt((d + log(1/delta)) / m)`.

        Loose: a loss in [0, B] changes by at most (B/2) |D - D_i|_1 between distributions, half of (9). The appendix
        prints B^2 instead of B.
        """
        shift = self.loss_bound * self.distance
        return self.global_risk + shift + constant * np.sqrt(self.complexity / self.total_samples)


def risk_bound(risk: Risk, mix: float, constant: float) -> float:
    """`L_{D_i}(m h + (1 - m) h') <= 2 m^2 (alone) + 2 (1 - m)^2 (shared)`: Theorem 1, (2).

    For squared hinge loss and squared error. `constant` is C.
    """
    _check_mix(mix)
    return 2 * mix**2 * risk.alone(constant) + 2 * (1 - mix) ** 2 * risk.shared(constant)


def best_mix(risk: Risk, constant: float) -> float:
    """`shared / (shared + alone)`, the weight that minimizes (2): section 2.2. Departures from the paper: none.

    It compares bounds, not risks, so it only indicates the direction in which a client's data point. At this weight,
    (2) equals 2 (alone)(shared) / (alone + shared).
    """
    alone, shared = risk.alone(constant), risk.shared(constant)
    return 0.5 if alone + shared == 0 else shared / (alone + shared)


def gain_over_local(risk: Risk, mix: float, constant: float, lower_constant: float) -> float:
    """Bound the mixed model's risk minus the local model's: the mixture wins if it is negative (Corollary 1).

        (2 m^2 - 1) L_{D_i}(h_i*) + (4 m^2 C_1 - C_2) sqrt((d + log(1/delta)) / m_i) + 2 m^2 G lambda_H(S_i)
        + 2 (1 - m)^2 (shared)

    It is (2) minus the lower bound L_{D_i}(h_i*) + C_2 sqrt((d + log(1/delta)) / m_i) of the local model's risk on its
    worst-case distributions. `constant` is the C of Theorem 1, `lower_constant` is C_2.

    Departures from the paper: 4 m^2 C_1 follows from (2), where the corollary has 2 m^2 C_1. The corollary only states
    that some C_1 exists, and with twice the C of Theorem 1 it holds as printed. Its probability 1 - delta does not
    follow: two events of probability 1 - delta leave 1 - 2 delta, and the lower bound from learning theory that it
    cites has probability delta, not 1 - delta. Of the two constant functions, the empirically best is the worse one
    with probability below 1/2 for every distribution, so 1 - delta > 1/2 leaves only C_2 = 0, for which it holds.
    """
    local = risk.local_risk + lower_constant * np.sqrt(risk.complexity / risk.num_samples)
    return risk_bound(risk, mix, constant) - local


@dataclass(frozen=True)
class MixtureSetting:
    """The problem of a client and a run of Algorithm 1.

    | field | symbol |
    |---|---|
    | `smoothness`, `strong_convexity` | L, mu; kappa = L / mu |
    | `noise` | sigma of a batch |
    | `diversity`, `total_diversity` | zeta_i, zeta = sum_i zeta_i: `gradient_diversity` |
    | `gap` | Delta_i: `optimal_gap` |
    | `num_steps`, `num_local_steps` | T, all local steps; tau, local steps between two rounds |
    | `cohort_size`, `num_clients` | K, n |
    """

    smoothness: float
    strong_convexity: float
    noise: float
    diversity: float
    total_diversity: float
    gap: float
    num_steps: int
    num_local_steps: int
    cohort_size: int
    num_clients: int

    def __post_init__(self) -> None:
        require_positive("smoothness", self.smoothness)
        for name in ("strong_convexity", "noise", "diversity", "total_diversity", "gap"):
            require_nonnegative(name, getattr(self, name))
        for name in ("num_steps", "num_local_steps", "cohort_size", "num_clients"):
            require_count(name, getattr(self, name))

    @property
    def condition(self) -> float:
        """`kappa = L / mu`."""
        require_positive("strong_convexity", self.strong_convexity, "Use the terms for nonconvex losses.")
        return self.smoothness / self.strong_convexity

    @property
    def share(self) -> float:
        """`b = min(K / n, 1/2)`."""
        return min(self.cohort_size / self.num_clients, 0.5)


def least_mix(setting: MixtureSetting) -> float:
    """Return the least weight for which Theorems 2 and 5 hold.

    It is `max(1 - 1 / (4 sqrt(6) kappa), 1 - 1 / (4 sqrt(6) kappa sqrt(mu)))`.

    With sampled clients the proof needs more: (29) divides by 1 - 8 (m - m^2 K / n), which near m = 1 is positive only
    if K > 7 n / 8.
    """
    factor = 4 * np.sqrt(6) * setting.condition
    return float(max(1 - 1 / factor, 1 - 1 / (factor * np.sqrt(setting.strong_convexity))))


def step_size(setting: MixtureSetting) -> StronglyConvex:
    """`eta_t = 16 / (mu (t + a))`, `a = max(128 kappa, tau)`: the step size of Theorems 2, 4, 5 and 6.

    In E.1.3, the step from one weight to the next, `(1 - mu eta_t / 8) p_t / eta_t <= p_{t-1} / eta_{t-1}`, is false
    for t + a > 2.62. The excess is at most mu p_t / 16, and f_i - f_i* >= mu |v - v_i*|^2 / 2 compensates for it in
    Theorem 5, whose constant 4/3 becomes 8/5, and in Theorem 2 for b > 1/8.
    """
    return StronglyConvex(setting.strong_convexity, max(128 * setting.condition, setting.num_local_steps))


def step_size_of_any_mix(setting: MixtureSetting) -> StronglyConvex:
    """`eta_t = 8 / (mu (t + a))`, `a = max(64 kappa, tau)`: the step size of Theorem 7.

    E.1.3's inequality is false here too, with 1 - mu eta_t / 4 as its first factor; b > 1/4 compensates for it.
    """
    offset = max(64 * setting.condition, setting.num_local_steps)
    return StronglyConvex(setting.strong_convexity, offset, scale=8.0)


def personal_terms(setting: MixtureSetting, mix: float) -> dict[str, float]:
    """Return the terms of E[f_i(v_i)] - f_i* for strongly convex losses and sampled clients: Theorem 2.

    With a bounded domain, its proof and those of Theorems 4 to 7 confuse the mixture of projections with the projection
    of the mixture: for 3 and -1 on [-1, 1] with equal weights, the former is 0 and the latter 1. Without a bounded
    domain this step is correct.
    """
    s, away = setting, _away(mix)
    mu, kappa, b, steps, tau = s.strong_convexity, s.condition, s.share, s.num_steps, s.num_local_steps
    spread = s.total_diversity / s.cohort_size
    return {
        "own_noise": mix**2 * s.noise**2 / (mu * b * steps),
        "shared_noise": away * kappa**2 * s.noise**2 / (mu * b * s.cohort_size * steps),
        "local_drift": away * kappa**2 * tau**2 * (s.diversity + kappa**2 * spread) / (mu * b * steps**2),
        "diversity": away * (s.diversity + spread) / (mu * b),
        "gap": away * kappa * s.smoothness * s.gap / b,
    }


def personal_terms_nonconvex(setting: MixtureSetting, mix: float, squared_diameter: float) -> dict[str, float]:
    """Return the terms of (1/T) sum_t |grad f_i(v_i(t))|^2 with full gradients of all clients: Theorem 3.

    `squared_diameter` bounds |w - w'|^2 over the domain, D_W in the theorem (Lemma 8 writes D_W^2 for it).

    False as printed if iterates reach the boundary: its proof and that of Theorem 8 use <g, P> >= |g|^2 for a
    projected step P, where Ghadimi 2016 has <g, P> >= |P|^2. Counterexample: f(v) = v + 1 on [-1, 1], m = 1, from v =
    -1: the gradient is always 1, but every term goes to 0. The theorem holds if the projection is never active. Both
    theorems also need tau <= sqrt(T) (Lemma 10) and nonnegative losses.
    """
    s, away = setting, _away(mix)
    level, steps, tau, n = s.smoothness, s.num_steps, s.num_local_steps, s.num_clients
    own_drift = tau**4 * s.total_diversity / (n * steps**2) + tau**2 * s.diversity / steps
    return {
        "own_optimisation": level / np.sqrt(steps),
        "shared_optimisation": away * level / np.sqrt(steps),
        "residual": (1 - mix**2) ** 2 * (s.diversity + level**2 * squared_diameter),
        "own_drift": mix**4 * away * own_drift,
        "shared_drift": away * tau**2 * s.total_diversity / (n * steps),
    }


def global_terms_of_all(setting: MixtureSetting) -> dict[str, float]:
    """Return the terms of E[F(w)] - F* for strongly convex losses with all clients in every round: Theorem 4.

    Departures from the paper: the 1/mu in `noise`, see `global_terms`.
    """
    s = setting
    return _global_terms(s, s.total_diversity / s.num_clients, s.num_clients)


def personal_terms_of_all(setting: MixtureSetting, mix: float) -> dict[str, float]:
    """Return the terms of E[f_i(v_i)] - f_i* for strongly convex losses with all clients: Theorem 5."""
    s, away = setting, _away(mix)
    mu, steps = s.strong_convexity, s.num_steps
    return {
        "start": mu / steps**3,
        "own_noise": mix**2 * s.noise**2 / (mu * steps),
        "diversity": away * s.diversity / mu,
        "gap": away * s.condition * s.smoothness * s.gap,
        **_shared_terms(s, away, s.num_clients, 1.0),
    }


def global_terms(setting: MixtureSetting) -> dict[str, float]:
    """Return the terms of E[F(w)] - F* for strongly convex losses and sampled clients: Theorem 6, (24), corrected.

    With K < n, only one local step per round (tau = 1) is covered.

    Departures from the paper: Theorem 6 is false as printed if K < n. (25) replaces the cohort's mean gradient by grad
    F, also inside the square, and thus drops the variance of the cohort. `sampling` is this term for tau = 1:

        q zeta / (n mu T),  q = (n - K) / (K (n - 1))

    since the mean of K of n gradients, drawn without replacement, has the variance q (1/n) sum_j |grad f_j - grad F|^2.
    Counterexample: f(w) = mu (w -+ 1)^2 / 2, one of two clients per step, without noise, from w*: E[F] - F* is 0.82 mu
    / T, and the printed terms are about 4 mu / T^2. With several local steps, the iterate within a round also depends
    on the cohort. We have no proof for this case, so it raises `NotCovered`.

    `noise` is sigma^2 / (mu K T), where Theorems 4 and 6 print sigma^2 / (n T) and sigma^2 / (K T). The last sum of
    their proofs, (1/S_T) sum_t p_t eta_t sigma^2 / K, contains the 1/mu of eta_t, and no constant can replace it: for
    one client with f = mu w^2 / 2 from w = 0, E[F] - F* is 0.82 sigma^2 / (mu T) after 10^5 steps.

    Remark 5 derives O(sqrt(1/KT)) from it for tau = sqrt(T/K). With K = n the terms even give O(1/KT).
    """
    s = setting
    terms = _global_terms(s, 2 * s.total_diversity / s.cohort_size, s.cohort_size)
    if s.cohort_size >= s.num_clients:
        return terms
    if s.num_local_steps > 1:
        raise NotCovered(
            f"Theorem 6 is false for sampled clients (`cohort_size` {s.cohort_size} of {s.num_clients}), and its "
            f"correction covers only one local step, got `num_local_steps` {s.num_local_steps}. "
            "Set `num_local_steps` to 1, or sample all clients."
        )
    left_out = (s.num_clients - s.cohort_size) / (s.cohort_size * (s.num_clients - 1))
    variance = left_out * s.total_diversity / s.num_clients
    return {**terms, "sampling": variance / (s.strong_convexity * s.num_steps)}


def personal_terms_of_any_mix(setting: MixtureSetting, mix: float, gradient_bound: float) -> dict[str, float]:
    """Return the terms of E[f_i(v_i)] - f_i* for strongly convex losses and any weight: Theorem 7, (33)."""
    s, away = setting, _away(mix)
    mu, b, steps = s.strong_convexity, s.share, s.num_steps
    return {
        "start": mu / (b * steps**3),
        "own_noise": mix**2 * s.noise**2 / (mu * b * steps),
        "residual": away * gradient_bound**2 / (mu * b),
        **_shared_terms(s, away, s.cohort_size, b),
    }


def global_terms_nonconvex(setting: MixtureSetting) -> dict[str, float]:
    """Return the terms of (1/T) sum_t |grad F(w(t))|^2 with full gradients of all clients: Theorem 8.

    False as printed if iterates reach the boundary of a bounded domain, see `personal_terms_nonconvex`.
    """
    s = setting
    drift = s.num_local_steps**2 * s.total_diversity / (s.num_clients * s.num_steps)
    return {"optimisation": s.smoothness / float(np.sqrt(s.num_steps)), "local_drift": drift}


def _global_terms(s: MixtureSetting, spread: float, num: int) -> dict[str, float]:
    steps, tau = s.num_steps, s.num_local_steps
    drift = s.condition**2 * tau * (s.noise**2 + tau * spread) / s.strong_convexity
    return {
        "start": s.strong_convexity / steps**3,
        "local_drift": drift / steps**2,
        "late_drift": drift * float(np.log(steps)) / steps**3,
        "noise": s.noise**2 / (s.strong_convexity * num * steps),
    }


def _shared_terms(s: MixtureSetting, away: float, num: int, b: float) -> dict[str, float]:
    """Return the terms of Theorems 5 and 7 that come from the shared model."""
    mu, kappa, steps, tau = s.strong_convexity, s.condition, s.num_steps, s.num_local_steps
    spread = s.total_diversity / num
    own = kappa**2 * tau * (s.noise**2 + tau * (s.diversity + spread))
    shared = kappa**4 * tau * (s.noise**2 + 2 * tau * spread)
    return {
        "shared_start": away * kappa * s.smoothness * float(np.log(steps)) / (b * steps**3),
        "shared_noise": away * kappa**2 * s.noise**2 / (mu * b * num * steps),
        "own_drift": away * own / (mu * b * steps**2),
        "shared_drift": away * shared / (mu * b * steps**2),
    }


def _away(mix: float) -> float:
    """Return `(1 - m)^2`, the weight of the shared model's terms."""
    _check_mix(mix)
    return (1 - mix) ** 2


def _check_mix(mix: float) -> None:
    require(lambda v: (v >= 0) & (v <= 1), "mix", mix, "lie between 0 and 1")
