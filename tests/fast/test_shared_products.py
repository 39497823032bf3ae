"""Steps in a span of inputs, or on a trail, give the numbers of the plain way, which a loss of no structure takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.fast import shared_products
from personax.fast.shared_products import Place, Span, UnrolledSteps, shares_products, unrolls
from personax.typing import Batch, DenseLayer, LayeredLoss, Model
from tests.recipes import RECIPES

NUM_INPUTS = 60
TASKS = {
    "classification": personax.classification(personax.mlp((32, 16), 3)),
    "regression": personax.regression(personax.mlp((32,), 2, "tanh")),
    "linear": personax.classification(personax.logistic_regression(40)),
    "standardized": personax.classification(personax.standardized(personax.mlp((32,), 3), 0.5, 0.25)),
}
HVPS = (
    personax.curvature.exact,
    personax.curvature.first_order,
    personax.curvature.finite_difference(1e-3),
    personax.curvature.relative_difference(1e-3),
)


def plain(loss):
    return lambda params, batch: loss(params, batch)


def setting(name):
    """A task, parameters and batches of `role`, the last row of each a filler."""
    task, rng = TASKS[name], np.random.default_rng(7)
    params = task.model.init(jax.random.key(1), jnp.zeros((1, NUM_INPUTS)))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)) / 3, params)

    def batches(num, size):
        y = rng.normal(size=(num, size, 2)) if name == "regression" else rng.integers(0, 3, (num, size))
        weight = jnp.ones((num, size)).at[:, -1].set(0)
        return Batch(jnp.asarray(rng.random((num, size, NUM_INPUTS))), jnp.asarray(y), weight, _keys(num))

    return task, params, batches


def _keys(num):
    return jax.random.split(jax.random.key(2), num)


def assert_same(found, truth, rtol=1e-9):
    for leaf, true in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(leaf, true, rtol=rtol, atol=rtol * float(jnp.abs(true).max()))


def batches_of(objective, batches, sizes=(6, 8, 5)):
    by_role = dict(zip(("adapt", "outer", "curvature"), sizes, strict=True))
    return {role: batches(num, by_role[role]) for role, num in objective.roles().items() if num}


@pytest.mark.parametrize(
    ("name", "num_adapt_steps", "hvp"),
    [("classification", num, hvp) for num in (1, 2, 3) for hvp in HVPS]
    + [(name, 2, hvp) for name in TASKS if name != "classification" for hvp in HVPS[::3]],
    ids=str,
)
@pytest.mark.parametrize("curvature_on", ["own", "outer"])
def test_the_meta_gradient_in_a_span_is_the_plain_one(name, num_adapt_steps, hvp, curvature_on):
    task, params, batches = setting(name)
    objective = personax.Meta(0.3, num_adapt_steps, hvp, curvature_on)
    given = batches_of(objective, batches)
    assert shares_products(task.loss, params, sum(batch.weight.size for batch in given.values()))
    found, truth = (
        jax.jit(lambda params, loss=loss: objective.gradient(loss, params, (), None, given)[0])(params)
        for loss in (task.loss, plain(task.loss))
    )
    assert_same(found, truth)


@pytest.mark.parametrize(("num_steps", "tolerance"), [(3, None), (12, None), (12, 0.5)])
@pytest.mark.parametrize("name", TASKS)
def test_the_prox_in_a_span_is_the_plain_one(name, num_steps, tolerance):
    task, params, batches = setting(name)
    batch = jax.tree.map(lambda leaf: leaf[0], batches(1, 12))
    objective = personax.Moreau(2.0, 0.1, num_steps, tolerance)
    found, truth = (objective.prox(loss, params, batch) for loss in (task.loss, plain(task.loss)))
    assert_same(found, truth)
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True)) > 1e-2


def test_gradients_in_a_span_need_less_arithmetic():
    task, params, batches = setting("regression")
    batch = jax.tree.map(lambda leaf: leaf[0], batches(1, 12))
    meta = personax.Meta(0.3, 1, personax.curvature.exact)
    given = batches_of(meta, batches, (8, 8, 8))
    cost = lambda function, *given: jax.jit(function).lower(*given).compile().cost_analysis()["flops"]
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
    given = batches_of(objective, lambda *own: (lambda b: b._replace(x=(255 * b.x).astype(jnp.uint8)))(batches(*own)))
    found = jax.jit(lambda params: objective.gradient(task.loss, params, (), None, given)[0])(params)
    batch = jax.tree.map(lambda leaf: leaf[0], given["outer"])
    theta = jax.jit(lambda params: personax.Moreau(2.0, 0.1, 3, 1e-3).prox(task.loss, params, batch))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves((found, theta))} == {jnp.dtype(dtype)}


def test_clients_at_once_with_numbers_of_their_own():
    task, params, batches = setting("standardized")
    given = batches(4, 6)
    objectives = personax.Meta(0.3, 1, personax.curvature.relative_difference(1e-2)), personax.Moreau(2.0, 0.1, 3, 0.5)

    def gradients(loss):
        def one(scale, batch):
            meta, moreau = jax.tree.map(lambda number: scale * number, objectives)
            of_role = jax.tree.map(lambda leaf: leaf[None], batch)
            found = meta.gradient(loss, params, (), None, dict.fromkeys(meta.roles(), of_role))[0]
            return found, moreau.prox(loss, params, batch)

        return jax.jit(jax.vmap(one))(jnp.linspace(0.5, 2, 4), given)

    assert_same(gradients(task.loss), gradients(plain(task.loss)))


def test_a_product_with_the_hessian_that_is_not_known_sees_parameters():
    @personax.value
    class Damped:
        needs_batch = True
        is_coordinate_free = False  # it adds the vector itself, which has other coordinates in a span
        given_norm = personax.curvature.norm_unused

        def __call__(self, loss, params, vector, batch):
            product = personax.curvature.exact(loss, params, vector, batch)
            return jax.tree.map(lambda h, v: h + 0.5 * v, product, vector)

    task, params, batches = setting("classification")
    objective = personax.Meta(0.3, 1, Damped())
    given = batches_of(objective, batches)
    found, truth = (objective.gradient(loss, params, (), None, given)[0] for loss in (task.loss, plain(task.loss)))
    assert_same(found, truth)


def test_a_batch_keeps_its_key():
    def after(rest, products, key=None):
        return (products + rest) * jax.random.uniform(key, products.shape)

    split, join = lambda params: (params["kernel"], params["bias"]), lambda k, b: {"kernel": k, "bias": b}
    apply = lambda params, x, key=None: after(params["bias"], x @ params["kernel"], key)
    task = personax.regression(Model(None, apply, DenseLayer(split, join, lambda rest, x: x, after, is_first=True)))
    rng = np.random.default_rng(3)
    params = {"kernel": jnp.asarray(rng.normal(size=(NUM_INPUTS, 20))), "bias": jnp.zeros((1, 20))}
    batch = lambda num: Batch(rng.random((num, 6, NUM_INPUTS)), rng.random((num, 6, 20)), np.ones((num, 6)), _keys(num))
    given = {"adapt": batch(2), "outer": batch(1), "curvature": batch(2)}
    objective = personax.Meta(0.3, 2)
    assert shares_products(task.loss, params, 6 * 5)
    found = objective.gradient(task.loss, params, (), None, given)[0]
    unlayered = lambda params, one: jnp.square(apply(params, one.x, one.key) - one.y).mean()
    assert_same(found, objective.gradient(unlayered, params, (), None, given)[0])


def test_norms_and_models_of_a_span_are_those_of_the_parameters():
    task, params, batches = setting("classification")
    span = Span(task.loss, params, {"outer": batches(2, 6)})
    at = span.start().plus(-0.5, span.gradient(span.start(), ("outer", 0)))
    vector = at.plus(2.0, span.gradient(at, ("outer", 1)))
    as_tree = span.vector(vector)
    np.testing.assert_allclose(span.norm(vector), np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(as_tree))))
    layer = task.model.dense
    kernel, rest = layer.split(params)
    assert_same(span.model(vector), layer.join(kernel + layer.split(as_tree)[0], vector.rest))
    assert_same(span.model(span.start()), layer.join(kernel, rest))


def test_a_norm_is_a_number_where_rows_cancel_each_other():
    loss, rest = personax.regression(personax.mlp((), 1)).loss, {"dense_0": {"kernel": None, "bias": jnp.zeros(1)}}
    rng, name = np.random.default_rng(1), ("outer", 0)
    x = rng.normal(size=(20, 5)) @ rng.normal(size=(5, 40))
    params = loss.layer.join(jnp.zeros((40, 1), jnp.float32), rest)
    batch = Batch(jnp.asarray(x, jnp.float32)[None], jnp.zeros((1, 20, 1)), jnp.ones((1, 20)), _keys(1))
    span = Span(loss, params, {"outer": batch})
    for along in np.linalg.svd(x)[0].T[5:]:  # what the rows have no part of
        norm = span.norm(Place(rest, {name: jnp.asarray(along, jnp.float32)[:, None]}))
        assert 0 <= norm < 1e-2 * np.linalg.norm(x)


def test_a_place_keeps_its_types_and_adds_what_is_along_the_same_batch():
    a, b = ("outer", 0), ("outer", 1)
    place = Place({"bias": jnp.ones(2, jnp.float32)}, {a: jnp.ones(1, jnp.float32)})
    vector = Place({"bias": jnp.ones(2)}, {a: jnp.ones(1), b: jnp.full(1, 3.0)})
    found = place.plus(0.5, vector)
    assert found.rest["bias"].dtype == found.along[a].dtype == jnp.float32
    np.testing.assert_array_equal([found.rest["bias"][0], found.along[a][0], found.along[b][0]], [1.5, 1.5, 1.5])


def test_only_few_rows_and_losses_without_a_penalty_span():
    model = personax.mlp((20,), 3)
    loss = personax.classification(model).loss
    params = model.init(jax.random.key(0), jnp.zeros((1, 30)))
    assert isinstance(loss, LayeredLoss)
    assert shares_products(loss, params, 24) and not shares_products(loss, params, 25)  # 2 * 30 * 20 / (30 + 20)
    for task in (
        personax.classification(model, l2=0.1),
        personax.rematerialize(personax.classification(model), 2),
        personax.classification(personax.cnn((2,), (4,), 3)),
    ):
        assert not shares_products(task.loss, params, 1)


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
    task, rng = personax.classification(NETWORKS[name]), np.random.default_rng(5)
    params = task.model.init(jax.random.key(1), jnp.zeros((1, *IMAGE)))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)) / 3, params)
    weights = [jnp.ones(size).at[-1].set(0) for size in sizes]
    given = zip(sizes, weights, _keys(len(sizes)), strict=True)
    return task, params, [Batch(rng.random((n, *IMAGE)), rng.integers(0, 3, n), w, key) for n, w, key in given]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_dense_layer_is_the_network(name):
    task, params, (batch, *_) = images(name, (5,))
    layer = task.model.dense
    kernel, rest = layer.split(params)
    for key in (None, batch.key):
        found = layer.apply(rest, layer.rows(rest, batch.x) @ kernel, key)
        np.testing.assert_allclose(found, task.model.apply(params, batch.x, key), rtol=1e-12)
    assert jax.tree.all(jax.tree.map(np.array_equal, layer.join(kernel, rest), params))
    assert len(jax.tree.leaves(rest)) == len(jax.tree.leaves(params)) - 1


@pytest.mark.parametrize("name", NETWORKS)
def test_a_trail_ends_where_plain_gradient_steps_end(name):
    task, params, batches = images(name, (4, 6, 3))
    sizes = (0.3, 0.2, 0.5)

    def on_a_trail(params, batches):
        steps_so_far, ends = UnrolledSteps(task.loss, *task.loss.layer.split(params)), []
        for lr, batch in zip(sizes, batches, strict=True):
            steps_so_far = steps_so_far.step(lr, batch)
            ends.append(steps_so_far.end())
        return ends

    def plainly(params, batches):
        ends = [params]
        for lr, batch in zip(sizes, batches, strict=True):
            gradient = jax.grad(plain(task.loss))(ends[-1], batch)
            ends.append(jax.tree.map(lambda leaf, slope, lr=lr: leaf - lr * slope, ends[-1], gradient))
        return ends[1:]

    assert_same(jax.jit(on_a_trail)(params, batches), jax.jit(plainly)(params, batches))


def test_a_trail_keeps_the_types_of_the_parameters():
    task, params, batches = images("behind convolutions", (4, 4))
    short = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    def end(params):
        steps_so_far = UnrolledSteps(task.loss, *task.loss.layer.split(params))
        for batch in batches:
            steps_so_far = steps_so_far.step(jnp.float32(0.1), batch)
        return steps_so_far.end()

    assert {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(end, short))} == {jnp.dtype(jnp.bfloat16)}


def test_steps_that_stand_still_need_no_finite_numbers():
    task, params, (batch, *_) = images("behind convolutions", (4,))
    lost = batch._replace(x=jnp.full_like(batch.x, jnp.inf))

    @jax.jit
    def ends(params):
        begun = UnrolledSteps(task.loss, *task.loss.layer.split(params)).step(0.1, batch)
        still = begun.step(0.1, lost, is_active=False).step(0.1, lost, is_active=False)
        return begun.end(), still.end(), begun.step(0.1, lost).end()

    begun, still, moved = ends(params)
    assert not jax.tree.all(jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), moved))
    assert_same(still, begun)


def traced_anew():
    """A task of which nothing is compiled yet: `jit` knows it by its functions."""
    return personax.classification(NETWORKS["behind convolutions"])._replace(check=lambda outputs, targets: "")


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
def test_a_visit_on_a_trail_is_the_plain_visit(name, length, monkeypatch):
    rng, counts = np.random.default_rng(0), (12, 5, 9, 1)  # three steps of an epoch at most, and one
    clients = [(rng.random((num, *IMAGE)), rng.integers(0, 3, num)) for num in counts]
    federation, key = personax.Federation.from_clients(clients), jax.random.key(3)
    algorithm = VISITS[name](batch_size=4, **length)
    is_asynchronous = algorithm.server.buffer_size is not None
    schedule = personax.uniform_arrivals(4, 9, 2, key=key) if is_asynchronous else personax.rounds(4, 3, 2, key=key)

    def run(wide):
        monkeypatch.setattr(shared_products, "WIDE", wide)
        result = personax.simulate(algorithm, traced_anew(), federation, schedule, key=key)
        return result.params, result.personal

    taken, step = [], UnrolledSteps.step
    monkeypatch.setattr(UnrolledSteps, "step", lambda *given: taken.append(True) or step(*given))
    plainly = run(10**9)
    assert not taken
    assert_same(run(1), plainly)
    assert taken


@pytest.mark.parametrize("name", ["fedavg_adam", "local_only", "fedprox", "per_fedavg_fo", "recorded"])
def test_other_visits_take_no_trail(name, monkeypatch):
    """An optimizer of its own, a clipped direction, other objectives, a recorded path."""
    monkeypatch.setattr(shared_products, "WIDE", 1)
    monkeypatch.setattr(UnrolledSteps, "step", lambda *given: pytest.fail("a trail was taken"))
    rng, key = np.random.default_rng(0), jax.random.key(3)
    federation = personax.Federation.from_clients([(rng.random((9, *IMAGE)), rng.integers(0, 3, 9))] * 2)
    recipe, tracker = ("fedavg", personax.RandomIterate()) if name == "recorded" else (name, None)
    options = {"key": key, "monitor": personax.Monitor(tracker=tracker)}
    personax.simulate(RECIPES[recipe](1.0), traced_anew(), federation, personax.rounds(2, 1, key=key), **options)


def test_trails_are_few_steps_with_few_rows_from_wide_kernels(monkeypatch):
    task, params, _ = images("behind convolutions", (1,))
    monkeypatch.setattr(shared_products, "WIDE", 2 * 1 * 5 * 20)
    assert unrolls(task.loss, params, 3, 6)
    assert not unrolls(task.loss, params, 3, 7)  # 21 rows of 20 outputs
    assert not unrolls(task.loss, params, 4, 1)  # a loop longer than three steps is not unrolled on a CPU
    assert not unrolls(plain(task.loss), params, 3, 6)
    monkeypatch.setattr(shared_products, "WIDE", 2 * 1 * 5 * 20 + 1)
    assert not unrolls(task.loss, params, 3, 6)
