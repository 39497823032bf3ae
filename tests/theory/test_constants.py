"""Measured constants against closed forms on least squares and dense derivatives on logistic regression."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import personax
from personax import theory
from personax.data.federation import Federation
from personax.objectives import Erm, Meta, Mixture, Moreau
from personax.theory import region as regions
from personax.theory.spectrum import cubic_norm, extremes
from personax.typing import Batch
from tests import closed_forms

KEY = jax.random.key(0)
LEAST_SQUARES, CURVES = closed_forms.federation()
SQUARES = theory.sample_clients(LEAST_SQUARES)
WS = np.random.default_rng(3).normal(size=(3, closed_forms.DIMENSION))
SQUARE_REGION = theory.path([{"w": w} for w in WS])
square_loss = closed_forms.TASK.loss


def logistic():
    """Three clients of unlike data, two features, three classes: nine parameters."""
    rng = np.random.default_rng(5)
    sizes = (5, 8, 6)
    data = [(rng.normal(size=(n, 2)) + i, rng.integers(0, 3, n)) for i, n in enumerate(sizes)]
    task = personax.classification(personax.logistic_regression(3), l2=0.1)
    federation = Federation.from_clients(data)
    params = task.model.init(jax.random.key(1), jnp.asarray(data[0][0]))
    return task.loss, federation, theory.sample_clients(federation), theory.ball(params, 2.0, 3, key=jax.random.key(2))


LOSS, FEDERATION, BATCHES, REGION = logistic()


@jax.jit
def in_full(models, batches):
    """Gradients [models, clients, d] and Hessians, formed in full."""

    def of(model, batch):
        flat, restore = ravel_pytree(model)
        f = lambda w: LOSS(restore(w), batch)
        return jax.grad(f)(flat), jax.hessian(f)(flat)

    return jax.vmap(lambda model: jax.vmap(lambda batch: of(model, batch))(batches))(models)


@pytest.fixture(scope="module")
def dense():
    """Of the clients' losses, and of single samples', client by client."""
    gradients, hessians = map(np.asarray, in_full(REGION.models, BATCHES))
    single = lambda leaf: jnp.asarray(leaf)[:, None]
    num = len(FEDERATION.x)
    singles = Batch(single(FEDERATION.x), single(FEDERATION.y), jnp.ones((num, 1)), jax.random.split(KEY, num))
    by_client = lambda table: np.split(np.asarray(table), FEDERATION.offsets[1:-1], axis=1)
    of_samples = in_full(REGION.models, singles)
    return {
        "gradients": gradients,
        "hessians": hessians,
        "sample_gradients": by_client(of_samples[0]),
        "sample_hessians": by_client(of_samples[1]),
    }


def test_gradient_bound_is_the_largest_gradient(dense):
    found = theory.gradient_bound(LOSS, REGION, BATCHES)
    norms = np.linalg.norm(dense["gradients"], axis=2)
    np.testing.assert_allclose(found.value, norms.max())
    assert (found.model, found.client) == np.unravel_index(norms.argmax(), norms.shape)
    assert found.region == REGION.description and "radius 2" in found.region and found.error == 0


def test_smoothness_and_strong_convexity_are_the_extreme_eigenvalues(dense):
    values = np.linalg.eigvalsh(dense["hessians"])
    found = theory.smoothness(LOSS, REGION, BATCHES, key=KEY)
    np.testing.assert_allclose(found.value, np.abs(values).max(), rtol=1e-9)
    found = theory.strong_convexity(LOSS, REGION, BATCHES, key=KEY)
    np.testing.assert_allclose(found.value, values.min(), rtol=1e-7)
    assert found.value > 0.1 - 1e-9  # the penalty's


def test_noise_is_the_spread_of_single_samples(dense):
    found = theory.gradient_noise(LOSS, REGION, BATCHES)
    deviations = [
        np.linalg.norm(own - dense["gradients"][:, i : i + 1], axis=2)
        for i, own in enumerate(dense["sample_gradients"])
    ]
    squares = np.array([(d**2).mean(axis=1) for d in deviations])  # [clients, models]
    np.testing.assert_allclose(found.deviation.value, np.sqrt(squares.max()))
    np.testing.assert_allclose(found.kurtosis.value, max((d**4).mean(axis=1).max() for d in deviations))
    client, model = np.unravel_index(squares.argmax(), squares.shape)
    values = deviations[client][model] ** 2
    error = values.std() / np.sqrt(len(values)) / (2 * np.sqrt(values.mean()))
    np.testing.assert_allclose(found.deviation.error, error)
    assert (found.deviation.client, found.deviation.model) == (client, model)


def test_hessian_noise_is_the_spread_in_the_spectral_norm(dense):
    found = theory.hessian_noise(LOSS, REGION, BATCHES, key=KEY)
    deviations = [
        np.linalg.norm(own - dense["hessians"][:, i : i + 1], 2, axis=(2, 3))
        for i, own in enumerate(dense["sample_hessians"])
    ]
    np.testing.assert_allclose(found.deviation.value, max(np.sqrt((d**2).mean(axis=1)).max() for d in deviations))
    np.testing.assert_allclose(found.kurtosis.value, max((d**4).mean(axis=1).max() for d in deviations))


def test_spreads_are_distances_from_the_mean_of_the_clients(dense):
    away = dense["gradients"] - dense["gradients"].mean(axis=1, keepdims=True)
    found = theory.gradient_spread(LOSS, REGION, BATCHES)
    np.testing.assert_allclose(found.value, np.sqrt((away**2).sum(axis=2).mean(axis=1)).max())
    assert found.client is None
    np.testing.assert_allclose(theory.gradient_diversity(LOSS, REGION, BATCHES), (away**2).sum(axis=2).max(axis=0))
    hessians = dense["hessians"] - dense["hessians"].mean(axis=1, keepdims=True)
    norms = np.linalg.norm(hessians, 2, axis=(2, 3))
    found = theory.hessian_spread(LOSS, REGION, BATCHES, key=KEY)
    np.testing.assert_allclose(found.value, np.sqrt((norms**2).mean(axis=1)).max(), rtol=1e-9)


def test_on_least_squares_constants_have_closed_forms():
    hessians = np.array([curve.hessian for curve in CURVES])
    gradients = np.array([[curve.gradient(w) for curve in CURVES] for w in WS])
    eigenvalues = np.linalg.eigvalsh(hessians)
    measured = theory.measure(square_loss, SQUARE_REGION, SQUARES, key=KEY)
    assert {name for name in measured} == set(theory.Constants.__dataclass_fields__)
    found = theory.constants_of(measured)
    np.testing.assert_allclose(found.smoothness, eigenvalues.max())
    np.testing.assert_allclose(found.hessian_lipschitz, 0, atol=1e-12)
    np.testing.assert_allclose(found.gradient_bound, np.linalg.norm(gradients, axis=2).max())
    away = gradients - gradients.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found.gradient_spread, np.sqrt((away**2).sum(axis=2).mean(axis=1)).max())
    norms = np.linalg.norm(hessians - hessians.mean(axis=0), 2, axis=(1, 2))
    np.testing.assert_allclose(found.hessian_spread, np.sqrt((norms**2).mean()))
    # one sample's gradient is x (x . w - y), its Hessian x x^T
    noise, hessian_noise = [], []
    for i, (x, y) in enumerate(closed_forms.clients()):
        samples = x * (x @ WS.T - y[:, None]).T[..., None]
        noise.append(((samples - gradients[:, i : i + 1]) ** 2).sum(axis=2).mean(axis=1).max())
        outer = np.einsum("si,sj->sij", x, x) - hessians[i]
        hessian_noise.append((np.linalg.norm(outer, 2, axis=(1, 2)) ** 2).mean())
    np.testing.assert_allclose(found.gradient_noise, np.sqrt(max(noise)))
    np.testing.assert_allclose(found.hessian_noise, np.sqrt(max(hessian_noise)))


def test_the_gradient_bound_of_a_quadratic_grows_with_the_region():
    """It is infinite on all of space: every measured number belongs to its region."""
    near, far = (theory.ball({"w": WS[0]}, radius, 50, key=KEY) for radius in (1.0, 100.0))
    bounds = [theory.gradient_bound(square_loss, region, SQUARES).value for region in (near, far)]
    assert bounds[1] > 20 * bounds[0]


def test_hessian_lipschitz_of_a_logistic_loss():
    """Of the mean of log(1 + exp(-x . w)) it is max |v . D^3 v v| = max_v |mean s(1-s)(1-2s) (x . v)^3|, on a grid."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 6, 2)), rng.normal(size=2)
    loss = lambda params, batch: (batch.weight * jnp.logaddexp(0, -batch.x @ params["w"])).sum() / batch.weight.sum()
    batches = Batch(jnp.asarray(x), jnp.zeros((2, 6)), jnp.ones((2, 6)), jax.random.split(KEY, 2))
    found = theory.hessian_lipschitz(loss, theory.at({"w": jnp.asarray(w)}), batches, key=KEY, num_starts=8)
    angles = np.linspace(0, np.pi, 20001)
    directions = np.stack([np.cos(angles), np.sin(angles)])
    s = 1 / (1 + np.exp(-x @ w))
    cubes = np.einsum("cs,csa->ca", s * (1 - s) * (1 - 2 * s), (x @ directions) ** 3) / 6
    np.testing.assert_allclose(found.value, np.abs(cubes).max(), rtol=1e-6)


def extremes_of(product, start, num_steps):
    return jax.jit(lambda start: extremes(product, start, num_steps))(start)


@pytest.mark.parametrize("num_steps, exactly", [(3, False), (7, True), (30, True)])
def test_lanczos_is_exact_with_as_many_steps_as_dimensions(num_steps, exactly):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(7, 7))
    matrix = matrix + matrix.T
    found = extremes_of(lambda v: jnp.asarray(matrix) @ v, jnp.asarray(rng.normal(size=7)), num_steps)
    values = np.linalg.eigvalsh(matrix)
    assert found.largest <= values[-1] + 1e-12 and found.smallest >= values[0] - 1e-12
    if exactly:
        np.testing.assert_allclose([found.smallest, found.largest], values[[0, -1]], rtol=1e-10)
        assert found.largest_error < 1e-8
    else:
        # each lies within its error of an eigenvalue
        assert np.abs(values - found.largest).min() <= found.largest_error
        assert np.abs(values - found.smallest).min() <= found.smallest_error
        assert found.largest < values[-1] - 1e-6
    np.testing.assert_allclose(found.norm, max(abs(found.smallest), abs(found.largest)))


def test_lanczos_stops_where_the_matrix_maps_a_space_into_itself():
    """A multiple of the identity: one step is all there is, and the steps after it must not invent an eigenvalue 0."""
    found = extremes_of(lambda v: 3.0 * v, jnp.asarray(np.random.default_rng(0).normal(size=5)), 5)
    np.testing.assert_allclose([found.smallest, found.largest], 3.0)
    assert found.smallest_error < 1e-12


def test_lanczos_finds_negative_curvature():
    matrix = jnp.diag(jnp.array([-4.0, 1.0, 2.0]))
    found = extremes_of(lambda v: matrix @ v, jnp.array([0.3, 0.5, 0.7]), 3)
    np.testing.assert_allclose([found.norm, found.smallest, found.largest], [4, -4, 2], rtol=1e-9)
    early = extremes_of(lambda v: matrix @ v, jnp.array([0.6, 0.5, 0.7]), 2)
    assert early.norm == -early.smallest and early.norm_error == early.smallest_error != early.largest_error


def test_the_norm_of_a_cubic_form():
    """T[v, v, v] = sum_k c_k v_k^3 has its largest value at the axis of the largest |c_k|."""
    scale = jnp.array([0.5, -2.0, 1.0])
    starts = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)))
    norms = jax.jit(lambda: (cubic_norm(lambda v: scale * v**2, starts, 30), cubic_norm(lambda v: 0 * v, starts, 5)))
    np.testing.assert_allclose(norms(), [2.0, 0.0], rtol=1e-9)


def test_samples_of_clients_are_their_own_and_no_more():
    taken = theory.sample_clients(FEDERATION, 6, key=KEY)
    assert taken.weight.sum(axis=1).tolist() == [5, 6, 6]
    for i in range(3):
        own, real = FEDERATION.client(i)[0], np.asarray(taken.x[i])[np.asarray(taken.weight[i]) > 0]
        assert len(np.unique(real, axis=0)) == len(real)
        assert all((row == own).all(axis=1).any() for row in real)
    assert (np.asarray(BATCHES.x[2])[6:] == FEDERATION.client(2)[0][0]).all()  # filler is the client's own too
    again = theory.sample_clients(FEDERATION.select([1, 0, 2]), 6, key=KEY)
    np.testing.assert_array_equal(again.x[0], taken.x[1])  # a client's samples follow its id
    with pytest.raises(ValueError, match="Drawing 6 samples of each client needs a `key`"):
        theory.sample_clients(FEDERATION, 6)


def test_filler_counts_for_nothing():
    """The first client has five samples, and filler up to the eight of the second."""
    alone = theory.sample_clients(FEDERATION.select([0]))
    first = jax.tree.map(lambda leaf: leaf[:1], BATCHES)
    assert first.weight.shape == (1, 8) and alone.weight.shape == (1, 5)
    for measured in (theory.gradient_noise, theory.gradient_bound):
        np.testing.assert_allclose(
            jax.tree.leaves(measured(LOSS, REGION, first))[0], jax.tree.leaves(measured(LOSS, REGION, alone))[0]
        )


def test_sampled_noise_is_within_a_few_of_its_errors():
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(4000, 2)), rng.normal(size=4000))]
    federation = Federation.from_clients(data)
    region = theory.at({"w": jnp.array([0.3, -0.2])})
    whole = theory.gradient_noise(square_loss, region, theory.sample_clients(federation)).deviation
    off = []
    for seed in range(20):
        batches = theory.sample_clients(federation, 200, key=jax.random.key(seed))
        found = theory.gradient_noise(square_loss, region, batches).deviation
        off.append((found.value - whole.value) / found.error)
    assert 0.6 < np.std(off) < 1.5 and abs(np.mean(off)) < 0.7
    assert whole.error < found.error / 3


def test_single_samples_have_constants_of_their_own(dense):
    """B and L of Fallah (14): of each l(w; z)."""
    singles = theory.by_example(BATCHES)
    assert singles.weight.shape == (19, 1)
    found = theory.gradient_bound(LOSS, REGION, singles)
    np.testing.assert_allclose(found.value, max(np.linalg.norm(g, axis=2).max() for g in dense["sample_gradients"]))


def test_regions_are_stated_and_balls_are_full():
    center = {"a": jnp.zeros((2, 2)), "b": jnp.ones(3)}
    region = theory.ball(center, 0.5, 400, key=KEY)
    flat = np.concatenate([np.asarray(leaf).reshape(400, -1) for leaf in jax.tree.leaves(region.models)], axis=1)
    radii = np.linalg.norm(flat - np.r_[np.zeros(4), np.ones(3)], axis=1)
    assert radii[0] == 0 and radii.max() <= 0.5 and region.num_models == 400
    # uniform in the ball: a share r^7 of it within r
    np.testing.assert_allclose((radii[1:] < 0.5 * 0.5 ** (1 / 7)).mean(), 0.5, atol=0.1)
    assert theory.at(center).num_models == 1
    with pytest.raises(ValueError, match="at least one model"):
        theory.path([])
    with pytest.raises(ValueError, match=r"`radius` must be positive, got 0.*at"):
        theory.ball(center, 0, 2, key=KEY)


def test_optima_and_their_gap():
    optima = theory.find_optima(square_loss, {"w": jnp.zeros(3)}, SQUARES)
    minimizers = np.array([curve.minimizer for curve in CURVES])
    np.testing.assert_allclose(optima.alone["w"], minimizers, atol=1e-6)
    hessians = np.array([curve.hessian for curve in CURVES])
    together = np.linalg.solve(hessians.mean(axis=0), np.einsum("cij,cj->i", hessians, minimizers) / len(CURVES))
    np.testing.assert_allclose(optima.shared["w"], together, atol=1e-6)
    gap = ((minimizers - together) ** 2).sum(axis=1)
    np.testing.assert_allclose(theory.optimal_gap(optima), gap, atol=1e-5)
    assert optima.gradient_norms.shape == (5,) and optima.gradient_norms.max() < 1e-6


def test_the_optimal_gap_adds_up_all_leaves():
    optima = theory.Optima(
        {"a": jnp.zeros(2), "b": jnp.ones(())}, {"a": jnp.ones((3, 2)), "b": jnp.zeros(3)}, np.zeros(4)
    )
    np.testing.assert_allclose(theory.optimal_gap(optima), [3, 3, 3])


def test_disagreement_of_linear_models_lies_between_its_ends():
    """With few samples the maximum over signs can be taken by trying all of them."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        x = rng.normal(size=(7, 3))
        signs = np.array(np.meshgrid(*[[-1, 1]] * 7)).reshape(7, -1)
        exactly = 2 * 1.5 * np.linalg.norm(x.T @ signs, axis=0).max() / 7
        found = theory.linear_disagreement(x, 1.5, key=jax.random.key(seed))
        assert found.low <= exactly * (1 + 1e-12) and exactly <= found.high
        np.testing.assert_allclose(found.low, exactly, rtol=1e-9)
    equal = theory.linear_disagreement(np.array([[2.0], [-2.0]]), 1.0, key=KEY)
    np.testing.assert_allclose(equal, (4, 4))


def test_disagreement_of_given_models_is_that_of_the_worst_pair():
    outputs = np.random.default_rng(0).normal(size=(4, 9))
    pairs = [np.abs(a - b).mean() for a in outputs for b in outputs]
    np.testing.assert_allclose(theory.disagreement(outputs), max(pairs))
    with pytest.raises(ValueError, match=r"be 2, \[models, samples\], got 1"):
        theory.disagreement(outputs[0])


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_stationarity_of_meta_is_the_closed_form(num_steps):
    w, lr = WS[0], 0.2
    gradients = np.array([curve.meta_gradient(w, lr, num_steps) for curve in CURVES])
    # whatever Hessians it trains with, the objective's own gradient is exact
    for hvp in (personax.curvature.exact, personax.curvature.first_order):
        found = theory.stationarity(Meta(lr, num_steps, hvp), square_loss, {"w": jnp.asarray(w)}, SQUARES)
        np.testing.assert_allclose(found.squared_norm, (gradients.mean(axis=0) ** 2).sum(), rtol=1e-9)
        spread = ((gradients - gradients.mean(axis=0)) ** 2).sum(axis=1).mean()
        np.testing.assert_allclose(found.squared_spread, spread, rtol=1e-9)


def test_gradients_as_trained_are_those_of_the_estimator():
    """First-order ones lack the factors (I - lr H)."""
    w, lr = WS[0], 0.2
    found = theory.client_gradients(
        Meta(lr, 1, personax.curvature.first_order), square_loss, {"w": jnp.asarray(w)}, SQUARES, as_trained=True
    )
    np.testing.assert_allclose(found["w"], [curve.gradient(curve.descend(w, lr, 1)) for curve in CURVES], rtol=1e-9)


def test_stationarity_of_moreau_and_of_plain_averaging():
    strength = 4.0
    objective = Moreau(strength, 0.1, 2000, tolerance=1e-12)
    gradients = np.array([[strength * (w - curve.prox(w, strength)) for curve in CURVES] for w in WS])
    found = theory.stationarity_along(objective, square_loss, SQUARE_REGION, SQUARES)
    np.testing.assert_allclose(found.squared_norm, (gradients.mean(axis=1) ** 2).sum(axis=1), rtol=1e-6)
    plain = theory.client_gradients(Erm(), square_loss, {"w": jnp.asarray(WS[1])}, SQUARES)["w"]
    np.testing.assert_allclose(plain, [curve.gradient(WS[1]) for curve in CURVES], rtol=1e-9)


def test_objectives_without_a_function_of_the_shared_model_are_refused():
    with pytest.raises(
        ValueError, match="Clients of `objective` must minimize a single function, as with Erm, Meta or Moreau"
    ):
        theory.stationarity(Mixture(0.5), square_loss, {"w": jnp.asarray(WS[0])}, SQUARES)


def test_measured_numbers_print_with_their_error_and_region():
    found = theory.Measured(1.2345678, 0.01234, 2, 0, "one model")
    assert str(found) == "1.235 ± 0.012 (client 2, model 0 of one model)"
    assert str(found._replace(client=None)) == "1.235 ± 0.012 (model 0 of one model)"


def test_measuring_again_does_not_trace_again():
    traced = 0

    def loss(params, batch):
        nonlocal traced
        traced += 1
        return square_loss(params, batch)

    theory.gradient_bound(loss, SQUARE_REGION, SQUARES)
    once = traced
    theory.gradient_bound(loss, regions.Region(jax.tree.map(lambda m: m + 1, SQUARE_REGION.models), "moved"), SQUARES)
    assert traced == once
