"""Adapters on dense layers: the initial base, products equal to merged ones, and no kernel per client."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import personax
from personax.fast.low_rank import find_dense
from personax.models import cnn, dual_lora, from_equinox, from_flax, from_nnx, lora, mlp
from personax.typing import Batch, Model


def flat(batch=4, size=6):
    return jnp.asarray(np.random.default_rng(0).normal(size=(batch, size)))


def sequences():
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 8)))


class Perceptron(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(3, param_dtype=float)(jnp.tanh(linen.Dense(7, param_dtype=float)(x)))


class Attention(linen.Module):
    """Kernels with several axes: [model, head, size] and [head, size, model]."""

    @linen.compact
    def __call__(self, x):
        return linen.MultiHeadDotProductAttention(num_heads=2, param_dtype=float)(x).mean(axis=1)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 7, param_dtype=float, rngs=rngs)
        self.second = nnx.Linear(7, 3, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return self.second(jax.nn.gelu(self.first(x)))


def equinox_mlp(key):
    return eqx.nn.MLP(6, 3, 7, 2, dtype=float, key=key)


def stacked(remat=False):
    """Three layers with the axes [layer, input, output], in a loop."""

    def init(key, x):
        return {"layers": {"kernel": jax.random.normal(key, (3, 6, 6)) / 3, "shift": jnp.zeros((3, 6))}}

    def layer(x, own):
        return jnp.tanh(x @ own["kernel"] + own["shift"][None]), None

    step = jax.checkpoint(layer) if remat else layer
    return Model(init, lambda params, x, key=None: jax.lax.scan(step, x, params["layers"])[0])


def recurrent():
    """One kernel at each step of a loop over time."""

    def init(key, x):
        keys = jax.random.split(key)
        return {name: {"kernel": jax.random.normal(own, (8, 8)) / 3} for name, own in zip("hx", keys, strict=True)}

    def apply(params, x, key=None):
        def step(state, now):
            return jnp.tanh(state @ params["h"]["kernel"] + now @ params["x"]["kernel"]), None

        return jax.lax.scan(step, x[:, 0], x.swapaxes(0, 1))[0]

    return Model(init, apply)


def tied():
    """An encoder and a decoder with the same kernel, once transposed; experts multiply in a batch; a branch."""

    def init(key, x):
        keys = jax.random.split(key)
        return {
            "kernel": jax.random.normal(keys[0], (6, 4)),
            "experts": {"kernel": jax.random.normal(keys[1], (3, 6, 5))},
        }

    def apply(params, x, key=None):
        decoded = jnp.tanh(x @ params["kernel"]) @ params["kernel"].T
        chosen = jax.lax.cond(x.sum() > 0, lambda w: decoded @ w, lambda w: 2 * decoded @ w, params["kernel"])
        return jnp.einsum("nd,edo->neo", decoded, params["experts"]["kernel"]).sum(axis=1).sum(-1) + chosen.sum(-1)

    return Model(init, apply)


CASES = {
    "mlp": (mlp((7, 5), 3), "*.kernel", flat),
    "cnn": (cnn((2,), (5,), 3, kernel_size=3), "*.kernel", lambda: flat(4, 64).reshape(4, 8, 8)),
    "linen": (from_flax(Perceptron()), "*.kernel", flat),
    "attention": (from_flax(Attention()), "*.kernel", sequences),
    "nnx": (from_nnx(lambda rngs: Nnx(rngs)), "*.kernel", flat),
    "equinox": (from_equinox(equinox_mlp), "*.weight", flat),
    "stacked": (stacked(), "*.kernel", flat),
    "remat": (stacked(remat=True), "*.kernel", flat),
    "recurrent": (recurrent(), "*.kernel", sequences),
    "tied": (tied(), "*kernel", flat),
}


def by_name(params):
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(keys, simple=True, separator="."): leaf for keys, leaf in leaves}


def disturbed(params, seed=1):
    """Change all numbers, so that no term is zero."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.asarray(leaf) + 0.3 * rng.normal(size=leaf.shape), params)


def merged(base, adapters, layouts, scale=1.0):
    """The base with W + scale A B in place of each kernel W, in NumPy."""
    leaves, named = by_name(base), by_name(adapters)
    for name in [name[:-2] for name in named if name.endswith(".a")]:
        stacked, inputs, outputs = layouts[name]
        a, b = np.asarray(named[f"{name}.a"]), np.asarray(named[f"{name}.b"])
        rows = a.reshape(*a.shape[: len(stacked)], -1, a.shape[-1])
        change = rows @ b.reshape(*b.shape[: len(stacked)], b.shape[len(stacked)], -1)
        order = (*stacked, *inputs, *outputs)
        shape = [leaves[name].shape[axis] for axis in order]
        leaves[name] = leaves[name] + scale * change.reshape(shape).transpose(np.argsort(order))
    return jax.tree.unflatten(jax.tree.structure(base), list(leaves.values()))


def layouts_of(model, base, x):
    structure, names = jax.tree.structure(base), list(by_name(base))
    run = lambda leaves, x: model.apply(jax.tree.unflatten(structure, [leaves[name] for name in names]), x)
    return find_dense(run, by_name(base), x)


@pytest.mark.parametrize("name", CASES)
def test_the_network_starts_as_its_base_and_computes_as_if_merged(name):
    model, on, make = CASES[name]
    x, adapted = make(), lora(model, 2, on, scale=0.5)
    params = jax.jit(adapted.init)(jax.random.key(0), x)
    assert by_name(params["lora"])
    changed = disturbed(params)
    whole = merged(changed["base"], changed["lora"], layouts_of(model, params["base"], x), 0.5)
    both = jax.jit(lambda params, base: (adapted.apply(params, x), model.apply(base, x)))
    outputs, of_base = both(params, params["base"])
    np.testing.assert_allclose(outputs, of_base, rtol=1e-12)
    outputs, of_whole = both(changed, whole)
    assert np.abs(outputs - both(params, changed["base"])[1]).max() > 1e-3
    np.testing.assert_allclose(outputs, of_whole, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_adapters_are_those_of_the_merged_kernels(name):
    """For f(W + A B) with the gradient G at W + A B, the gradients are G B' and A' G, and that of W is G."""
    model, on, make = CASES[name]
    x, adapted = make(), lora(model, 2, on)
    shapes = jax.eval_shape(adapted.init, jax.random.key(0), x)
    params = disturbed(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    layouts = layouts_of(model, params["base"], x)
    whole = merged(params["base"], params["lora"], layouts)
    gradient = lambda model, params: jax.grad(lambda params: jnp.sum(jnp.sin(model.apply(params, x))))(params)
    found, expected = jax.jit(lambda *own: (gradient(adapted, own[0]), gradient(model, own[1])))(params, whole)
    expected = by_name(expected)
    for own, gradient in by_name(found["base"]).items():
        np.testing.assert_allclose(gradient, expected[own], rtol=1e-8, atol=1e-10)
    adapters, gradients = by_name(params["lora"]), by_name(found["lora"])
    for kernel in [own[:-2] for own in adapters if own.endswith(".a")]:
        num, inputs, outputs = (len(axes) for axes in layouts[kernel])
        own = np.asarray(expected[kernel]).transpose([axis for axes in layouts[kernel] for axis in axes])
        batch, of_in, of_out = "nm"[:num], "ijk"[:inputs], "xyz"[:outputs]
        of_a, of_b, of_w = f"{batch}{of_in}r", f"{batch}r{of_out}", f"{batch}{of_in}{of_out}"
        a, b = adapters[f"{kernel}.a"], adapters[f"{kernel}.b"]
        np.testing.assert_allclose(gradients[f"{kernel}.a"], np.einsum(f"{of_w},{of_b}->{of_a}", own, b), rtol=1e-8)
        np.testing.assert_allclose(gradients[f"{kernel}.b"], np.einsum(f"{of_w},{of_a}->{of_b}", own, a), rtol=1e-8)


def test_convolutions_and_tied_embeddings_have_no_adapters():
    x = flat(4, 64).reshape(4, 8, 8)
    params = jax.eval_shape(lora(cnn((2,), (5,), 3, kernel_size=3), 2).init, jax.random.key(0), x)
    assert list(params["lora"]) == ["dense_0", "dense_1"]

    def embedded(params, x, key=None):
        table = params["embedding"]["kernel"]
        return jnp.tanh(table[x] @ params["dense"]["kernel"]) @ table.T

    init = lambda key, x: {name: {"kernel": jnp.ones((5, 5))} for name in ("embedding", "dense")}
    params = jax.eval_shape(lora(Model(init, embedded), 2).init, jax.random.key(0), jnp.arange(3))
    assert list(params["lora"]) == ["dense"]


def test_dual_adapters_are_mixed():
    x, model = flat(), mlp((7,), 3)
    dual = dual_lora(model, 2, mix=0.25, scale=2.0)
    params = disturbed(jax.jit(dual.init)(jax.random.key(0), x))
    layouts = layouts_of(model, params["base"], x)
    both = merged(merged(params["base"], params["global"], layouts, 1.5), params["local"], layouts, 0.5)
    np.testing.assert_allclose(jax.jit(dual.apply)(params, x), jax.jit(model.apply)(both, x), rtol=1e-10)


def test_dropout_is_that_of_the_model():
    x, model = flat(4, 64).reshape(4, 8, 8), cnn((2,), (5,), 3, kernel_size=3, dropout=0.5)
    adapted = lora(model, 2)
    params, key = jax.jit(adapted.init)(jax.random.key(0), x), jax.random.key(5)
    both = jax.jit(lambda params, key: (adapted.apply(params, x, key), model.apply(params["base"], x, key)))
    np.testing.assert_array_equal(*both(params, key))


def test_adapters_have_the_type_of_their_kernel():
    model = mlp((7,), 3)
    half = Model(lambda key, x: jax.tree.map(lambda w: w.astype(jnp.bfloat16), model.init(key, x)), model.apply)
    params = jax.eval_shape(lora(half, 2).init, jax.random.key(0), flat())
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(lora(half, 2).apply, params, flat()).dtype == jnp.bfloat16


def test_no_array_of_a_client_has_the_size_of_a_kernel():
    """Clients with their own adapters multiply by one W: nothing in the program of their gradients is larger."""
    num_clients, width, rank = 6, 64, 2
    x = jnp.ones((num_clients, 3, width))
    model = lora(mlp((width, width), width), rank)
    params = jax.jit(model.init)(jax.random.key(0), x[0])

    def loss(adapters, x):
        return jnp.sum(jnp.square(model.apply({**params, "lora": adapters}, x)))

    own = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_clients), params["lora"])
    program = jax.make_jaxpr(jax.vmap(jax.grad(loss)))(own, x)
    made = [var.aval.size for equation in program.eqns for var in equation.outvars]
    assert max(made) < width * width
    merge = lambda adapters: {
        layer: {
            **params["base"][layer],
            "kernel": params["base"][layer]["kernel"] + own["kernel"]["a"] @ own["kernel"]["b"],
        }
        for layer, own in adapters.items()
    }
    as_merged = lambda adapters, x: jnp.sum(jnp.square(mlp((width, width), width).apply(merge(adapters), x)))
    program = jax.make_jaxpr(jax.vmap(jax.grad(as_merged)))(own, x)
    assert max(var.aval.size for equation in program.eqns for var in equation.outvars) == num_clients * width**2


def test_equal_arguments_give_the_same_model():
    assert lora(mlp((7,), 3), 2) is lora(mlp((7,), 3), 2, ["*.kernel"])
    assert lora(mlp((7,), 3), 2) is not lora(mlp((7,), 3), 3)


@pytest.mark.parametrize(
    ("on", "layers"),
    [("dense_0", ["dense_0"]), (("*.kernel", "!dense_1"), ["dense_0", "dense_2"]), ("*_1.*", ["dense_1"])],
)
def test_kernels_are_selected_like_other_parameters(on, layers):
    params = jax.eval_shape(lora(mlp((5, 4), 3), 2, on).init, jax.random.key(0), jnp.ones((1, 6)))
    assert sorted(params["lora"]) == layers


def test_a_pattern_without_dense_kernels_lists_the_names():
    model = lora(from_equinox(equinox_mlp), 2)
    with pytest.raises(ValueError, match=r"in `on`. Dense kernels: layers.0.weight, .*layers.2.bias"):
        model.init(jax.random.key(0), flat())
    with pytest.raises(ValueError, match=r"No dense kernel matches 'conv_\*'"):
        lora(cnn((2,), (5,), 3), 2, ["*.kernel", "conv_*"]).init(jax.random.key(0), jnp.ones((2, 8, 8)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: lora(mlp((7,), 3), 0), "`rank`"),
        (lambda: lora(mlp((7,), 3), 2, []), "`on` is empty"),
        (lambda: lora(mlp((7,), 3), 2, scale=0.0), "`scale` must be positive"),
        (lambda: dual_lora(mlp((7,), 3), 2, mix=1.0), "`mix` must lie strictly between"),
    ],
)
def test_wrong_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_kernel_that_another_program_reads_differently_is_an_error():
    init = lambda key, x: {"kernel": jnp.ones((6, 6))}
    apply = lambda params, x, key=None: x @ params["kernel"] + (0.0 if key is None else params["kernel"][0][None])
    model = lora(Model(init, apply), 2, "kernel")
    params = model.init(jax.random.key(0), flat())
    with pytest.raises(ValueError, match="`kernel` is used here outside matrix products"):
        model.apply(params, flat(), jax.random.key(0))


def test_adapters_train_in_a_task():
    x, model = flat(), lora(mlp((7,), 3), 2)
    task = personax.classification(model)
    params = jax.jit(model.init)(jax.random.key(0), x)
    batch = Batch(x, jnp.array([0, 1, 2, 0]), jnp.ones(4), jax.random.key(0))
    gradient = jax.jit(jax.grad(task.loss))(params, batch)
    assert all(np.abs(own["kernel"]["b"]).max() > 0 for own in gradient["lora"].values())
    assert all(np.abs(own["kernel"]["a"]).max() == 0 for own in gradient["lora"].values())  # because B is zero


class NnxAdapters(nnx.Module):
    """Flax's own adapters."""

    def __init__(self, rngs):
        self.first = nnx.LoRALinear(6, 7, lora_rank=2, param_dtype=float, rngs=rngs)
        self.second = nnx.Linear(7, 3, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def test_adapters_of_another_library_are_divided_by_their_names():
    model = from_nnx(lambda rngs: NnxAdapters(rngs))
    fed = personax.Federation.from_clients([(np.asarray(flat(5)), np.arange(5) % 3)] * 2)
    sharing = personax.Sharing(personal="*.lora_b", frozen=("*.kernel", "*.bias"))
    local = personax.Local(0.1, num_steps=2, batch_size=3)
    algorithm = personax.Algorithm(personax.Erm(), local, personax.synchronous(), sharing)
    key, task = jax.random.key(0), personax.classification(model)
    params = disturbed(jax.jit(model.init)(key, flat()))
    result = personax.simulate(algorithm, task, fed, personax.rounds(2, 1, 2, key=key), key=key, params=params)
    changed = {name for name, leaf in by_name(result.params).items() if np.any(leaf != by_name(params)[name])}
    assert changed == {"first.lora.lora_a"}
    assert list(by_name(result.personal.part)) == ["first.lora.lora_b"]
