"""Runs whose moments are known exactly: clients in one dimension whose gradient estimates are linear in the model."""

import itertools
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.polynomial.polynomial import polymul

from personax.client.sampling import BatchSizes
from personax.theory import Constants, fallah, gmeta, persafl


class Linear(NamedTuple):
    """Clients in one dimension whose gradient estimates are `slope (w - center) + noise`, [clients] each.

    `noise` is the variance of one estimate, the same at every w.
    """

    slope: np.ndarray
    center: np.ndarray
    noise: np.ndarray

    @property
    def minimizer(self):
        return (self.slope * self.center).sum() / self.slope.sum()

    @property
    def gap(self):
        """F(0) - min F of the mean of slope (w - center)^2 / 2."""
        return self.slope.mean() * self.minimizer**2 / 2

    def squared_gradient(self, mean, second):
        """E|grad F(w)|^2 from the first two moments of w."""
        m = self.minimizer
        return self.slope.mean() ** 2 * (second - 2 * m * mean + m**2)


def synchronous_stationarity(clients, training):
    """The left side of Fallah (111) from w_0 = 0, exactly: the mean over rounds, steps, cohorts and noise."""
    n, size = training.num_clients, training.cohort_size
    cohorts = np.array([np.isin(np.arange(n), c) for c in itertools.combinations(range(n), size)]) / size
    keep = 1 - training.local_lr * clients.slope
    steps = np.arange(training.num_local_steps + 1)[:, None]
    scale, shift = keep**steps, (1 - keep**steps) * clients.center
    variance = training.local_lr**2 * clients.noise * np.cumsum(np.r_[[0 * keep], keep ** (2 * steps[:-1])], axis=0)
    # w after t steps of a cohort: P w_k + Q + noise
    P, Q, V = (scale @ cohorts.T, shift @ cohorts.T, variance @ (cohorts**2).T)
    mean, second, total = 0.0, 0.0, 0.0
    for _ in range(training.num_rounds):
        means = (P * mean + Q).mean(axis=1)
        seconds = (P**2 * second + 2 * P * Q * mean + Q**2 + V).mean(axis=1)
        total += clients.squared_gradient(means[:-1], seconds[:-1]).mean()
        mean, second = means[-1], seconds[-1]
    return total / training.num_rounds


def long_run(lr, num_steps):
    """E|grad F|^2 of two clients (w - c)^2 / 2, c = -1 and 1, one a round, after many rounds, over the local steps.

    w <- k w + (1 - k) c after a round with k = (1 - lr)^num_steps, so the variance of w becomes (1 - k) / (1 + k).
    """
    keep = np.exp(np.arange(num_steps + 1) * np.log1p(-lr))
    variance = (1 - keep[-1]) / (1 + keep[-1])
    return (keep[:-1] ** 2 * variance + (1 - keep[:-1]) ** 2).mean()


def root_meta_gradient(adapt_lr):
    """grad F_i(w) of f_i(w) = sqrt(1 + w^2) - s w, where s is -1 or 1: B = 2, L = gamma_G = 1, gamma_H = 0."""
    slope = lambda s, w: w / np.sqrt(1 + w**2) - s
    return lambda s, w: (1 - adapt_lr * (1 + w**2) ** -1.5) * slope(s, w - adapt_lr * slope(s, w))


ROOT_CONSTANTS = Constants(
    gradient_bound=2.0, smoothness=1.0, hessian_lipschitz=1.5 * 1.25**-2.5, gradient_spread=1.0
)  # 3 w (1 + w^2)^(-5/2) is largest at w = 1/2


def long_run_of(gradient, lr, num_steps, degree=8):
    """`long_run` of any two clients s = -1, 1 that mirror each other, for a small `lr * num_steps`.

    A round adds a function of w, here a polynomial in u = w / R for a range of 12 deviations; so the moments of u after
    many rounds solve E[(u + d(u))^j] = E[u^j].
    """
    slope, curvature = gradient(1, 0.0), (gradient(1, 1e-4) - gradient(1, -1e-4)) / 2e-4
    reach = 12 * np.sqrt(lr * num_steps * slope**2 / (2 * curvature))
    nodes = chebyshev.chebpts1(2 * degree + 1)
    fitted = lambda values: chebyshev.cheb2poly(chebyshev.chebfit(nodes, values, degree))
    rises, seen = np.zeros((degree + 1, degree + 1)), 0.0
    for s in (-1, 1):
        moved = np.zeros(len(nodes))
        for _ in range(num_steps):
            at = reach * nodes + moved
            seen = seen + ((gradient(-1, at) + gradient(1, at)) / 2) ** 2 / (2 * num_steps)
            moved = moved - lr * gradient(s, at)
        change, power = fitted(moved / reach), np.ones(1)
        for i in range(1, degree + 1):
            power = polymul(power, change)[: degree + 1]
            for j in range(i, degree + 1):  # the term of u^(j - i) d(u)^i in (u + d(u))^j - u^j
                rises[j, j - i :] += comb(j, i) * np.pad(power, (0, degree + 1 - len(power)))[: degree + 1 - (j - i)]
    moments = np.linalg.solve(rises[1:, 1:], -rises[1:, 0])
    return fitted(seen) @ np.concatenate([[1.0], moments])


def asynchronous_stationarity(clients, training, local_lr):
    """The left side of PersA-FL Theorems 1 to 3 from w^0 = 0, exactly, when every update is `staleness` old.

    In coordinates (w^t, ..., w^{t-tau}, 1) an update of client i is a matrix; the second moments follow from the mean
    over clients.
    """
    keep = (1 - local_lr * clients.slope) ** training.num_local_steps
    powers = (1 - local_lr * clients.slope)[:, None] ** (2 * np.arange(training.num_local_steps))
    noise = (local_lr**2 * clients.noise * powers.sum(axis=1)).mean()
    width = training.staleness + 2
    maps = np.tile(np.eye(width, k=-1), (len(keep), 1, 1))
    maps[:, -1], maps[:, -1, -1] = 0, 1
    maps[:, 0, 0] = 1
    maps[:, 0, -2] -= 1 - keep
    maps[:, 0, -1] = (1 - keep) * clients.center
    moment = np.zeros((width, width))
    moment[-1, -1] = 1
    total = 0.0
    for _ in range(training.num_updates):
        total += clients.squared_gradient(moment[0, -1], moment[0, 0])
        moment = np.einsum("iab,bc,idc->ad", maps, moment, maps) / len(maps)
        moment[0, 0] += noise
    return total / training.num_updates


class Case(NamedTuple):
    """The exact value of the quantity that a theorem bounds, and the bound."""

    found: float
    bound: float


def quadratics(seed, num_clients=4, scale=1.0):
    """Curvatures, centers and the spread of a client's samples around its center: losses h (w - c - e)^2 / 2."""
    rng = np.random.default_rng(seed)
    return scale * rng.uniform(0.2, 1, num_clients), rng.normal(size=num_clients), rng.uniform(0, 0.5, num_clients)


def quadratic_constants(curvature, center, deviation, reach=3.0):
    """Over models at most `reach` from 0; samples of a client differ in their centers, not in their curvature."""
    gradients = curvature * (np.array([-reach, 0, reach])[:, None] - center)
    return Constants(
        gradient_bound=np.abs(gradients).max(),
        smoothness=curvature.max(),
        gradient_noise=(curvature * deviation).max(),
        gradient_spread=gradients.std(axis=1).max(),
        hessian_spread=curvature.std(),
    )


def meta_clients(problem, adapt_lr, sizes, num_adapt_steps=1):
    """Per-FedAvg on quadratics: the estimate (1 - a h)^nu h (w_nu - c - outer noise) is linear in w."""
    h, c, s = problem
    keep = 1 - adapt_lr * h
    # one step adds a h e to w, and the later ones shrink it
    adapted = (adapt_lr * h) ** 2 * sum(keep ** (2 * k) for k in range(num_adapt_steps)) / sizes.of("adapt")
    noise = (keep**num_adapt_steps * h * s) ** 2 * (adapted + 1 / sizes.of("outer"))
    return Linear(keep ** (2 * num_adapt_steps) * h, c, noise)


def per_fedavg_cases(seed, num_adapt_steps, adapt_share, cohort_size, num_local_steps, lr_share):
    """Fallah (111) with gMeta's lemmas, and for one adaptation step also with Fallah's own."""
    problem, sizes = quadratics(seed), BatchSizes(2, adapt=3)
    constants = quadratic_constants(*problem)
    adapt_lr = adapt_share / constants.smoothness
    clients = meta_clients(problem, adapt_lr, sizes, num_adapt_steps)
    given = (constants, adapt_lr, num_adapt_steps)
    lemmas = [(gmeta.meta_smoothness(*given), gmeta.exact_error(*given, sizes), gmeta.meta_spread(*given))]
    if num_adapt_steps == 1:
        given = (constants, adapt_lr)
        own = (fallah.meta_smoothness(*given), fallah.exact_error(*given, sizes), fallah.meta_spread(*given))
        lemmas.append(own)
    for lemma in lemmas:
        lr = lr_share * fallah.largest_local_lr(lemma[0], num_local_steps)
        training = fallah.RoundTraining(lr, num_local_steps, 60, cohort_size, 4)
        bound = fallah.stationarity_bound(training, clients.gap, *lemma)
        yield Case(synchronous_stationarity(clients, training), bound)


def fedasync_case(seed, scale, staleness, num_local_steps, length):
    """PersA-FL Theorem 1."""
    h, c, s = problem = quadratics(seed, scale=0.01 + 0.02 * scale)
    constants = quadratic_constants(*problem)
    least = persafl.least_num_updates(constants.smoothness, num_local_steps, staleness)
    training = persafl.ArrivalTraining(int(np.ceil(length * least)), num_local_steps, staleness)
    lr = persafl.local_lr(training, constants.smoothness)
    gap = 0.5 * (h * c**2).mean()  # f(0), and every client's minimum is 0
    found = asynchronous_stationarity(Linear(h, c, (h * s) ** 2 / 2), training, lr)
    return Case(found, persafl.fedasync_bound(training, gap, constants, 2))


def persafl_meta_case(seed, adapt_share, staleness, num_local_steps, length):
    """PersA-FL Theorem 2."""
    h, c, _ = problem = quadratics(seed)
    constants = quadratic_constants(*problem)
    adapt_lr = adapt_share / constants.smoothness
    level = persafl.meta_smoothness(constants, adapt_lr)
    training = persafl.ArrivalTraining(int(np.ceil(length * 64 * level)), num_local_steps, staleness)
    clients = meta_clients(problem, adapt_lr, BatchSizes(2))
    found = asynchronous_stationarity(clients, training, persafl.local_lr(training, level))
    gap = 0.5 * (h * (1 - adapt_lr * h) ** 2 * c**2).mean()
    return Case(found, persafl.persafl_meta_bound(training, gap, constants, adapt_lr, 2))


def persafl_moreau_case(seed, scale, staleness, num_local_steps, strength_share):
    """PersA-FL Theorem 3, as corrected; of h (theta - c)^2 / 2 the envelope has the slope lambda h / (lambda + h)."""
    h, c, s = problem = quadratics(seed, scale=0.003 + 0.003 * scale)
    constants = quadratic_constants(*problem)
    strength = strength_share * constants.smoothness
    level, slope = persafl.moreau_smoothness(constants, strength), strength * h / (strength + h)
    least = 288 * level * (num_local_steps + 7) * (staleness + 1) ** 3
    training = persafl.ArrivalTraining(int(np.ceil(least)), num_local_steps, staleness)
    lr = persafl.local_lr(training, level)
    found = asynchronous_stationarity(Linear(slope, c, (slope * s) ** 2 / 2), training, lr)
    gap = 0.5 * (slope * c**2).mean()
    return Case(found, persafl.persafl_moreau_bound(training, gap, constants, strength, 0.0, 2))
