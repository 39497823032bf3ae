"""Counterexamples to APFL's theorems as printed, and to steps of its proofs."""

from dataclasses import replace
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from personax.client.step_sizes import Clock, StronglyConvex
from personax.objectives import Mixture, Visit
from personax.theory import apfl
from personax.typing import Batch

SETTING = apfl.MixtureSetting(4.0, 0.5, 0.3, 0.2, 1.6, 0.7, 400, 5, 4, 8)


def line(params, batch):
    """f(v) = v + 1: at least 0 on [-1, 1]."""
    return params["w"].sum() + 1


def gradients_of_a_run(num_steps):
    """|grad f|^2 = 1 at v and w of APFL on [-1, 1] with m = 1 from -1, one client; also where it ends."""
    objective, lr = Mixture(1.0, update_mix="never", radius=1.0), 1 / (2 * np.sqrt(5 * num_steps))
    start = {"w": jnp.array([-1.0])}
    iterate, memory = objective.begin(start, objective.init_personal(start))
    batches = {"outer": Batch(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.zeros(1))}
    for step in range(num_steps):
        visit = Visit(start, (), Clock(0, step, num_steps), lr)
        slope, memory = objective.gradient(line, iterate, memory, visit, batches)
        iterate = objective.project({"w": iterate["w"] - lr * slope["w"]})
        assert slope["w"] == 1.0
    return float(iterate["w"][0]), float(memory.model["w"][0])


def test_theorems_3_and_8_take_a_projected_step_for_longer_than_its_gradient():
    """f(v) = v + 1 on [-1, 1] from -1: the gradient stays 1, and the printed terms go to 0 with T."""
    for num_steps in (10, 40):
        assert gradients_of_a_run(num_steps) == (-1.0, -1.0)
    alone = replace(SETTING, smoothness=1.0, diversity=0.0, total_diversity=0.0, num_local_steps=1)
    total = lambda num_steps: (
        sum(apfl.personal_terms_nonconvex(replace(alone, num_steps=num_steps), 1.0, 4.0).values())
        + sum(apfl.global_terms_nonconvex(replace(alone, num_steps=num_steps)).values())
    )
    assert total(10**8) < 1e-3
    assert total(10**12) / total(10**8) == pytest.approx(0.01)
    # Ghadimi 2016, Lemma 1, and what the proofs of Lemmas 8 and 9 put in its place, for w = -0.9, g = 1
    w, g, lr = -0.9, 1.0, 0.5
    projected = (w - np.clip(w - lr * g, -1, 1)) / lr
    assert g * projected >= projected**2
    assert g * projected < g**2


def averaged_variance(num_steps, offset):
    """mu^2 / sigma^2 times the variance of APFL's average of w <- (1 - mu eta_t) w + eta_t noise from 0."""
    time = np.arange(1, num_steps + 1) + offset
    weight, rate = time.astype(float) ** 2, 16 / time  # mu eta_t
    reach, total = 0.0, 0.0  # what a shock of step t adds to later iterates, by their weights
    for t in range(num_steps - 1, 0, -1):
        reach = weight[t] + (1 - rate[t]) * reach
        total += (rate[t - 1] * reach) ** 2
    return total / weight.sum() ** 2


def test_the_noise_of_theorems_4_and_6_lacks_the_strong_convexity():
    """f = mu w^2 / 2, one client, one local step, w^(1) = w*: E[F] - F* is 0.82 sigma^2 / (mu T)."""
    num_steps = 10**5
    shape = averaged_variance(num_steps, 128.0)
    assert shape * num_steps / 2 == pytest.approx(0.825, abs=0.001)
    ratios = []
    for mu in (1e-1, 1e-2, 1e-3):
        one = apfl.MixtureSetting(mu, mu, 1.0, 0.0, 0.0, 0.0, num_steps, 1, 1, 1)
        corrected, truth = apfl.global_terms(one), shape / (2 * mu)
        assert corrected == apfl.global_terms_of_all(one)
        printed = {**corrected, "noise": 1 / num_steps}
        assert truth <= sum(corrected.values())
        ratios.append(truth / sum(printed.values()))
    assert ratios[0] > 8 and np.allclose(np.divide(ratios[1:], ratios[:-1]), 10, rtol=0.02)


def test_the_average_of_the_noise_is_that_of_runs():
    rng, num_runs, w = np.random.default_rng(0), 20_000, 0.0
    mean, total = 0.0, 0.0
    for t in range(1, 41):
        mean, total = mean + (t + 20) ** 2 * w, total + (t + 20) ** 2
        lr = StronglyConvex(1.0, 20.0)(Clock(0, t - 1, 40))
        w = w - lr * (w + rng.normal(size=num_runs))
    np.testing.assert_allclose(np.mean((mean / total) ** 2), averaged_variance(40, 20.0), rtol=0.03)


def of_one_in_two(strong_convexity, num_steps):
    """The setting of f(w) = mu (w -+ 1)^2 / 2 with one of the two clients per step: |grad f_i - grad F| = mu."""
    mu = strong_convexity
    return apfl.MixtureSetting(mu, mu, 0.0, mu**2, 2 * mu**2, 1.0, num_steps, 1, 1, 2)


def test_theorem_6_drops_the_variance_of_the_cohort():
    """Of f(w) = mu (w -+ 1)^2 / 2 one client per step, from w* = 0: E[F] - F* is 0.82 mu / T, the terms 4 mu / T^2."""
    ratios = []
    for num_steps in (10**3, 10**4, 10**5):
        for mu in (1e-2, 3.0):
            terms = apfl.global_terms(of_one_in_two(mu, num_steps))
            # the step is (1 - mu eta) w +- eta mu: noise of deviation mu
            truth = mu / 2 * averaged_variance(num_steps, 128.0)
            assert truth <= terms["sampling"] == pytest.approx(mu / num_steps)
        ratios.append(truth / (sum(terms.values()) - terms["sampling"]))
    np.testing.assert_allclose(ratios, (182, 2037, 20616), rtol=0.01)


def test_the_error_from_one_of_two_clients_is_that_of_runs():
    rng, num_runs, num_steps, w = np.random.default_rng(0), 20_000, 200, np.zeros(20_000)
    setting = of_one_in_two(2.0, num_steps)
    lr, mean, total = apfl.step_size(setting), 0.0, 0.0
    for t in range(1, num_steps + 1):
        mean, total = mean + (t + 128) ** 2 * w, total + (t + 128) ** 2
        center = rng.choice([-1.0, 1.0], num_runs)
        w = w - float(lr(Clock(0, t - 1, num_steps))) * 2.0 * (w - center)
    found = np.mean((mean / total) ** 2)  # (mu / 2) w^2 with mu = 2
    np.testing.assert_allclose(found, averaged_variance(num_steps, 128.0), rtol=0.03)
    assert found <= apfl.global_terms(setting)["sampling"]


def test_the_variance_of_a_cohort_is_that_of_all_its_draws():
    """The mean of K of n numbers without replacement: (n - K) / (K (n - 1)) times their variance."""
    slopes = np.array([0.3, -1.0, 2.0, 0.5, 0.1])
    for cohort_size in (1, 2, 4):
        means = [np.mean(one) for one in combinations(slopes, cohort_size)]
        setting = apfl.MixtureSetting(1.0, 1.0, 0.0, 0.0, 5 * slopes.var(), 0.0, 10, 1, cohort_size, 5)
        assert apfl.global_terms(setting)["sampling"] == pytest.approx(np.var(means) / 10)
    assert "sampling" not in apfl.global_terms(replace(SETTING, cohort_size=8))


def test_the_inequality_of_e_1_3_is_false_and_what_makes_up_for_it():
    """(1 - mu eta / 8) p_t / eta_t <= p_{t-1} / eta_{t-1}, with x = t + a: (x - 2) x^2 <= (x - 1)^3."""
    x = np.arange(2, 10_000)
    holds = (x - 2) * x**2 <= (x - 1) ** 3
    assert holds[x < 2.62].all() and not holds[x > 2.62].any()
    assert ((x - 8) * x**2 <= (x - 1) ** 3)[x >= 128].all()  # that of Lemma 4
    # mu (x^3 - 2 x^2) / 16 exceeds it by mu (x^2 - 3 x + 1) / 16, which 1/8 of p_t (f - f*) >= p_t mu |.|^2 / 2 covers
    surplus = ((x - 2) * x**2 - (x - 1) ** 3) / 16
    assert (surplus <= x**2 / 2 / 8).all() and not (surplus <= x**2 / 2 / 9).all()
    # Theorem 7: eta = 8 / (mu x) and 1 - mu eta / 4
    surplus = ((x - 2) * x**2 - (x - 1) ** 3) / 8
    assert (surplus <= x**2 / 2 / 4).all()


def test_the_mixture_of_projections_is_farther_than_the_projection_of_the_mixture():
    """E.1.3 begins with |v_hat(t+1) - v*| <= |unprojected - v*|; on [-1, 1] with m = 1/2 and v* = 1 it is 1 and 0."""
    own, shared, optimum = 3.0, -1.0, 1.0
    project = lambda w: np.clip(w, -1, 1)
    unprojected = (own + shared) / 2
    assert abs(project(unprojected) - optimum) <= abs(unprojected - optimum) == 0
    assert abs((project(own) + project(shared)) / 2 - optimum) == 1


def test_the_sum_of_weights_is_above_a_third_of_the_cube():
    """S_T > T^3 with a = 128 until T = 280 only; S_T > T^3 / 3 always, which changes constants."""
    steps = np.arange(1, 5000)
    sums = np.cumsum((steps + 128.0) ** 2)
    assert (sums > steps**3)[:280].all() and not (sums > steps**3)[280:].any()
    assert (sums > steps**3 / 3).all()


def test_the_worse_of_two_hypotheses_is_not_chosen_with_high_probability():
    """Corollary 1 takes L(ERM) >= L(h*) + C_2 sqrt(...) for an event of probability 1 - delta, for some distribution.

    Of the constant functions -1 and 1 the ERM takes the worse one with probability below 1/2 for every distribution.
    """
    for num in (1, 11, 101):
        wrong = np.array([binom.cdf(num // 2, num, share) for share in np.linspace(0.501, 0.999, 250)])
        assert wrong.max() < 0.5  # of labels 1 with probability `share`, fewer than half were drawn


def test_apfls_proof_of_theorem_2_needs_nearly_all_clients():
    """(29) divides by 1 - 8 (m - m^2 K / n), for weights that the theorem allows."""
    divisor = lambda mix, share: 1 - 8 * (mix - mix**2 * share)
    least = lambda cohort_size: apfl.least_mix(apfl.MixtureSetting(2.0, 1.0, 0, 0, 0, 0, 1, 1, cohort_size, 8))
    assert divisor(least(8), 8 / 8) > 0 > divisor(least(4), 4 / 8)
    assert divisor(1.0, 7 / 8) == 0 > divisor(1.0, 6 / 8)


def test_without_a_bounded_domain_the_mixture_becomes_the_local_model():
    """Remark 2: half of v and half of w = 0 reach the minimum of (x - 3)^2 / 2, and on [-1, 1] they do not."""
    loss = lambda params, batch: ((params["w"] - 3) ** 2).sum() / 2
    w, num_steps = {"w": jnp.zeros(1)}, 400
    batches = Batch(
        jnp.zeros((num_steps, 1)), jnp.zeros((num_steps, 1)), jnp.ones((num_steps, 1)), jnp.zeros(num_steps)
    )
    for radius, end in ((None, 3.0), (1.0, 0.5)):
        objective = Mixture(0.5, update_mix="never", radius=radius)
        mixed = objective.personalize(loss, w, objective.init_personal(w), (), batches, 0.5)
        np.testing.assert_allclose(mixed["w"], end)


def test_the_step_sizes_of_the_theorems():
    """Theorem 2: 16 / (mu (t + a)), a = max(128 kappa, tau); Theorem 7: 8 and 64. kappa = 8."""
    clock = Clock(0, 4, 5)  # the step that makes iterate t = 5
    assert apfl.step_size(SETTING)(clock) == 16 / (0.5 * (5 + 128 * 8))
    assert apfl.step_size_of_any_mix(SETTING)(clock) == 8 / (0.5 * (5 + 64 * 8))
    long = replace(SETTING, num_local_steps=2000)
    assert apfl.step_size(long).offset == apfl.step_size_of_any_mix(long).offset == 2000
    with pytest.raises(ValueError, match="`strong_convexity` must be positive"):
        apfl.step_size(replace(SETTING, strong_convexity=0.0))
