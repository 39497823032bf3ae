"""Distances between clients against their definitions, and the bounds of heterogeneity that follow from them."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.stats import wasserstein_distance

import personax
from personax import theory
from personax.data.federation import Federation
from personax.theory import distances, fallah
from tests import closed_forms

KEY = jax.random.key(0)
few = settings(max_examples=25, deadline=None, derandomize=True)


def federation_of(xs, ys):
    return Federation.from_clients([(np.asarray(x), np.asarray(y)) for x, y in zip(xs, ys, strict=True)])


def test_total_variation_of_labels_against_the_average_client():
    federation = federation_of([np.zeros((4, 1)), np.zeros((2, 1))], [[0, 0, 1, 2], [1, 1]])
    table = theory.label_distributions(federation)
    np.testing.assert_allclose(table, [[0.5, 0.25, 0.25], [0, 1, 0]])
    # the average counts clients, not samples: (0.25, 0.625, 0.125)
    np.testing.assert_allclose(theory.total_variation(table), [0.375, 0.375])
    np.testing.assert_allclose(theory.l1_distance(table), [0.75, 0.75])


def test_several_labels_a_sample_all_count():
    federation = federation_of([np.zeros((1, 1)), np.zeros((1, 1))], [[[0, 0]], [[0, 1]]])
    np.testing.assert_allclose(theory.label_distributions(federation), [[1, 0], [0.5, 0.5]])


def test_labels_must_be_labels():
    with pytest.raises(ValueError, match=r"integer labels .got float64.. Use `cell_distributions"):
        theory.label_distributions(closed_forms.federation()[0])
    with pytest.raises(ValueError, match="rows that are probabilities"):
        theory.total_variation(np.array([[0.5, 0.2]]))


@few
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 6))
def test_total_variation_is_between_its_ends(seed, num_clients, num_outcomes):
    """0 for equal clients; 1 - 1/n for clients that share nothing; never above."""
    table = np.random.default_rng(seed).dirichlet(np.full(num_outcomes, 0.3), num_clients)
    found = theory.total_variation(table)
    assert (found >= 0).all() and (found <= 1 - 1 / num_clients + 1e-12).all()
    np.testing.assert_allclose(theory.total_variation(np.tile(table[:1], (num_clients, 1))), 0, atol=1e-12)
    np.testing.assert_allclose(theory.total_variation(np.eye(num_clients)), 1 - 1 / num_clients)


def test_cells_quantise_features_and_keep_labels_apart():
    xs = [np.array([[0.0], [0.9]]), np.array([[1.0], [0.1]])]
    federation = federation_of(xs, [[0, 1], [1, 1]])
    # halves of [0, 1] with labels: client 0 in (low, 0), (high, 1), client 1 in (high, 1), (low, 1)
    np.testing.assert_allclose(theory.total_variation(theory.cell_distributions(federation, 2)), [0.25, 0.25])
    features = theory.cell_distributions(federation, 2, with_labels=False)
    np.testing.assert_allclose(theory.total_variation(features), [0, 0])


def test_cells_of_real_targets_and_of_constant_features():
    federation = federation_of([np.ones((2, 1)), np.ones((2, 1))], [[0.0, 0.1], [0.9, 1.0]])
    np.testing.assert_allclose(theory.total_variation(theory.cell_distributions(federation, 2)), [0.5, 0.5])
    np.testing.assert_allclose(theory.total_variation(theory.cell_distributions(federation, 1)), [0, 0])


def test_finer_cells_never_bring_clients_closer():
    rng = np.random.default_rng(0)
    federation = federation_of([rng.normal(size=(30, 2)) + i for i in range(3)], [np.zeros(30, int)] * 3)
    found = [theory.total_variation(theory.cell_distributions(federation, 2**k)) for k in range(5)]
    assert all((later >= earlier - 1e-12).all() for earlier, later in pairwise(found))


def brute_force(federation, label_cost):
    """W_1 as an assignment between equally many equally weighted points: clients of one size, each repeated."""
    z, n = distances.points(federation, label_cost=label_cost), federation.num_clients
    parts = z.reshape(n, -1, z.shape[1])
    found = []
    for part in parts:
        own = np.repeat(part, n, axis=0)
        cost = np.linalg.norm(own[:, None] - z[None], axis=2)
        found.append(cost[linear_sum_assignment(cost)].mean())
    return np.array(found)


@pytest.mark.parametrize("label_cost", [0.0, 1.5])
@pytest.mark.parametrize("with_pot", [True, False])
def test_wasserstein_is_the_best_assignment(label_cost, with_pot, monkeypatch):
    rng = np.random.default_rng(1)
    federation = federation_of([rng.normal(size=(4, 2)) + i for i in range(3)], rng.integers(0, 3, (3, 4)))
    if not with_pot:
        monkeypatch.setattr(distances, "find_spec", lambda name: None)
    found = theory.wasserstein(federation, label_cost=label_cost)
    np.testing.assert_allclose(found, brute_force(federation, label_cost), rtol=1e-6)


@pytest.mark.parametrize("with_pot", [True, False])
def test_wasserstein_in_one_dimension_is_scipys(with_pot, monkeypatch):
    if not with_pot:
        monkeypatch.setattr(distances, "find_spec", lambda name: None)
    rng = np.random.default_rng(2)
    xs = [rng.normal(size=(n, 1)) * (i + 1) for i, n in enumerate((5, 9))]
    federation = federation_of(xs, [np.zeros(5), np.zeros(9)])
    everyone, weights = np.concatenate(xs).ravel(), np.r_[np.full(5, 0.1), np.full(9, 1 / 18)]
    expected = [wasserstein_distance(x.ravel(), everyone, v_weights=weights) for x in xs]
    np.testing.assert_allclose(theory.wasserstein(federation), expected, rtol=1e-6)
    np.testing.assert_allclose(theory.sliced_wasserstein(federation, num_directions=3, key=KEY), expected)


def test_labels_are_their_cost_apart_and_targets_scaled():
    federation = federation_of([np.zeros((3, 2))], [[5, 5, 9]])
    z = distances.points(federation, label_cost=2.0)
    np.testing.assert_allclose(np.linalg.norm(z[:, None] - z[None], axis=2), [[0, 0, 2], [0, 0, 2], [2, 2, 0]])
    assert distances.points(federation).shape == (3, 2)
    real = federation_of([np.zeros((2, 2))], [[0.0, 3.0]])
    assert np.linalg.norm(np.diff(distances.points(real, label_cost=2.0), axis=0)) == 6


def test_images_are_in_the_unit_cube():
    federation = federation_of([np.array([[[0], [255]]], np.uint8)], [[0]])
    np.testing.assert_array_equal(distances.points(federation), [[0, 1]])


def shifted(num_features, by):
    """Two clients with the same points, the second's moved; the average is halfway between."""
    x = np.random.default_rng(0).normal(size=(12, num_features))
    return federation_of([x, x + by], [np.zeros(12), np.zeros(12)])


@pytest.mark.parametrize("num_features", [2, 30])
def test_sliced_wasserstein_of_a_large_shift_is_half_of_it(num_features):
    """Between p and (p + q) / 2 half of the mass moves by the shift; slices see E|u_1| of it."""
    federation = shifted(num_features, 100.0)
    exactly = 50 * np.sqrt(num_features)
    np.testing.assert_allclose(theory.wasserstein(federation), exactly, rtol=0.02)
    sliced = theory.sliced_wasserstein(federation, num_directions=4000, key=KEY)
    np.testing.assert_allclose(sliced, exactly, rtol=0.05)


@few
@given(st.integers(0, 10**6))
def test_sliced_wasserstein_is_a_lower_bound(seed):
    rng = np.random.default_rng(seed)
    federation = federation_of(rng.normal(size=(3, 6, 3)) * rng.uniform(0.2, 3, (3, 1, 1)), np.zeros((3, 6)))
    sliced = theory.sliced_wasserstein(federation, num_directions=400, key=jax.random.key(seed))
    assert (sliced <= theory.wasserstein(federation) * 1.1).all()


def test_mean_projections():
    u = np.random.default_rng(0).normal(size=(200_000, 5))
    sampled = np.abs(u[:, 0] / np.linalg.norm(u, axis=1)).mean()
    np.testing.assert_allclose(distances.mean_projection(5), sampled, rtol=0.01)


def test_subsets_need_a_key_and_give_about_the_distance():
    federation = shifted(2, 3.0)
    with pytest.raises(ValueError, match="Drawing 5 samples of each client needs a `key`"):
        theory.wasserstein(federation, num_samples=5)
    some = theory.wasserstein(federation, num_samples=10, key=KEY)
    np.testing.assert_allclose(some, theory.wasserstein(federation), rtol=0.4)
    np.testing.assert_array_equal(theory.wasserstein(federation, num_samples=12), theory.wasserstein(federation))


def common_support(seed):
    """Clients that draw their samples from the same five points, so that distributions can overlap."""
    rng = np.random.default_rng(seed)
    support, labels = rng.normal(size=(5, 2)), rng.integers(0, 2, 5)
    rows = [rng.choice(5, size=12, p=rng.dirichlet(np.full(5, 0.4))) for _ in range(3)]
    return federation_of([support[r] for r in rows], [labels[r] for r in rows])


TASK = personax.classification(personax.logistic_regression(2))
PARAMS = TASK.model.init(KEY, jnp.zeros((1, 2)))


def spreads_and_bounds(seed, scale):
    """gamma_g and gamma_h, each with its bounds, Fallah (14a) and (16).

    TV is over the points themselves, W_1 has the metric of (x, y), and L_Z is over pairs of points.
    """
    federation = common_support(seed)
    region = theory.at(jax.tree.map(lambda leaf: leaf * scale, PARAMS))
    batches = theory.sample_clients(federation)
    singles = theory.by_example(batches)
    gamma_g = theory.gradient_spread(TASK.loss, region, batches).value
    gamma_h = theory.hessian_spread(TASK.loss, region, batches, key=KEY, num_steps=6).value
    variation = theory.total_variation(theory.cell_distributions(federation, 10_000))
    bound = theory.gradient_bound(TASK.loss, region, singles).value
    level = theory.smoothness(TASK.loss, region, singles, key=KEY, num_steps=6).value
    gradients, hessians = derivatives_of(region, singles)
    z = distances.points(federation, label_cost=1.0)
    apart = np.linalg.norm(z[:, None] - z[None], axis=2)
    slope = lambda changes: np.divide(changes, apart, out=np.zeros_like(apart), where=apart > 1e-9).max()
    lipschitz = slope(np.linalg.norm(gradients[:, None] - gradients[None], axis=2))
    hessian_lipschitz = slope(np.linalg.norm(hessians[:, None] - hessians[None], 2, axis=(2, 3)))
    moved = theory.wasserstein(federation, label_cost=1.0)
    by_variation, by_distance = fallah.spread_from_total_variation, fallah.spread_from_wasserstein
    return [
        (gamma_g, by_variation(bound, variation)),
        (gamma_h, by_variation(level, variation)),
        (gamma_g, by_distance(lipschitz, moved)),
        (gamma_h, by_distance(hessian_lipschitz, moved)),
    ]


@few
@given(st.integers(0, 10**6), st.floats(0, 2))
def test_distances_bound_the_spread_of_gradients_and_hessians(seed, scale):
    for spread, bound in spreads_and_bounds(seed, scale):
        assert spread <= bound * (1 + 1e-6) + 1e-9


def test_distances_are_as_loose_as_measured():
    """The median of bound / truth over eight federations: a bound that is wrong by a factor leaves its range."""
    ratios = [[bound / spread for spread, bound in spreads_and_bounds(seed, 1.0)] for seed in range(8)]
    np.testing.assert_allclose(np.median(ratios, axis=0), (4.215, 4.916, 1.866, 2.361), rtol=0.02)


@jax.jit
def _derivatives(model, singles):
    flat, restore = jax.flatten_util.ravel_pytree(model)
    f = lambda w, batch: TASK.loss(restore(w), batch)
    return jax.vmap(jax.grad(f), (None, 0))(flat, singles), jax.vmap(jax.hessian(f), (None, 0))(flat, singles)


def derivatives_of(region, singles):
    return map(np.asarray, _derivatives(jax.tree.map(lambda leaf: leaf[0], region.models), singles))


def test_the_spread_bounds_are_the_formulas():
    found = fallah.spread_from_total_variation(3.0, np.array([0.1, 0.3]))
    np.testing.assert_allclose(found**2, 4 * 9 * (0.01 + 0.09) / 2)
    np.testing.assert_allclose(fallah.spread_from_wasserstein(3.0, np.array([0.1, 0.3])) ** 2, 9 * (0.01 + 0.09) / 2)
