"""Gradients in shared products, and unrolled steps, give the numbers of plain autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.fast import near as near_module
from personax.fast.dense_product import find_products
from personax.fast.near import Place, Plain, SharedProducts, UnrolledSteps, along, near, saves, shared_product
from personax.fast.passes import optimized
from personax.fast.precision import products_in
from personax.typing import Batch, Model
from tests.recipes import RECIPES

NUM_INPUTS = 60
TASKS = {
    "classification": personax.classification(personax.mlp((32,), 3)),
    "regression": personax.regression(personax.mlp((32,), 2, "tanh")),
    "linear": personax.classification(personax.logistic_regression(40)),
    "standardized": personax.classification(personax.standardized(personax.mlp((32, 16), 3), 0.5, 0.25)),
}
HVPS = (
    personax.curvature.exact,
    personax.curvature.first_order,
    personax.curvature.finite_difference(1e-3),
    personax.curvature.relative_difference(1e-3),
)


def plain(loss):
    """The same loss, which reads each of its kernels twice: no product of it can be taken apart."""
    return lambda params, batch: loss(params, batch) + 0 * sum(map(jnp.sum, jax.tree.leaves(params)))


def setting(name):
    """A task, parameters and batches of `role`, the last row of each a filler."""
    task, rng = TASKS[name], np.random.default_rng(7)
    params = drawn(rng, task.model, (NUM_INPUTS,))

    def batches(num, size):
        y = rng.normal(size=(num, size, 2)) if name == "regression" else rng.integers(0, 3, (num, size))
        weight = np.tile(np.arange(size) < size - 1, (num, 1)).astype(float)
        return Batch(rng.random((num, size, NUM_INPUTS)), y, weight, keys(num))

    return task, params, batches


def drawn(rng, model, shape):
    """Random parameters of a network for inputs of this shape, without compiling its initialization."""
    shapes = jax.eval_shape(model.init, jax.random.key(1), jnp.zeros((1, *shape)))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 3), shapes)


def keys(num):
    return jax.random.split(jax.random.key(2), num)


def first(batches):
    return jax.tree.map(lambda leaf: leaf[0], batches)


def assert_same(found, truth, rtol=1e-9):
    for leaf, true in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(leaf, true, rtol=rtol, atol=rtol * float(np.abs(true).max()))


def batches_of(objective, batches, sizes=(6, 8, 5)):
    by_role = dict(zip(("adapt", "outer", "curvature"), sizes, strict=True))
    return {role: batches(num, by_role[role]) for role, num in objective.roles().items() if num}


def both(function, task, *given):
    """A function of the loss of a task and of the same loss without products to share, compiled together."""
    return jax.jit(lambda *given: [function(loss, *given) for loss in (task.loss, plain(task.loss))])(*given)


@pytest.mark.parametrize(
    ("name", "num_adapt_steps", "hvp", "curvature_on"),
    [("classification", num, hvp, "own") for num in (1, 3) for hvp in HVPS]
    + [("classification", 2, hvp, "outer") for hvp in HVPS[::3]]
    + [(name, 2, hvp, "own") for name in TASKS if name != "classification" for hvp in HVPS[::3]],
    ids=str,
)
def test_the_meta_gradient_in_shared_products_is_the_plain_one(name, num_adapt_steps, hvp, curvature_on):
    task, params, batches = setting(name)
    objective = personax.Meta(0.3, num_adapt_steps, hvp, curvature_on)
    given = batches_of(objective, batches)
    taken = []

    def gradient(loss, params, given):
        taken.append(type(near(loss, params, given, 9, hvp)))
        return objective.gradient(loss, params, (), None, given)[0]

    assert_same(*both(gradient, task, params, given))
    assert taken == [SharedProducts, Plain]


@pytest.mark.parametrize(("num_steps", "tolerance"), [(3, None), (12, None), (12, 0.5)])
@pytest.mark.parametrize("name", TASKS)
def test_the_prox_in_shared_products_is_the_plain_one(name, num_steps, tolerance):
    task, params, batches = setting(name)
    batch = first(batches(1, 12))
    objective = personax.Moreau(2.0, 0.1, num_steps, tolerance)
    found, truth = both(objective.prox, task, params, batch)
    assert_same(found, truth)
    assert (
        max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True))
        > 1e-2
    )


def test_shared_products_need_less_arithmetic():
    task, params, batches = setting("regression")
    batch = first(batches(1, 12))
    meta = personax.Meta(0.3, 1, personax.curvature.exact)
    given = batches_of(meta, batches, (8, 8, 8))
    cost = lambda function, *own: jax.jit(function).lower(*own).compile().cost_analysis()["flops"]
    prox = lambda loss: cost(lambda *own: personax.Moreau(2.0, 0.1, 3).prox(loss, *own), params, batch)
    gradient = lambda loss: cost(lambda *own: meta.gradient(loss, own[0], (), None, own[1])[0], params, given)
    assert prox(task.loss) < 0.6 * prox(plain(task.loss))
    assert gradient(task.loss) < 0.9 * gradient(plain(task.loss))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("hvp", HVPS[::3], ids=str)
def test_types_are_those_of_the_parameters(hvp, dtype):
    task, params, batches = setting("classification")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    objective = personax.Meta(0.3, 2, hvp)
    given = batches_of(objective, lambda *own: (lambda b: b._replace(x=(255 * b.x).astype(np.uint8)))(batches(*own)))

    def found(params, given):
        assert isinstance(near(task.loss, params, given, 9, hvp), SharedProducts)
        theta = personax.Moreau(2.0, 0.1, 3, 1e-3).prox(task.loss, params, first(given["outer"]))
        return objective.gradient(task.loss, params, (), None, given)[0], theta

    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(found, params, given))} == {jnp.dtype(dtype)}


def test_clients_at_once_with_numbers_of_their_own():
    task, params, batches = setting("standardized")
    given = batches(4, 6)
    objectives = personax.Meta(0.3, 1, personax.curvature.relative_difference(1e-2)), personax.Moreau(2.0, 0.1, 3, 0.5)

    def gradients(loss, scales, given):
        def one(scale, batch):
            meta, moreau = jax.tree.map(lambda number: scale * number, objectives)
            of_role = jax.tree.map(lambda leaf: leaf[None], batch)
            found = meta.gradient(loss, params, (), None, dict.fromkeys(meta.roles(), of_role))[0]
            return found, moreau.prox(loss, params, batch)

        return jax.vmap(one)(scales, given)

    assert_same(*both(gradients, task, jnp.linspace(0.5, 2, 4), given))


def test_a_product_with_the_hessian_that_is_not_known_sees_parameters():
    @personax.value
    class Damped:
        needs_batch = True
        is_coordinate_free = False  # it adds the vector itself, which has other coordinates in shared products
        given_norm = personax.curvature.norm_unused

        def __call__(self, loss, params, vector, batch):
            product = personax.curvature.exact(loss, params, vector, batch)
            return jax.tree.map(lambda h, v: h + 0.5 * v, product, vector)

    task, params, batches = setting("classification")
    objective = personax.Meta(0.3, 1, Damped())
    given = batches_of(objective, batches)
    assert_same(*both(lambda loss, *own: objective.gradient(loss, own[0], (), None, own[1])[0], task, params, given))


def test_a_batch_keeps_its_key():
    def apply(params, x, key=None):
        products = x @ params["kernel"] + params["bias"]
        return products * jax.random.uniform(key, products.shape)

    task = personax.regression(Model(None, apply))
    rng = np.random.default_rng(3)
    params = {"kernel": jnp.asarray(rng.normal(size=(NUM_INPUTS, 20))), "bias": jnp.zeros((1, 20))}
    batch = lambda num: Batch(rng.random((num, 6, NUM_INPUTS)), rng.random((num, 6, 20)), np.ones((num, 6)), keys(num))
    given = {"adapt": batch(2), "outer": batch(1), "curvature": batch(2)}
    objective = personax.Meta(0.3, 2)
    taken = []

    def gradient(loss, params, given):
        taken.append(type(near(loss, params, given, 3, objective.hvp)))
        return objective.gradient(loss, params, (), None, given)[0]

    assert_same(*both(gradient, task, params, given))
    assert taken == [SharedProducts, Plain]


def shared(task, params, batches):
    return SharedProducts({role: shared_product(task.loss, params, first(of)) for role, of in batches.items()},
                          params, batches)  # fmt: skip


def test_models_and_vectors_are_those_of_the_parameters():
    task, params, batches = setting("classification")

    @jax.jit
    def moved_along(params, batches):
        here = shared(task, params, {"outer": batches})
        one, other = here.batches("outer")
        at = here.step(here.start(), -0.5, here.gradient(here.start(), one))
        vector = here.step(here.gradient(here.start(), one), 2.0, here.gradient(at, other))
        moved = here.step(here.start(), 1.0, vector)
        return here.params(moved), here.vector(vector), here.params(here.start())

    moved, vector, start = moved_along(params, batches(2, 6))
    assert_same(moved, jax.tree.map(np.add, params, vector))
    assert_same(start, params)


class Norms:
    """A product with a Hessian that is the norm that it was given."""

    def given_norm(self, norm):
        return lambda loss, params, vector, batch: jax.tree.map(lambda leaf: jnp.full_like(leaf, norm), vector)


def test_a_norm_is_that_of_the_parameters():
    task, params, batches = setting("classification")

    @jax.jit
    def norm_and_vector(params, batches):
        here = shared(task, params, {"outer": batches})
        one, other = here.batches("outer")
        vector = here.step(here.gradient(here.start(), one), 2.0, here.gradient(here.start(), other))
        return here.hvp(Norms(), here.start(), vector, one).along[one], here.vector(vector)

    found, vector = norm_and_vector(params, batches(2, 6))
    np.testing.assert_allclose(found, np.sqrt(sum((np.asarray(leaf) ** 2).sum() for leaf in jax.tree.leaves(vector))))


def test_a_norm_is_a_number_where_rows_cancel_each_other():
    task, rng = personax.regression(personax.mlp((), 1)), np.random.default_rng(1)
    x = rng.normal(size=(20, 5)) @ rng.normal(size=(5, 40))
    params = {"dense_0": {"kernel": jnp.zeros((40, 1), jnp.float32), "bias": jnp.zeros(1, jnp.float32)}}
    batch = Batch(jnp.asarray(x, jnp.float32)[None], jnp.zeros((1, 20, 1)), jnp.ones((1, 20)), keys(1))

    @jax.jit
    @jax.vmap
    def norms(nothing):
        here = shared(task, params, {"outer": batch})
        (name,) = here.batches("outer")
        vector = Place(here.start().rest, {name: nothing[:, None]})
        return here.hvp(Norms(), here.start(name), vector, name).along[name]

    found = np.asarray(norms(jnp.asarray(np.linalg.svd(x)[0].T[5:], jnp.float32)))  # what the rows have no part of
    assert len(found) == 15 and (found >= 0).all() and (found < 1e-2 * np.linalg.norm(x)).all()


def test_a_step_keeps_its_types_and_adds_what_is_along_the_same_batch():
    task, params, batches = setting("classification")
    here = shared(task, params, {"outer": batches(2, 6)})
    a, b = here.batches("outer")
    place = Place((jnp.ones(2, jnp.float32),), {a: jnp.ones(1, jnp.float32)})
    found = here.step(place, 0.5, Place((jnp.ones(2),), {a: jnp.ones(1), b: jnp.full(1, 3.0)}))
    assert found.rest[0].dtype == found.along[a].dtype == jnp.float32
    np.testing.assert_array_equal([found.rest[0][0], found.along[a][0], found.along[b][0]], [1.5, 1.5, 1.5])


def test_only_few_rows_and_kernels_that_are_read_once_share_products():
    model = personax.mlp((20,), 3)
    params = model.init(jax.random.key(0), jnp.zeros((1, 30)))
    batch = Batch(jnp.zeros((4, 30)), jnp.zeros(4, int), jnp.ones(4), keys(1)[0])
    product = shared_product(personax.classification(model).loss, params, batch)
    assert saves(product, 24) and not saves(product, 25)  # 2 * 30 * 20 / (30 + 20)
    for task in (
        personax.classification(model, l2=0.1),  # the penalty reads the kernel too
        personax.rematerialize(personax.classification(model), 2),
    ):
        assert shared_product(task.loss, params, batch) is None


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_products_are_shared_in_any_precision_of_the_run(precision):
    task, params, batches = setting("classification")
    with products_in(precision):
        assert shared_product(task.loss, params, first(batches(1, 4))) is not None


IMAGE = (8, 7, 2)
NETWORKS = {
    "first layer": personax.mlp((32, 16), 3),
    "behind convolutions": personax.cnn((4, 5), (20,), 3, kernel_size=3),
    "no hidden layer": personax.cnn((4,), (), 3, kernel_size=3, activation="tanh", pooling="last"),
    "standardized": personax.standardized(personax.cnn((4,), (12,), 3), (0.5, 0.25), 0.2),
    "dropout": personax.cnn((4,), (12,), 3, dropout=0.5),
}


def images(name, sizes):
    """A task, its parameters and a batch of images of each size, the last a filler."""
    task, rng = optimized(personax.classification(NETWORKS[name])), np.random.default_rng(5)
    params = drawn(rng, task.model, IMAGE)
    weights = [(np.arange(size) < size - 1).astype(float) for size in sizes]
    given = zip(sizes, weights, keys(len(sizes)), strict=True)
    return task, params, [Batch(rng.random((n, *IMAGE)), rng.integers(0, 3, n), w, key) for n, w, key in given]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_product_that_is_found_is_the_loss(name):
    task, params, (batch, *_) = images(name, (5,))
    found = find_products(task.loss, params, batch)
    assert len(found) == len([key for key in params if key.startswith("dense")])
    assert [product.is_first for product in found] == [name == "first layer"] + [False] * (len(found) - 1)

    @jax.jit
    def losses(params, batch):
        heads = []
        for product in found:
            kernel, rest = product.split(params)
            heads.append(product.head((rest, product.rows(rest, batch) @ kernel), batch))
        return heads, task.loss(params, batch)

    heads, loss = losses(params, batch)
    np.testing.assert_allclose(heads, loss, rtol=1e-12)
    for product in found:
        kernel, rest = product.split(params)
        assert kernel.shape == product.shape and len(rest) == len(jax.tree.leaves(params)) - 1
        assert jax.tree.all(jax.tree.map(np.array_equal, product.join(kernel, rest), params))


@pytest.mark.parametrize(
    ("product", "shape"),
    [
        (lambda x, kernel: x.reshape(4, 3, 10) @ kernel, (10, 5)),  # several rows of each example
        (lambda x, kernel: x @ kernel.T, (7, 30)),
        (lambda x, kernel: jax.lax.dot_general(kernel, x, (((0,), (1,)), ((), ()))).T, (30, 5)),
        (lambda x, kernel: jax.lax.dot_general(kernel, x, (((1,), (1,)), ((), ()))), (6, 30)),
    ],
    ids=["rows", "transposed", "kernel first", "both"],
)
def test_a_product_is_found_in_any_form(product, shape):
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=shape)), "scale": jnp.asarray(2.0)}
    batch = Batch(rng.random((4, 30)), np.zeros(4), np.ones(4), keys(1)[0])
    loss = lambda params, batch: jnp.sum(params["scale"] * jnp.sin(product(batch.x, params["kernel"])))
    (found,) = find_products(loss, params, batch)

    @jax.jit
    def in_parts(params):
        kernel, rest = found.split(params)
        head = lambda kernel: found.head((rest, found.rows(rest, batch) @ kernel), batch)
        value, gradient = jax.value_and_grad(head)(kernel)
        return value, found.join(gradient, rest)["kernel"]

    value, gradient = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert_same(in_parts(params), (value, gradient["kernel"]))


@pytest.mark.parametrize(
    "product",
    [
        lambda x, kernel: (x @ kernel) + (x @ kernel),
        lambda x, kernel: (x @ kernel) * jnp.sum(kernel),
        lambda x, kernel: x @ (2 * kernel),
        lambda x, kernel: x @ kernel + jnp.sum(kernel.T @ jnp.ones(30)),
        lambda x, kernel: jnp.matmul(x, kernel, precision="highest"),
        lambda x, kernel: jax.lax.scan(lambda c, row: (c, row @ kernel), 0, x)[1],
    ],
    ids=["twice", "by itself", "scaled", "transposed too", "a precision of its own", "in a loop"],
)
def test_other_uses_of_a_kernel_are_left_alone(product):
    loss = lambda kernel, batch: jnp.sum(product(batch.x, kernel))
    batch = Batch(jnp.ones((4, 30)), jnp.zeros(4), jnp.ones(4), keys(1)[0])
    assert not find_products(loss, jnp.ones((30, 5)), batch)


def unrolled(task, params, batch):
    return UnrolledSteps(max(find_products(task.loss, params, batch), key=lambda one: np.prod(one.shape)), params)


@pytest.mark.parametrize("name", NETWORKS)
def test_unrolled_steps_end_where_plain_gradient_steps_end(name):
    task, params, batches = images(name, (4, 4, 4))
    sizes = (0.3, 0.2, 0.5)

    def ends(here):
        at, found = here.start(), []
        for lr, batch in zip(sizes, batches, strict=True):
            at = here.step(at, -lr, here.gradient(at, batch))
            found.append(here.params(at))
        return found

    ways = lambda params: (unrolled(task, params, batches[0]), Plain(task.loss, params, {}))
    assert_same(*jax.jit(lambda params: [ends(here) for here in ways(params)])(params))


def test_unrolled_steps_keep_the_types_of_the_parameters():
    task, params, batches = images("behind convolutions", (4, 4))
    short = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def end(params):
        here = unrolled(task, params, batches[0])
        at = here.start()
        for batch in batches:
            at = here.step(at, jnp.float32(-0.1), here.gradient(at, batch))
        return here.params(at)

    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(end, short))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("make", [unrolled, lambda task, params, batch: Plain(task.loss, params, {})])
def test_steps_that_are_not_taken_need_no_finite_numbers(make):
    task, params, (batch, *_) = images("behind convolutions", (4,))
    lost = batch._replace(x=np.full_like(batch.x, np.inf))

    @jax.jit
    def ends(params):
        here = make(task, params, batch)
        step = lambda at, batch, is_taken: here.step(at, -0.1, here.gradient(at, batch), is_taken)
        begun = step(here.start(), batch, True)
        skipped = step(step(begun, lost, jnp.asarray(False)), lost, jnp.asarray(False))
        return tuple(map(here.params, (begun, skipped, step(begun, lost, jnp.asarray(True)))))

    begun, skipped, moved = ends(params)
    assert not jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), moved))
    assert_same(skipped, begun)


def newly_traced():
    """A task of which nothing is compiled yet: `jit` knows it by its functions.

    Its second kernel, whose inputs depend on the model, has more outputs than the steps have rows; the first has not.
    """
    return personax.classification(personax.mlp((8, 16), 3))._replace(check=lambda outputs, targets: "")


VISITS = {
    "fedavg": lambda **of: personax.fedavg(lr=personax.step_sizes.Decay(0.2, 0.5), **of),
    "local_only": lambda **of: personax.local_only(lr=0.2, **of),
    "fedasync": lambda **of: personax.fedasync(lr=0.2, **of),
}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("fedavg", {"num_steps": 3}),
        ("fedavg", {"num_epochs": 1}),
        ("local_only", {"num_epochs": 1}),
        ("fedasync", {"num_steps": 3}),
    ],
)
def test_an_unrolled_visit_is_the_plain_visit(name, length, monkeypatch):
    rng, counts = np.random.default_rng(0), (12, 5, 9, 1)  # three steps of an epoch at most, and one
    clients = [(rng.random((num, *IMAGE)), rng.integers(0, 3, num)) for num in counts]
    federation, key = personax.Federation.from_clients(clients), jax.random.key(3)
    algorithm = VISITS[name](batch_size=4, **length)
    is_asynchronous = algorithm.server.buffer_size is not None
    schedule = personax.uniform_arrivals(4, 9, 2, key=key) if is_asynchronous else personax.rounds(4, 3, 2, key=key)

    def run(wide):
        monkeypatch.setattr(near_module, "WIDE", wide)
        result = personax.simulate(algorithm, newly_traced(), federation, schedule, key=key)
        return result.params, result.personal

    taken, step = [], UnrolledSteps.step
    monkeypatch.setattr(UnrolledSteps, "step", lambda *given: taken.append(True) or step(*given))
    plainly = run(10**9)
    assert not taken
    assert_same(run(1), plainly)
    assert taken


@pytest.mark.parametrize("name", ["fedavg_adam", "local_only", "fedprox", "per_fedavg_fo", "recorded"])
def test_other_visits_are_not_unrolled(name, monkeypatch):
    """An optimizer of its own, a clipped direction, other objectives, a recorded path."""
    monkeypatch.setattr(near_module, "WIDE", 1)
    monkeypatch.setattr(UnrolledSteps, "step", lambda *given: pytest.fail("steps were unrolled"))
    rng, key = np.random.default_rng(0), jax.random.key(3)
    federation = personax.Federation.from_clients([(rng.random((9, *IMAGE)), rng.integers(0, 3, 9))] * 2)
    recipe, tracker = ("fedavg", personax.RandomIterate()) if name == "recorded" else (name, None)
    options = {"key": key, "monitor": personax.Monitor(tracker=tracker)}
    personax.simulate(RECIPES[recipe](1.0), newly_traced(), federation, personax.rounds(2, 1, key=key), **options)


def test_few_steps_with_few_rows_from_wide_kernels_are_unrolled(monkeypatch):
    task, params, (six, seven, one) = images("behind convolutions", (6, 7, 1))
    is_unrolled = lambda loss, batch, num_steps: isinstance(along(loss, params, batch, num_steps), UnrolledSteps)
    monkeypatch.setattr(near_module, "WIDE", 2 * 1 * 5 * 20)
    assert is_unrolled(task.loss, six, 3)
    assert not is_unrolled(task.loss, seven, 3)  # 21 rows of 20 outputs
    assert not is_unrolled(task.loss, one, 4)  # a loop longer than three steps is not unrolled on a CPU
    assert not is_unrolled(plain(task.loss), six, 3)
    monkeypatch.setattr(near_module, "WIDE", 2 * 1 * 5 * 20 + 1)
    assert not is_unrolled(task.loss, six, 3)
