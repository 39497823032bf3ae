"""At which powers errors fall, beside the bounds', and how loose those are: `python -m tests.theory.orders`."""

from typing import NamedTuple

import jax
import numpy as np
from scipy.linalg import solve_discrete_lyapunov
from scipy.optimize import brentq

from personax.client.sampling import BatchSizes
from personax.curvature import exact, finite_difference, first_order
from personax.objectives import Meta, Moreau
from personax.theory import Constants, EstimatorError, fallah, gmeta, persafl
from tests.theory import runs
from tests.theory.problems import (
    ROLES,
    SIZES,
    Draws,
    estimates,
    every_draw,
    meta_gradient,
    moments,
    random_waves,
    spreads_along,
    wave_constants,
)
from tests.theory.runs import long_run


class Orders(NamedTuple):
    """Powers of a quantity in what is varied: measured, and the bound's."""

    measured: float
    bound: float


def order(xs, ys):
    """The slope of log y against log x."""
    return np.polyfit(np.log(xs), np.log(ys), 1)[0]


SEED = 3
X, Y, W = random_waves(SEED)
CONSTANTS = wave_constants(X)
ADAPT_LR = 0.5 / CONSTANTS.smoothness
WHOLE = np.ones((1, 1, 2))


def only_random(role, size):
    """Draws of one adaptation step in which one role's batch is random and the others are all of the data."""
    drawn = every_draw(0, BatchSizes(size))  # one batch of this size
    weights = {name: np.ones((len(drawn.probability), 1, 2)) for name in ROLES}
    weights[role] = drawn.weights["outer"]
    return Draws(weights, drawn.probability)


def hessian_free_bias_by_radius(num_adapt_steps):
    """|HF - exact| with all data in every batch, against the radius."""
    radii = np.array([0.2, 0.1, 0.05, 0.025])
    truth = np.asarray(meta_gradient(W, X[0], Y[0], ADAPT_LR, num_adapt_steps))
    weights = {"adapt": np.ones((1, num_adapt_steps, 2)), "outer": WHOLE, "curvature": np.ones((1, num_adapt_steps, 2))}
    found = []
    for radius in radii:
        objective = Meta(ADAPT_LR, num_adapt_steps, finite_difference(radius))
        found.append(np.linalg.norm(np.asarray(estimates(objective, W, X[0], Y[0], weights))[0] - truth))
    noiseless = Constants(CONSTANTS.gradient_bound, CONSTANTS.smoothness, CONSTANTS.hessian_lipschitz)
    bound = [gmeta.hessian_free_error(noiseless, ADAPT_LR, num_adapt_steps, BatchSizes(1), r).bias for r in radii]
    return Orders(order(radii, found), order(radii, bound))


def mean_square_by_batch_size(hvp, name):
    """E|estimate - gradient|^2 for one step against the size of all batches; first-order: around its own mean."""
    sizes = np.array([4, 8, 16])
    truth = meta_gradient(W, X[0], Y[0], ADAPT_LR, 1)
    if name == "first_order":
        truth = estimates(Meta(ADAPT_LR, 1, hvp), W, X[0], Y[0], only_random("outer", 1).weights)
        truth = np.asarray(truth).mean(axis=0)
    found = [
        moments(Meta(ADAPT_LR, 1, hvp), W, X[0], Y[0], every_draw(1, BatchSizes(n)), truth) for n in map(int, sizes)
    ]
    c = CONSTANTS
    noise = Constants(
        0.0 if name == "first_order" else c.gradient_bound, c.smoothness, 0, c.gradient_noise, c.hessian_noise
    )
    extra = (0.1,) if name == "hessian_free" else ()
    bounds = [
        getattr(fallah, f"{name}_error")(noise, ADAPT_LR, BatchSizes(n), *extra).mean_square for n in map(int, sizes)
    ]
    return Orders(order(sizes, [m.mean_square for m in found]), order(sizes, bounds))


def bias_by_adapt_size():
    """The bias of the exact estimator against the size of the adaptation batch."""
    sizes = [16, 32, 64, 128]
    truth = meta_gradient(W, X[0], Y[0], ADAPT_LR, 1)
    found = [moments(Meta(ADAPT_LR), W, X[0], Y[0], only_random("adapt", n), truth).bias for n in sizes]
    bound = [fallah.exact_error(CONSTANTS, ADAPT_LR, BatchSizes(n)).bias for n in sizes]
    return Orders(order(sizes, found), order(sizes, bound))


def bias_by_outer_size():
    """(23) contains sigma_G / sqrt(D_nu); the estimator is unbiased in the outer batch. Returns the bias itself."""
    truth = meta_gradient(W, X[0], Y[0], ADAPT_LR, 1)
    return moments(Meta(ADAPT_LR), W, X[0], Y[0], only_random("outer", 2), truth).bias


def hessian_free_mean_square_by_radius():
    """As the radius goes to 0: both ends of the difference see one batch, and nothing blows up."""
    radii = np.array([1e-2, 1e-3, 1e-4])
    truth, draws = meta_gradient(W, X[0], Y[0], ADAPT_LR, 1), every_draw(1, BatchSizes(2))
    found = [moments(Meta(ADAPT_LR, 1, finite_difference(r)), W, X[0], Y[0], draws, truth).mean_square for r in radii]
    bound = [fallah.hessian_free_error(CONSTANTS, ADAPT_LR, BatchSizes(2), r).mean_square for r in radii]
    return Orders(order(radii, found), order(radii, bound))


def moreau_bias_by_batch_size():
    """The bias of the Moreau estimator, whose inner problem is solved exactly on its batch."""
    sizes, level = [4, 8, 16, 32], float((X[0] ** 2).sum(axis=1).max())
    objective = Moreau(8 * level, 1 / (9 * level), 2000, tolerance=1e-13)
    truth = estimates(objective, W, X[0], Y[0], {"outer": WHOLE})[0]
    found = []
    for size in sizes:
        drawn = every_draw(0, BatchSizes(size))
        own = np.asarray(estimates(objective, W, X[0], Y[0], {"outer": drawn.weights["outer"]}))
        found.append(np.linalg.norm(drawn.probability @ (own - np.asarray(truth))))
    constants = Constants(smoothness=level, gradient_noise=CONSTANTS.gradient_noise)
    bound = [persafl.moreau_error(constants, 8 * level, 0.0, n).bias for n in sizes]
    return Orders(order(sizes, found), order(sizes, bound))


def floor_by_adapt_lr(keeps_hessian):
    """|grad F|^2 where the mean estimate vanishes, which is where a run with small steps ends, against adapt_lr.

    Three clients, waves of one feature; the adaptation batch is one of two samples, the others are all of the data.
    """
    rng = np.random.default_rng(1)
    a, b = rng.uniform(0.5, 1.5, (3, 2)), rng.uniform(2, 4, (3, 2))
    slope = lambda w: -(a * np.sin(a * w + b)).mean(axis=1)
    curvature = lambda w: -(a**2 * np.cos(a * w + b)).mean(axis=1)
    own = lambda w: -a * np.sin(a * w + b)  # of each sample, [clients, samples]

    def mean_estimate(w, lr):
        adapted = w - lr * own(w)
        outer = -(a[:, None] * np.sin(a[:, None] * adapted[..., None] + b[:, None])).mean(axis=(1, 2))
        return ((1 - lr * curvature(w)) * outer if keeps_hessian else outer).mean()

    def gradient(w, lr):
        adapted = w - lr * slope(w)
        outer = -(a * np.sin(a * adapted[:, None] + b)).mean(axis=1)
        return ((1 - lr * curvature(w)) * outer).mean()

    lrs = np.array([0.02, 0.01, 0.005])
    found = [gradient(brentq(mean_estimate, -1.5, 1.5, (lr,), xtol=1e-15, rtol=1e-14), lr) ** 2 for lr in lrs]
    constants = wave_constants(a[..., None])
    error = fallah.exact_error if keeps_hessian else fallah.first_order_error
    return Orders(order(lrs, found), order(lrs, [error(constants, lr, BatchSizes(1)).bias ** 2 for lr in lrs]))


def excess_by_staleness():
    """The increase of E|grad f|^2 from staleness in the long run: w <- w - lr w(tau updates ago) + lr noise."""
    lr, delays = 1e-3, np.array([1, 2, 4, 8, 16])

    def variance(delay):
        step = np.eye(delay + 1, k=-1)
        step[0, 0] += 1
        step[0, -1] -= lr
        shock = np.zeros((delay + 1, delay + 1))
        shock[0, 0] = lr**2
        return solve_discrete_lyapunov(step, shock)[0, 0]

    fresh = lr / (2 - lr)
    constants = Constants(smoothness=1.0, gradient_spread=1.0)
    bound = lambda delay: persafl.fedasync_bound(persafl.ArrivalTraining(10**8, 1, delay), 0.0, constants, 1)
    excess = [bound(int(d)) - bound(0) for d in delays]
    return Orders(order(delays, [variance(d) - fresh for d in delays]), order(delays, excess))


def floor_by_local_steps():
    """The long-run error from client sampling, by local steps; (108) as printed has the power 0."""
    steps, lr = np.array([16, 32, 64, 128]), 1e-6
    trainings = [fallah.RoundTraining(lr, int(n), 1, 1, 2) for n in steps]
    bound = [fallah.noise_floor(training, 1.0, EstimatorError(0.0, 0.0), 1.0) for training in trainings]
    return Orders(order(steps, [long_run(lr, n) for n in steps]), order(steps, bound))


def floor_by_accuracy():
    """The error left by Corollary 4.6's choice if one of two clients trains per round; as printed the power is 1."""
    accuracies = np.array([1e-8, 1e-10, 1e-12])
    trainings = [fallah.training_for(accuracy, 1, 2) for accuracy in accuracies]
    bound = [fallah.noise_floor(training, 1.0, EstimatorError(0.0, 0.0), 1.0) for training in trainings]
    found = [long_run(training.local_lr, training.num_local_steps) for training in trainings]
    return Orders(order(accuracies, found), order(accuracies, bound))


def looseness(num_federations=40):
    """Median over random waves of bound / truth, by lemma: (bias, mean square) or one number."""
    rows = {}
    estimators = {"exact": exact, "first_order": first_order, "hessian_free": finite_difference(0.1)}
    for name, hvp in estimators.items():
        for nu in (1, 2, 3):
            papers = {"gMeta": gmeta, **({"Fallah": fallah} if nu == 1 else {})}
            for paper, module in papers.items():
                ratios = []
                for seed in range(num_federations):
                    x, y, w = random_waves(seed)
                    constants = wave_constants(x)
                    lr = 0.5 / constants.smoothness
                    truth = meta_gradient(w, x[0], y[0], lr, nu)
                    found = moments(Meta(lr, nu, hvp), w, x[0], y[0], every_draw(nu, SIZES[nu]), truth)
                    given = (constants, lr, *((nu,) if module is gmeta else ()), SIZES[nu])
                    extra = (0.1,) if name == "hessian_free" else ()
                    bound = getattr(module, f"{name}_error")(*given, *extra)
                    ratios.append((bound.bias / found.bias, bound.mean_square / found.mean_square))
                rows[f"{paper}, {name}, nu = {nu}"] = np.median(ratios, axis=0)
    return rows


def spread_looseness(num_federations=40):
    """Median over random waves of three clients of bound / truth for the similarity lemmas, by number of steps."""
    rows = {}
    for nu in (1, 2, 3):
        ratios = []
        for seed in range(num_federations):
            x, y, w = random_waves(seed, num_clients=3)
            lr = 0.5 / wave_constants(x).smoothness
            gamma_g, gamma_h = spreads_along(x, y, w, lr, nu)
            constants = wave_constants(x, gradient_spread=gamma_g, hessian_spread=gamma_h)
            gradients = np.array([meta_gradient(w, a, b, lr, nu) for a, b in zip(x, y, strict=True)])
            truth = np.sqrt(((gradients - gradients.mean(axis=0)) ** 2).sum(axis=1).mean())
            bounds = [gmeta.meta_spread(constants, lr, nu)]
            if nu == 1:
                bounds += [fallah.meta_spread(constants, lr), persafl.meta_spread(constants, lr)]
            ratios.append(np.array(bounds) / truth)
        names = ["gMeta Lemma 7, corrected", "Fallah Lemma 4.4", "PersA-FL Lemma 3"]
        rows |= {f"{name}, nu = {nu}": value for name, value in zip(names, np.median(ratios, axis=0), strict=False)}
    return rows


def theorem_looseness(num_federations=40):
    """Median over random quadratics of bound / truth of the convergence theorems."""
    seeds = range(num_federations)
    ratio = lambda case: case.bound / case.found
    own = [[ratio(case) for case in runs.per_fedavg_cases(seed, 1, 0.5, 2, 4, 1.0)] for seed in seeds]
    lemmas = np.median(own, axis=0)
    return {
        "Fallah (111), corrected, gMeta's lemmas": lemmas[0],
        "Fallah (111), corrected, Fallah's lemmas": lemmas[1],
        "PersA-FL Theorem 1": np.median([ratio(runs.fedasync_case(seed, 0.5, 2, 2, 1)) for seed in seeds]),
        "PersA-FL Theorem 2": np.median([ratio(runs.persafl_meta_case(seed, 0.5, 2, 2, 1)) for seed in seeds]),
        "PersA-FL Theorem 3, corrected": np.median(
            [ratio(runs.persafl_moreau_case(seed, 0.5, 2, 2, 10)) for seed in seeds]
        ),
    }


MEASURED = {
    "Hessian-free bias, radius, nu = 1": lambda: hessian_free_bias_by_radius(1),
    "Hessian-free bias, radius, nu = 2": lambda: hessian_free_bias_by_radius(2),
    "Hessian-free bias, radius, nu = 3": lambda: hessian_free_bias_by_radius(3),
    "Hessian-free mean square, radius to 0": hessian_free_mean_square_by_radius,
    "mean square of exact, batch sizes": lambda: mean_square_by_batch_size(exact, "exact"),
    "mean square of first-order, batch sizes": lambda: mean_square_by_batch_size(first_order, "first_order"),
    "mean square of Hessian-free, batch sizes": lambda: mean_square_by_batch_size(
        finite_difference(0.1), "hessian_free"
    ),
    "bias of exact, adaptation batch": bias_by_adapt_size,
    "bias of Moreau, batch": moreau_bias_by_batch_size,
    "floor of first-order, adapt_lr": lambda: floor_by_adapt_lr(False),
    "floor of exact, adapt_lr": lambda: floor_by_adapt_lr(True),
    "excess stationarity, staleness": excess_by_staleness,
    "floor of client sampling, local steps": floor_by_local_steps,
    "floor of Corollary 4.6, accuracy": floor_by_accuracy,
}


def main():
    jax.config.update("jax_enable_x64", True)
    print("| quantity, in what | measured | bound |\n|---|---|---|")
    for name, measure in MEASURED.items():
        found = measure()
        print(f"| {name} | {found.measured:.2f} | {found.bound:.2f} |")
    print("\n| lemma | bias | mean square |\n|---|---|---|")
    for name, (bias, square) in looseness().items():
        print(f"| {name} | {bias:.2g} | {square:.2g} |")
    print("\n| bound | bound / truth |\n|---|---|")
    for name, ratio in {**spread_looseness(), **theorem_looseness()}.items():
        print(f"| {name} | {ratio:.2g} |")


if __name__ == "__main__":
    main()
