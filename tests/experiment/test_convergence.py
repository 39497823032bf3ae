"""Stationarity during a run: gradient norms by hand, random iterates, and bounds if a theorem covers the run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.experiment.build import resolve
from personax.experiment.config import parse
from personax.experiment.convergence import Convergence, can_follow, tracker_of
from personax.experiment.folders import Folder
from personax.experiment.runs import execute, prepare, start
from personax.report import write_report
from personax.simulation.simulate import initial_params
from tests.experiment.test_runs import TINY, Stop

pytestmark = pytest.mark.xdist_group("convergence")


def tables(lr=0.1, num_rounds=4, **more):
    local = {"lr": lr, "num_steps": 2, "batch_size": 4}
    schedule = {"num_rounds": num_rounds, "cohort_size": 2, "delays": "persafl"}
    evaluation = {"every": 1, "adaptation_steps": [], "stationarity": True}
    return TINY | {"local": local, "schedule": schedule, "evaluation": evaluation, "task": {"l2": 0.1}} | more


def done(root, **changes):
    folder = start(resolve(parse(tables(**changes)), baselines=False), root)
    return folder, execute(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return done(tmp_path_factory.mktemp("stationarity") / "run")


def evaluations(record, name):
    return next(one for one in record.algorithms if one.name == name).scores[0].evaluations


def test_the_norm_is_that_of_the_mean_gradient_of_all_clients(whole):
    """By hand: every client's full gradient at the initial models."""
    _, record = whole
    plan = prepare(resolve(parse(tables()), baselines=False)).plan
    federation, loss = plan.federation, plan.task.loss
    for seed, key in enumerate(plan.keys):
        params = initial_params(plan.task, federation, key=key)
        gradients = []
        for i in range(federation.num_clients):
            rows = slice(federation.offsets[i], federation.offsets[i + 1])
            x, y = jnp.asarray(federation.x[rows]), jnp.asarray(federation.y[rows])
            batch = px.Batch(x, y, jnp.ones(len(y)), jax.random.key(0))
            gradients.append(jax.flatten_util.ravel_pytree(jax.grad(loss)(params, batch))[0])
        wanted = float(jnp.sum(jnp.square(jnp.mean(jnp.stack(gradients), axis=0))))
        assert evaluations(record, "FedAvg")[0].stationarity[seed] == pytest.approx(wanted, rel=1e-6)


def test_only_objectives_with_a_function_in_common_are_followed(whole):
    _, record = whole
    assert all(one.stationarity is None for one in evaluations(record, "APFL"))
    assert all(one.stationarity is not None for one in evaluations(record, "PersA-FL"))
    assert not can_follow(px.apfl(lr=0.1, num_steps=1)) and can_follow(px.per_fedavg(adapt_lr=0.1, lr=0.1, num_steps=1))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [("fedavg", "batch normalization makes them depend on the batch"), ("fedbn", "a part is personal or frozen")],
)
def test_batch_normalization_and_divided_models_have_no_theorem(tmp_path, recipe, reason):
    """The run itself, from TOML: its bound states the reason, and nothing is followed."""
    model = {"kind": "mlp", "widths": [4], "norm": "batch"}
    _, record = done(tmp_path / "run", model=model, algorithms={"A": {"recipe": recipe}}, num_rounds=2)
    assert all(one.stationarity is None for one in evaluations(record, "A"))
    assert reason in record.algorithms[0].bound.words
    assert np.all(np.isfinite(evaluations(record, "A")[-1].mean["accuracy"]))


def test_random_iterates_are_those_of_synchronous_rounds(whole):
    _, record = whole
    assert all(one.iterate_stationarity is None for one in evaluations(record, "PersA-FL"))
    first, *later = evaluations(record, "FedAvg")
    assert first.iterate_stationarity == first.stationarity  # the model is unchanged
    models = [(one.iterate_stationarity, one.stationarity) for one in later]
    assert all(iterate != model for iterate, model in models)


def test_an_interrupted_run_has_the_same_norms(whole, tmp_path):
    folder = start(resolve(parse(tables()), baselines=False), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        execute(folder, Stop(3), checkpoint_seconds=0.0)
    again = execute(Folder(tmp_path / "run"))
    for name in ("FedAvg", "PersA-FL"):
        for one, other in zip(evaluations(again, name), evaluations(whole[1], name), strict=True):
            assert (one.stationarity, one.iterate_stationarity) == (other.stationarity, other.iterate_stationarity)


def test_a_bound_or_the_reason_for_its_absence_is_recorded(whole, tmp_path):
    record = whole[1]
    bounds = {one.name: one.bound for one in record.algorithms}
    assert bounds["APFL"] is None and not bounds["FedAvg"].values
    assert "`local_lr` must be at most 1 / (10 tau L_F)" in bounds["FedAvg"].words
    assert "a server step size of 1" in bounds["PersA-FL"].words  # it is 0.2
    folder, small = done(tmp_path / "small", lr=1e-3)
    bound = next(one.bound for one in small.algorithms if one.name == "FedAvg")
    assert bound.rounds == [1, 2, 3, 4] and bound.values == sorted(bound.values, reverse=True)
    means = np.cumsum([np.mean(one.iterate_stationarity) for one in evaluations(small, "FedAvg")[1:]]) / bound.rounds
    assert np.all(means <= bound.values)
    page = write_report([folder.root], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "random iterates" in page and "the bound" in page


def test_an_asynchronous_run_with_the_theorems_step_size_has_one_number(tmp_path, monkeypatch):
    """Theorem 1 of PersA-FL needs many updates: here the constants are small enough."""
    quiet = px.theory.Constants(smoothness=1e-3, gradient_noise=0.1, gradient_spread=0.1)
    monkeypatch.setattr("personax.experiment.convergence.theory.constants_of", lambda measured: quiet)
    lr = px.theory.persafl.local_lr(px.theory.persafl.ArrivalTraining(8, 2, 0), 1e-3)
    entry = {"recipe": "fedasync", "lr": lr}
    _, record = done(tmp_path / "run", lr=lr, algorithms={"FedAsync": entry})
    bound = record.algorithms[0].bound
    work = prepare(resolve(parse(tables(lr=lr, algorithms={"FedAsync": entry})), baselines=False))
    schedule = work.runs["FedAsync"].schedules[0]
    staleness = int(schedule.staleness().max())
    needed = px.theory.persafl.least_num_updates(1e-3, 2, staleness)
    assert (len(bound.values) == 1) == (needed <= 8), bound.words
    assert bound.values or f"{needed:.6g}"[:3] in bound.words
    other = Convergence(work.plan, px.fedasync(lr=2 * lr, num_steps=2))
    end = initial_params(work.plan.task, work.plan.federation, key=work.plan.keys[0])
    assert "1 / (Q sqrt(L T))" in other.bound(schedule, end, [4]).words


def test_only_a_run_that_no_theorem_covers_goes_without_a_bound():
    plan = prepare(resolve(parse(tables()), baselines=False)).plan
    end = initial_params(plan.task, plan.federation, key=plan.keys[0])
    schedule = px.rounds(plan.federation.num_clients, num_rounds=4, cohort_size=2, key=plan.keys[0])
    bound = lambda rounds, **server: Convergence(plan, px.fedavg(lr=1e-3, num_steps=2, **server)).bound(
        schedule, end, rounds
    )
    assert bound([4]).values and "a server step size of 1" in bound([4], server=px.synchronous(lr=0.5)).words
    with pytest.raises(ValueError, match="`num_rounds` must be a whole number of at least 1, got 0") as caught:
        bound([0])
    assert not isinstance(caught.value, px.theory.NotCovered)


def test_a_run_without_it_measures_nothing(tmp_path):
    _, record = done(tmp_path / "run", evaluation={"every": 2, "adaptation_steps": []})
    assert all(one.stationarity is None for one in evaluations(record, "FedAvg"))
    assert record.algorithms[0].bound is None
    assert tracker_of(px.fedavg(lr=0.1, num_epochs=1)) is None
