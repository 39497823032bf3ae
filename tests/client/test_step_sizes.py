"""Step sizes: each formula on both clocks, identities between them, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from personax.client.step_sizes import (
    Clock,
    Decay,
    InverseDecay,
    InverseSqrt,
    StronglyConvex,
    require_step_size,
    step_size_at,
)

CLOCKS = [Clock(r, s, n) for n in (1, 5) for r in (0, 1, 7) for s in (0, n - 1)]
# For a clock that has ticked t times.
FORMULAS = {
    "decay": (lambda clock: Decay(0.3, 0.01, clock), lambda t: 0.3 * 0.99**t),
    "inverse": (lambda clock: InverseDecay(0.3, 0.2, clock), lambda t: 0.3 / (1 + 0.2 * t)),
    "strongly convex": (lambda clock: StronglyConvex(2.0, 50.0, clock), lambda t: 16 / (2.0 * (t + 1 + 50.0))),
}
each_clock = pytest.mark.parametrize("name", ["step", "round"])


# formulas


@each_clock
@pytest.mark.parametrize("formula", FORMULAS)
def test_step_sizes_are_their_formulas(formula, name):
    make, expected = FORMULAS[formula]
    for clock in CLOCKS:
        ticks = clock.round if name == "round" else clock.round * clock.num_steps + clock.step
        np.testing.assert_allclose(make(name)(clock), expected(ticks), rtol=1e-12)


def test_inverse_sqrt_counts_rounds_from_one():
    """Fallah Remark G.1: beta_k = O(1 / sqrt(tau k)); on the other clock the root of the steps, this one included."""
    for r, s, n in CLOCKS:
        np.testing.assert_allclose(InverseSqrt(0.7)(Clock(r, s, n)), 0.7 / np.sqrt(n * (r + 1)), rtol=1e-12)
        np.testing.assert_allclose(InverseSqrt(0.7, "step")(Clock(r, s, n)), 0.7 / np.sqrt(r * n + s + 1), rtol=1e-12)


def test_strongly_convex_is_apfl_theorem_2():
    """eta_t = 16 / (mu (t + a)) with a = max(128 kappa, tau): at most 1 / (8 L) from the first iterate t = 1 on."""
    mu, smoothness, num_steps = 0.5, 3.0, 10
    offset = max(128 * smoothness / mu, num_steps)
    sizes = [StronglyConvex(mu, offset)(Clock(r, s, num_steps)) for r in range(3) for s in range(num_steps)]
    np.testing.assert_allclose(sizes, [16 / (mu * (t + offset)) for t in range(1, 31)], rtol=1e-12)
    assert max(sizes) < 1 / (8 * smoothness)


def test_decay_loses_one_percent_each_iteration():
    sizes = [Decay(0.1, 0.01)(Clock(r, s, 4)) for r in range(3) for s in range(4)]
    assert sizes[0] == 0.1
    np.testing.assert_allclose(np.divide(sizes[1:], sizes[:-1]), 0.99, rtol=1e-12)


def test_a_number_is_constant():
    assert {step_size_at(0.25, clock) for clock in CLOCKS} == {0.25}
    assert step_size_at(Decay(0.25, 0.0), CLOCKS[-1]) == 0.25


# identities


def test_the_round_clock_is_constant_within_a_visit():
    for make, _ in (*FORMULAS.values(), (lambda clock: InverseSqrt(1.0, clock), None)):
        assert len({float(make("round")(Clock(3, s, 6))) for s in range(6)}) == 1
        assert len({float(make("step")(Clock(3, s, 6))) for s in range(6)}) == 6


@settings(max_examples=20, deadline=None)
@given(r=st.integers(0, 10**6), n=st.integers(1, 1000))
def test_clocks_of_inverse_sqrt_meet_at_the_last_step_of_a_visit(r, n):
    last = Clock(r, n - 1, n)
    np.testing.assert_allclose(InverseSqrt(2.0, "round")(last), InverseSqrt(2.0, "step")(last), rtol=1e-12)


@pytest.mark.parametrize("formula", FORMULAS)
def test_with_one_step_a_visit_the_clocks_agree(formula):
    make, _ = FORMULAS[formula]
    for r in range(5):
        np.testing.assert_allclose(make("step")(Clock(r, 0, 1)), make("round")(Clock(r, 0, 1)), rtol=1e-12)


@each_clock
@pytest.mark.parametrize("formula", FORMULAS)
def test_step_sizes_can_be_traced_and_their_numbers_swept(formula, name):
    lr = FORMULAS[formula][0](name)
    run = jax.jit(lambda lr, clock: step_size_at(lr, clock))
    for clock in CLOCKS[:3]:
        np.testing.assert_allclose(run(lr, jax.tree.map(jnp.asarray, clock)), lr(clock), rtol=1e-12)
    doubled = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), jax.tree.map(jnp.asarray, lr))
    np.testing.assert_allclose(jax.vmap(lambda lr: lr(CLOCKS[-1]))(doubled), np.full(2, lr(CLOCKS[-1])), rtol=1e-12)


# errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Decay(0.0, 0.1), "`initial` must be positive, got 0.0"),
        (lambda: Decay(0.1, 1.0), r"`rate` must lie in \[0, 1\), got 1.0"),
        (lambda: Decay(0.1, -0.1), r"`rate` must lie in \[0, 1\), got -0.1"),
        (lambda: Decay(0.1, 0.1, "epoch"), "`clock` must be one of 'step', 'round', got 'epoch'"),
        (lambda: InverseDecay(-1.0, 0.1), "`initial` must be positive"),
        (lambda: InverseDecay(1.0, -0.1), "`rate` must not be negative, got -0.1"),
        (lambda: InverseDecay(1.0, 0.1, "epoch"), "`clock`"),
        (lambda: InverseSqrt(0.0), "`scale` must be positive, got 0.0"),
        (lambda: InverseSqrt(1.0, "epoch"), "`clock`"),
        (lambda: StronglyConvex(0.0, 1.0), "`strong_convexity` must be positive"),
        (lambda: StronglyConvex(1.0, -1.0), "`offset` must not be negative"),
        (lambda: StronglyConvex(1.0, 1.0, scale=0.0), "`scale` must be positive"),
        (lambda: StronglyConvex(1.0, 1.0, "epoch"), "`clock`"),
        (lambda: require_step_size("prox_lr", -0.5, "Use less."), "`prox_lr` must be positive, got -0.5. Use less."),
        (lambda: require_step_size("lr", float("inf")), "`lr` must be positive, got inf"),
    ],
)
def test_errors_name_the_problem(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_what_is_a_step_size_is_accepted():
    for lr in (0.1, 1, Decay(0.1, 0.5), lambda clock: 0.1, None, np.array([0.1, 0.2])):
        assert require_step_size("lr", lr) is None
