"""The sentence about a slow run: it names the primitive that no pass makes fast, and stays away otherwise."""

import jax
import numpy as np
import pytest

import personax as px
from personax.simulation import speed


def three_axes(params, x, key=None):
    """A convolution over three axes, which is left to XLA."""
    y = jax.lax.conv_general_dilated(x.reshape(-1, 1, 8, 8, 8), params["kernel"], (1, 1, 1), "SAME")
    return y.mean((2, 3, 4))


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)
    return px.Federation.from_clients([(rng.normal(size=(9, 512)), rng.integers(0, 2, 9)) for _ in range(2)])


MODEL = px.Model(lambda key, x: {"kernel": jax.random.normal(key, (2, 1, 3, 3, 3))}, three_axes)
ALGORITHM = px.fedavg(lr=0.1, num_steps=2, batch_size=4)


def test_a_slow_run_is_explained(federation):
    found = px.explain_speed(ALGORITHM, px.classification(MODEL), federation, num_visits=10, seconds=3600)
    assert "times as long as its operations should take" in found
    assert "`conv_general_dilated` takes the most time" in found and speed.REMEDIES["conv_general_dilated"] in found


def test_a_run_at_its_speed_and_a_short_run_need_no_words(federation):
    task = px.classification(MODEL)
    assert not px.explain_speed(ALGORITHM, task, federation, num_visits=10**9, seconds=3600)
    assert not px.explain_speed(ALGORITHM, task, federation, num_visits=1, seconds=speed.PATIENCE - 1)


def test_the_factor_counts_visits_steps_and_gradients(federation, monkeypatch):
    monkeypatch.setattr(speed, "expected_seconds", lambda program: 0.01)
    task, meta = px.classification(MODEL), px.per_fedavg(adapt_lr=0.1, lr=0.1, num_steps=3, batch_size=4)
    factor = lambda algorithm: (
        12_000 / (50 * algorithm.local.num_steps * algorithm.objective.gradients_per_step() * 0.01)
    )
    for algorithm in (ALGORITHM, meta):
        found = px.explain_speed(algorithm, task, federation, num_visits=50, seconds=12_000)
        assert found.startswith(f"Training took {factor(algorithm):.0f} times")
