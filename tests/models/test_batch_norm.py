"""Batch normalization of every library: closed forms of the running statistics, padding, and the module by hand."""

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
    return px.Batch(jnp.asarray(x), jnp.arange(len(x)) % 3, jnp.asarray(weight), jax.random.key(1))


def is_none(leaf):
    return leaf is None


def leaves(tree):
    return jax.tree.leaves(tree)


def assert_same(one, other, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)


@every_network
def test_running_statistics_move_to_those_of_the_rows_that_count(name):
    model = NETWORKS[name]
    task, params = px.classification(model), model.init(KEY, X)
    seen = X[WEIGHT > 0] @ np.asarray(KERNELS[name](params))
    old = RUNNING[name](params)
    new = RUNNING[name](task.statistics(params, batch_of()))
    share = 0.0 if name == "equinox running" else MOMENTUM  # its first batch replaces the initial statistics
    np.testing.assert_allclose(new[0], share * old[0] + (1 - share) * seen.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new[1], share * old[1] + (1 - share) * seen.var(axis=0), rtol=1e-5, atol=1e-6)


@every_network
def test_only_the_statistics_are_given_and_they_keep_their_types(name):
    model = NETWORKS[name]
    params = model.init(KEY, X)
    new = px.classification(model).statistics(params, batch_of())
    whole = jax.tree.map(lambda own, old: old if own is None else own, new, params, is_leaf=is_none)
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    assert [leaf.dtype for leaf in leaves(whole)] == [leaf.dtype for leaf in leaves(params)]
    assert len(leaves(new)) == (3 if name.startswith("equinox") else 2) < len(leaves(params))


@every_network
def test_filler_rows_change_neither_loss_nor_gradient_nor_statistics(name):
    model = NETWORKS[name]
    task, params = px.classification(model, l2=0.1), model.init(KEY, X)
    short = batch_of()
    short = jax.tree.map(lambda leaf: leaf[WEIGHT > 0], short._replace(key=None))._replace(key=short.key)
    for function in (task.loss, task.statistics, jax.grad(task.loss)):
        assert_same(function(params, batch_of()), function(params, short))


@every_network
def test_a_batch_of_fillers_leaves_the_statistics(name):
    model = NETWORKS[name]
    task, params = px.classification(model), model.init(KEY, X)
    params = jax.tree.map(lambda leaf: leaf + 0.25, params)
    new = task.statistics(params, batch_of(weight=np.zeros(7)))
    assert all(np.any(leaf) for leaf in leaves(new))
    jax.tree.map(
        lambda own, old: None if own is None else np.testing.assert_array_equal(own, old),
        new,
        params,
        is_leaf=is_none,
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in leaves(jax.grad(task.loss)(params, batch_of(weight=np.zeros(7)))))


@every_network
def test_training_sees_the_batch_and_evaluation_the_running_statistics(name):
    model = NETWORKS[name]
    params = model.init(KEY, X)
    alone = lambda **options: np.concatenate([model.apply(params, X[i : i + 1], **options) for i in range(3)])
    np.testing.assert_allclose(model.apply(params, X)[:3], alone(), rtol=1e-5, atol=1e-6)
    assert not np.allclose(model.apply(params, X, KEY)[:3], model.apply(params, X)[:3], atol=1e-3)
    trained = model.train(params, X, jnp.ones(7), KEY)[0]
    np.testing.assert_array_equal(model.apply(params, X, KEY), trained)


@every_network
def test_no_gradient_moves_the_statistics_but_l2_moves_the_rest(name):
    model = NETWORKS[name]
    params = model.init(KEY, X)
    loss, penalized = px.classification(model).loss, px.classification(model, l2=0.5).loss
    extra = jax.tree.map(jnp.subtract, jax.grad(penalized)(params, batch_of()), jax.grad(loss)(params, batch_of()))
    new = px.classification(model).statistics(params, batch_of())
    zeros = jax.tree.map(jnp.zeros_like, new)
    moved = jax.tree.map(lambda zero, old: old if zero is None else zero, zeros, params, is_leaf=is_none)
    assert_same(extra, jax.tree.map(lambda leaf: 0.5 * leaf, moved))
    penalty = 0.25 * sum(np.sum(np.square(leaf)) for leaf in leaves(moved))
    scored = [px.classification(model, l2=l2).metrics(params, batch_of())["loss"] for l2 in (0.5, 0.0)]
    assert_same(scored[0] - scored[1], penalty)


def test_our_own_layer_is_the_equation_for_images_too():
    model = px.cnn((3,), (4,), 2, kernel_size=3, norm="batch")
    x = np.random.default_rng(1).normal(size=(6, 6, 6, 1))
    params = model.init(KEY, x)
    assert set(params["conv_0"]) == {"kernel"} and set(params["dense_1"]) == {"kernel", "bias"}
    weight = jnp.array([1.0, 1, 1, 1, 0, 0])
    outputs, new = model.train(params, x, weight, KEY)
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
    params = model.init(KEY, X)
    params["norm_0"]["var"] = jnp.full(4, -0.5)
    assert np.all(np.isfinite(model.apply(params, X)))


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
    for _ in range(3):
        expected, state = jax.vmap(module, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(X, state)
        outputs, statistics = model.train(params, X, jnp.ones(7), KEY)
        assert_same(outputs, expected)
        params = jax.tree.map(lambda own, old: old if own is None else own, statistics, params, is_leaf=is_none)
    expected, _ = jax.vmap(eqx.nn.inference_mode(module), axis_name="rows", in_axes=(0, None), out_axes=(0, None))(
        X, state
    )
    assert_same(model.apply(params, X), expected)


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
    params = model.init(KEY, X)
    outputs, new = model.train(params, X, jnp.asarray(WEIGHT), KEY)
    expected = inner.train(params["base"], X, jnp.asarray(WEIGHT), KEY)
    assert_same(outputs, expected[0])  # the adapters start at zero
    assert_same(new["base"], expected[1])
    assert not leaves(new["lora"]) and leaves(new)
    assert_same(model.apply(params, X), inner.apply(params["base"], X))


def test_standardized_networks_keep_their_statistics():
    inner = px.mlp((4,), 3, norm="batch")
    model = px.models.standardized(inner, 1.0, 2.0)
    params = model.init(KEY, X)
    one = px.classification(model).statistics(params, batch_of())
    assert_same(one, px.classification(inner).statistics(params, batch_of((X - 1) / 2)))
