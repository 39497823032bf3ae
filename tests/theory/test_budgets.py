"""Proposition F.1 and the corollaries: how far clients drift, and what a run needs for an accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personax.objectives import Moreau
from personax.theory import Constants, EstimatorError, NotCovered, fallah, persafl
from personax.typing import Batch
from tests.theory.orders import order
from tests.theory.runs import long_run, quadratics

few = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 10**6)
SOME = Constants(1.3, 0.7, 0.4, 0.9, 0.6, 0, 0, 0.5, 0.3)
GAP, Q, STALENESS = 5.0, 3, 2
EXACTLY = EstimatorError(0.0, 0.0)


def drift_of(problem, lr, num_steps):
    """E|w_i - w|^2, averaged over clients h (w - c)^2 / 2 with noisy gradients that all start at 0, after each step."""
    slope, center, noise = problem
    keep = 1 - lr * slope
    for step in range(num_steps + 1):
        means = (1 - keep**step) * center
        variances = lr**2 * noise * (keep[:, None] ** (2 * np.arange(step))).sum(axis=1)
        yield means.var() + (1 - 1 / len(means)) * variances.mean()


@few
@given(seeds, st.integers(1, 6), st.floats(0.01, 1), st.none() | st.floats(0.05, 2), st.floats(0.1, 3))
def test_proposition_f_1_and_corollary_f_2_bound_how_far_clients_drift(seed, num_steps, lr_share, split, stretch):
    slope, center, deviation = quadratics(seed)
    noise = (slope * deviation) ** 2
    estimator, level = EstimatorError(0.0, noise.max()), slope.max()
    within = max(abs(center))  # iterates stay between 0 and a center, where the gradients differ by at most this
    spread = max((slope * (w - center)).std() for w in np.linspace(-within, within, 50))
    lr = lr_share * fallah.largest_local_lr(level, num_steps)
    training = fallah.RoundTraining(lr, num_steps, 1, 1, len(slope))
    given_ = (level, estimator, spread)
    for step, found in enumerate(drift_of((slope, center, noise), lr, num_steps)):
        small = fallah.client_drift_of_small_steps(training, step, *given_)
        for bound in (small, fallah.client_drift(training, step, *given_, split=split)):
            assert found <= bound.second * (1 + 1e-9) and np.sqrt(found) <= np.sqrt(bound.second) * (1 + 1e-9)
    fast = fallah.RoundTraining(stretch, num_steps, 1, 1, len(slope))  # F.1 holds for any step size
    found = list(drift_of((slope, center, noise), stretch, num_steps))[-1]
    assert found <= fallah.client_drift(fast, num_steps, *given_, split=split).second * (1 + 1e-9)


def test_formulas_of_proposition_f_1_and_corollary_f_2():
    beta, tau, t, level, noise, gamma, phi = 0.01, 4, 3, 2.0, 0.3, 0.7, 0.6
    training, given_ = fallah.RoundTraining(beta, tau, 1, 1, 8), (t, level, EstimatorError(0.1, noise), gamma)
    first = 2 * beta * t * (1 + 2 * beta * level) ** (t - 1) * (noise**0.5 + gamma)
    second = lambda phi: (
        (4 * beta**2 * (1 + 1 / phi) * t * (1 + phi + 16 * (1 + 1 / phi) * beta**2 * level**2) ** (t - 1))
        * (2 * noise + gamma**2)
    )
    assert fallah.client_drift(training, *given_, split=phi) == pytest.approx((first, second(phi)))
    assert fallah.client_drift(training, *given_) == pytest.approx((first, second(1 / (2 * tau))))
    small = (4 * beta * t * (noise**0.5 + gamma), 35 * beta**2 * t * tau * (2 * noise + gamma**2))
    assert fallah.client_drift_of_small_steps(training, *given_) == pytest.approx(small)
    assert fallah.client_drift(training, 0, *given_[1:]) == (0.0, 0.0)
    with pytest.raises(NotCovered, match="`step` must be at most the 4 local steps, got 5"):
        fallah.client_drift_of_small_steps(training, 5, *given_[1:])
    with pytest.raises(NotCovered, match="`local_lr` must be at most"):
        fallah.client_drift_of_small_steps(fallah.RoundTraining(0.02, tau, 1, 1, 8), *given_)


@pytest.mark.parametrize("cohort_size, power", [(8, 1.0), (4, 0.5)])
def test_corollary_4_6_reaches_its_accuracy_with_everyone_and_its_root_with_a_sample(cohort_size, power):
    accuracies = np.array([1e-6, 1e-10, 1e-11, 1e-12])
    choices = [fallah.training_for(accuracy, cohort_size, 8) for accuracy in accuracies]
    bounds = [fallah.stationarity_bound(one, 1.0, 2.0, EstimatorError(0.0, 0.1), 0.7) for one in choices]
    assert order(accuracies[1:], bounds[1:]) == pytest.approx(power, abs=0.02)
    assert [(one.num_local_steps, one.num_rounds) for one in choices[:1]] == [(1000, 10**9)]


def test_what_corollary_4_6_leaves_with_a_sample_is_the_root_of_the_accuracy():
    """The truth, not the bound: two clients, one a round, beta tau / 2 with the choice of the corollary."""
    accuracies = np.array([1e-4, 1e-6, 1e-8])
    left = [long_run(one.local_lr, one.num_local_steps) for one in (fallah.training_for(e, 1, 2) for e in accuracies)]
    np.testing.assert_allclose(left, accuracies**0.5 / 2, rtol=0.02)


def test_the_early_steps_of_remark_g_1_are_too_long():
    """beta_k = 1 / sqrt(tau k) is at most 1 / (10 tau L_F) from round 100 tau L_F^2 on."""
    level, tau = 2.0, 5
    most = fallah.largest_local_lr(level, tau)
    allowed = [k for k in range(1, 3000) if 1 / np.sqrt(tau * k) <= most * (1 + 1e-12)]
    assert allowed[0] == 100 * tau * level**2


BUDGETS = {
    "Corollary 1": (
        lambda accuracy: persafl.meta_budget(accuracy, GAP, SOME, 0.8, Q, STALENESS),
        lambda run, b: persafl.persafl_meta_bound(run, GAP, SOME, 0.8, b.batch_size),
    ),
    "Corollary 3": (
        lambda accuracy: persafl.moreau_budget(accuracy, GAP, SOME, 7.0, Q, STALENESS),
        lambda run, b: persafl.persafl_moreau_bound(run, GAP, SOME, 7.0, b.tolerance, b.batch_size),
    ),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_the_budgets_of_persafl_reach_their_accuracy_and_hardly_more(name):
    budget, bound = BUDGETS[name]
    accuracies = np.array([1e-2, 1e-3, 1e-4, 1e-5])
    found = [budget(accuracy) for accuracy in accuracies]
    for accuracy, one in zip(accuracies, found, strict=True):
        run = persafl.ArrivalTraining(one.num_updates, Q, STALENESS)
        assert 0.95 * accuracy <= bound(run, one) <= accuracy * (1 + 1e-9)
    assert order(accuracies, [one.num_updates for one in found]) == pytest.approx(-2, abs=0.02)
    assert order(accuracies, [one.batch_size for one in found]) == pytest.approx(-1, abs=0.02)
    if name == "Corollary 3":
        assert order(accuracies, [one.tolerance for one in found]) == pytest.approx(0.5, abs=1e-9)


def test_budgets_keep_to_the_conditions_of_the_theorems():
    """With a large accuracy the least T of the theorem decides."""
    assert persafl.meta_budget(1e9, GAP, SOME, 0.8, Q, STALENESS) == (
        np.ceil(64 * persafl.meta_smoothness(SOME, 0.8)),
        1,
        0.0,
    )
    level = persafl.moreau_smoothness(SOME, 7.0)
    budget = persafl.moreau_budget(1e9, GAP, SOME, 7.0, Q, STALENESS)
    assert budget.num_updates == np.ceil(288 * level * (Q + 7) * (STALENESS + 1) ** 3)


def test_corollary_3_needs_large_batches():
    """With its T and nu alone the counterexample of Theorem 3 keeps (7/115)^2, whatever the accuracy."""
    noisy = Constants(smoothness=3.0, gradient_noise=3.0)
    for accuracy in (1e-3, 1e-4):
        budget = persafl.moreau_budget(accuracy, 1.0, noisy, 21.0, 1, 0)
        run = persafl.ArrivalTraining(budget.num_updates, 1, 0)
        given_ = (1.0, noisy, 21.0, budget.tolerance)
        assert persafl.persafl_moreau_bound(run, *given_, budget.batch_size) <= accuracy
        assert persafl.persafl_moreau_bound(run, *given_, 1) > (7 / 115) ** 2 > accuracy


@pytest.mark.parametrize("strength, tolerance", [(1.5, 1e-3), (3.0, 1e-8), (20.0, 1e-5)])
def test_the_count_of_inner_steps_is_attained_where_a_loss_curves_down(strength, tolerance):
    """f(w) = 2 w - w^2 / 2: the inner problem has the least curvature that L = 1 allows."""
    loss = lambda params, batch: (2 * params["w"] - params["w"] ** 2 / 2).sum()
    batch = Batch(jnp.zeros((1, 1)), jnp.zeros(1), jnp.ones(1), jax.random.key(0))
    w = {"w": jnp.array([0.5])}
    first = abs(float(jax.grad(loss)(w, batch)["w"][0]))
    num = persafl.num_prox_steps(Constants(smoothness=1.0), strength, tolerance, first)
    left = []
    for num_steps in (num - 1, num):
        theta = Moreau(strength, 1 / (strength + 1), num_steps).prox(loss, w, batch)["w"]
        left.append(abs(float((2 - theta + strength * (theta - w["w"]))[0])))
    assert left[0] > tolerance >= left[1]


def test_inner_steps_that_are_not_needed():
    assert persafl.num_prox_steps(Constants(smoothness=1.0), 2.0, 0.5, 0.5) == 0
    assert persafl.num_prox_steps(Constants(), 2.0, 0.1, 0.5) == 1
    with pytest.raises(NotCovered, match="`strength` must be above the smoothness"):
        persafl.num_prox_steps(Constants(smoothness=1.0), 1.0, 0.1, 0.5)
