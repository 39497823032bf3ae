"""The fast path against each paper's pseudocode, on the same samples."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
import pytest

import personax
from personax import BatchSizes, Local, Meta, Moreau, asynchronous, synchronous
from personax.fast.near import SharedProducts
from tests.reference import apfl, baselines, fallah, gmeta, network, persafl
from tests.reference.problem import COUNTS, FEDERATION, TASK, W0, N, Samples, data, flat, grad, hvp, tree
from tests.simulation.options import grouped

KEYS = jax.random.split(jax.random.key(3), 4)
SIZES = BatchSizes(4, adapt=3, curvature=5)  # different, so that no role can stand for another
SIZES_BY_STEP = BatchSizes(4, adapt=(3, 6, 2), curvature=(5, 1, 7))  # gMeta Remark 2
TAU = 3


def rounds(key):
    return personax.rounds(N, 4, 3, key=key)


def all_train(key):
    return personax.rounds(N, 4, num_aggregated=3, key=key)


def arrivals(key):
    return personax.arrivals(N, 24, delays=personax.delays.persafl_delays(N, key=key), key=key)


def uniform(key):
    return personax.uniform_arrivals(N, 24, 5, key=key)


class Case(NamedTuple):
    """An algorithm, its twin (of the initial model, a schedule and the samples), and what they have in common."""

    algorithm: personax.Algorithm
    twin: Callable[..., dict]
    schedules: tuple[Callable, ...] = (rounds, rounds)  # one for each seed
    read: Callable[[personax.Result], dict] = lambda result: {"w": flat(result.params)}


def read_mixed(result):
    return {"w": flat(result.params), "v": flat(result.personal.model), "alpha": result.personal.mix}


def read_own(name):
    return lambda result: {"w": flat(result.params), name: flat(result.personal)}


def read_scaffold(result):
    return {"w": flat(result.params), "c": flat(result.shared), "c_i": flat(result.personal)}


def read_dropped(result):
    return {"w": flat(result.params), "num_dropped": result.num_dropped}


def read_aruba(result):
    b, g, t = result.shared
    return {"w": flat(result.params), "b": flat(b), "g": flat(g), "t": t}


ALPHA, BETA, DELTA = 0.5, 0.3, 1.0
HVPS = {
    "exact": personax.curvature.exact,
    "first-order": personax.curvature.first_order,
    "Hessian-free": personax.curvature.finite_difference(DELTA),
    "relative": personax.curvature.relative_difference(DELTA),
}
FALLAH = {
    "exact": fallah.exact,
    "first-order": fallah.first_order,
    "Hessian-free": fallah.hessian_free(fallah.constant(DELTA)),
    "relative": fallah.hessian_free(fallah.relative(DELTA)),
}
GMETA = {
    "exact": gmeta.local_update,
    "first-order": gmeta.local_update_fo,
    "Hessian-free": gmeta.local_update_hf(DELTA),
}


def per_fedavg(name, **local):
    algorithm = personax.per_fedavg(adapt_lr=ALPHA, lr=BETA, hvp=HVPS[name], num_steps=TAU, batch_size=SIZES, **local)
    twin = partial(fallah.per_fedavg, estimate=FALLAH[name], alpha=ALPHA, beta=lambda k: BETA, tau=TAU)
    return Case(algorithm, twin)


def as_printed(name):
    """Fallah's Algorithm 1, where the Hessian sees the outer batch."""
    case = per_fedavg(name, curvature_on="outer")
    return case._replace(twin=partial(case.twin, estimate=fallah.as_printed(FALLAH[name])))


def generalized_meta(name, num_adapt=3, **options):
    options = {"num_adapt_steps": num_adapt, "num_steps": TAU, "batch_size": SIZES, **options}
    update = gmeta.on_outer(GMETA[name]) if options.get("curvature_on") == "outer" else GMETA[name]
    twin = partial(gmeta.generalized_meta, update=update, alpha=ALPHA, beta=BETA, tau=TAU, nu=num_adapt)
    return Case(personax.per_fedavg(adapt_lr=ALPHA, lr=BETA, hvp=HVPS[name], **options), twin)


ADAPTS = {
    "never": lambda t, tau: False,
    "round": lambda t, tau: t % tau == 1,  # the first of the tau iterations of each round
    "step": lambda t, tau: True,
}


RADIUS = 2.0


def mixture(mix, update_mix, lr, eta, radius=None):
    project = apfl.everywhere if radius is None else apfl.ball(radius)
    algorithm = personax.apfl(lr=lr, mix=mix, update_mix=update_mix, radius=radius, num_steps=TAU, batch_size=4)
    twin = partial(apfl.apfl, alpha=mix, eta=eta, tau=TAU, adapts=ADAPTS[update_mix], project=project)
    return Case(algorithm, twin, read=read_mixed)


ETA, Q, STRENGTH, PROX_LR, NU = 0.2, 3, 2.0, 0.15, 1e-2
PROX_COUNTS: list[int] = []


def asynchronously(objective, direction, read=Case._field_defaults["read"]):
    algorithm = personax.Algorithm(objective, Local(ETA, num_steps=Q, batch_size=SIZES), asynchronous(0.8))
    twin = partial(persafl.persafl, direction=direction, eta=ETA, beta=0.8, Q=Q)
    return Case(algorithm, twin, (arrivals, arrivals, uniform, uniform), read)


LR = 0.4
FIXED = {"lr": LR, "num_steps": baselines.steps(TAU)}
RAGGED = {"lr": LR, "num_steps": baselines.epochs(2, 4)}
STEPS = {"num_steps": TAU, "batch_size": 4}
EPOCHS = {"num_epochs": 2, "batch_size": 4, "sampling": "shuffled"}
PFEDME = {"strength": STRENGTH, "lr": ETA, "prox_lr": PROX_LR, "num_prox_steps": 4}
ARUBA = {"epsilon": 0.4, "zeta": 0.9, "p": 0.7}
ASYNC = (arrivals, uniform)

CASES = {
    "Fallah (8)": per_fedavg("exact"),
    "Fallah (112)": per_fedavg("first-order"),
    "Fallah (119)-(121)": per_fedavg("Hessian-free"),
    "Fallah, relative radius, query share": per_fedavg("relative", query_share=0.3),
    "Fallah Algorithm 1 as printed": as_printed("exact"),
    "Fallah Algorithm 1 as printed, Hessian-free": as_printed("Hessian-free"),
    "gMeta Algorithm 2": generalized_meta("exact"),
    "gMeta Algorithm 3": generalized_meta("first-order"),
    "gMeta Algorithm 4": generalized_meta("Hessian-free"),
    "gMeta Algorithm 2, Hessians on the outer batch": generalized_meta("exact", curvature_on="outer"),
    "gMeta Algorithm 4, sizes by step": generalized_meta("Hessian-free", batch_size=SIZES_BY_STEP),
    "gMeta Algorithm 2, sizes by step, shuffled": generalized_meta(
        "exact", batch_size=SIZES_BY_STEP, sampling="shuffled", query_share=0.3
    ),
    "APFL, fixed": mixture(0.3, "never", 0.3, lambda t: 0.3),
    "APFL, per round": mixture(0.3, "round", 0.3, lambda t: 0.3),
    "APFL, per step, decaying": mixture(
        0.6, "step", personax.step_sizes.Decay(0.4, 0.1), lambda t: 0.4 * 0.9 ** (t - 1)
    ),
    "APFL, per step, projected": mixture(0.6, "step", 0.3, lambda t: 0.3, RADIUS),
    "PersA-FL, Option A": asynchronously(personax.Erm(), persafl.option_a),
    "PersA-FL, Option B": asynchronously(Meta(ALPHA), persafl.option_b(ALPHA)),
    "PersA-FL, Option C, fixed steps": asynchronously(
        Moreau(STRENGTH, PROX_LR, 10),
        persafl.option_c(STRENGTH, persafl.fixed_steps(PROX_LR, 10)),
        read_own("theta"),
    ),
    "PersA-FL, Option C, tolerance": asynchronously(
        Moreau(STRENGTH, PROX_LR, 200, tolerance=NU),
        persafl.option_c(STRENGTH, persafl.up_to(PROX_LR, NU, PROX_COUNTS)),
        read_own("theta"),
    ),
    "FedAvg": Case(personax.fedavg(lr=LR, **STEPS), partial(baselines.fedavg, **FIXED)),
    "FedAvg, by samples, epochs": Case(
        personax.fedavg(lr=LR, server=synchronous(weighting="samples"), **EPOCHS),
        partial(baselines.fedavg, **RAGGED, weights=lambda i: COUNTS[i]),
    ),
    "FedProx": Case(personax.fedprox(strength=0.7, lr=LR, **STEPS), partial(baselines.fedprox, **FIXED, mu=0.7)),
    "SCAFFOLD, Option I": Case(
        personax.scaffold(lr=LR, option=1, server=synchronous(0.7), **STEPS),
        partial(baselines.scaffold, **FIXED, global_lr=0.7, option=1),
        read=read_scaffold,
    ),
    "SCAFFOLD, Option II": Case(
        personax.scaffold(lr=LR, option=2, server=synchronous(0.7), **EPOCHS),
        partial(baselines.scaffold, **RAGGED, global_lr=0.7, option=2),
        read=read_scaffold,
    ),
    "SCAFFOLD, Option II, decaying": Case(
        personax.scaffold(lr=personax.step_sizes.Decay(LR, 0.3), option=2, server=synchronous(0.7), **STEPS),
        partial(
            baselines.scaffold,
            lr=lambda r, k: LR * 0.7 ** (r * TAU + k),
            num_steps=baselines.steps(TAU),
            global_lr=0.7,
            option=2,
        ),
        read=read_scaffold,
    ),
    "pFedMe": Case(
        personax.pfedme(**PFEDME, server=synchronous(0.6), **STEPS),
        partial(baselines.pfedme, **PFEDME, beta=0.6, R=TAU),
        (all_train, all_train),
        read_own("theta"),
    ),
    "FedAsync, polynomial": Case(
        personax.fedasync_mixing(lr=LR, mixing=0.6, strength=0.7, discount=personax.discounts.Polynomial(0.8), **STEPS),
        partial(baselines.fedasync, **FIXED, rho=0.7, alpha=0.6, s=baselines.polynomial(0.8)),
        ASYNC,
    ),
    "FedAsync, hinge, bounded": Case(
        personax.fedasync_mixing(
            lr=LR, mixing=0.6, strength=0.7, discount=personax.discounts.Hinge(1.5, 2), max_staleness=4, **STEPS
        ),
        partial(baselines.fedasync, **FIXED, rho=0.7, alpha=0.6, s=baselines.hinge(1.5, 2), max_staleness=4),
        ASYNC,
        read_dropped,
    ),
    "FedBuff": Case(
        personax.fedbuff(lr=LR, buffer_size=3, server_lr=0.9, **STEPS),
        partial(baselines.fedbuff, **FIXED, global_lr=0.9, K=3),
        ASYNC,
    ),
    "ARUBA": Case(
        personax.aruba(personax.Aruba(ARUBA["epsilon"], ARUBA["zeta"], ARUBA["p"]), **STEPS),
        partial(baselines.aruba, num_steps=FIXED["num_steps"], **ARUBA),
        read=read_aruba,
    ),
    "local training": Case(
        personax.local_only(lr=LR, **EPOCHS), partial(baselines.local_only, **RAGGED), read=read_own("v")
    ),
}
ALONE = ("PersA-FL, Option C, tolerance", "SCAFFOLD, Option II")


def simulate(case, schedule, key, **options):
    return personax.simulate(case.algorithm, TASK, FEDERATION, schedule, key=key, params=tree(W0), **grouped(**options))


def run_twin(case, schedule, key, **options):
    return case.twin(W0, schedule, Samples(key, case.algorithm.local), **options)


def assert_agree(fast, twin, rtol=1e-9):
    """Each array, to `rtol` times its largest entry."""
    for name, value in fast.items():
        np.testing.assert_allclose(value, twin[name], rtol=0, atol=rtol * np.abs(twin[name]).max(), err_msg=name)


# Other cases have sizes by step, shuffled batches, a query share and exact Hessians; and others have Hessian-free
# products and the outer batch (below, on a network).
SLOW = ("gMeta Algorithm 2, sizes by step, shuffled", "Fallah Algorithm 1 as printed, Hessian-free")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_seeds_together_agree_with_the_twin(name):
    case = CASES[name]
    keys = KEYS[: len(case.schedules)]
    schedules = [make(key) for make, key in zip(case.schedules, keys, strict=True)]
    fast = case.read(simulate(case, schedules, keys))
    for seed, (schedule, key) in enumerate(zip(schedules, keys, strict=True)):
        assert_agree({name: value[seed] for name, value in fast.items()}, run_twin(case, schedule, key))


@pytest.mark.parametrize("name", ALONE)
def test_one_seed_agrees_with_the_twin(name):
    case, key = CASES[name], KEYS[1]
    schedule = case.schedules[1](key)
    assert_agree(case.read(simulate(case, schedule, key)), run_twin(case, schedule, key))


@pytest.mark.parametrize("key", KEYS[:2])
def test_apfl_theorem_2(key):
    """The step size 16 / (mu (t + a)) and the average iterate of every client, selected or not."""
    mu, a, mix = 4.0, 10.0, 0.7
    case = mixture(mix, "never", personax.step_sizes.StronglyConvex(mu, a), lambda t: 16 / (mu * (t + a)))
    tracker, schedule = personax.WeightedAverage(a), rounds(key)
    result = simulate(case, schedule, key, tracker=tracker)
    fast = case.read(result) | {"v_hat": flat(tracker.read(result.tracked))}
    assert_agree(fast, run_twin(case, schedule, key, a=a))


def test_fallah_remark_4_7():
    """The tracked model is the cohort's mean at a step t_k < tau of the last round; every t_k occurs for some seed."""
    keys = jax.random.split(jax.random.key(0), 16)
    schedules = [rounds(key) for key in keys]
    local = Local(personax.step_sizes.InverseSqrt(), num_steps=TAU, batch_size=SIZES)
    meta = Meta(ALPHA, hvp=personax.curvature.first_order)
    case = per_fedavg("first-order")._replace(algorithm=personax.Algorithm(meta, local, synchronous()))
    result = simulate(case, schedules, keys, tracker=personax.RandomIterate())
    found = set()
    for seed, (schedule, key) in enumerate(zip(schedules, keys, strict=True)):
        twin = run_twin(case, schedule, key, beta=lambda k: 1 / np.sqrt(TAU * k))  # Remark G.1
        assert_agree({"w": flat(result.params)[seed]}, twin)
        gaps = [np.abs(flat(result.tracked)[seed] - iterate).max() for iterate in twin["means"]]
        assert min(gaps) < 1e-6 < 1e-3 < sorted(gaps)[1]
        found.add(int(np.argmin(gaps)))
    assert found == set(range(TAU))


def test_the_problem_is_the_task():
    """NumPy's gradient and Hessian-vector product are those of the task's loss."""
    w, u = np.random.default_rng(1).normal(size=(2, W0.size))
    gradient = jax.jit(jax.grad(TASK.loss))
    for i in range(N):
        x, y = data(i)
        batch = personax.Batch(x, y, np.ones(len(y)), jax.random.key(0))
        value, product = jax.jvp(lambda params, batch=batch: gradient(params, batch), (tree(w),), (tree(u),))
        assert_agree({"g": flat(value), "h": flat(product)}, {"g": grad(w, (x, y)), "h": hvp(w, (x, y), u)})


ON_NETWORK = {
    **{f"{name}, one step": (per_fedavg(name), fallah, 2) for name in ("exact", "first-order", "Hessian-free")},
    **{f"{name}, two steps": (generalized_meta(name, 2), gmeta, 1) for name in GMETA},
    "as printed": (as_printed("exact"), fallah, 2),
    "Hessian-free, two steps, on the outer batch": (
        generalized_meta("Hessian-free", 2, curvature_on="outer"),
        gmeta,
        1,
    ),
    "first-order, two steps, sizes by step": (
        generalized_meta("first-order", 2),
        gmeta,
        BatchSizes(1, adapt=(1, 2)),
    ),
}


# The others differ from one of these in the estimate or the number of steps only; tests/fast/test_near.py has them all.
FAST_ON_NETWORK = (
    "Hessian-free, one step",
    "exact, two steps",
    "Hessian-free, two steps, on the outer batch",
    "first-order, two steps, sizes by step",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST_ON_NETWORK)) for n in ON_NETWORK]
)
def test_meta_gradients_of_a_network_in_shared_products_agree_with_the_twin(name, monkeypatch):
    """A nonconvex loss in whole visits, with batches that are small enough for shared products."""
    case, twins, size = ON_NETWORK[name]
    monkeypatch.setattr(twins, "grad", network.grad)
    monkeypatch.setattr(twins, "hvp", network.hvp)
    case = case._replace(algorithm=replace(case.algorithm, local=replace(case.algorithm.local, batch_size=size)))
    key, schedule = KEYS[0], rounds(KEYS[0])
    params = network.tree(network.W0)
    taken, make = [], SharedProducts.__init__
    monkeypatch.setattr(SharedProducts, "__init__", lambda *given: taken.append(True) or make(*given))
    result = personax.simulate(case.algorithm, network.TASK, FEDERATION, schedule, key=key, params=params)
    twin = case.twin(network.W0, schedule, Samples(key, case.algorithm.local))
    assert_agree({"w": network.flat(result.params)}, twin)
    assert taken and np.linalg.norm(twin["w"] - network.W0) > 0.1


def test_the_network_is_the_task_and_is_not_convex():
    w, u = np.random.default_rng(1).normal(size=(2, network.W0.size))
    x, y = data(1)
    batch = personax.Batch(x, y, np.ones(len(y)), jax.random.key(0))
    gradient = lambda params: jax.grad(network.TASK.loss)(params, batch)
    value, product = jax.jit(lambda w, u: jax.jvp(gradient, (w,), (u,)))(network.tree(w), network.tree(u))
    found = {"g": network.flat(value), "h": network.flat(product)}
    assert_agree(found, {"g": network.grad(w, (x, y)), "h": network.hvp(w, (x, y), u)})
    hessian = np.stack([network.hvp(w, (x, y), row) for row in np.eye(w.size)])
    assert np.linalg.eigvalsh(hessian)[0] < -1e-2


@pytest.mark.parametrize(
    "names",
    [
        ("Fallah (8)", "Fallah (112)", "Fallah (119)-(121)"),
        ("gMeta Algorithm 2", "gMeta Algorithm 3", "gMeta Algorithm 4"),
        ("Fallah (8)", "gMeta Algorithm 2"),
        ("Fallah (8)", "Fallah Algorithm 1 as printed", "Fallah Algorithm 1 as printed, Hessian-free"),
        ("gMeta Algorithm 2", "gMeta Algorithm 2, Hessians on the outer batch"),
        ("gMeta Algorithm 4", "gMeta Algorithm 4, sizes by step"),
        ("Fallah (112)", "gMeta Algorithm 3"),
        ("APFL, fixed", "APFL, per round", "APFL, per step, decaying", "APFL, per step, projected"),
    ],
    ids=lambda names: names[0],
)
def test_what_should_differ_differs(names):
    """Differ by more than a percent, so that no twin agrees by accident."""
    ends = [run_twin(CASES[name], rounds(KEYS[0]), KEYS[0]) for name in names]
    ends = [np.ravel(end["v"] if "v" in end else end["w"]) for end in ends]
    for i, end in enumerate(ends):
        assert all(np.linalg.norm(end - other) > 1e-2 * np.linalg.norm(end) for other in ends[:i])


def test_the_cases_exercise_what_they_name():
    """Stale updates, idle clients, weights at their bound, models on the sphere, searches of several lengths."""
    assert min(make(key).staleness().max() for make in (arrivals, uniform) for key in KEYS) >= 4
    key = KEYS[0]
    idle = set(range(N)) - set(rounds(key).client.tolist())
    assert idle
    projected = run_twin(CASES["APFL, per step, projected"], rounds(key), key)
    assert np.isclose(np.linalg.norm(projected["v"], axis=1), RADIUS).any()
    assert all((projected["v"][i] == W0).all() for i in idle)
    weights = [run_twin(CASES["APFL, per round"], rounds(key), key)["alpha"] for key in KEYS[:2]]
    assert np.isin([0.0, 1.0], weights).any()
    PROX_COUNTS.clear()
    run_twin(CASES["PersA-FL, Option C, tolerance"], arrivals(key), key)
    assert len(set(PROX_COUNTS)) > 2 and max(PROX_COUNTS) < 200
    assert run_twin(CASES["FedAsync, hinge, bounded"], arrivals(key), key)["num_dropped"] > 0


def test_shuffled_epochs_see_each_sample_once():
    local = CASES["FedAvg, by samples, epochs"].algorithm.local
    samples = Samples(KEYS[0], local)
    for i in range(N):
        per_epoch = baselines.epochs(1, 4)(i)
        passes = [[samples.rows(i, 1, e * per_epoch + k) for k in range(per_epoch)] for e in range(2)]
        own = np.arange(FEDERATION.offsets[i], FEDERATION.offsets[i + 1])
        assert all(np.array_equal(np.sort(np.concatenate(rows)), own) for rows in passes)
        assert not np.array_equal(*map(np.concatenate, passes))
