"""The networks: sizes as formulas, layouts, standardized inputs, dropout, types, caching, adapters."""

import subprocess
import sys
from itertools import pairwise
from math import prod, sqrt

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from personax.fast.backends import pretend
from personax.models import (
    cnn,
    cnn2,
    cnn3,
    from_equinox,
    from_flax,
    from_nnx,
    logistic_regression,
    mlp,
    networks,
    standardized,
)

NETWORKS = {
    "mlp": lambda: mlp((7, 5), 3),
    "logistic_regression": lambda: logistic_regression(3),
    "cnn": lambda: cnn((2, 3), (6,), 3, kernel_size=3, dropout=0.5),
}


def images(seed=0, shape=(4, 12, 10, 2)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def start(model, x, seed=0):
    return jax.jit(model.init)(jax.random.key(seed), x)


def apply(model, *given):
    return jax.jit(model.apply)(*given)


def num_params(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def dense_params(*sizes):
    return sum((a + 1) * b for a, b in pairwise(sizes))


def assert_trees_close(left, right, rtol=1e-10):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12), left, right)


# sizes and starts


@pytest.mark.parametrize(
    ("widths", "shape"),
    [((80, 60), (3, 28, 28)), ((200, 200), (3, 784)), ((), (3, 5)), ((4,), (3,)), ((2,) * 4, (1, 6))],
)
def test_mlp_has_the_parameters_of_its_layers(widths, shape):
    model = mlp(widths, 10)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(shape))
    assert num_params(params) == dense_params(prod(shape[1:]), *widths, 10)
    assert list(params) == [f"dense_{i}" for i in range(len(widths) + 1)]
    assert jax.eval_shape(model.apply, params, jnp.zeros(shape)).shape == (shape[0], 10)


def test_logistic_regression_is_an_mlp_without_hidden_layers():
    assert logistic_regression(10) is mlp((), 10)
    x = images()
    params = start(logistic_regression(10), x)
    expected = np.asarray(x).reshape(4, -1) @ np.asarray(params["dense_0"]["kernel"])
    np.testing.assert_allclose(apply(logistic_regression(10), params, x), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("side", "kernel_size", "padding", "pooled"),
    [(28, 5, "SAME", 7), (28, 5, "VALID", 4), (13, 3, "SAME", 3), (15, 4, "SAME", 3), (15, 4, "VALID", 1)],
)
def test_cnn_has_the_parameters_of_its_layers(side, kernel_size, padding, pooled):
    model = cnn((2, 3), (6,), 10, kernel_size, padding)
    x = jnp.zeros((2, side, side, 4))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    convs = sum((kernel_size**2 * a + 1) * b for a, b in [(4, 2), (2, 3)])
    assert num_params(params) == convs + dense_params(pooled**2 * 3, 6, 10)
    assert jax.eval_shape(model.apply, params, x).shape == (2, 10)


@pytest.mark.parametrize(("model", "count"), [(cnn2(10), 2), (cnn3(10), 3)])
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 32, 32, 3)])
def test_the_papers_networks_have_as_many_dense_layers_as_convolutions(model, count, shape):
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(shape))
    assert set(params) == {f"{kind}_{i}" for kind in ("conv", "dense") for i in range(count)}


def test_kernels_start_glorot_normal_and_biases_at_zero():
    params = start(cnn((30,), (300,), 10), jnp.zeros((1, 16, 16, 20)))
    fans = {"conv_0": 25 * (20 + 30), "dense_0": 8 * 8 * 30 + 300}
    for name, fan in fans.items():
        kernel = np.asarray(params[name]["kernel"])
        deviation = sqrt(2 / fan)
        # five standard errors of a mean and of a standard deviation over kernel.size draws
        assert abs(kernel.mean()) < 5 * deviation / sqrt(kernel.size)
        assert abs(kernel.std() / deviation - 1) < 5 / sqrt(2 * kernel.size)
    assert all(not np.any(layer["bias"]) for layer in params.values())


def test_with_fan_in_kernels_and_biases_start_uniform_within_one_over_the_root_of_the_inputs():
    params = start(cnn((30,), (300,), 10, init="fan_in"), jnp.zeros((1, 16, 16, 20)))
    for name, num_inputs in {"conv_0": 25 * 20, "dense_0": 8 * 8 * 30, "dense_1": 300}.items():
        bound = 1 / sqrt(num_inputs)
        for values in (np.asarray(params[name]["kernel"]).ravel(), np.asarray(params[name]["bias"])):
            assert np.abs(values).max() <= bound
            # five standard errors of the mean and of the mean square of uniform draws
            assert abs(values.mean()) < 5 * bound / sqrt(3 * values.size)
            assert abs((values**2).mean() / bound**2 - 1 / 3) < 5 * sqrt(4 / 45 / values.size)


@pytest.mark.parametrize("init", ["glorot", "fan_in"])
def test_layers_start_from_different_keys(init):
    params = start(mlp((5, 5), 5, init=init), jnp.zeros((1, 5)))
    kernels = [layer["kernel"] for layer in params.values()]
    assert not np.allclose(kernels[0], kernels[1])
    assert not np.allclose(kernels[1], kernels[2])


# outputs


@pytest.mark.parametrize(
    ("name", "function"),
    [("elu", lambda v: np.where(v > 0, v, np.expm1(v))), ("relu", lambda v: np.maximum(v, 0)), ("tanh", np.tanh)],
)
def test_mlp_is_its_formula(name, function):
    model = mlp((7, 5), 3, name)
    x = images()
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.1, start(model, x, seed=1))
    hidden = np.asarray(x).reshape(4, -1)
    for i in range(3):
        layer = jax.tree.map(np.asarray, params[f"dense_{i}"])
        hidden = hidden @ layer["kernel"] + layer["bias"]
        hidden = function(hidden) if i < 2 else hidden
    np.testing.assert_allclose(apply(model, params, x), hidden, rtol=1e-10)


def test_derivatives_of_an_mlp_with_elu_are_those_of_its_formula():
    model, x = mlp((7, 5), 3), images()
    params, vector = (start(model, x, seed) for seed in (1, 2))

    def formula(params):
        hidden = x.reshape(4, -1)
        for name in ("dense_0", "dense_1", "dense_2"):
            hidden = hidden @ params[name]["kernel"] + params[name]["bias"][None, :]
            hidden = hidden if name == "dense_2" else jnp.where(hidden > 0, hidden, jnp.exp(hidden) - 1)
        return jnp.sum(hidden**2)

    losses = (lambda params: jnp.sum(model.apply(params, x) ** 2)), formula
    forward = lambda loss, *own: jax.jvp(loss, *own)[1]
    derivatives = lambda loss, *own: (forward(loss, *own), jax.grad(loss)(*own[0]), forward(jax.grad(loss), *own))
    all_of = jax.jit(lambda *own: [derivatives(loss, *own) for loss in losses])
    assert_trees_close(*all_of((params,), (vector,)), rtol=1e-9)


def test_cnn_is_its_formula():
    model = cnn((3,), (), 2, kernel_size=2, padding="VALID", activation="tanh")
    x = images(shape=(2, 6, 5, 2))
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.1, start(model, x, seed=1))
    conv, dense = (jax.tree.map(np.asarray, params[name]) for name in ("conv_0", "dense_0"))
    pixels = np.asarray(x)
    activity = np.empty((2, 5, 4, 3))
    for row, col in np.ndindex(5, 4):
        patch = pixels[:, row : row + 2, col : col + 2]
        activity[:, row, col] = np.tanh(np.einsum("bijc,ijco->bo", patch, conv["kernel"]) + conv["bias"])
    pooled = np.empty((2, 2, 2, 3))
    for row, col in np.ndindex(2, 2):
        pooled[:, row, col] = activity[:, 2 * row : 2 * row + 2, 2 * col : 2 * col + 2].max(axis=(1, 2))
    expected = pooled.reshape(2, -1) @ dense["kernel"] + dense["bias"]
    np.testing.assert_allclose(apply(model, params, x), expected, rtol=1e-10)


def test_an_image_without_a_channel_axis_has_one_channel():
    model = cnn((2,), (4,), 3)
    x = images(shape=(4, 8, 8))
    params = start(model, x)
    assert_trees_close(params, start(model, x[..., None]))
    np.testing.assert_array_equal(apply(model, params, x), apply(model, params, x[..., None]))


@pytest.mark.parametrize("pooling", ["each", "last"])
def test_channels_first_and_last_are_the_same_network(pooling):
    model, x = cnn((2, 3), (6,), 3, kernel_size=3, padding="VALID", pooling=pooling), images()
    params = start(model, x)
    found = []
    for backend in ("cpu", "gpu"):
        with pretend(backend):
            found.append(jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(model.apply(p, x)))))(params))
    assert_trees_close(*found)


def test_only_the_last_convolution_is_pooled_where_that_is_asked_for():
    networks = (cnn((2, 3), (6,), 3, 3, pooling=pooling) for pooling in ("each", "last"))
    each, last = (jax.eval_shape(model.init, jax.random.key(0), images()) for model in networks)
    assert each["dense_0"]["kernel"].shape == (3 * 2 * 3, 6)
    assert last["dense_0"]["kernel"].shape == (6 * 5 * 3, 6)


@pytest.mark.parametrize("mean, deviation", [(0.5, 0.25), ((0.5, -1.0), (0.25, 2.0))])
def test_a_standardized_network_sees_inputs_less_the_mean_over_the_deviation(mean, deviation):
    plain, x = cnn((2,), (4,), 3), images()
    model = standardized(plain, mean, deviation)
    params = start(model, x)
    assert_trees_close(params, start(plain, x))
    by_hand = (np.asarray(x) - np.asarray(mean)) / np.asarray(deviation)
    np.testing.assert_allclose(apply(model, params, x), apply(plain, params, by_hand), atol=1e-12)
    assert standardized(plain, mean, deviation) is model


def test_the_number_of_means_must_match_the_channels():
    with pytest.raises(ValueError, match=r"must have one number, or 2, one for each channel .* got 3"):
        standardized(cnn2(10), (0.1, 0.2, 0.3), 1.0).init(jax.random.key(0), images())


def test_a_deviation_of_zero_is_refused():
    with pytest.raises(ValueError, match="`deviation` must be positive"):
        standardized(cnn2(10), 0.5, (0.2, 0.0))


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_the_slopes_of_the_outputs(name):
    model = NETWORKS[name]()
    x, key = images(0, (2, 8, 8)), jax.random.key(1)
    params = start(model, x)
    loss = jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(model.apply(p, x, key)))))
    ends = [loss(jax.tree.map(lambda p, r=r: np.asarray(p) + r, params))[0] for r in (1e-6, -1e-6)]
    slope = sum(np.sum(leaf) for leaf in jax.tree.leaves(loss(params)[1]))  # along a vector of ones
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6)


# dropout


def test_dropout_is_off_without_a_key_and_a_function_of_the_key():
    x = images()
    dropped, plain = (cnn((2,), (40, 40), 3, dropout=rate) for rate in (0.5, 0.0))
    params = start(dropped, x)
    one, same, other = (apply(dropped, params, x, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(apply(dropped, params, x), apply(plain, params, x))
    np.testing.assert_array_equal(apply(plain, params, x, jax.random.key(1)), apply(plain, params, x))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)


def test_dropout_keeps_the_share_and_the_scale():
    x = jnp.ones((200, 500))
    dropped = np.asarray(networks.drop_units(x, 0.2, jax.random.key(0)))
    kept = dropped > 0
    np.testing.assert_allclose(dropped[kept], 1 / 0.8)
    assert abs(kept.mean() - 0.8) < 5 * sqrt(0.8 * 0.2 / x.size)


def test_the_mask_of_an_example_does_not_depend_on_filler_rows():
    x = images()
    model = cnn((2,), (40,), 3, dropout=0.5)
    params = start(model, x)
    padded = jnp.concatenate([x, jnp.zeros_like(x)])
    full, part = (apply(model, params, given, jax.random.key(1)) for given in (padded, x))
    np.testing.assert_allclose(full[:4], part, rtol=1e-10)


# types, transformations, caching


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("x_dtype", [jnp.uint8, jnp.float32, jnp.float64])
def test_outputs_and_gradients_have_the_parameters_type(name, dtype, x_dtype):
    model = NETWORKS[name]()
    x = jnp.ones((2, 8, 8), x_dtype)
    params = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), jax.eval_shape(model.init, jax.random.key(0), x))
    key = jax.random.key(1)
    assert jax.eval_shape(model.apply, params, x, key).dtype == dtype
    gradient = jax.eval_shape(jax.grad(lambda p: model.apply(p, x, key).sum()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(dtype)}


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_start_in_the_default_float_type(name):
    x = jnp.ones((2, 8, 8), jnp.uint8)
    params = jax.eval_shape(NETWORKS[name]().init, jax.random.key(0), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.zeros(()).dtype}


@pytest.mark.parametrize("name", NETWORKS)
def test_mapping_over_clients_equals_a_loop(name):
    model = NETWORKS[name]()
    x, keys = images(0, (3, 2, 8, 8)), jax.random.split(jax.random.key(1), 3)
    params = jax.jit(jax.vmap(model.init))(keys, x)
    together = jax.jit(jax.vmap(model.apply))(params, x, keys)
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], params)
        np.testing.assert_allclose(np.asarray(together)[i], apply(model, one, x[i], keys[i]), rtol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_arguments_give_the_same_model(name):
    assert NETWORKS[name]() is NETWORKS[name]()


def test_equal_arguments_give_the_same_model_however_they_are_written():
    assert cnn2(10) is cnn2(10, dropout=0.0)
    assert cnn3(10, 0.5) is cnn3(10, dropout=0.5)
    assert mlp([80, np.int64(60)], num_outputs=10) is mlp((80, 60), 10, activation="elu")
    assert cnn(channels=[2], widths=(3,), num_outputs=4, dropout=0) is cnn((2,), (3,), 4, 5, "SAME", "relu", 0.0)
    assert mlp((80, 60), 10) is not mlp((80, 60), 10, "relu")


# errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mlp((80, 0), 10), "`widths` must be a whole number of at least 1, got 0"),
        (lambda: mlp((80, 2.5), 10), "`widths` must be a whole number"),
        (
            lambda: mlp(80, 10),
            r"`widths` must be a tuple of layer sizes, got 80. Write one layer of size 80 as \(80,\)",
        ),
        (lambda: mlp((80,), 0), "`num_outputs` must be a whole number of at least 1, got 0"),
        (lambda: mlp((80,), 10, init="zero"), "`init` must be one of 'glorot', 'fan_in', got 'zero'"),
        (lambda: mlp((80,), 10, "selu"), "`activation` must be one of 'elu', 'relu', 'tanh', got 'selu'"),
        (lambda: cnn((0,), (3,), 2), "`channels` must be a whole number"),
        (lambda: cnn((2,), (3,), 2, kernel_size=0), "`kernel_size` must be a whole number"),
        (lambda: cnn((2,), (3,), 2, padding="same"), "`padding` must be one of 'SAME', 'VALID', got 'same'"),
        (lambda: cnn((2,), (3,), 2, dropout=1.0), r"`dropout` must be in \[0, 1\), got 1.0"),
        (lambda: cnn((2,), (), 2, dropout=0.5), "`widths` must not be empty with dropout"),
        (lambda: cnn2(10).init(jax.random.key(0), jnp.zeros((2, 784))), r"got \(2, 784\). For flat inputs, use `mlp"),
        (lambda: cnn3(10).init(jax.random.key(0), jnp.zeros((2, 6, 9))), "got a side of 6. Use fewer `channels`"),
        (lambda: cnn((2,), (), 2, padding="VALID").init(jax.random.key(0), jnp.zeros((2, 9, 5))), "got a side of 5"),
    ],
)
def test_errors_state_the_requirement_the_value_and_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# adapters


class LinenNet(linen.Module):
    width: int = 6

    @linen.compact
    def __call__(self, x, deterministic=True):
        x = linen.relu(linen.Dense(self.width)(x))
        return linen.Dense(3)(linen.Dropout(0.5, deterministic=deterministic)(x))


class LinenTrain(linen.Module):
    @linen.compact
    def __call__(self, x, *, train):
        return linen.Dropout(0.5, deterministic=not train)(linen.Dense(40)(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(5, 40, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.List([nnx.Linear(40, 3, rngs=rngs)])

    def __call__(self, x):
        return self.last[0](self.drop(jax.nn.relu(self.first(x))))


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    drop: eqx.nn.Dropout
    order: jax.Array

    def __init__(self, key):
        self.first = eqx.nn.Linear(5, 40, key=key)
        self.drop = eqx.nn.Dropout(0.5)
        self.order = jnp.arange(40)[::-1]

    def __call__(self, x, *, key=None):
        return self.drop(self.first(x)[self.order], key=key)


def make_eqx_mlp(key):
    return eqx.nn.MLP(5, 3, 7, 2, activation=jnp.tanh, key=key)


class EqxWithoutKey(eqx.Module):
    inner: eqx.nn.Linear

    def __init__(self, key):
        self.inner = eqx.nn.Linear(5, 3, key=key)

    def __call__(self, x):
        return self.inner(x)


ADAPTED = {
    "linen deterministic": lambda: from_flax(LinenNet()),
    "linen train": lambda: from_flax(LinenTrain()),
    "nnx": lambda: from_nnx(NnxNet),
    "equinox": lambda: from_equinox(EqxNet),
    "equinox mlp": lambda: from_equinox(make_eqx_mlp),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_models_are_cached_and_train(name):
    model = ADAPTED[name]()
    assert model is ADAPTED[name]()
    x = images(0, (4, 5))
    params = start(model, x)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(model.apply(p, x, jax.random.key(1)) ** 2)))(params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    stacked = jax.eval_shape(jax.vmap(model.init, (0, None)), jax.random.split(jax.random.key(0), 2), x)
    outputs = jax.eval_shape(jax.vmap(model.apply, (0, None)), stacked, x)
    assert outputs.shape == (2, *jax.eval_shape(model.apply, params, x).shape)


@pytest.mark.parametrize("name", ["linen deterministic", "linen train", "nnx", "equinox"])
def test_adapted_dropout_is_off_without_a_key_and_a_function_of_the_key(name):
    model = ADAPTED[name]()
    x = images(0, (4, 5))
    params = start(model, x)
    one, same, other = (apply(model, params, x, jax.random.key(seed)) for seed in (1, 1, 2))
    plain = apply(model, params, x)
    np.testing.assert_array_equal(plain, apply(model, params, x))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    assert not np.allclose(one, plain)


def test_from_flax_equals_the_module():
    module, x, key = LinenNet(width=20), images(0, (4, 5)), jax.random.key(1)
    model = from_flax(module)
    params = start(model, x)
    variables = module.init(jax.random.key(0), x)
    assert_trees_close(params, variables["params"])
    np.testing.assert_array_equal(apply(model, params, x), apply(module, variables, x))
    expected = module.apply(variables, x, deterministic=False, rngs={"dropout": key})
    np.testing.assert_array_equal(apply(model, params, x, key), expected)


def test_from_nnx_equals_the_module():
    x, key = images(0, (4, 5)), jax.random.key(1)
    model, module = from_nnx(NnxNet), NnxNet(nnx.Rngs(jax.random.key(0)))
    params = start(model, x)
    assert_trees_close(params, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    by_hand = module.last[0](jax.nn.relu(module.first(x)))
    np.testing.assert_allclose(apply(model, params, x), by_hand, rtol=1e-10)
    seeded = NnxNet(nnx.Rngs(0, dropout=key))
    nnx.update(seeded, nnx.state(module, nnx.Param))
    np.testing.assert_allclose(apply(model, params, x, key), seeded(x), rtol=1e-10)


def test_from_equinox_equals_the_module():
    x, key = images(0, (4, 5)), jax.random.key(0)
    for make in (EqxNet, make_eqx_mlp, EqxWithoutKey):
        model, module = from_equinox(make), eqx.nn.inference_mode(make(key))
        params = start(model, x)
        expected = jax.jit(jax.vmap(module))(x)
        np.testing.assert_allclose(apply(model, params, x), expected, rtol=1e-10)
    np.testing.assert_array_equal(apply(model, params, x, key), apply(model, params, x))


def test_from_equinox_gives_each_example_its_own_mask_whatever_the_batch():
    model, x, key = from_equinox(EqxNet), jnp.ones((4, 5)), jax.random.key(1)
    params = start(model, x)
    full = np.asarray(apply(model, params, x, key))
    assert not np.allclose(full[0], full[1])
    np.testing.assert_allclose(apply(model, params, x[:2], key), full[:2], rtol=1e-10)


def test_from_equinox_can_be_called_inside_jit():
    def make(key):
        return EqxNet(key)

    x = jnp.ones((2, 5))
    params = jax.jit(lambda key: from_equinox(make).init(key, x))(jax.random.key(0))
    assert from_equinox(make).apply(params, x).shape == (2, 40)


def test_adapters_refuse_objects_that_are_not_modules():
    with pytest.raises(TypeError, match=r"instance of flax.linen.Module, got .*LinenNet"):
        from_flax(LinenNet)
    with pytest.raises(TypeError, match=r"must return an equinox.Module, got tuple"):
        from_equinox(lambda key: (EqxNet(key), None))


@pytest.mark.parametrize(
    ("adapt", "package", "extra"),
    [(from_flax, "flax.linen", "flax"), (from_nnx, "flax.nnx", "flax"), (from_equinox, "equinox", "equinox")],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, adapt, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf'needs {package}, .*pip install "personax\[{extra}\]"'):
        adapt(lambda key: key)


def test_models_do_not_import_flax_or_equinox():
    code = "import sys, personax.models; sys.exit(bool({'flax', 'equinox'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
