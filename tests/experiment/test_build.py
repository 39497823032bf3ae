"""Configurations build the same values as Python, or raise an error that explains the mismatch."""

import dataclasses
import sys
import tomllib

import jax
import numpy as np
import pytest
import tomli_w

import personax as px
from personax.data import datasets, partition
from personax.experiment.build import (
    build,
    make_federation,
    make_schedules,
    make_task,
    make_training,
    outputs_of,
    resolve,
)
from personax.experiment.config import AlgorithmSection, Config, load, parse
from personax.experiment.runs import prepare
from personax.models import logistic_regression, mlp
from personax.values import DATASETS, RECIPES, Kind, to_dict
from tests.data.test_datasets import write_leaf
from tests.experiment.test_config import refused
from tests.recipes import RECIPES as VALUES

KEY = jax.random.key(0)
SHARED = {"lr": 0.1, "num_steps": 2}
SMALL = {"kind": "synthetic", "num_clients": 5, "num_features": 3, "num_classes": 3, "num_samples": 10}


def config_of(algorithms, **sections):
    return parse({"local": SHARED, "algorithms": algorithms, **sections})


def resolved(algorithms, baselines=False, **sections):
    return resolve(config_of(algorithms, **sections), baselines=baselines)


def without_kind(table):
    return {key: item for key, item in table.items() if key != "kind"}


def algorithm_of(recipe, **options):
    """Build the value of a TOML table."""
    table = tomllib.loads(tomli_w.dumps({"recipe": recipe, **options}))
    entry = resolve(parse({"algorithms": {"A": table}}), baselines=False).algorithms["A"]
    return make_training("A", entry).algorithm


def assert_same_data(one, other):
    for name in ("x", "y", "offsets", "test_x", "test_y", "test_offsets", "ids"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


# Options and scores


def test_shared_options_reach_every_recipe_and_an_algorithms_own_win():
    local = {"lr": 0.1, "num_steps": 3, "batch_size": 7, "optimizer": "adam"}
    entries = {"A": {"recipe": "fedavg"}, "B": {"recipe": "apfl", "lr": 0.5, "batch_size": 2}}
    config = resolve(parse({"local": local, "algorithms": entries}), baselines=False)
    assert config.algorithms["A"].options == local and config.local == {}
    assert config.algorithms["B"].options == {**local, "lr": 0.5, "batch_size": 2}


@pytest.mark.parametrize(
    ("shared", "own", "steps"),
    [
        ({"num_steps": 3}, {}, (3, None)),
        ({"num_steps": 3}, {"num_steps": 4}, (4, None)),
        ({"num_steps": 3}, {"num_epochs": 2}, (None, 2)),
        ({"num_epochs": 3}, {"num_steps": 4}, (4, None)),
        ({}, {"num_epochs": 2}, (None, 2)),
    ],
)
def test_own_steps_replace_shared_epochs_and_vice_versa(shared, own, steps):
    config = parse({"local": {"lr": 0.1, **shared}, "algorithms": {"A": {"recipe": "fedavg", **own}}})
    training = make_training("A", resolve(config, baselines=False).algorithms["A"])
    assert (training.algorithm.local.num_steps, training.algorithm.local.num_epochs) == steps


def test_aruba_learns_its_step_sizes_and_takes_no_shared_one():
    entry = resolved({"A": {"recipe": "aruba"}, "B": {"recipe": "aruba", "lr": 0.5}}).algorithms
    assert "lr" not in entry["A"].options and entry["B"].options["lr"] == 0.5


@pytest.mark.parametrize(
    ("entry", "scores"),
    [
        ({"recipe": "fedavg"}, {"model": "global"}),
        ({"recipe": "scaffold"}, {"model": "global"}),
        ({"recipe": "local_only"}, {"model": "personal"}),
        ({"recipe": "apfl"}, {"model": "personal"}),
        ({"recipe": "pfedme", "strength": 1.0, "prox_lr": 0.1}, {"model": "personal"}),
        (
            {"recipe": "per_fedavg", "adapt_lr": 0.3, "num_adapt_steps": 4},
            {"model": "adapted", "num_steps": 4, "lr": 0.3},
        ),
        (
            {"recipe": "persafl", "objective": {"kind": "Meta", "adapt_lr": 1}},
            {"model": "adapted", "num_steps": 1, "lr": 1.0},
        ),
    ],
    ids=lambda part: part.get("recipe", ""),
)
def test_without_scores_an_algorithm_has_its_objectives_default(entry, scores):
    assert resolved({"A": entry}).algorithms["A"].scores == {"A": scores}
    own = {"B": {"model": "localized"}}
    assert resolved({"A": {**entry, "scores": own}}).algorithms["A"].scores == own


def test_scores_become_scorings():
    scores = {"S": {"model": "adapted", "num_steps": 3, "lr": 1, "batch_size": 5, "adapt_on": "test"}, "T": {}}
    training = make_training("A", resolved({"A": {"recipe": "fedavg", "scores": scores}}).algorithms["A"])
    assert training.scorings == {"S": px.Scoring("adapted", 3, 1, 5, adapt_on="test"), "T": px.Scoring()}


# Baselines


def test_a_comparison_has_local_training_and_the_global_model_of_fedavg():
    config = resolved({"A": {"recipe": "apfl", "lr": 0.5}}, baselines=True)
    assert config.algorithms["Local"] == AlgorithmSection("local_only", SHARED, {"Local": {"model": "personal"}})
    assert config.algorithms["FedAvg"] == AlgorithmSection("fedavg", SHARED, {"FedAvg": {"model": "global"}})
    assert list(resolved({"A": {"recipe": "apfl"}}).algorithms) == ["A"]


def test_baselines_that_are_there_are_not_added():
    given = {"mine": {"recipe": "local_only"}, "avg": {"recipe": "fedavg", "scores": {"s": {"model": "global"}}}}
    assert list(resolved(given, baselines=True).algorithms) == ["mine", "avg"]
    plan = build(dataclasses.replace(resolved(given, baselines=True), data=config_of(given, data=SMALL).data))
    assert (plan.local_baseline, plan.global_baseline) == ("mine", "s")


def test_fedavg_without_a_global_score_is_not_a_baseline():
    given = {"FedAvg": {"recipe": "fedavg", "scores": {"tuned": {"model": "adapted"}}}}
    config = resolved(given, baselines=True)
    assert list(config.algorithms) == ["FedAvg", "Local", "FedAvg (baseline)"]
    assert config.algorithms["FedAvg (baseline)"].scores == {"FedAvg (baseline)": {"model": "global"}}


def test_names_of_baselines_are_free_whatever_others_are_called():
    names = ["Local", "Local (baseline)", "Local (baseline 2)"]
    scores = {"FedAvg": {"model": "personal"}}
    given = {**{name: {"recipe": "apfl"} for name in names}, "last": {"recipe": "apfl", "scores": scores}}
    config = resolved(given, baselines=True)
    assert list(config.algorithms) == [*names, "last", "Local (baseline 3)", "FedAvg (baseline)"]


def test_baselines_without_shared_options_descend_as_the_first_algorithm_does():
    own = {"lr": 0.3, "num_epochs": 2, "batch_size": 5, "optimizer": "adam"}
    first = {"recipe": "per_fedavg", "adapt_lr": 0.1, "query_share": 0.3, **own}
    config = parse({"algorithms": {"aruba": {"recipe": "aruba", "num_steps": 1}, "A": first}})
    assert resolve(config, baselines=True).algorithms["Local"].options == own
    shared = parse({"local": {"num_steps": 7}, "algorithms": {"A": first}})
    assert resolve(shared, baselines=True).algorithms["FedAvg"].options == {
        **{name: item for name, item in own.items() if name != "num_epochs"},
        "num_steps": 7,
    }


def test_baselines_need_a_step_size():
    config = parse({"algorithms": {"A": {"recipe": "aruba", "num_steps": 1}}})
    with refused("The comparison needs `local_only`, which has no `lr`. Set `local.lr`."):
        resolve(config, baselines=True)


# Mismatches


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"recipe": "fedavgg"}, "`algorithms.A` has no recipe `fedavgg`. Did you mean `fedavg`?"),
        ({"recipe": "fedavg", "num_step": 3}, "`algorithms.A` has no setting `num_step`. Did you mean `num_steps`?"),
        ({"recipe": "fedavg", "mix": 0.5}, "`algorithms.A` has no setting `mix`."),
        ({"recipe": "fedavg", "lr": -1}, "`algorithms.A`: `lr` must be positive, got -1."),
        ({"recipe": "fedavg", "lr": "big"}, "`algorithms.A.lr` must be a number, got 'big'."),
        (
            {"recipe": "fedavg", "lr": [0.1, 0.2]},
            "`algorithms.A.lr` must be one value, got the list [0.1, 0.2]. To",
        ),
        ({"recipe": "fedavg", "lr": {"kind": "Erm"}}, "`algorithms.A.lr` has no kind `Erm`. There are: Decay,"),
        ({"recipe": "fedavg", "lr": {"initial": 1}}, "`algorithms.A.lr` has no kind `None`."),
        (
            {"recipe": "fedavg", "clip_norm": {"kind": "Erm"}},
            "`algorithms.A.clip_norm` must be one value, got the",
        ),
        (
            {"recipe": "fedavg", "num_epochs": 1, "num_steps": 1},
            "`algorithms.A`: Give either `num_steps` or `num_e",
        ),
        (
            {"recipe": "fedprox"},
            "`algorithms.A` needs `strength`. Add it.",
        ),
        ({"recipe": "per_fedavg", "adapt_lr": 0.1, "hvp": "exakt"}, "no kind `exakt`. Did you mean `exact`?"),
        ({"recipe": "per_fedavg", "adapt_lr": 0.1, "hvp": 3}, "`algorithms.A.hvp` must be a kind or a table with a `k"),
        ({"recipe": "fedavg", "server": 3}, "`algorithms.A.server` must be a kind or a table with a `kind`, got 3."),
        ({"recipe": "fedavg", "server": "asynchron"}, "no kind `asynchron`. Did you mean `asynchronous`?"),
        ({"recipe": "fedavg", "server": {"kind": "buffered"}}, "`algorithms.A.server` needs `buffer_size`. Add it."),
        ({"recipe": "fedavg", "server": {"kind": "synchronous", "buffer_size": 2}}, "no setting `buffer_size`"),
        (
            {"recipe": "fedavg", "server": {"kind": "synchronous", "lr": 0}},
            "`algorithms.A.server`: `lr` must be pos",
        ),
        (
            {"recipe": "fedavg", "optimizer": "adm"},
            "`algorithms.A.optimizer`: No optimizer can be made from name 'adm'",
        ),
        ({"recipe": "fedavg", "optimizer": True}, "`algorithms.A.optimizer` must be a kind or a table"),
        ({"recipe": "persafl", "objective": {"kind": "Meta"}}, "`algorithms.A.objective` needs `adapt_lr`. Add it."),
        ({"recipe": "aruba", "objective": "Erm"}, "`algorithms.A.objective` must be Aruba, got Erm."),
        ({"recipe": "fedavg", "kind": "fedprox"}, "`algorithms.A` has no setting `kind`."),
        ({"recipe": {"kind": "import", "path": "a:b", "lr": 1}}, "`algorithms.A.recipe` has no setting `lr`."),
        ({"recipe": "import", "path": "os:system"}, "`algorithms.A` has no recipe `import`."),
        ({"recipe": "scaffold", "option": True}, "`algorithms.A.option` must be 1 or 2, got True."),
        ({"recipe": "persafl", "objective": "Polynomial"}, "`algorithms.A.objective` has no kind `Polynomial`."),
        (
            {"recipe": "persafl", "objective": {"kind": "Meta", "adapt_lr": 0.1, "hvp": {"kind": "FirstOrde"}}},
            "`algorithms.A.objective.hvp` has no kind `FirstOrde`. Did you mean `FirstOrder`?",
        ),
        (
            {"recipe": "fedavg", "scores": {"S": {"modell": "x"}}},
            "`algorithms.A.scores.S` has no setting `modell`.",
        ),
        ({"recipe": "fedavg", "scores": {"S": {"model": "x"}}}, "`algorithms.A.scores.S.model` must be 'global' or"),
        ({"recipe": "fedavg", "scores": {"S": {"num_steps": -1}}}, "`algorithms.A.scores.S`: `num_steps` must be"),
    ],
)
def test_errors_explain_why_an_algorithm_cannot_be_built(entry, said):
    with refused(said):
        for name, one in resolved({"A": entry}).algorithms.items():
            make_training(name, one)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"local": {"learning_rate": 1}}, "`local` has no setting `learning_rate`."),
        ({"local": {"lrs": 1}}, "`local` has no setting `lrs`. Did you mean `lr`?"),
        ({"seeds": [1, 2, 1]}, r"`seeds` must be different, got [1, 2, 1]."),
    ],
)
def test_invalid_configurations_are_refused_when_resolved(sections, said):
    with refused(said):
        resolved({"A": {"recipe": "fedavg"}}, **sections)


def test_scores_of_one_name_are_refused():
    given = {name: {"recipe": "fedavg", "scores": {"same": {"model": "global"}}} for name in "AB"}
    with refused("Duplicate score name `same`. Rename one."):
        resolved(given)


SYNC, ASYNC = {"recipe": "fedavg"}, {"recipe": "fedasync"}


@pytest.mark.parametrize(
    ("entry", "sections", "said"),
    [
        (
            SYNC,
            {"schedule": {"cohort_size": 6}},
            "`schedule.cohort_size` must be at most the 5 training clients",
        ),
        (ASYNC, {}, 'Asynchronous algorithms need delays. Set `schedule.delays = "persafl"`.'),
        (SYNC, {"split": {"num_held_out": 5}}, "`split.num_held_out` must be below the 5 clients, got 5."),
        ({**SYNC, "scores": {"S": {"clients": "held_out"}}}, {}, "`algorithms.A.scores.S` scores held-out clients"),
        ({**SYNC, "scores": {"S": {"model": "personal"}}}, {}, "`algorithms.A.scores.S` has no model `personal`."),
        (
            {**ASYNC, "scores": {"S": {"model": "global", "clients": "cohort"}}},
            {"schedule": {"delays": "persafl", "cohort_size": 2}},
            "`algorithms.A.scores.S` scores a cohort, but an asynchronous server has none.",
        ),
        ({**SYNC, "query_share": 0.5}, {}, "`query_share` reserves a part of the data for the outer batches"),
        (SYNC, {"model": {"kind": "cnn2"}}, "The model and its parameters must take the clients' data"),
        (SYNC, {"data": {"kind": "digits"}}, "`digits` data must be divided among clients. Add `[partition]`."),
        (
            SYNC,
            {"partition": {"kind": "iid", "num_clients": 3}},
            "`synthetic` data is already divided among clients.",
        ),
    ],
)
def test_incompatible_settings_are_reported_before_training(entry, sections, said):
    config = resolved({"A": entry}, **{"data": SMALL, "schedule": {"cohort_size": 2}, **sections})
    with refused(said, kind=ValueError):
        prepare(config)


# Every recipe, in TOML and in Python

LOCAL = {"lr": 0.1, "num_steps": 3, "batch_size": 4}
WRITTEN = {
    "fedavg": ({}, px.fedavg(**LOCAL)),
    "fedprox": ({"strength": 0.5}, px.fedprox(strength=0.5, **LOCAL)),
    "scaffold": ({"option": 2}, px.scaffold(option=2, **LOCAL)),
    "aruba": ({"objective": {"kind": "Aruba", "power": 2.0}}, px.aruba(px.Aruba(power=2.0), **LOCAL)),
    "local_only": ({"clip_norm": 5.0}, px.local_only(clip_norm=5.0, **LOCAL)),
    "per_fedavg": (
        {"adapt_lr": 0.2, "hvp": "first_order", "num_adapt_steps": 2},
        px.per_fedavg(adapt_lr=0.2, hvp=px.curvature.first_order, num_adapt_steps=2, **LOCAL),
    ),
    "ditto": ({"strength": 2.0}, px.ditto(strength=2.0, **LOCAL)),
    "pfedme": ({"strength": 2.0, "prox_lr": 0.05}, px.pfedme(strength=2.0, prox_lr=0.05, **LOCAL)),
    "apfl": (
        {"mix": 0.3, "update_mix": "never", "radius": 9.0},
        px.apfl(mix=0.3, update_mix="never", radius=9.0, **LOCAL),
    ),
    "anil": (
        {"head": "dense_1", "adapt_lr": 0.2, "hvp": "exact"},
        px.anil(head="dense_1", adapt_lr=0.2, hvp=px.curvature.exact, **LOCAL),
    ),
    "fedper": ({"personal": "dense_1"}, px.fedper(personal="dense_1", **LOCAL)),
    "lg_fedavg": ({"personal": ["dense_0"]}, px.lg_fedavg(personal=("dense_0",), **LOCAL)),
    "fedrep": (
        {"personal": "dense_1", "num_personal_epochs": 2, "personal_lr": 0.3},
        px.fedrep(personal="dense_1", num_personal_epochs=2, personal_lr=0.3, **LOCAL),
    ),
    "fedalt": (
        {"personal": "*.bias", "num_personal_steps": 2},
        px.fedalt(personal="*.bias", num_personal_steps=2, **LOCAL),
    ),
    "fedsim": ({"personal": "*.bias"}, px.fedsim(personal="*.bias", **LOCAL)),
    "fedbabu": ({"head": "dense_1"}, px.fedbabu(head="dense_1", **LOCAL)),
    "fedbn": ({"norm": ["norm_0", "*.var"]}, px.fedbn(norm=("norm_0", "*.var"), **LOCAL)),
    "fedsa_lora": ({"personal": "*.b"}, px.fedsa_lora(personal="*.b", **LOCAL)),
    "feddpa": (
        {"num_personal_steps": 2, "frozen": ["base", "!*.bias"]},
        px.feddpa(num_personal_steps=2, frozen=("base", "!*.bias"), **LOCAL),
    ),
    "fedasync": ({"server": {"kind": "asynchronous", "lr": 0.5}}, px.fedasync(server=px.asynchronous(0.5), **LOCAL)),
    "fedasync_mixing": (
        {"mixing": 0.4, "discount": {"kind": "Hinge", "slope": 1.0, "start": 4.0}, "max_staleness": 9},
        px.fedasync_mixing(mixing=0.4, discount=px.discounts.Hinge(1.0, 4.0), max_staleness=9, **LOCAL),
    ),
    "fedbuff": (
        {"buffer_size": 3, "server_lr": 0.7, "discount": "Constant"},
        px.fedbuff(buffer_size=3, server_lr=0.7, discount=px.discounts.Constant(), **LOCAL),
    ),
    "persafl": (
        {"objective": {"kind": "Meta", "adapt_lr": 0.1, "hvp": {"kind": "FiniteDifference", "radius": 0.01}}},
        px.persafl(px.Meta(0.1, hvp=px.curvature.finite_difference(0.01)), **LOCAL),
    ),
}


@pytest.mark.parametrize("recipe", list(RECIPES.kinds))
def test_every_recipe_can_be_written_in_toml(recipe):
    options, wanted = WRITTEN[recipe]
    assert algorithm_of(recipe, **options, **LOCAL) == wanted


@pytest.mark.parametrize("name", VALUES)
def test_every_algorithm_can_be_composed_in_toml(name):
    """Objective, descent and server from their own tables, with `persafl` as the frame that takes any of them."""
    wanted = dataclasses.replace(VALUES[name](1.0), sharing=px.Sharing())
    objective, local, server = (to_dict(part) for part in (wanted.objective, wanted.local, wanted.server))
    assert algorithm_of("persafl", objective=objective, server=server, **without_kind(local)) == wanted


@pytest.mark.parametrize(
    ("written", "server"),
    [
        ("synchronous", px.synchronous()),
        ("asynchronous", px.asynchronous()),
        ({"kind": "synchronous", "weighting": "samples"}, px.synchronous(weighting="samples")),
        ({"kind": "asynchronous", "lr": 0.5, "max_staleness": 4}, px.asynchronous(0.5, max_staleness=4)),
        ({"kind": "buffered", "buffer_size": 4, "applies": "models"}, px.buffered(4, applies="models")),
        ({"kind": "Server", "lr": 0.5, "buffer_size": 2}, px.buffered(2, 0.5)),
        ({"kind": "synchronous", "optimizer": "adam"}, px.synchronous(optimizer=px.optimizer("adam"))),
        (
            {"kind": "synchronous", "optimizer": {"kind": "Optimizer", "name": "sgd", "options": [["momentum", 0.9]]}},
            px.synchronous(optimizer=px.optimizer("sgd", momentum=0.9)),
        ),
    ],
    ids=str,
)
def test_servers_from_tables_and_short_words(written, server):
    assert algorithm_of("fedavg", server=written, **LOCAL) == px.fedavg(server=server, **LOCAL)


@pytest.mark.parametrize(
    ("written", "hvp"),
    [("exact", px.curvature.exact), ("first_order", px.curvature.first_order), ({"kind": "Exact"}, px.curvature.exact)],
    ids=str,
)
def test_curvature_from_short_words(written, hvp):
    options = {"adapt_lr": 0.1, **LOCAL}
    assert algorithm_of("per_fedavg", hvp=written, **options) == px.per_fedavg(hvp=hvp, **options)


def test_step_sizes_and_batch_sizes_from_tables():
    written = {"lr": {"kind": "Decay", "initial": 0.1, "rate": 0.01}, "batch_size": {"kind": "BatchSizes", "outer": 4}}
    values = {"lr": px.step_sizes.Decay(0.1, 0.01), "batch_size": px.BatchSizes(4)}
    assert algorithm_of("fedavg", num_steps=1, **written) == px.fedavg(num_steps=1, **values)


def test_the_batch_of_the_hessian_and_sizes_by_adaptation_step():
    """Fallah's Algorithm 1 as printed, and gMeta Remark 2."""
    options = {"lr": 0.1, "num_steps": 1, "adapt_lr": 0.1, "num_adapt_steps": 2, "curvature_on": "outer"}
    made = px.per_fedavg(**options, batch_size=px.BatchSizes(4, adapt=(3, 2)))
    sizes = {"kind": "BatchSizes", "outer": 4, "adapt": [3, 2]}
    assert algorithm_of("per_fedavg", **options, batch_size=sizes) == made


# Data

CUTS = [
    {"kind": "iid", "num_clients": 6, "num_per_client": 20},
    {"kind": "shards", "num_clients": 6},
    {"kind": "classes_per_client", "num_clients": 6, "num_classes_each": 3, "num_per_client": 30},
    {"kind": "dirichlet", "num_clients": 6, "concentration": 0.5, "num_per_client": 20},
    {"kind": "dirichlet_by_class", "num_clients": 6, "concentration": 0.5, "least": 5},
    {"kind": "fallah_halves", "num_clients": 6, "num_each": 10, "without_first": True},
]


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut["kind"])
def test_digits_are_divided_as_in_python(cut):
    pool, options = datasets.digits(), without_kind(cut)
    divide = getattr(partition, cut["kind"])
    parts = divide(pool.y, **options, key=KEY)
    config = config_of({"A": SYNC}, data={"kind": "digits"}, partition=cut, split={"test_share": 0.25})
    made = make_federation(config)
    assert_same_data(made, px.Federation.from_partition(pool.x, pool.y, *parts.split(0.25, key=KEY)))
    assert made.num_clients == 6 and "digits" in str(made).lower()


def test_the_split_has_its_own_seed():
    cut = {"data": {"kind": "digits"}, "partition": CUTS[0]}
    one, same, other = (
        make_federation(config_of({"A": SYNC}, seeds=seeds, split={"seed": seed}, **cut))
        for seed, seeds in ((0, 1), (0, [5]), (1, 1))
    )
    assert_same_data(one, same)
    assert np.any(one.x != other.x)


def test_newcomers_are_apart_from_the_clients_that_train():
    config = config_of({"A": SYNC}, data=SMALL, split={"num_held_out": 2, "seed": 3})
    whole = datasets.synthetic(0.5, 0.5, **without_kind(SMALL), key=jax.random.key(3))
    made = make_federation(config)
    expected = whole.hold_out(2, key=jax.random.key(3))
    assert_same_data(made, expected)
    assert_same_data(made.newcomers, expected.newcomers)
    assert set(made.ids.tolist()) | set(made.newcomers.ids.tolist()) == set(range(5))


def test_digits_have_no_published_test_set_to_cut():
    cut = {"kind": "fallah_halves", "num_clients": 4, "num_each": 10, "test_each": 5}
    config = config_of({"A": SYNC}, data={"kind": "digits"}, partition=cut)
    with refused("has no published test set for `partition.test_each`. Omit it."):
        make_federation(config)


def test_a_pool_with_a_published_test_set_is_cut_on_both_sides(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (200, 28, 28)).astype(np.uint8), "y": np.repeat(np.arange(10), 20)}
    tests = {f"test_{name}": item[::2] for name, item in arrays.items()}
    pool = px.datasets.pool.Pool(*arrays.values(), *tests.values(), num_classes=10, name="Toy", citation="")
    monkeypatch.setitem(DATASETS.kinds, "mnist", Kind("mnist", lambda: pool))
    cut = {"kind": "fallah_halves", "num_clients": 4, "num_each": 4, "test_each": 2}
    made = make_federation(config_of({"A": SYNC}, data={"kind": "mnist"}, partition=cut))
    train = partition.fallah_halves(pool.y, 4, 4, key=KEY)
    test = partition.fallah_halves(pool.test_y, 4, 2, key=KEY)
    wanted = px.Federation.from_partition(pool.x, pool.y, train, test, test_x=pool.test_x, test_y=pool.test_y)
    assert_same_data(made, wanted)


def table_of(seed=0, clients=("ann", "bob", "cyd"), num=10, label=lambda rng: rng.integers(0, 3)):
    rng = np.random.default_rng(seed)
    rows = [(who, *rng.normal(size=2).round(3), label(rng)) for who in clients for _ in range(num)]
    return "\n".join(["who,a,b,sick", *(",".join(map(str, row)) for row in rows)])


def test_a_user_file_is_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(table_of())
    section = {"kind": "file", "path": str(path), "client": "who", "label": "sick"}
    made = make_federation(config_of({"A": SYNC}, data=section, split={"test_share": 0.3, "seed": 1}))
    read = datasets.read_table(path, client="who", label="sick")
    assert_same_data(made, read.split_tests(0.3, key=jax.random.key(1)))
    assert list(made.names) == ["ann", "bob", "cyd"] and made.counts.tolist() == [7, 7, 7]


def test_a_user_file_with_tests_and_shapes(tmp_path):
    path = tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    x, y, client = rng.normal(size=(12, 4)), rng.integers(0, 2, 12), np.repeat([4, 7], 6)
    np.savez(path, x=x, y=y, client=client, test_x=x[::3], test_y=y[::3], test_client=client[::3])
    section = {"kind": "file", "path": str(path), "label": "y", "shape": [2, 2]}
    made = make_federation(config_of({"A": SYNC}, data=section))
    assert made.x.shape == (12, 2, 2) and made.test_x.shape == (4, 2, 2) and made.ids.tolist() == [4, 7]
    with pytest.raises(ValueError, match="`shape` must be that of 4 features"):
        make_federation(config_of({"A": SYNC}, data={**section, "shape": [3]}))


def test_a_file_that_is_not_there_is_an_error_with_its_path():
    with refused("File not found: nowhere.csv.", kind=OSError):
        make_federation(config_of({"A": SYNC}, data={"kind": "file", "path": "nowhere.csv"}))


def test_a_folder_of_leaf(tmp_path):
    rng = np.random.default_rng(0)
    for part, num in (("train", 6), ("test", 2)):
        users = {f"user {i}": (rng.normal(size=(num, 3)), rng.integers(0, 4, num)) for i in range(3)}
        write_leaf(tmp_path / part / "all.json", {user: (x.tolist(), y.tolist()) for user, (x, y) in users.items()})
    made = make_federation(config_of({"A": SYNC}, data={"kind": "leaf", "path": str(tmp_path)}))
    assert_same_data(made, datasets.read_leaf(tmp_path))
    assert made.num_clients == 3


# Tasks and models


def federation_of(y, test_y=None, newcomers=None):
    ones = lambda labels: (np.ones((len(labels), 2), np.float32), np.asarray(labels))
    fed = px.Federation.from_clients([ones(y)], [ones(y if test_y is None else test_y)])
    return dataclasses.replace(fed, newcomers=newcomers)


def test_there_is_an_output_for_each_class_up_to_the_largest_label_of_anyone():
    config = config_of({"A": SYNC})
    assert outputs_of(config, federation_of([0, 1, 0])) == ("classification", 2)
    assert outputs_of(config, federation_of([0, 1], [4, 0])) == ("classification", 5)
    assert outputs_of(config, federation_of([0, 1], newcomers=federation_of([6, 0], [0, 0]))) == ("classification", 7)
    assert outputs_of(config, federation_of([0, 1], newcomers=federation_of([0, 0], [8, 0]))) == ("classification", 9)


def test_the_task_is_what_the_labels_suggest_or_what_is_asked_for():
    config, real = config_of({"A": SYNC}), federation_of([0.5, 1.5])
    assert outputs_of(config, real) == ("regression", 1)
    assert outputs_of(config, federation_of(np.ones((4, 3)))) == ("regression", 3)
    asked = config_of({"A": SYNC}, task={"kind": "regression"})
    assert outputs_of(asked, federation_of([0, 1])) == ("regression", 1)
    with refused("Classification needs integer labels, got float64. Use `regression`."):
        outputs_of(config_of({"A": SYNC}, task={"kind": "classification"}), real)


@pytest.mark.parametrize(
    ("section", "model"),
    [
        ({"kind": "mlp", "widths": [4, 5], "activation": "relu"}, lambda n: mlp((4, 5), n, "relu")),
        ({"kind": "mlp", "widths": [4], "init": "fan_in"}, lambda n: mlp((4,), n, init="fan_in")),
        ({"kind": "cnn2", "init": "fan_in"}, lambda n: px.cnn2(n, init="fan_in")),
        ({"kind": "logistic_regression"}, logistic_regression),
        ({"kind": "cnn2"}, px.cnn2),
        ({"kind": "cnn3"}, px.cnn3),
    ],
)
def test_models_and_penalties_are_those_of_python(section, model):
    config = config_of({"A": SYNC}, model=section, task={"l2": 0.1})
    task = make_task(config, outputs_of(config, federation_of([0, 2])))
    assert task == px.classification(model(3), 0.1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A new current folder, which is not on the import path otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return tmp_path


MODULE = """
import personax
def build(num_outputs, width=3):
    return personax.mlp((width,), num_outputs)
def broken(num_outputs):
    raise RuntimeError("out of order")
def wrong(num_outputs):
    return num_outputs
class Unhashable:
    __hash__ = None
    def __call__(self, *_): ...
def unhashable(num_outputs):
    return personax.Model(Unhashable(), Unhashable())
"""


def imported(path, **options):
    config = config_of({"A": SYNC}, model={"kind": "import", "path": path, **options})
    return make_task(config, outputs_of(config, federation_of([0, 2])))


def test_a_user_model_is_imported_from_the_current_folder(here):
    (here / "my_models_of_a_test.py").write_text(MODULE)
    assert imported("my_models_of_a_test:build") == px.classification(mlp((3,), 3))
    assert imported("my_models_of_a_test:build", width=5) == px.classification(mlp((5,), 3))


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        ("my_models_of_another:broken", {}, "my_models_of_another:broken failed: RuntimeError: out of order"),
        ("my_models_of_another:wrong", {}, "`model` must give a personax.Model (got int). Use an adapter"),
        (
            "my_models_of_another:absent",
            {},
            "`model`: cannot import 'my_models_of_another:absent': AttributeError: module",
        ),
        ("my_models_of_another:unhashable", {}, "its functions must be hashable: unhashable type"),
        ("my_models_of_another:build", {"height": 3}, "`model` has no setting `height`. There are: width."),
        ("my_models_of_another:build", {"num_outputs": 3}, "`model` has no setting `num_outputs`"),
        (
            "no_such_module_at_all:build",
            {},
            "cannot import 'no_such_module_at_all:build': ModuleNotFoundError: No module named",
        ),
        ("...:build", {}, "cannot import '...:build': "),
    ],
)
def test_errors_explain_why_a_model_cannot_be_imported(here, path, options, said):
    (here / "my_models_of_another.py").write_text(MODULE)
    with refused(said):
        imported(path, **options)


# Schedules and the whole


def test_rounds_for_servers_that_wait_and_as_many_updates_for_others():
    section = {"num_rounds": 4, "cohort_size": 3, "delays": "persafl"}
    config = config_of({"A": SYNC}, seeds=[3, 8], schedule=section)
    waits, not_waits = px.fedavg(lr=0.1, num_steps=1), px.fedasync(lr=0.1, num_steps=1)
    for seed, made, others in zip(
        [3, 8], make_schedules(config, waits, 6), make_schedules(config, not_waits, 6), strict=True
    ):
        key = jax.random.key(seed)
        delays = px.delays.persafl_delays(6, key=key)
        for one, wanted in (
            (made, px.rounds(6, 4, 3, key=key, delays=delays)),
            (others, px.arrivals(6, 12, delays=delays, key=key)),
        ):
            assert all(np.array_equal(getattr(one, name), getattr(wanted, name)) for name in ("client", "time"))
        assert made.has_rounds and not others.has_rounds and made.num_events == others.num_events == 12


def test_schedules_of_devices_deadlines_and_limited_arrivals(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("device,samples_per_second,upload,download\nslow,1,10,10\nfast,8,80,80\n")
    section = {
        "num_rounds": 4,
        "cohort_size": 3,
        "delays": {"kind": "traces", "devices": str(path)},
        "num_aggregated": 2,
        "aggregate": "first",
        "deadline": 30.0,
        "concurrency": 3,
    }
    config, key = config_of({"A": SYNC}, seeds=[3], schedule=section), jax.random.key(3)
    work = px.traces.VisitWork(np.full(6, 4.0), 40.0, 80.0)
    delays = px.traces.read(path).delays(work, key=key)
    options = {"num_aggregated": 2, "aggregate": "first", "deadline": 30.0}
    for algorithm, wanted in (
        (px.fedavg(lr=0.1, num_steps=1), px.rounds(6, 4, 3, key=key, delays=delays, **options)),
        (px.fedasync(lr=0.1, num_steps=1), px.arrivals(6, 8, key=key, delays=delays, concurrency=3)),
    ):
        (made,) = make_schedules(config, algorithm, 6, work)
        assert made.begins_with(wanted) and wanted.begins_with(made)
    generated = {**section, "delays": {"kind": "devices", "num_devices": 20, "always_online": True}}
    (made,) = make_schedules(config_of({"A": SYNC}, seeds=[3], schedule=generated), algorithm, 6, work)
    assert made.num_events == 8 and made.time.min() > 0
    with refused("`schedule.num_aggregated` must be at most the cohort's 3, got 4"):
        make_schedules(config_of({"A": SYNC}, schedule={**section, "num_aggregated": 4}), algorithm, 6, work)


TIMING = """
import personax as px
class Slower:
    def __init__(self, num_clients, key, factor: float = 2.0):
        self.delays = px.delays.Delays(upload=px.delays.Fixed(factor))
    def visits(self, *given):
        return self.delays.visits(*given)
    def plan_rounds(self, *given):
        return self.delays.plan_rounds(*given)
    def visit_starter(self, *given):
        return self.delays.visit_starter(*given)
class NoTiming:
    def visits(self, *given): ...
"""


def test_delays_of_any_class_can_be_imported(here):
    (here / "my_delays_of_a_test.py").write_text(TIMING)
    named = lambda name, **options: {"kind": "import", "path": f"my_delays_of_a_test:{name}", **options}
    make = lambda delays, algorithm: make_schedules(
        config_of({"A": SYNC}, seeds=[3], schedule={"num_rounds": 2, "cohort_size": 3, "delays": delays}), algorithm, 6
    )
    (waits,) = make(named("Slower"), px.fedavg(lr=0.1, num_steps=1))
    assert waits.time.tolist() == [2.0] * 3 + [4.0] * 3
    (not_waits,) = make(named("Slower", factor=5.0), px.fedasync(lr=0.1, num_steps=1))
    assert set(not_waits.time.tolist()) == {5.0}
    with refused("`schedule.delays`: NoTiming lacks `plan_rounds`, `visit_starter`"):
        make(named("NoTiming"), px.fedavg(lr=0.1, num_steps=1))


def test_all_clients_as_a_cohort_and_rounds_without_delays():
    config = config_of({"A": SYNC}, seeds=1, schedule={"num_rounds": 2, "cohort_size": "all"})
    (made,) = make_schedules(config, px.fedavg(lr=0.1, num_steps=1), 5)
    assert made.num_events == 10 and sorted(made.client[:5]) == list(range(5)) and not made.time.any()


def test_the_whole_plan_of_the_embedded_configuration():
    config = resolve(load(None), baselines=True)
    work = prepare(config)
    assert (
        isinstance(work.config, Config)
        and work.plan.local_baseline == "Local"
        and work.plan.global_baseline == "FedAvg"
    )
    assert [t.name for t in work.plan.trainings] == list(config.algorithms) == list(work.runs)
    assert work.plan.federation.num_clients == 60 and work.plan.federation.newcomers.num_clients == 6
    np.testing.assert_array_equal(
        jax.random.key_data(work.plan.keys), [jax.random.key_data(jax.random.key(seed)) for seed in range(3)]
    )
