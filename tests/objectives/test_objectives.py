import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.client.step_sizes import Clock
from personax.fast.backends import pretend, unroll_length
from personax.objectives import Visit
from personax.objectives.mixture import Mixed, mix_models
from personax.typing import Batch
from tests import closed_forms
from tests.closed_forms import TASK, quadratic, whole
from tests.test_curvature import network

W, V = np.random.default_rng(3).normal(size=(2, closed_forms.DIMENSION))
X, Y = closed_forms.clients()[0]
Q = quadratic(X, Y)


def stacked(batch, num):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * num), batch)


def direction(objective, params=None, memory=(), anchor=None, loss=TASK.loss, batch=None, shared=(), lr=0.1, step=0):
    """An objective's gradient where every batch is the same."""
    params = {"w": W} if params is None else params
    batch = whole(X, Y) if batch is None else batch
    batches = {role: stacked(batch, num) for role, num in objective.roles().items() if num}
    visit = Visit(params if anchor is None else anchor, shared, Clock(0, step, 1), lr)
    return objective.gradient(loss, params, memory, visit, batches)


@pytest.mark.parametrize("num_adapt_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("hvp", [personax.curvature.exact, personax.curvature.finite_difference(1e-3)], ids=str)
def test_the_meta_gradient_of_a_quadratic(num_adapt_steps, hvp):
    found, _ = direction(personax.Meta(0.3, num_adapt_steps, hvp))
    np.testing.assert_allclose(found["w"], Q.meta_gradient(W, 0.3, num_adapt_steps), rtol=1e-8)


@pytest.mark.parametrize("num_adapt_steps", [1, 3])
def test_the_first_order_gradient_is_the_gradient_at_the_adapted_model(num_adapt_steps):
    found, _ = direction(personax.Meta(0.3, num_adapt_steps, personax.curvature.first_order))
    np.testing.assert_allclose(found["w"], Q.gradient(Q.descend(W, 0.3, num_adapt_steps)), rtol=1e-12)


@pytest.mark.parametrize("num_adapt_steps", [1, 2, 4])
def test_the_exact_meta_gradient_is_autodiff_of_the_composition(num_adapt_steps):
    loss, params, _, batch = network()

    def composed(w):
        for _ in range(num_adapt_steps):
            w = jax.tree.map(lambda p, g: p - 0.5 * g, w, jax.grad(loss)(w, batch))
        return loss(w, batch)

    found, _ = jax.jit(lambda w: direction(personax.Meta(0.5, num_adapt_steps), w, loss=loss, batch=batch))(params)
    for leaf, truth in zip(*map(jax.tree.leaves, (found, jax.jit(jax.grad(composed))(params))), strict=True):
        np.testing.assert_allclose(leaf, truth, rtol=1e-9, atol=1e-12)


def test_exact_first_order_and_hessian_free_are_three_things():
    """Flower's FedMeta trap: its second-order gradient equals the first-order one."""
    loss, params, _, batch = network()
    meta = {hvp: direction(personax.Meta(0.5, 1, hvp), params, loss=loss, batch=batch)[0] for hvp in HVPS}
    flat = {hvp: jax.flatten_util.ravel_pytree(g)[0] for hvp, g in meta.items()}
    exact, first, free = (flat[hvp] for hvp in HVPS)
    assert jnp.linalg.norm(exact - first) > 1e-2 * jnp.linalg.norm(exact)
    assert jnp.linalg.norm(exact - free) < 1e-5 * jnp.linalg.norm(exact)


HVPS = (personax.curvature.exact, personax.curvature.first_order, personax.curvature.finite_difference(1e-4))


@pytest.mark.parametrize(
    ("hvp", "num_curvature"),
    [(personax.curvature.exact, 3), (personax.curvature.first_order, 0), (HVPS[2], 3)],
    ids=str,
)
def test_the_number_of_batches_of_gmeta(hvp, num_curvature):
    assert personax.Meta(0.1, 3, hvp).roles() == {"adapt": 3, "outer": 1, "curvature": num_curvature}


def test_each_role_of_meta_uses_its_own_batch():
    """gMeta (11): w_l by the l-th adapt batch, the gradient by the outer one, H(w_l) by the l-th curvature batch."""
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(6, 3)), rng.normal(size=6)) for _ in range(5)]
    problems = [quadratic(x, y) for x, y in data]
    pack = lambda items: jax.tree.map(lambda *leaves: jnp.stack(leaves), *[whole(*item) for item in items])
    batches = {"adapt": pack(data[:2]), "outer": pack(data[2:3]), "curvature": pack(data[3:])}
    visit = Visit({"w": W}, (), Clock(0, 0, 1), 0.1)
    found, _ = personax.Meta(0.2, 2).gradient(TASK.loss, {"w": W}, (), visit, batches)
    adapted = problems[1].descend(problems[0].descend(W, 0.2, 1), 0.2, 1)
    factors = [np.eye(3) - 0.2 * problems[i].hessian for i in (3, 4)]
    np.testing.assert_allclose(found["w"], factors[0] @ factors[1] @ problems[2].gradient(adapted), rtol=1e-10)


@pytest.mark.parametrize("num_adapt_steps", [1, 2])
@pytest.mark.parametrize("hvp", [personax.curvature.exact, personax.curvature.finite_difference(1e-3)], ids=str)
def test_every_hessian_can_be_that_of_the_outer_batch(num_adapt_steps, hvp):
    """Fallah's Algorithm 1 as printed: no curvature batches, (I - a H(D')) in front of grad f(w~, D')."""
    rng = np.random.default_rng(0)
    adapt, outer = ((rng.normal(size=(6, 3)), rng.normal(size=6)) for _ in range(2))
    meta = personax.Meta(0.2, num_adapt_steps, hvp, curvature_on="outer")
    assert meta.roles() == {"adapt": num_adapt_steps, "outer": 1, "curvature": 0}
    batches = {"adapt": stacked(whole(*adapt), num_adapt_steps), "outer": stacked(whole(*outer), 1)}
    found, _ = meta.gradient(TASK.loss, {"w": W}, (), Visit({"w": W}, (), Clock(0, 0, 1), 0.1), batches)
    adapted = quadratic(*adapt).descend(W, 0.2, num_adapt_steps)
    factor = np.linalg.matrix_power(np.eye(3) - 0.2 * quadratic(*outer).hessian, num_adapt_steps)
    np.testing.assert_allclose(found["w"], factor @ quadratic(*outer).gradient(adapted), rtol=1e-8)


def test_no_theorem_covers_a_hessian_on_the_outer_batch():
    """The lemmas have independent batches; without a Hessian there is no such batch."""

    class Named:
        meta, none = (lambda self, *of: "meta"), (lambda self: "none")

    exact, first_order = personax.curvature.exact, personax.curvature.first_order
    found = [personax.Meta(0.1, 1, hvp, on).theorem(Named()) for hvp in (exact, first_order) for on in ("own", "outer")]
    assert found == ["meta", "none", "meta", "meta"]


def test_the_proximal_gradient():
    found, _ = direction(personax.Proximal(0.7), anchor={"w": V})
    np.testing.assert_allclose(found["w"], Q.gradient(W) + 0.7 * (W - V), rtol=1e-12)


def test_the_moreau_gradient_and_its_personal_model():
    found, theta = direction(personax.Moreau(2.0, 0.2, 300))
    np.testing.assert_allclose(theta["w"], Q.prox(W, 2.0), rtol=1e-9)
    np.testing.assert_allclose(found["w"], 2.0 * (W - Q.prox(W, 2.0)), rtol=1e-8)


def test_the_prox_residual_falls_geometrically():
    errors = []
    for num in (5, 10, 15, 20):
        theta = personax.Moreau(2.0, 0.1, num).prox(TASK.loss, {"w": W}, whole(X, Y))["w"]
        errors.append(np.linalg.norm(theta - Q.prox(W, 2.0)))
    slowest = 1 - 0.1 * (2.0 + np.linalg.eigvalsh(Q.hessian)[0])
    fastest = 1 - 0.1 * (2.0 + np.linalg.eigvalsh(Q.hessian)[-1])
    ratios = np.array(errors[1:]) / np.array(errors[:-1])
    assert np.all(ratios <= slowest**5 + 1e-12) and np.all(ratios >= fastest**5 - 1e-12)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6])
def test_the_prox_stops_at_its_tolerance(tolerance):
    """PersA-FL Algorithm 2, step 11: the gradient of the inner problem is no longer than nu, and just so."""
    moreau = personax.Moreau(2.0, 0.05, 10_000, tolerance)
    theta = moreau.prox(TASK.loss, {"w": W}, whole(X, Y))["w"]
    residual = np.linalg.norm(Q.gradient(theta) + 2.0 * (theta - W))
    assert 0.5 * tolerance < residual <= tolerance


def test_a_prox_that_cannot_reach_its_tolerance_stops_at_its_steps():
    found = personax.Moreau(2.0, 0.05, 3, 1e-12).prox(TASK.loss, {"w": W}, whole(X, Y))["w"]
    np.testing.assert_allclose(found, personax.Moreau(2.0, 0.05, 3).prox(TASK.loss, {"w": W}, whole(X, Y))["w"])


@pytest.mark.parametrize("num", [5, 8, 9])
def test_inner_steps_unrolled_as_on_a_gpu_end_where_a_loop_ends(num):
    prox = lambda: personax.Moreau(2.0, 0.05, num).prox(TASK.loss, {"w": W}, whole(X, Y))["w"]
    looped = prox()
    with pretend("gpu"):
        np.testing.assert_allclose(prox(), looped, rtol=1e-12)
        assert unroll_length(num) == (num if num <= 8 else 1)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_the_mixture_follows_apfl_5_and_6(mix):
    mixture = personax.Mixture(mix, update_mix="step")
    found, kept = direction(mixture, memory=Mixed({"w": jnp.asarray(V)}, jnp.asarray(mix)), lr=0.1)
    slope = Q.gradient(mix * V + (1 - mix) * W)
    np.testing.assert_allclose(found["w"], Q.gradient(W), rtol=1e-12)
    np.testing.assert_allclose(kept.model["w"], V - 0.1 * mix * slope, rtol=1e-12)
    np.testing.assert_allclose(kept.mix, np.clip(mix - 0.1 * (V - W) @ slope, 0, 1), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_the_mixing_weight_stays_in_its_interval(bound):
    """A step of 0.4 beyond the bound ends at the bound; half of the way to it, in the middle."""
    slope = (V - W) @ Q.gradient(0.6 * V + 0.4 * W)
    for share, end in ((0.5, (0.6 + bound) / 2), (1.0, bound), (2.0, bound)):
        mix_lr = share * (0.6 - bound) / slope
        own = Mixed({"w": jnp.asarray(V)}, jnp.asarray(0.6))
        # A negative step size is not accepted, so the loss is negated where the step must go up the slope.
        loss = lambda params, batch, sign=np.sign(mix_lr): sign * TASK.loss(params, batch)
        mixture = personax.Mixture(0.6, mix_lr=abs(mix_lr), update_mix="step")
        _, kept = direction(mixture, memory=own, loss=loss)
        np.testing.assert_allclose(kept.mix, end, rtol=1e-12, atol=1e-12)


def test_parameters_are_mixed_not_outputs():
    """FedTorch's trap. On a network the loss of mixed parameters differs from the loss of mixed outputs."""
    loss, params, other, batch = network()
    own = Mixed(other, jnp.asarray(0.4))
    slope = jax.grad(lambda m: loss(mix_models(own._replace(mix=m), params), batch))(own.mix)
    _, kept = direction(personax.Mixture(0.4, update_mix="step"), params, own, loss=loss, batch=batch, lr=0.01)
    np.testing.assert_allclose(kept.mix, 0.4 - 0.01 * slope, rtol=1e-12)


def test_the_factor_of_the_mixing_weight_is_in_v():
    """FedJAX's trap: v's gradient carries the factor mix, so halving the weight more than halves nothing but it."""
    moves = {}
    for mix in (0.5, 0.25):
        target = (X, X @ (mix * V + (1 - mix) * W) - 1.0)  # the same residual, so the same slope, for both weights
        own = Mixed({"w": jnp.asarray(V)}, jnp.asarray(mix))
        _, kept = direction(personax.Mixture(mix, update_mix="never"), memory=own, batch=whole(*target))
        moves[mix] = V - np.asarray(kept.model["w"])
    np.testing.assert_allclose(moves[0.5], 2 * moves[0.25], rtol=1e-10)


def test_one_mixing_weight_for_each_client():
    assert personax.Mixture(0.3).init_personal({"a": jnp.ones((2, 3)), "b": jnp.ones(4)}).mix.shape == ()


@pytest.mark.parametrize(
    ("update_mix", "moves"), [("never", (False, False)), ("round", (True, False)), ("step", (True, True))]
)
def test_when_the_mixing_weight_moves(update_mix, moves):
    own = Mixed({"w": jnp.asarray(V)}, jnp.asarray(0.5))
    for step, moved in enumerate(moves):
        _, kept = direction(personax.Mixture(0.5, update_mix=update_mix), memory=own, step=step)
        assert (kept.mix != 0.5) == moved


def test_projection_onto_a_ball_is_the_nearest_point():
    mixture = personax.Mixture(0.5, radius=2.0)
    for scale in (0.1, 1.0, 50.0):
        tree = {"a": scale * jnp.ones(3), "b": scale * jnp.ones((2, 2))}
        norm = scale * np.sqrt(7)
        found = mixture.project(tree)
        np.testing.assert_allclose(found["a"], tree["a"] * min(1, 2.0 / norm), rtol=1e-12)


def test_scaffold_corrects_by_the_control_variates():
    own, all_ = {"w": jnp.asarray(V)}, {"w": jnp.asarray(2 * W)}
    found, kept = direction(personax.Scaffold(), memory=own, shared=all_)
    np.testing.assert_allclose(found["w"], Q.gradient(W) - V + 2 * W, rtol=1e-12)
    assert kept is own


def test_scaffold_keeps_its_control_variate():
    """FL-bench's trap: the client's control variate stays 0 while the server's grows."""
    fed, problems = closed_forms.federation()
    algorithm = personax.scaffold(lr=0.1, num_steps=3, **closed_forms.FULL_BATCH)
    schedule = personax.rounds(fed.num_clients, 1, key=jax.random.key(0))
    result = personax.simulate(algorithm, TASK, fed, schedule, key=jax.random.key(0), params={"w": W})
    variates = np.stack([problem.gradient(W) for problem in problems])
    np.testing.assert_allclose(result.personal["w"], variates, rtol=1e-10)
    np.testing.assert_allclose(result.shared["w"], variates.mean(axis=0), rtol=1e-10)


def test_scaffold_option_2_of_one_full_step_is_option_1():
    fed, _ = closed_forms.federation()
    run = lambda option: personax.simulate(
        personax.scaffold(lr=0.1, option=option, num_steps=1, **closed_forms.FULL_BATCH),
        TASK,
        fed,
        personax.rounds(fed.num_clients, 5, 2, key=jax.random.key(1)),
        key=jax.random.key(0),
    )
    # After one step y = x - eta (g - c_i + c), so that c_i - c + (x - y) / eta = g.
    for leaf, other in zip(*(jax.tree.leaves((r.params, r.personal, r.shared)) for r in map(run, (1, 2))), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-9)


def test_aruba_refines_with_growing_sums():
    aruba = personax.Aruba(distance_scale=0.5, gradient_scale=2.0, refinement=3.0)
    shared = aruba.init_shared({"w": jnp.asarray(W)})
    batches = stacked(whole(X, Y), 3)
    found = aruba.personalize(TASK.loss, {"w": jnp.asarray(W)}, (), shared, batches, 1.0)["w"]
    w, squares = W, np.full(3, 2.0**2)
    for _ in range(3):
        gradient = Q.gradient(w)
        w, squares = w - 0.5 / np.sqrt(squares) * gradient, squares + 3.0 * gradient**2
    np.testing.assert_allclose(found, w, rtol=1e-12)


def test_personal_models_of_newcomers():
    """Fallah's few steps; the Moreau envelope's theta, not w; APFL (7)."""
    batches, params = stacked(whole(X, Y), 4), {"w": jnp.asarray(W)}
    adapt = lambda objective: objective.personalize(
        TASK.loss, params, objective.init_personal(params), objective.init_shared(params), batches, 0.2
    )["w"]
    for objective in (personax.Erm(), personax.Proximal(1.0), personax.Meta(0.1), personax.Scaffold()):
        np.testing.assert_allclose(adapt(objective), Q.descend(W, 0.2, 4), rtol=1e-12)
    np.testing.assert_allclose(adapt(personax.Moreau(2.0, 0.2, 300)), Q.prox(W, 2.0), rtol=1e-9)
    v = W
    for _ in range(4):
        v = v - 0.2 * 0.6 * Q.gradient(0.6 * v + 0.4 * W)
    np.testing.assert_allclose(adapt(personax.Mixture(0.6)), 0.6 * v + 0.4 * W, rtol=1e-12)


def test_the_moreau_personal_model_uses_all_its_batches():
    """`theta_i` of the mean loss of the rows of all batches, which differ: not of the first or the last alone."""
    halves = [(X[:3], Y[:3]), (X[3:], Y[3:])]
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(whole(*half) for half in halves))
    found = personax.Moreau(2.0, 0.2, 300).personalize(TASK.loss, {"w": jnp.asarray(W)}, (), (), batches, 0.2)["w"]
    np.testing.assert_allclose(found, Q.prox(W, 2.0), rtol=1e-9)
    for half in halves:
        residual = half[0].T @ (half[0] @ found - half[1]) / 3 + 2.0 * (found - W)
        assert np.linalg.norm(residual) > 1e-2


def test_the_personal_model_of_a_mixture_stays_in_the_ball():
    """APFL (7) with the projection of (5): every step of v ends in the ball of the radius."""
    radius = 0.9 * np.linalg.norm(V)
    own = Mixed({"w": jnp.asarray(V)}, jnp.asarray(0.6))
    mixture = personax.Mixture(0.6, radius=radius)
    given = (TASK.loss, {"w": jnp.asarray(W)}, own, (), stacked(whole(X, Y), 4), 0.2)
    v, free = V, V
    for _ in range(4):
        v = v - 0.2 * 0.6 * Q.gradient(0.6 * v + 0.4 * W)
        v = v * min(1, radius / np.linalg.norm(v))
        free = free - 0.2 * 0.6 * Q.gradient(0.6 * free + 0.4 * W)
    np.testing.assert_allclose(mixture.personalize(*given)["w"], 0.6 * v + 0.4 * W, rtol=1e-12)
    assert np.linalg.norm(v - free) > 1e-2


BAD = [
    (lambda: personax.Meta(-0.1), "`adapt_lr` must not be negative, got -0.1"),
    (lambda: personax.Meta(0.1, curvature_on="adapt"), "`curvature_on` must be one of 'own', 'outer', got 'adapt'"),
    (lambda: personax.Meta(0.1, -1), "`num_adapt_steps` must be a whole number of at least 0, got -1"),
    (lambda: personax.Proximal(-1.0), "`strength` must not be negative"),
    (lambda: personax.Moreau(0.0, 0.1, 5), "`strength` must be positive, got 0.0"),
    (lambda: personax.Moreau(1.0, 0.1, 0), "`num_prox_steps` must be a whole number of at least 1"),
    (lambda: personax.Mixture(1.5), r"`mix` must lie in \[0, 1\], got 1.5"),
    (lambda: personax.Mixture(0.5, update_mix="often"), "`update_mix` must be one of 'never', 'round', 'step'"),
    (lambda: personax.Mixture(0.5, radius=-1.0), "`radius` must be positive"),
    (lambda: personax.Scaffold(3), "`option` must be 1"),
    (lambda: personax.Aruba(distance_scale=0.0), "`distance_scale` must be positive"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_numbers_are_named_with_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_filler_rows_do_not_count():
    batch = whole(X, Y)
    padded = Batch(
        jnp.concatenate([batch.x, 7 * batch.x]),
        jnp.concatenate([batch.y, batch.y]),
        jnp.concatenate([batch.weight, 0 * batch.weight]),
        batch.key,
    )
    for objective in (personax.Erm(), personax.Meta(0.1), personax.Proximal(0.5)):
        np.testing.assert_allclose(direction(objective)[0]["w"], direction(objective, batch=padded)[0]["w"], rtol=1e-12)


def test_ditto_follows_its_equation():
    """`v <- v - lr (grad f(v) + strength (v - w))`, pulled toward the downloaded model, not toward the local one."""
    ditto, anchor = personax.Ditto(0.7, local_lr=0.2), np.array([0.3, -1.0, 0.5])
    found, v = direction(ditto, memory={"w": V}, anchor={"w": anchor})
    np.testing.assert_allclose(found["w"], Q.gradient(W), rtol=1e-12)
    np.testing.assert_allclose(v["w"], V - 0.2 * (Q.gradient(V) + 0.7 * (V - anchor)), rtol=1e-12)
    _, v = direction(personax.Ditto(0.7), memory={"w": V}, anchor={"w": anchor}, lr=0.05)
    np.testing.assert_allclose(v["w"], V - 0.05 * (Q.gradient(V) + 0.7 * (V - anchor)), rtol=1e-12)


def test_a_newcomer_s_ditto_model_starts_at_the_shared_one():
    """The fixed point of h(v; w) on a quadratic: (H + strength I) v = H optimum + strength w."""
    ditto, params = personax.Ditto(0.7), {"w": jnp.asarray(W)}
    batches = stacked(whole(X, Y), 500)
    v = ditto.personalize(TASK.loss, params, ditto.init_personal(params), (), batches, 0.3)["w"]
    np.testing.assert_allclose(Q.gradient(v) + 0.7 * (v - W), 0, atol=1e-9)


def test_ditto_without_a_pull_trains_alone():
    with pytest.raises(ValueError, match="With 0 the personal model is that of `local_only"):
        personax.Ditto(-1.0)
    _, v = direction(personax.Ditto(0.0), memory={"w": V})
    np.testing.assert_allclose(v["w"], V - 0.1 * Q.gradient(V), rtol=1e-12)
