"""Rewritten programs compute what the plain ones do: outputs, gradients, Hessian products, random bits."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import personax as px
from personax.bench.own import Lstm, own_model
from personax.fast.backends import pretend
from personax.fast.passes import optimized
from personax.fast.programs import inlined
from personax.fast.rewrite import count_rewrites, has_rule, rewritten
from personax.models import from_equinox, from_flax, from_nnx

IMAGES, SIGNALS, TOKENS = (8, 8, 3), (16, 4), (6,)


class NnxCnn(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
        self.dense = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), strides=(2, 2))
        return self.dense(x.reshape(len(x), -1))


class EquinoxCnn(eqx.Module):
    conv: eqx.nn.Conv2d
    depthwise: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    dense: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(3, 4, 3, stride=2, padding=1, key=keys[0])
        self.depthwise = eqx.nn.Conv2d(4, 4, 3, padding="SAME", groups=4, key=keys[1])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.dense = eqx.nn.Linear(16, 10, key=keys[2])

    def __call__(self, x):
        return self.dense(self.pool(self.depthwise(jax.nn.relu(self.conv(x.transpose(2, 0, 1))))).reshape(-1))


own = functools.partial(own_model, channels=(4, 5), widths=(12,), num_outputs=10)
# A model, the shape of a sample, and how many equations of each primitive are rewritten.
NETWORKS = {
    "px.cnn": (lambda: px.cnn((4, 5), (12,), 10, 3, dropout=0.5), IMAGES, {"conv": 2, "reduce_window_max": 2}),
    "px.mlp": (lambda: px.mlp((12,), 10), IMAGES, {}),
    "flax-cnn": (lambda: own("flax-cnn"), IMAGES, {"conv": 2, "reduce_window_max": 1}),
    "flax-mlp": (lambda: own("flax-mlp"), IMAGES, {}),
    "resnet": (lambda: own("resnet"), IMAGES, {"conv": 9, "reduce_sum": 14}),
    "signal-cnn": (lambda: own("signal-cnn"), SIGNALS, {"conv": 2, "reduce_window_max": 2}),
    "lstm": (lambda: from_flax(Lstm(10, width=8)), TOKENS, {"scan": 2}),
    "transformer": (lambda: own("transformer"), TOKENS, {}),
    "nnx": (lambda: from_nnx(NnxCnn), IMAGES, {"conv": 1, "reduce_window_sum": 1, "reduce_sum": 2}),
    "equinox": (lambda: from_equinox(EquinoxCnn), IMAGES, {"conv": 2, "reduce_window_max": 1}),
}


def draw(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def setting(name):
    """A task, its parameters, a batch with a filler row, and the counts; in 64 bits where the network allows it."""
    make, shape, counts = NETWORKS[name]
    task, rng = px.classification(make()), np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 255, (5, *shape)) if shape is TOKENS else rng.normal(size=(5, *shape)))
    dtype = jnp.float32 if name == "lstm" else float  # the carry of Flax's cells is of their own type
    shapes = jax.eval_shape(task.model.init, jax.random.key(1), x)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 3, dtype), shapes)
    batch = px.Batch(x, rng.integers(0, 10, 5), np.array([1.0, 1, 1, 1, 0]), jax.random.key(2))
    return task, params, batch, {name.replace("conv", "conv_general_dilated"): num for name, num in counts.items()}


def assert_same(found, truth, rtol=1e-9):
    for leaf, true in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(leaf, true, rtol=rtol, atol=rtol * max(float(np.abs(true).max()), 1e-6))


def derivatives(task, params, batch):
    """The loss and metrics, the gradient and a product with the Hessian."""
    gradient = jax.grad(task.loss)
    product = jax.jvp(lambda params: gradient(params, batch), (params,), (params,))[1]
    return task.loss(params, batch), task.metrics(params, batch), gradient(params, batch), product


def of_each(function, ways):
    """A function of each of several ways, compiled together."""
    return jax.jit(lambda *given: [function(way, *given) for way in ways])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_rewritten_network_is_the_network(name):
    task, params, batch, counts = setting(name)
    assert count_rewrites(task.loss, params, batch) == counts
    found, truth = of_each(derivatives, (optimized(task), task))(params, batch)
    assert_same(found, truth, rtol=1e-4 if name == "lstm" else 1e-9)


def test_a_program_for_a_gpu_is_traced_and_the_same():
    task, params, batch, counts = setting("flax-cnn")
    with pretend("gpu"):
        assert count_rewrites(task.loss, params, batch) == counts
        found, truth = of_each(derivatives, (optimized(task._replace(check=None)), task))(params, batch)
    assert_same(found, truth)


def test_passes_can_be_turned_off():
    task = px.classification(own("flax-cnn"))
    assert optimized(task, "none") is task and optimized(task) is optimized(task)
    clients = [(draw(seed, (6, *IMAGES)), np.arange(6) % 3) for seed in range(2)]
    federation, key = px.Federation.from_clients(clients), jax.random.key(0)
    algorithm = px.per_fedavg(adapt_lr=0.1, lr=0.1, num_steps=2, batch_size=3)
    params = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf.astype(float), task.model.init(key, x)))(clients[0][0])
    run = lambda passes: px.simulate(
        algorithm,
        task,
        federation,
        px.rounds(2, 2, key=key),
        key=key,
        params=params,
        execution=px.Execution(passes=passes),
    )
    assert_same(run("all").params, run("none").params)
    with pytest.raises(ValueError, match="`passes`"):
        px.Execution(passes="some")


# calls


def conv(x):
    kernel = jnp.arange(9.0).reshape(3, 3, 1, 1) / 9
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_jvp
def own_jvp(x):
    return conv(x)


@own_jvp.defjvp
def _own_jvp(primals, tangents):
    return own_jvp(*primals), 3 * tangents[0]  # not the derivative, so that it shows


@jax.custom_vjp
def own_vjp(x):
    return conv(x)


own_vjp.defvjp(lambda x: (own_vjp(x), ()), lambda kept, slope: (5 * slope,))

CALLS = {
    "jit": jax.jit(conv),
    "nested jit": jax.jit(lambda x: jnp.sin(jax.jit(conv)(x))),
    "custom_jvp": own_jvp,
    "custom_vjp": own_vjp,
    "remat": jax.checkpoint(lambda x: jnp.sin(conv(x))),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.sin(conv(c)), c.sum()), x, length=3),
    "while": lambda x: jax.lax.while_loop(lambda c: conv(c)[0, 0, 0, 0] < 3, lambda c: conv(c) + 1, x),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, conv, lambda x: 2 * x, x),
    "inside both": jax.jit(lambda x: jax.lax.scan(lambda c, _: (own_jvp(c), None), x, length=2)[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_entered_and_keep_their_derivative_rules(name):
    call, x = CALLS[name], jnp.abs(draw(0, (2, 4, 4, 1)))
    assert count_rewrites(call, x)["conv_general_dilated"] == (2 if name == "while" else 1)

    def all_of(call, x):
        total = lambda x: sum(map(jnp.sum, jax.tree.leaves(call(x))))
        push = None if name == "custom_vjp" else jax.jvp(total, (x,), (x,))  # JAX has no forward mode for it
        return call(x), push, None if name == "while" else jax.grad(total)(x)  # and no reverse mode for this

    assert_same(*of_each(all_of, (rewritten(call), call))(x))


def test_calls_without_a_convolution_are_left_as_they_are():
    def network(x):
        x = jax.nn.relu(conv(x))
        return jax.nn.softplus(jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=2)[0])

    x = draw(0, (2, 4, 4, 1))
    after = lambda names: names[names.index("custom_jvp_call") :]
    names = lambda function: after([one.primitive.name for one in jax.make_jaxpr(function)(x).eqns])
    assert names(rewritten(network)) == names(network)


def test_the_gradient_of_relu_at_zero_and_of_ties_is_kept():
    def network(x):
        x = jax.nn.relu(conv(x))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()

    for x in (jnp.zeros((1, 4, 4, 1)), jnp.ones((1, 4, 4, 1)), jnp.round(draw(0, (1, 4, 4, 1)))):
        np.testing.assert_array_equal(jax.jit(jax.grad(rewritten(network)))(x), jax.jit(jax.grad(network))(x))


def test_random_bits_are_kept():
    network = lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), conv(x), 0)
    x, key = jnp.abs(draw(0, (3, 4, 4, 1))), jax.random.key(7)
    assert_same(jax.jit(rewritten(network))(x, key), jax.jit(network)(x, key))


def test_a_program_without_anything_to_rewrite_runs_as_it_is():
    calls = []
    plain = lambda x: (calls.append(1), jnp.sin(x))[1]
    program = jax.make_jaxpr(rewritten(plain))(jnp.ones(3))
    assert [one.primitive.name for one in program.eqns] == ["sin"] and not has_rule(program.jaxpr)
    assert [one.primitive.name for one in inlined(jax.make_jaxpr(jax.jit(jnp.sin))(jnp.ones(3))).jaxpr.eqns] == ["sin"]


# sums


@pytest.mark.parametrize("axes", [(0, 2), (1, 3), (0, 1, 3), (0, 2, 3)])
def test_sums_on_both_sides_of_an_axis_are_two_sums(axes):
    x = draw(0, (3, 4, 5, 2))
    total = lambda x: jnp.sum(x, axes)
    has_two = axes[-1] == 3 and axes != (0, 1, 2, 3)
    assert count_rewrites(total, x) == ({"reduce_sum": 1} if has_two else {})
    assert_same(jax.jit(rewritten(total))(x), total(x))


@pytest.mark.parametrize("axes", [(0, 1), (2, 3), (0, 1, 2, 3), (1,)])
def test_other_sums_are_left_as_they_are(axes):
    assert not count_rewrites(lambda x: jnp.sum(x, axes), draw(0, (3, 4, 5, 2)))


# loops over time


def recurrent(kernels, start, rows, reverse=False, unroll=1):
    """A gated network: two products with inputs, two with the carry, one with a kernel that is computed."""

    def step(carry, row):
        gate = jax.nn.sigmoid(row @ kernels["in"] + carry @ kernels["carry"])
        new = gate * carry + (1 - gate) * jnp.tanh(jnp.sin(row) @ kernels["in"] + carry @ (2 * kernels["other"]))
        return new, new[:, 0] * row[:, 0]

    return jax.lax.scan(step, start, rows, reverse=reverse, unroll=unroll)


@pytest.mark.parametrize(("options", "is_mapped"), [({}, False), ({"reverse": True}, True), ({"unroll": 3}, False)])
def test_a_loop_with_its_products_taken_apart_is_the_loop(options, is_mapped):
    shapes = {"in": (4, 6), "carry": (6, 6), "other": (6, 6)}
    kernels = {name: draw(seed, shape) / 3 for seed, (name, shape) in enumerate(shapes.items())}
    given = kernels, draw(3, (5, 6)), draw(4, (7, 5, 4))
    loop = functools.partial(recurrent, **options)
    assert count_rewrites(loop, *given) == {"scan": 1}

    def all_of(run, *given):
        total = lambda *own: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(run(*own)))
        gradient = jax.grad(total, (0, 1, 2))
        derive = lambda *own: (run(*own), gradient(*own), jax.jvp(gradient, own, own)[1])
        return (jax.vmap(derive) if is_mapped else derive)(*given)

    own = jax.tree.map(lambda leaf: np.stack((leaf, 0.5 * np.asarray(leaf))), given) if is_mapped else given
    assert_same(*of_each(all_of, (rewritten(loop), loop))(*own))


def test_the_gradient_of_a_kernel_is_one_product_after_the_loop():
    """Plainly, the loop adds up an array as large as the kernel at each step."""
    kernel, rows = draw(0, (6, 6)), draw(1, (7, 5, 6))
    total = lambda run: lambda kernel: run(lambda c, row: (jnp.tanh(row + c @ kernel), None), rows[0], rows)[0].sum()
    plain = total(jax.lax.scan)
    bodies = lambda function: [one.params["jaxpr"].jaxpr for one in jax.make_jaxpr(jax.grad(function))(kernel).eqns
                               if one.primitive.name == "scan"]  # fmt: skip
    sizes = lambda body: [atom.aval.shape for atom in body.outvars if atom.aval.shape == kernel.shape]
    assert any(sizes(body) for body in bodies(plain))
    assert not any(sizes(body) for body in bodies(rewritten(plain)))


@pytest.mark.parametrize(
    "step",
    [
        lambda c, row: (jnp.tanh(c + row), None),
        lambda c, row: (c @ (row.T @ row), None),
        lambda c, row: (jnp.einsum("ij,jk->ik", c, jnp.ones((4, 4), jnp.float32).astype(float)) + row, None),
    ],
    ids=["no product", "a kernel that changes", "a constant"],
)
def test_other_loops_stay_the_same(step):
    run = lambda start, rows: jax.lax.scan(step, start, rows)[0]
    given = draw(0, (5, 4)), draw(1, (3, 5, 4))
    assert_same(jax.jit(rewritten(run))(*given), jax.jit(run)(*given))
