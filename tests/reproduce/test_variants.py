"""Variants of the papers' algorithms and networks that reproductions use: closed forms and identities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.objectives import Mixture
from personax.objectives.objective import Visit
from personax.reproduce.apfl.networks import (
    MixedOutputs,
    augmented,
    batch_norm_mlp,
    mixing_outputs,
    pairs,
    synthetic_of_authors,
)
from personax.reproduce.apfl.setting import mixture
from personax.reproduce.apfl.variants import KeptStep, OutputMixture, PerEpoch, PersistentTheta
from personax.reproduce.cited_code import WithoutTwo, network, squared_error
from personax.reproduce.measures import MeasuredRun, StepTimesCurvature
from personax.typing import Batch, Clock

KEY = jax.random.key(3)
pytestmark = pytest.mark.xdist_group("reproduce")


def federation():
    return px.datasets.synthetic(0.5, 0.5, num_clients=4, num_samples=20, num_features=3, key=KEY)


def quadratic(params, batch):
    """1/2 |p - x|^2 of one-dimensional parameters, whose gradient is p - mean x."""
    return 0.5 * jnp.mean((params["w"] - batch.x) ** 2)


def batches(*values):
    one = lambda value: Batch(jnp.full((1, 1), value), jnp.zeros((1, 1)), jnp.ones((1, 1)), jax.random.split(KEY, 1))
    return {name: one(value) for name, value in zip(("adapt", "outer"), values, strict=False)}


def visit(lr, step=0):
    return Visit(None, (), Clock(0, step, 20), lr)


def test_a_mixture_with_its_copy_has_the_numbers_of_the_mixture():
    task, data = px.classification(px.logistic_regression(10)), federation()
    plain = px.apfl(lr=0.1, mix=0.5, num_steps=3, batch_size=5)
    kept = mixture(lr=0.1, mix=0.5, num_steps=3, batch_size=5)
    schedule = px.rounds(4, 3, 4, key=KEY)
    ends = [px.simulate(one, task, data, schedule, key=KEY).snapshot for one in (plain, kept)]
    jax.tree.map(np.testing.assert_array_equal, ends[0].params, ends[1].params)
    jax.tree.map(np.testing.assert_array_equal, ends[0].personal, ends[1].personal.own)
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), ends[1].personal.copy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), mean, ends[1].params)  # copies average to w
    scores = {
        name: px.evaluate(kept, task, data, ends[1], px.Scoring(name), key=KEY).of("loss")
        for name in ("personal", "own_copy")
    }
    own = ends[1].personal
    assert isinstance(kept.objective.mixture, Mixture) and not np.allclose(scores["personal"], scores["own_copy"])
    for i in range(4):
        begin, end = data.test_offsets[i : i + 2]
        batch = Batch(data.test_x[begin:end], data.test_y[begin:end], jnp.ones(end - begin), KEY)
        mix = own.own.mix[i]
        model = jax.tree.map(lambda v, w, i=i, mix=mix: mix * v[i] + (1 - mix) * w[i], own.own.model, own.copy)
        np.testing.assert_allclose(task.loss(model, batch), scores["own_copy"][i], rtol=1e-5)


def test_a_mixture_of_outputs_steps_w_first_and_moves_its_weight_by_both_gradients():
    """With f(p) = p and h = m v + (1 - m) w: grad_v l = m (h - x), grad_w l = (1 - m) (h - x)."""
    objective = OutputMixture(0.25, local_lr=0.1, adaptive=True)
    mixed = lambda params, batch: (
        quadratic(params, batch)
        if isinstance(params, dict)
        else 0.5 * jnp.mean((params.mix * params.own["w"] + (1 - params.mix) * params.shared["w"] - batch.x) ** 2)
    )
    w, v, m, x, lr = 2.0, 3.0, 0.25, 1.0, 0.5
    begin = objective.init_personal({"w": jnp.asarray(v)})
    direction, memory = objective.gradient(
        mixed, {"w": jnp.asarray(w)}, begin, visit(lr), {"outer": batches(x, x)["outer"]}
    )
    stepped = w - lr * (w - x)
    h = m * v + (1 - m) * stepped
    own = v - 0.1 * m * (h - x)
    slope = (own - stepped) * (m * m + (1 - m) * (1 - m)) * (h - x) + 0.02 * m
    assert float(direction["w"]) == pytest.approx(w - x)
    assert float(memory.own.model["w"]) == pytest.approx(own)
    assert float(memory.own.mix) == pytest.approx(np.clip(m - lr * slope, 0, 1))
    later = objective.gradient(mixed, {"w": jnp.asarray(w)}, begin, visit(lr, 1), {"outer": batches(x, x)["outer"]})[1]
    assert float(later.own.mix) == m  # it moves at the first step of a visit alone


def test_a_kept_step_is_two_steps():
    objective, w, lr = KeptStep(0.25), 3.0, 0.1
    direction = objective.gradient(quadratic, {"w": jnp.asarray(w)}, (), visit(lr), batches(1.0, 2.0))[0]
    adapted = w - 0.25 * (w - 1.0)
    assert w - lr * float(direction["w"]) == pytest.approx(adapted - lr * (adapted - 2.0))


def test_theta_stays_and_w_moves_every_fifth_batch():
    objective, w = PersistentTheta(15.0, 0.01), {"w": jnp.asarray(1.0)}
    memory, theta = objective.init_personal({"w": jnp.asarray(0.5)}), 0.5
    for step in range(6):
        direction, memory = objective.gradient(
            quadratic, w, memory, visit(0.01, step), {"outer": batches(0, 2.0)["outer"]}
        )
        theta -= 0.01 * (theta - 2.0 + 15.0 * (theta - 1.0))
        assert float(memory.model["w"]) == pytest.approx(theta)
        assert float(direction["w"]) == pytest.approx(15.0 * (1.0 - theta) if step == 4 else 0.0)


def test_a_step_per_epoch_falls_after_each_pass():
    lr = PerEpoch(0.1, 1.01, 24.0)
    assert float(lr(Clock(1, 3, 20))) == pytest.approx(0.1)  # 23 steps before
    assert float(lr(Clock(1, 4, 20))) == pytest.approx(0.1 / 1.01)
    assert float(lr(Clock(12, 0, 20))) == pytest.approx(0.1 / 1.01**10)


def test_outputs_are_mixed_and_one_model_is_as_before():
    model = px.mlp((4,), num_outputs=3)
    mixing = mixing_outputs(model)
    x = jax.random.normal(KEY, (5, 6))
    first, second = (model.init(jax.random.key(i), x) for i in (0, 1))
    outputs = mixing.apply(MixedOutputs(first, second, jnp.asarray(0.25)), x)
    np.testing.assert_allclose(outputs, 0.25 * model.apply(first, x) + 0.75 * model.apply(second, x), rtol=1e-5)
    np.testing.assert_array_equal(mixing.apply(first, x), model.apply(first, x))


def test_batches_are_normalized_by_their_own_statistics():
    model = batch_norm_mlp((4,), 3, dropout=0.5)
    x = jax.random.normal(KEY, (50, 6))
    params = model.init(KEY, x)
    moved = model.apply(params, 3 * x)  # a scale of the inputs, without bias, is undone
    zero = jax.tree.map(jnp.zeros_like, params["dense_0"]["bias"])
    unbiased = {**params, "dense_0": {**params["dense_0"], "bias": zero}}
    np.testing.assert_allclose(model.apply(unbiased, 3 * x), model.apply(unbiased, x), atol=1e-3)
    hidden = np.asarray(x) @ np.asarray(params["dense_0"]["kernel"]) + np.asarray(params["dense_0"]["bias"])
    normal = (hidden - hidden.mean(axis=0)) / np.sqrt(hidden.var(axis=0) + 1e-5)
    expected = np.maximum(normal, 0) @ np.asarray(params["dense_1"]["kernel"])
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)
    assert moved.shape == (50, 3) and not np.allclose(model.apply(params, x, KEY), expected)  # with a key: dropout


def test_images_are_moved_in_training_alone():
    seen = augmented(px.typing.Model(lambda key, x: {}, lambda params, x, key=None: x))
    image = jnp.arange(1.0, 1 + 3 * 8 * 8 * 1).reshape(3, 8, 8, 1)
    np.testing.assert_array_equal(seen.apply({}, image), image)
    moved = np.asarray(seen.apply({}, image, KEY))
    frame = np.pad(image, ((0, 0), (4, 4), (4, 4), (0, 0)))
    crops = lambda i: [frame[i, a : a + 8, b : b + 8] for a in range(9) for b in range(9)]
    for i in range(3):
        assert any(np.array_equal(moved[i], one) or np.array_equal(moved[i], one[:, ::-1]) for one in crops(i))


def test_pairs_of_classes_and_the_authors_generator():
    labels = np.arange(400) % 10
    parts = pairs(labels, 20, key=KEY)
    held = [sorted(set(labels[rows])) for rows in parts]
    assert held == [[i % 5, i % 5 + 5] for i in range(20)] and sorted(parts.rows) == list(range(400))
    made = synthetic_of_authors(0.5, 3, KEY)
    sizes = made.counts + made.test_counts
    assert ((sizes >= 500) & (sizes <= 1000)).all() and set(np.unique(made.y)) <= {0, 1}


def test_the_cited_network_has_its_output_loss_and_start():
    model = network()
    x = jax.random.uniform(KEY, (2000, 28, 28))
    params = model.init(KEY, x)
    for i, num_in in enumerate((784, 80, 60)):
        layer = params[f"dense_{i}"]
        assert float(layer["kernel"].std()) == pytest.approx(np.sqrt(2 / num_in), rel=0.1)
    biases = np.concatenate([params[f"dense_{i}"]["bias"] for i in range(3)])
    assert biases.std() == pytest.approx(1, rel=0.2)
    linear = network("cited", "linear").apply(params, x)
    np.testing.assert_allclose(model.apply(params, x), jnp.where(linear > 0, linear, jnp.expm1(linear)), rtol=1e-5)
    task = squared_error(model)
    batch = Batch(x[:3], jnp.array([1, 2, 3]), jnp.array([1.0, 1.0, 0.0]), KEY)
    far = np.square(np.asarray(model.apply(params, x[:2])) - np.eye(10)[[1, 2]]).sum(axis=1)
    assert float(task.loss(params, batch)) == pytest.approx(0.5 * far.mean(), rel=1e-5)
    assert float(task.metrics(params, batch)["loss"]) == pytest.approx(0.5 * far.mean(), rel=1e-5)
    plain = px.mlp((80, 60), num_outputs=10)
    np.testing.assert_allclose(
        network("glorot", "linear").apply(plain.init(KEY, x), x), plain.apply(plain.init(KEY, x), x), atol=1e-5
    )


def test_a_difference_without_the_2_is_twice_the_product():
    loss = lambda params, batch: jnp.sum(params**2 * jnp.array([1.0, 3.0]))
    vector = jnp.array([0.5, -1.0])
    found = WithoutTwo(1e-2)(loss, jnp.zeros(2), vector, None)
    np.testing.assert_allclose(found, 2 * 2 * np.array([1.0, 3.0]) * np.asarray(vector), rtol=1e-4)


def test_the_curvature_is_the_largest_eigenvalue_of_the_hessian():
    """Of l = 1/2 mean (x . w - y)^2 it is that of the inputs' second moments."""
    data = dataclasses.replace(federation())
    model = px.typing.Model(lambda key, x: jnp.zeros(3), lambda params, x, key=None: x @ params)
    loss = lambda params, batch: 0.5 * jnp.sum(batch.weight * (batch.x @ params - 1.0) ** 2) / batch.weight.sum()
    task = px.typing.Task(model, loss, lambda params, batch: {})
    snapshot = type("Snapshot", (), {"params": jnp.zeros((2, 3))})()
    found = StepTimesCurvature(0.5, num_clients=4).of_seeds(MeasuredRun(task, data, [], snapshot))
    moments = [
        (x := np.asarray(data.x[a:b], float)).T @ x / len(x)
        for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)
    ]
    expected = 0.5 * np.mean([np.linalg.eigvalsh(one)[-1] for one in moments])
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-3)
