"""Bounds of gMeta 2025 (any number nu of adaptation steps, any adapt_lr) as functions of its constants.

Batches by role, with one size or one for each step: D_{i,0..nu-1} is `adapt`, D_{i,nu} is `outer`, D'_{i,0..nu-1} is
`curvature`.
Theorem 8 is Fallah (111) with these numbers: use `fallah.stationarity_bound`.
"""

from typing import NamedTuple

import numpy as np

from personax.client.sampling import BatchSizes
from personax.theory.quantities import Constants, EstimatorError
from personax.values import require_count, require_nonnegative, require_positive


def meta_smoothness(constants: Constants, adapt_lr: float, num_adapt_steps: int) -> float:
    """`L_F = L (1 + aL)^(2 nu) + B a rho (1 + aL)^(nu - 1) sum_{l < nu} (1 + aL)^l`: Lemma 4, (19), a = adapt_lr.

    For one step it is L (1 + aL)^2 + a rho B, PersA-FL Lemma 1; with aL = 1 it is Fallah's Lemma 4.2.

    >>> import personax as px
    >>> px.theory.gmeta.meta_smoothness(px.theory.Constants(smoothness=2.0), adapt_lr=0.1, num_adapt_steps=2)
    4.1472
    """
    _check(adapt_lr, num_adapt_steps)
    c, growth = constants, 1 + adapt_lr * constants.smoothness
    if num_adapt_steps == 0:
        return c.smoothness
    lipschitz = growth ** (num_adapt_steps - 1) * sum(growth**step for step in range(num_adapt_steps))
    curvature = c.gradient_bound * adapt_lr * c.hessian_lipschitz * lipschitz
    return c.smoothness * growth ** (2 * num_adapt_steps) + curvature


class IterateError(NamedTuple):
    """Bounds on the mean of |w~_l - w_l|, its square and its fourth power: h, h' and h'' of Lemma 5."""

    first: float
    second: float
    fourth: float


def iterate_error(constants: Constants, adapt_lr: float, num_adapt_steps: int, sizes: BatchSizes) -> IterateError:
    """Bound the distance between stochastic and exact adaptation after `num_adapt_steps` steps: Lemma 5, (20)-(22).

        h_l   = (1 + aL) h_{l-1} + a sigma_G / sqrt(D)                     h_1   = a sigma_G / sqrt(D)
        h'_l  = 2 (1 + a^2 L^2) h'_{l-1} + 2 a^2 sigma_G^2 / D             h'_1  = a^2 sigma_G^2 / D
        h''_l = 8 (1 + 8 a^4 L^4) h''_{l-1} + 64 a^4 m_4(D)                h''_1 = a^4 m_4(D)

    where D is the size of batch l - 1 and m_4 is `mean_of_fourth`: (77), (82) and (86), whose solutions are (20)-(22).
    The paper calls w~_l unbiased, which is true only for l = 1.
    """
    return _iterate_errors(constants, adapt_lr, num_adapt_steps, sizes)[-1]


def _iterate_errors(constants: Constants, adapt_lr: float, nu: int, sizes: BatchSizes) -> list[IterateError]:
    """Return the errors of w_0, ..., w_nu."""
    _check(adapt_lr, nu)
    c, steps, sigma = constants, adapt_lr * constants.smoothness, adapt_lr * constants.gradient_noise
    found = [IterateError(0.0, 0.0, 0.0)]
    for step, size in enumerate(sizes.each("adapt", nu)):
        h, fourth = found[-1], adapt_lr**4 * mean_of_fourth(c.gradient_noise, c.gradient_kurtosis, size)
        # The first step starts without an error, so the factors for adding two errors do not apply.
        twice, eight = (1, 1) if step == 0 else (2, 64)
        error = IterateError(
            (1 + steps) * h.first + sigma / np.sqrt(size),
            2 * (1 + steps**2) * h.second + twice * sigma**2 / size,
            8 * (1 + 8 * steps**4) * h.fourth + eight * fourth,
        )
        found.append(error)
    return found


def mean_of_fourth(noise: float, kurtosis: float, size: int) -> float:
    """Bound `E|mean of D deviations|^4 <= (kappa + 3 (D - 1) sigma^4) / D^3`: Lemma 12, (68).

    True for vectors, and for matrices in the Frobenius norm. In the spectral norm, in which (17) is stated, (69) is
    false: for Hessians I, -I, diag(1, -1), diag(-1, 1), the mean of two has 3/4 where (69) has 1/2.
    """
    return (kurtosis + 3 * (size - 1) * noise**4) / size**3


def exact_error(constants: Constants, adapt_lr: float, num_adapt_steps: int, sizes: BatchSizes) -> EstimatorError:
    """The error of (11) with exact Hessian products: Lemma 6, (23)-(26).

        bias         (1 + aL)^nu (sigma_G / sqrt(D_nu) + L h_nu) + B a rho (1 + aL)^(nu-1) sum_{j=1}^{nu-1} h_j
                     + sqrt(d_nu (sigma_G^2 / D_nu + L^2 h'_nu))
        mean square  3 (1 + aL)^(2 nu) (sigma_G^2 / D_nu + L^2 h'_nu) + 3 B^2 d_nu
                     + 6 sqrt(2 d'_nu (m_4(D_nu) + L^4 h''_nu))

    The paper states it for nu > 1; it also holds for nu = 1, where `fallah.exact_error` is sharper. (24) is printed
    without its expectation. Its proof uses (69), which is false in the spectral norm; the lemma still holds, because
    the Hessians are applied only to vectors independent of them (given the iterates), for which d and d' hold.
    Loose: the bias does not contain sigma_G / sqrt(D_nu), because the outer batch is unbiased given the iterates.
    """
    c, a, nu = constants, adapt_lr, num_adapt_steps
    growth, h = 1 + a * c.smoothness, _iterate_errors(constants, a, nu, sizes)
    outer_first, outer_second, outer_fourth = _outer(c, h[nu], sizes.of("outer"))
    second, fourth = _hessian_product_errors(c, a, h, sizes)
    earlier = sum(error.first for error in h[1:nu])
    drift = c.gradient_bound * a * c.hessian_lipschitz * growth ** max(nu - 1, 0) * earlier
    bias = growth**nu * outer_first + drift + np.sqrt(second * outer_second)
    mean_square = 3 * growth ** (2 * nu) * outer_second + 3 * c.gradient_bound**2 * second
    return EstimatorError(float(bias), float(mean_square + 6 * np.sqrt(2 * fourth * outer_fourth)))


def first_order_error(constants: Constants, adapt_lr: float, num_adapt_steps: int, sizes: BatchSizes) -> EstimatorError:
    """The error of (31), which drops the Hessians: Lemma 10, (32)-(33).

        bias         sigma_G / sqrt(D_nu) + L h_nu + B ((1 + aL)^nu + 1)
        mean square  2 sigma_G^2 / D_nu + 2 L^2 h'_nu + 2 B^2 ((1 + aL)^nu + 1)^2

    Loose for small adapt_lr: |P g - g| <= ((1 + aL)^nu - 1) |g| for the product P of the nu factors, with a minus where
    the paper has a plus. So the true error, like Fallah's Lemma H.1, vanishes with adapt_lr, but this bound does not.
    """
    c, h = constants, iterate_error(constants, adapt_lr, num_adapt_steps, sizes)
    outer_first, outer_second, _ = _outer(c, h, sizes.of("outer"))
    dropped = c.gradient_bound * ((1 + adapt_lr * c.smoothness) ** num_adapt_steps + 1)
    return EstimatorError(float(outer_first + dropped), float(2 * outer_second + 2 * dropped**2))


def hessian_free_error(
    constants: Constants, adapt_lr: float, num_adapt_steps: int, sizes: BatchSizes, radius: float
) -> EstimatorError:
    """The error of (35)-(36) with differences of radius delta: Lemma 11, (37)-(41).

        bias  p_nu + q_nu,     mean square  2 p'_nu + 2 q_nu^2

        p_l  = (1 + aL) p_{l-1} + (a / delta) (sigma_G / sqrt(D') + L h_{nu-l})
        p'_l = 3 (1 + a^2 L^2) p'_{l-1} + (3 a^2 / 2 delta^2) (sigma_G^2 / D' + 2 L^2 h'_{nu-l})
        q_nu = a rho delta B^2 sum_{l < nu} (1 + aL)^(nu + l - 1)

    from p_0 = sigma_G / sqrt(D_nu) + L h_nu and p'_0 = sigma_G^2 / D_nu + L^2 h'_nu. (37) and (38) print the difference
    from grad F_i^HF; the proof, and this function, bound the one from grad F_i. (163) uses its hypothesis on
    |E[d~ - d]| as one on E|d~ - d|; read as the latter, the induction holds. Loose in delta, like Fallah's Lemma H.2.
    """
    require_positive("radius", radius)
    c, a, nu = constants, adapt_lr, num_adapt_steps
    steps, errors = a * c.smoothness, _iterate_errors(c, a, nu, sizes)
    first, second, _ = _outer(c, errors[nu], sizes.of("outer"))
    for h, size in reversed(list(zip(errors[:nu], sizes.each("curvature", nu), strict=True))):
        noise = c.gradient_noise / np.sqrt(size) + c.smoothness * h.first
        squared = c.gradient_noise**2 / size + 2 * c.smoothness**2 * h.second
        first = (1 + steps) * first + a / radius * noise
        second = 3 * (1 + steps**2) * second + 1.5 * (a / radius) ** 2 * squared
    powers = sum((1 + steps) ** (nu + step - 1) for step in range(nu))
    difference = a * c.hessian_lipschitz * radius * c.gradient_bound**2 * powers
    return EstimatorError(float(first + difference), float(2 * second + 2 * difference**2))


def meta_spread(constants: Constants, adapt_lr: float, num_adapt_steps: int) -> float:
    """Bound `gamma_F`, the root of (1/N) sum_i |grad F_i(w) - grad F(w)|^2: Lemma 7, corrected.

        (1 + aL)^(2 nu) gamma_G + a B (1 + aL)^(nu-1) (nu gamma_H + rho sum_{l < nu} d_l),
        d_l = gamma_G ((1 + aL)^l - 1) / L.

    Departures from the paper: (27) has gamma_F^2 = 15 B^2 g_nu + 6 gamma_G^2 (1 + aL)^(2 nu) (1 + a^2 L^2). Its proof
    writes w_l for the iterates of every client and of the mean, which differ after the first step. Counterexample:
    f_i(w) = L cos(w) + b_i w with small b_i = -b, b, at w = 0 with aL = 1: gamma_G = b, gamma_H = 0 everywhere, and
    grad F_i(0) is (1 + aL)^(2 nu) b_i up to O(b^3), so gamma_F^2 = 256 b^2 for two steps, where (27) has 192 b^2. For
    one step (27) holds.

    Proof of the above: let u_l be the path of f and w_l that of f_i, both from w. Their distance grows as
    |w_l - u_l| <= (1 + aL) |w_{l-1} - u_{l-1}| + a |grad f_i(u_{l-1}) - grad f(u_{l-1})|, so its root mean square over
    clients is at most d_l. Then grad F_i = P_i grad f_i(w_nu) differs from the fixed P grad f(u_nu) by
    P_i (grad f_i(w_nu) - grad f(u_nu)), where the difference has root mean square at most L d_nu + gamma_G, and by
    (P_i - P) grad f(u_nu), where factor by factor the Hessians differ by at most rho |w_l - u_l| and, in root mean
    square, gamma_H. A variance is at most the mean square distance from any fixed vector.
    """
    _check(adapt_lr, num_adapt_steps)
    c, nu, steps = constants, num_adapt_steps, adapt_lr * constants.smoothness
    # ((1 + aL)^l - 1) / L, also for L = 0
    apart = [c.gradient_spread * adapt_lr * sum((1 + steps) ** k for k in range(step)) for step in range(nu)]
    hessians = nu * c.hessian_spread + c.hessian_lipschitz * sum(apart)
    products = adapt_lr * c.gradient_bound * (1 + steps) ** max(nu - 1, 0) * hessians
    return (1 + steps) ** (2 * nu) * c.gradient_spread + products


def _hessian_product_errors(
    constants: Constants, adapt_lr: float, h: list[IterateError], sizes: BatchSizes
) -> tuple[float, float]:
    """Return `d_nu` and `d'_nu`, (25)-(26): second and fourth moments of the error of the product of the nu factors."""
    c, a, growth = constants, adapt_lr, 1 + adapt_lr * constants.smoothness
    second = fourth = 0.0
    for step, size in enumerate(sizes.each("curvature", len(h) - 1)):
        noise, fourth_noise = c.hessian_noise**2 / size, mean_of_fourth(c.hessian_noise, c.hessian_kurtosis, size)
        if step == 0:
            second, fourth = a**2 * noise, a**4 * fourth_noise
            continue
        fresh = noise + c.hessian_lipschitz**2 * h[step].second
        fresh_fourth = fourth_noise + c.hessian_lipschitz**4 * h[step].fourth
        second = 2 * second * (growth + a * np.sqrt(noise)) ** 2 + 2 * a**2 * growth ** (2 * step) * fresh
        kept = growth**4 + a**4 * fourth_noise
        fourth = 64 * fourth * kept + 64 * a**4 * growth ** (4 * step) * fresh_fourth
    return second, fourth


def _outer(constants: Constants, h: IterateError, size: int) -> tuple[float, float, float]:
    """Return the moments of the error of the outer gradient, (95)-(97), the fourth without its factor 8."""
    c = constants
    fourth = mean_of_fourth(c.gradient_noise, c.gradient_kurtosis, size) + c.smoothness**4 * h.fourth
    second = c.gradient_noise**2 / size + c.smoothness**2 * h.second
    return c.gradient_noise / np.sqrt(size) + c.smoothness * h.first, second, fourth


def _check(adapt_lr: float, num_adapt_steps: int) -> None:
    require_nonnegative("adapt_lr", adapt_lr)
    require_count("num_adapt_steps", num_adapt_steps, least=0)
