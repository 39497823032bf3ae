"""Batch normalization of every library: closed forms of the running statistics, padding, and the module by hand."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import personax as px
from tests.normalized import KERNELS, MOMENTUM, NETWORKS, NUM_INPUTS, RUNNING, Equinox, Linen, Nnx

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(7, NUM_INPUTS)).astype(np.float32) * 2 + 1
WEIGHT = np.array([1.0, 1, 0, 1, 1, 0, 1])
LINEN_INITIAL = Linen().init(KEY, X[:1])
every_network = pytest.mark.parametrize("name", NETWORKS)


def batch_of(x=X, weight=WEIGHT):
    return px.Batch(x, np.arange(len(x)) % 3, weight, jax.random.key(1))


@functools.cache
def started(name):
    """A network and its parameters, which tests do not change."""
    return NETWORKS[name], jax.jit(NETWORKS[name].init)(KEY, X)


def is_none(leaf):
    return leaf is None


def leaves(tree):
    return jax.tree.leaves(tree)


def assert_same(one, other, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)


@every_network
def test_running_statistics_move_to_those_of_the_rows_that_count(name):
    model, params = started(name)
    seen = X[WEIGHT > 0] @ np.asarray(KERNELS[name](params))
    old = RUNNING[name](params)
    new = RUNNING[name](jax.jit(px.classification(model).statistics)(params, batch_of()))
    share = 0.0 if name == "equinox running" else MOMENTUM  # its first batch replaces the initial statistics
    np.testing.assert_allclose(new[0], share * old[0] + (1 - share) * seen.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new[1], share * old[1] + (1 - share) * seen.var(axis=0), rtol=1e-5, atol=1e-6)


@every_network
def test_only_the_statistics_are_given_and_they_keep_their_types(name):
    model, params = started(name)
    new = jax.jit(px.classification(model).statistics)(params, batch_of())
    whole = jax.tree.map(lambda own, old: old if own is None else own, new, params, is_leaf=is_none)
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    assert [leaf.dtype for leaf in leaves(whole)] == [leaf.dtype for leaf in leaves(params)]
    assert len(leaves(new)) == (3 if name.startswith("equinox") else 2) < len(leaves(params))


@every_network
def test_filler_rows_change_neither_loss_nor_gradient_nor_statistics(name):
    model, params = started(name)
    task, x, y, weight, key = px.classification(model, l2=0.1), *batch_of()
    rows = weight > 0
    short = px.Batch(x[rows], y[rows], weight[rows], key)
    functions = task.loss, task.statistics, jax.grad(task.loss)
    assert_same(*jax.jit(lambda *both: [[of(params, batch) for of in functions] for batch in both])(batch_of(), short))


@every_network
def test_a_batch_of_fillers_leaves_the_statistics(name):
    model, params = started(name)
    task, params = px.classification(model), jax.tree.map(lambda leaf: np.asarray(leaf) + leaf.dtype.type(0.25), params)
    of_fillers = lambda params, batch: (task.statistics(params, batch), jax.grad(task.loss)(params, batch))
    new, gradient = jax.jit(of_fillers)(params, batch_of(weight=np.zeros(7)))
    assert all(np.any(leaf) for leaf in leaves(new))
    jax.tree.map(
        lambda own, old: None if own is None else np.testing.assert_array_equal(own, old),
        new,
        params,
        is_leaf=is_none,
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves(gradient))


@every_network
def test_training_sees_the_batch_and_evaluation_the_running_statistics(name):
    model, params = started(name)

    @jax.jit
    def outputs(params):
        alone = jnp.concatenate([model.apply(params, X[i : i + 1]) for i in range(3)])
        trained = model.train(params, X, jnp.ones(7), KEY)[0]
        return alone, model.apply(params, X), model.apply(params, X, KEY), trained

    alone, evaluated, with_key, trained = map(np.asarray, outputs(params))
    np.testing.assert_allclose(evaluated[:3], alone, rtol=1e-5, atol=1e-6)
    assert not np.allclose(with_key[:3], evaluated[:3], atol=1e-3)
    np.testing.assert_array_equal(with_key, trained)


@every_network
def test_no_gradient_moves_the_statistics_but_l2_moves_the_rest(name):
    model, params = started(name)
    tasks = [px.classification(model, l2=l2) for l2 in (0.5, 0.0)]
    of_both = lambda *own: [(jax.grad(task.loss)(*own), task.metrics(*own)["loss"]) for task in tasks]
    (penalized, more), (plain, less) = jax.jit(of_both)(params, batch_of())
    new = jax.eval_shape(tasks[1].statistics, params, batch_of())
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), new)
    moved = jax.tree.map(lambda zero, old: old if zero is None else zero, zeros, params, is_leaf=is_none)
    half = jax.tree.map(lambda leaf: 0.5 * np.asarray(leaf), moved)
    assert_same(jax.tree.map(np.subtract, penalized, plain), half)
    assert_same(more - less, 0.25 * sum(np.sum(np.square(leaf)) for leaf in leaves(moved)))


def test_our_own_layer_is_the_equation_for_images_too():
    model = px.cnn((3,), (4,), 2, kernel_size=3, norm="batch")
    x = np.random.default_rng(1).normal(size=(6, 6, 6, 1))
    params = jax.jit(model.init)(KEY, x)
    assert set(params["conv_0"]) == {"kernel"} and set(params["dense_1"]) == {"kernel", "bias"}
    weight = jnp.array([1.0, 1, 1, 1, 0, 0])
    outputs, new = jax.jit(model.train)(params, x, weight, KEY)
    maps = np.asarray(
        jax.lax.conv_general_dilated(
            x[:4], params["conv_0"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    mean, var = maps.mean(axis=(0, 1, 2)), maps.var(axis=(0, 1, 2))
    np.testing.assert_allclose(new["norm_0"]["mean"], 0.1 * mean, rtol=1e-6)
    np.testing.assert_allclose(new["norm_0"]["var"], 0.9 + 0.1 * var, rtol=1e-6)
    hidden = np.maximum((maps - mean) / np.sqrt(var + 1e-5), 0)
    pooled = hidden.reshape(4, 3, 2, 3, 2, 3).max(axis=(2, 4)).reshape(4, -1)
    dense = pooled @ np.asarray(params["dense_0"]["kernel"])
    dense = np.maximum((dense - dense.mean(axis=0)) / np.sqrt(dense.var(axis=0) + 1e-5), 0)
    by_hand = dense @ np.asarray(params["dense_1"]["kernel"]) + np.asarray(params["dense_1"]["bias"])
    np.testing.assert_allclose(outputs[:4], by_hand, rtol=1e-6)


def test_an_averaged_variance_below_zero_counts_as_zero():
    model = px.mlp((4,), 3, norm="batch")
    params = jax.jit(model.init)(KEY, X)
    params["norm_0"]["var"] = jnp.full(4, -0.5)
    assert np.all(np.isfinite(jax.jit(model.apply)(params, X)))


def test_from_flax_equals_the_module_in_both_modes():
    model, variables = NETWORKS["linen"], LINEN_INITIAL
    params = model.init(KEY, X)
    assert_same(params, {"params": variables["params"], "batch_stats": variables["batch_stats"]})
    expected, new = Linen().apply(variables, X, train=True, mutable=["batch_stats"])
    outputs, statistics = model.train(params, X, jnp.ones(7), KEY)
    assert_same(outputs, expected)
    assert_same(statistics["batch_stats"], new["batch_stats"])
    assert_same(model.apply(params, X), Linen().apply(variables, X))


def test_from_nnx_equals_the_module_in_both_modes():
    model, module = NETWORKS["nnx"], Nnx(nnx.Rngs(KEY))
    params = model.init(KEY, X)
    module.train()
    expected = module(X)
    outputs, statistics = model.train(params, X, jnp.ones(7), KEY)
    assert_same(outputs, expected)
    assert_same(statistics["norm"]["mean"], module.norm.mean[...])
    module.eval()
    params["norm"] |= {name: statistics["norm"][name] for name in ("mean", "var")}
    assert_same(model.apply(params, X), module(X))


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_from_equinox_equals_the_module_in_both_modes(mode):
    model = NETWORKS["equinox" if mode == "batch" else "equinox running"]
    module, state = eqx.nn.make_with_state(Equinox)(KEY, mode)
    params = model.init(KEY, X)
    train = jax.jit(model.train)
    of_rows = lambda module: jax.jit(jax.vmap(module, axis_name="rows", in_axes=(0, None), out_axes=(0, None)))
    train_module = of_rows(module)
    for _ in range(3):
        expected, state = train_module(X, state)
        outputs, statistics = train(params, X, np.ones(7), KEY)
        assert_same(outputs, expected)
        params = jax.tree.map(lambda own, old: old if own is None else own, statistics, params, is_leaf=is_none)
    expected, _ = of_rows(eqx.nn.inference_mode(module))(X, state)
    assert_same(jax.jit(model.apply)(params, X), expected)


class Fixed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(x)


class Turned(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        return linen.BatchNorm(use_running_average=not train)(x.T).T


class Sowing(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.variable("memory", "last", lambda: x)
        return x


class TwoAxes(eqx.Module):
    first: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm

    def __init__(self, key):
        self.first, self.second = (eqx.nn.BatchNorm(5, axis, mode="batch") for axis in ("a", "b"))


def test_networks_whose_statistics_cannot_be_followed_are_refused():
    with pytest.raises(ValueError, match=r"Fixed has batch normalization.* Give it the argument `train`"):
        px.from_flax(Fixed()).init(KEY, X)
    turned = px.from_flax(Turned())
    with pytest.raises(ValueError, match=r"must see the batch as its leading axis, got \(5, 7\) for a batch of 7"):
        turned.train(turned.init(KEY, X), X, jnp.ones(7), KEY)
    with pytest.raises(ValueError, match=r"statistics of batch normalization, got \['memory'\]. Remove other state"):
        px.from_flax(Sowing()).init(KEY, X)
    with pytest.raises(ValueError, match=r"the same `axis_name`, got \['a', 'b'\]"):
        px.from_equinox(TwoAxes)
    with pytest.raises(TypeError, match=r"got tuple. For a module with state, return only the module"):
        px.from_equinox(eqx.nn.make_with_state(Equinox))


def test_slices_of_a_batch_are_refused():
    task = px.rematerialize(px.classification(NETWORKS["own"]), 3)
    params = NETWORKS["own"].init(KEY, X)
    with pytest.raises(
        ValueError, match=r"`rematerialize` .* which with batch normalization is not the loss of the batch of 7"
    ):
        task.loss(params, batch_of())
    whole = px.rematerialize(px.classification(NETWORKS["own"]), 7)
    assert_same(whole.loss(params, batch_of()), px.classification(NETWORKS["own"]).loss(params, batch_of()))


@pytest.mark.parametrize("name", ["own", "linen", "nnx"])
def test_networks_with_adapters_keep_their_statistics(name):
    inner, model = NETWORKS[name], px.lora(NETWORKS[name], rank=2)
    params = jax.jit(model.init)(KEY, X)
    both = lambda params: ((model, params), (inner, params["base"]))
    trained = lambda params: [one.train(own, X, jnp.asarray(WEIGHT), KEY) for one, own in both(params)]
    (outputs, new), expected = jax.jit(trained)(params)
    assert_same(outputs, expected[0])  # the adapters start at zero
    assert_same(new["base"], expected[1])
    assert not leaves(new["lora"]) and leaves(new)
    assert_same(*jax.jit(lambda params: [one.apply(own, X) for one, own in both(params)])(params))


def test_standardized_networks_keep_their_statistics():
    inner = px.mlp((4,), 3, norm="batch")
    model = px.models.standardized(inner, 1.0, 2.0)
    params = model.init(KEY, X)
    one = px.classification(model).statistics(params, batch_of())
    assert_same(one, px.classification(inner).statistics(params, batch_of((X - 1) / 2)))
