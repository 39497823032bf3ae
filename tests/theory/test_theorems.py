"""The convergence theorems as inequalities: on runs with exact moments, and on a run of the library's own."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import personax
from personax import theory
from personax.client.sampling import BatchSizes
from personax.theory import Constants, EstimatorError, NotCovered, fallah, gmeta, persafl
from tests import closed_forms
from tests.theory import runs

few = settings(max_examples=40, deadline=None, derandomize=True)
seeds, shares = st.integers(0, 10**6), st.floats(0, 1)


def assert_holds(case):
    assert case.found <= case.bound * (1 + 1e-9)


@pytest.mark.parametrize("num_adapt_steps", [1, 2, 3])
@few
@given(seeds, shares, st.integers(1, 4), st.integers(1, 6), st.floats(0.05, 1))
def test_fallah_111_as_corrected_holds(num_adapt_steps, seed, adapt_share, cohort_size, num_local_steps, lr_share):
    """Per-FedAvg with one to three adaptation steps; gMeta Theorem 8 with explicit constants."""
    given = (seed, num_adapt_steps, adapt_share, cohort_size, num_local_steps, lr_share)
    for case in runs.per_fedavg_cases(*given):
        assert_holds(case)


@few
@given(seeds, shares, st.integers(0, 3), st.integers(1, 3), st.floats(1, 3))
def test_persafl_theorem_1_holds(seed, scale, staleness, num_local_steps, length):
    assert_holds(runs.fedasync_case(seed, scale, staleness, num_local_steps, length))


@few
@given(seeds, st.floats(0, 2), st.integers(0, 5), st.integers(1, 3), st.floats(1, 3))
def test_persafl_theorem_2_holds(seed, adapt_share, staleness, num_local_steps, length):
    assert_holds(runs.persafl_meta_case(seed, adapt_share, staleness, num_local_steps, length))


@few
@given(seeds, shares, st.integers(0, 2), st.integers(1, 2), st.floats(7, 20))
def test_persafl_theorem_3_as_corrected_holds(seed, scale, staleness, num_local_steps, strength_share):
    assert_holds(runs.persafl_moreau_case(seed, scale, staleness, num_local_steps, strength_share))


def test_formulas_of_the_theorems():
    """Fallah (108) and (111), PersA-FL Theorems 1 to 3, written out."""
    beta, tau, K, LF, s2, g, mF, q = 0.01, 4, 50, 2.0, 0.3, 0.7, 0.1, 6 / (2 * 7)
    training = fallah.RoundTraining(beta, tau, K, 2, 8)
    assert training.sampling_share == pytest.approx(q)
    floor = 280 * (beta * LF) ** 2 * tau * (tau - 1) * (2 * s2 + g**2) + beta * LF * (2 * s2 + q * g**2) + mF**2
    floor += 1.2 * q * beta * LF * g * (35 * tau * (tau - 1) * (2 * s2 + g**2)) ** 0.5
    lemma = (LF, EstimatorError(mF, s2), g)
    assert fallah.noise_floor(training, *lemma) == pytest.approx(floor)
    assert fallah.stationarity_bound(training, 5.0, *lemma) == pytest.approx(4 * 5 / (beta * tau * K) + 4 * floor)
    drift = beta * LF * tau * (tau - 1)
    assert fallah.stationarity_terms(training, 5.0, *lemma) == pytest.approx(
        {
            "optimisation": 4 * 5 / (beta * tau * K),
            "noise": beta * LF * (1 + drift) * s2,
            "sampling": beta * LF * g**2 * q,
            "local_drift": beta * LF * g**2 * drift,
            "bias": mF**2,
            "sampling_drift": q * beta * LF * g * (tau * (tau - 1) * (s2 + g**2)) ** 0.5,
        }
    )
    c, T, Q, t, b, a = Constants(1.3, 0.7, 0.4, 0.9, 0.6, 0, 0, 0.5, 0.3), 10**6, 3, 2, 4, 0.8
    run = persafl.ArrivalTraining(T, Q, t)
    s = 0.9**2 / b + 0.5**2
    expected = 4 * 0.7**0.5 * 5 / 1000 + 8 * 0.7**0.5 * s / 1000 + 80 * 0.7 * (1 + Q) * (t**2 + 1) * s / T
    assert persafl.fedasync_bound(run, 5.0, c, b) == pytest.approx(expected)
    Lb, error, spread = persafl.meta_smoothness(c, a), persafl.meta_error(c, a, b), persafl.meta_spread(c, a)
    G2 = persafl.meta_gradient_bound(c, a) ** 2
    expected = Lb**0.5 * (4 * 5 + 8 * (error.mean_square + spread**2)) / 1000
    expected += 20 * Q * Lb * (G2 + error.mean_square) * (t**2 + 1) / T
    expected += 4 * Q * a**2 * 0.7**2 * (1 + a * 0.7) ** 2 * 0.9**2 / b
    assert persafl.persafl_meta_bound(run, 5.0, c, a, b) == pytest.approx(expected)
    Lc, error = persafl.moreau_smoothness(c, 7.0), persafl.moreau_error(c, 7.0, 0.01, b)
    noise = error.mean_square + persafl.moreau_spread(c, 7.0) ** 2
    expected = (
        Lc**0.5 * (4 * 5 + 8 * noise) / 1000 + 144 * Lc * (1 + Q) * (t**2 + 1) * noise / T + 4 * Q * error.bias**2
    )
    assert persafl.persafl_moreau_bound(run, 5.0, c, 7.0, 0.01, b) == pytest.approx(expected)
    assert persafl.local_lr(run, 0.7) == pytest.approx(1 / (Q * (0.7 * T) ** 0.5))


def test_how_stale_a_run_may_be():
    least = persafl.least_num_updates(0.5, 3, 2)
    assert least == 160 * 0.5 * 10 * 27
    assert persafl.largest_staleness(0.5, 3, int(least)) == 2
    assert persafl.largest_staleness(0.5, 3, int(least) - 1) == 1
    assert persafl.largest_staleness(0.5, 3, 10) == -1


def test_from_how_many_updates_theorems_1_to_3_hold():
    """T >= 160 L (Q + 7) (tau + 1)^3, 64 L_b and 288 L_c (Q + 7) (tau + 1)^3: one update fewer is refused."""
    c, Q, t, strength, a = Constants(1.3, 0.7, 0.4, 0.9, 0.6, 0, 0, 0.5, 0.3), 3, 2, 7.0, 0.8
    level = strength * 0.7 / (strength - 0.7)
    bounds = {
        160 * 0.7 * (3 + 7) * 3**3: lambda run: persafl.fedasync_bound(run, 5.0, c, 4),
        64 * persafl.meta_smoothness(c, a): lambda run: persafl.persafl_meta_bound(run, 5.0, c, a, 4),
        288 * level * (3 + 7) * 3**3: lambda run: persafl.persafl_moreau_bound(run, 5.0, c, strength, 0.01, 4),
    }
    for least, bound in bounds.items():
        least = int(np.ceil(least * (1 - 1e-12)))
        assert np.isfinite(bound(persafl.ArrivalTraining(least, Q, t)))
        with pytest.raises(ValueError, match="`num_updates` must be at least"):
            bound(persafl.ArrivalTraining(least - 1, Q, t))


def test_how_large_a_local_step_may_be():
    assert fallah.largest_adapt_lr(4.0) == 0.25
    largest = fallah.largest_local_lr(2.0, 5)
    assert largest == 0.01
    with pytest.raises(NotCovered, match=r"`local_lr` must be at most 1 / \(10 tau L_F\) = 0.01, got 0.011"):
        fallah.noise_floor(fallah.RoundTraining(0.011, 5, 1, 1, 1), 2.0, EstimatorError(0, 0), 0.0)


def test_a_run_of_per_fedavg_keeps_to_the_bound_with_measured_constants():
    """The library's run, stationarity and constants together; the randomly chosen iterate of Remark 4.7 as well."""
    federation, curves = closed_forms.federation()
    loss, batches = closed_forms.TASK.loss, theory.sample_clients(federation)
    sizes, num_rounds, num_steps = BatchSizes(4), 30, 3
    params = {"w": np.ones(closed_forms.DIMENSION)}
    constants = theory.constants_of(
        theory.measure(loss, theory.ball(params, 3.0, 4, key=jax.random.key(1)), batches, key=jax.random.key(2))
    )
    adapt_lr = 0.2 / constants.smoothness
    lemma = (
        gmeta.meta_smoothness(constants, adapt_lr, 1),
        fallah.exact_error(constants, adapt_lr, sizes),
        gmeta.meta_spread(constants, adapt_lr, 1),
    )
    training = fallah.RoundTraining(fallah.largest_local_lr(lemma[0], num_steps), num_steps, num_rounds, 2, 4)
    algorithm = personax.per_fedavg(
        adapt_lr=adapt_lr, lr=training.local_lr, num_steps=num_steps, batch_size=sizes, hvp=personax.curvature.exact
    )
    objective = algorithm.objective
    models, tracked = [], []

    def watch(snapshot):
        models.append(snapshot.params)
        tracked.append(snapshot.state.tracked)

    schedule = personax.rounds(4, num_rounds, 2, key=jax.random.key(3))
    personax.simulate(
        algorithm,
        closed_forms.TASK,
        federation,
        schedule,
        key=jax.random.key(4),
        params=params,
        monitor=personax.Monitor(watch, every=1, tracker=personax.RandomIterate()),
    )
    found = theory.stationarity_along(objective, loss, theory.path(models[:-1]), batches).squared_norm
    chosen = theory.stationarity_along(objective, loss, theory.path(tracked[1:]), batches).squared_norm
    adapted = [curve.descend(params["w"], adapt_lr, 1) for curve in curves]
    pairs = zip(adapted, closed_forms.clients(), strict=True)
    gap = float(np.mean([loss({"w": w}, closed_forms.whole(*data)) for w, data in pairs]))  # F(w_0), and F* >= 0
    bound = fallah.stationarity_bound(training, gap, *lemma)
    assert found[-1] < 0.2 * found[0]
    # Constants over a ball are far from those along the run. The run is one of many: its ratio is known to a fifth.
    assert bound / found.mean() == pytest.approx(4057, rel=0.2)
    assert chosen.mean() <= bound
    np.testing.assert_allclose(chosen.mean(), found.mean(), rtol=0.5)
