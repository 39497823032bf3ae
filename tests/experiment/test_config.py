"""Configurations round-trip through TOML, and mistakes are explained before anything is computed."""

import contextlib
import copy
import dataclasses
import datetime
import inspect
import math
import tomllib

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import personax
from personax.experiment.build import make_task, make_training, outputs_of, resolve
from personax.experiment.config import (
    STARTER,
    Config,
    ConfigError,
    ScheduleSection,
    check_names,
    choose_algorithm,
    dump,
    load,
    parse,
)
from personax.experiment.runs import prepare
from personax.values import RECIPES

DEFAULT = STARTER
FEDAVG = {"A": {"recipe": "fedavg", "lr": 0.1, "num_steps": 1}}


def default():
    """The embedded configuration as plain tables."""
    return tomllib.loads(DEFAULT.read_text(encoding="utf-8"))


@contextlib.contextmanager
def refused(*said, kind=ConfigError):
    """Expect an error that contains these words."""
    with pytest.raises(kind) as error:
        yield
    for words in said:
        assert words in str(error.value)


def with_section(name, **settings):
    return {"algorithms": FEDAVG, name: settings}


def read_again(config):
    return parse(tomllib.loads(dump(config)))


# TOML -> Config -> TOML


def test_the_embedded_configuration_is_the_default():
    assert load(None) == load(DEFAULT) == parse(default())
    assert load(None).seed_list == [0, 1, 2] and load(None, ["seeds=[7, 5]"]).seed_list == [7, 5]


SECTIONS = [
    ("data", {"kind": "mnist"}),
    ("data", {"kind": "synthetic", "model_spread": 0, "num_clients": 7, "num_samples": 12}),
    ("data", {"kind": "leaf", "path": "some/folder"}),
    ("data", {"kind": "femnist", "path": "folder", "digits_only": True}),
    ("data", {"kind": "file", "path": 'with "quotes" and \\.csv', "split": "part", "shape": [28, 28]}),
    ("partition", {"kind": "iid", "num_clients": 5}),
    ("partition", {"kind": "shards", "num_clients": 5, "num_shards_each": 1}),
    ("partition", {"kind": "classes_per_client", "num_clients": 3, "num_classes_each": 2, "num_per_client": 20}),
    ("partition", {"kind": "dirichlet", "num_clients": 5, "concentration": 1, "num_per_client": 9}),
    ("partition", {"kind": "dirichlet_by_class", "num_clients": 5, "concentration": 0.5}),
    ("partition", {"kind": "fallah_halves", "num_clients": 4, "num_each": 10, "test_each": 2, "without_first": True}),
    ("model", {"kind": "mlp", "widths": [], "activation": "tanh"}),
    ("model", {"kind": "cnn2"}),
    ("model", {"kind": "import", "path": "my.models:build", "depth": 2, "names": ["a", "b"]}),
    ("partition", {"kind": "import", "path": "my.cuts:cut", "num_clients": 2}),
    ("data", {"kind": "import", "path": "my.data:load"}),
    ("schedule", {"delays": {"kind": "Delays", "upload": {"kind": "Gamma", "mean": 2.0}}}),
    ("task", {"kind": "regression", "l2": 1e-3}),
    ("schedule", {"cohort_size": "all", "num_rounds": 1, "delays": "persafl"}),
    ("evaluation", {"every": 3, "adaptation_steps": []}),
    (
        "live",
        {"num_clients": 3, "deadline": 60.0, "sync": True, "sample": {"shape": [8], "type": "uint8", "num_outputs": 3}},
    ),
    ("tune", {"lr": [0.1, {"kind": "Decay", "initial": 0.1, "rate": 0.01}]}),
    ("tune", {"search": "random", "num_trials": 5, "seed": 7, "share": 0.3, "objective.strength": [0.1, 1]}),
]


@pytest.mark.parametrize(("section", "table"), SECTIONS, ids=[table.get("kind", name) for name, table in SECTIONS])
def test_what_is_written_reads_back_the_same(section, table):
    config = parse(with_section(section, **table))
    assert read_again(config) == config != parse({"algorithms": FEDAVG})
    for name, item in table.items():  # and nothing that was given is lost
        written = tomllib.loads(dump(config))[section][name]
        assert (written | item if isinstance(item, dict) else item) == written


def test_resolved_configurations_read_back_the_same_and_resolve_to_themselves():
    for baselines in (False, True):
        config = resolve(load(None), baselines=baselines)
        assert read_again(config) == config == resolve(config, baselines=baselines)


def test_names_with_dots_and_quotes_survive():
    names = ["a.b", 'say "x"', "l'été", "# no comment", "x = 1", "[y]", "back\\slash", "a/b"]
    entry = {**FEDAVG["A"], "scores": {name: {"model": "global"} for name in names}}
    config = parse({"algorithms": {name: entry for name in names}})
    assert read_again(config) == config and list(config.algorithms) == names
    assert list(config.algorithms["a.b"].scores) == names


def test_all_clients_can_be_a_cohort():
    assert ScheduleSection().cohort_size == 10
    assert parse(with_section("schedule", cohort_size="all")).schedule.cohort_size == "all"


def test_the_options_of_an_algorithm_are_next_to_its_recipe():
    entry = parse({"algorithms": {"A": {"recipe": "apfl", "lr": 0.1, "mix": 0.5, "scores": {"S": {}}}}}).algorithms["A"]
    assert (entry.recipe, entry.options, entry.scores) == ("apfl", {"lr": 0.1, "mix": 0.5}, {"S": {}})


# Mistakes in tables


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"algoritms": FEDAVG}, "`the file` has no setting `algoritms`. Did you mean `algorithms`?"),
        (with_section("schedule", num_round=3), "`schedule` has no setting `num_round`. Did you mean `num_rounds`?"),
        (with_section("evaluation", evry=3), "`evaluation` has no setting `evry`. Did you mean `every`?"),
        (with_section("split", test_shares=0.1), "`split` has no setting `test_shares`. Did you mean `test_share`?"),
        (with_section("task", l1=0.1), "`task` has no setting `l1`. Did you mean `l2`?"),
        (
            with_section("data", kind="synthetic", num_classs=3),
            "`data` has no setting `num_classs`. Did you mean `num_classes`? There are: input_spread, model_spread,",
        ),
        (with_section("data", kind="digits", path="x"), "`data` has no setting `path`. There are: standardize."),
        (
            with_section("partition", kind="shards", num_clients=2, num_shards=2),
            "`partition` has no setting `num_shards`. Did you mean `num_shards_each`? There are: num_clients,",
        ),
        (with_section("model", kind="mlp", width=[3]), "`model` has no setting `width`. Did you mean `widths`?"),
        (
            with_section("model", kind="cnn2", widths=[3]),
            "`model` has no setting `widths`. There are: base, base_digest, dropout, init, lora.",
        ),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(table, said):
    with refused(said):
        parse(table)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "`algorithms`: dictionary should have at least 1 item"),
        ({"algorithms": {}}, "`algorithms`: dictionary should have at least 1 item"),
        ({"algorithms": 3}, "`algorithms`: input should be a valid dictionary, got 3."),
        ({"algorithms": {"A": 3}}, "`algorithms.A`: input should be a dictionary"),
        ({"algorithms": {"A": {}}}, "`algorithms.A` needs `recipe`. Add it"),
        ({"algorithms": {"A": {"recipe": 3}}}, "`algorithms.A.recipe`: input should be a valid string, got 3."),
        ({"algorithms": {"A": {"recipe": "x", "scores": 3}}}, "`algorithms.A.scores`: input should be a valid dict"),
        ({"algorithms": {"": FEDAVG["A"]}}, "string should have at least 1 character, got ''."),
        ({"algorithms": {"A" * 81: FEDAVG["A"]}}, "string should have at most 80 characters"),
        ({"algorithms": FEDAVG, "name": ""}, "`name`: string should have at least 1 character, got ''. Change it"),
        ({"algorithms": FEDAVG, "name": 3}, "`name`: input should be a valid string, got 3. Change it"),
        ({"algorithms": FEDAVG, "seeds": 0}, "`seeds`: input should be greater than or equal to 1, got 0."),
        ({"algorithms": FEDAVG, "seeds": 10**30}, "`seeds`: input should be less than or equal to 1000, got 1000"),
        ({"algorithms": FEDAVG, "seeds": True}, "`seeds`: input should be a valid integer, got True."),
        ({"algorithms": FEDAVG, "seeds": []}, "`seeds`: list should have at least 1 item"),
        ({"algorithms": FEDAVG, "seeds": [1, -1]}, "`seeds.1`: input should be greater than or equal to 0, got -1."),
        ({"algorithms": FEDAVG, "data": 3}, "`data`: input should be a dictionary"),
        ({"algorithms": FEDAVG, "data": {}}, "`data` needs `kind`. Add it"),
        (with_section("data", kind="digit"), "`data` has no kind `digit`. Did you mean `digits`?"),
        (with_section("data", kind="file"), "`data` needs `path`. Add it"),
        (with_section("data", kind="file", path=3), "`data.path` must be a string or a path, got 3."),
        (with_section("data", kind="file", path="x", shape=["a"]), "`data.shape.0` must be a whole number, got 'a'."),
        (
            with_section("data", kind="femnist", path="x", digits_only=1),
            "`data.digits_only` must be true or false, got 1.",
        ),
        (with_section("partition", kind="iid"), "`partition` needs `num_clients`. Add it"),
        (with_section("partition", num_clients=3), "`partition` needs `kind`. Add it"),
        (with_section("split", test_share=1.0), "`split.test_share`: input should be less than 1, got 1.0."),
        (with_section("split", test_share="half"), "`split.test_share`: input should be a valid number, got 'half'."),
        (with_section("split", seed=2**32), "`split.seed`: input should be less than 4294967296"),
        (with_section("model", kind="mlp", widths=[4, "a"]), "`model.widths.1` must be a whole number, got 'a'."),
        (with_section("model", kind="mlp", widths=3), "`model.widths` must be a list, got 3."),
        (with_section("task", l2=math.inf), "`task.l2`: input should be a finite number, got inf."),
        (with_section("schedule", cohort_size=0), "`schedule.cohort_size`: input should be greater than or equal to 1"),
        (with_section("schedule", cohort_size="most"), "`schedule.cohort_size`: input should be 'all', got 'most'."),
        (with_section("schedule", num_rounds=2.0), "`schedule.num_rounds`: input should be a valid integer, got 2.0."),
        (with_section("schedule", num_rounds=10**30), "`schedule.num_rounds`: input should be less than 2147483648"),
        (with_section("schedule", delays=3), "`schedule.delays`: input should be a valid string, got 3."),
        (with_section("evaluation", adaptation_steps=[-1]), "`evaluation.adaptation_steps.0`: input should be"),
        (with_section("tune", search="all"), "`tune.search`: input should be 'auto', 'grid' or 'random', got 'all'."),
        (with_section("tune", lr=[]), "`tune.lr`: list should have at least 1 item"),
        (with_section("tune", lr=0.1), "`tune.lr`: input should be a valid list, got 0.1."),
        ({"algorithms": FEDAVG, "local": [1]}, "`local`: input should be a valid dictionary, got [1]."),
    ],
)
def test_a_wrong_type_or_range_is_explained_with_a_remedy(table, said):
    with refused(said):
        parse(table)


def test_all_mistakes_are_reported_together_and_long_ones_are_cut():
    table = with_section("schedule", num_rounds=0, delays=["x" * 1000], num_clients=3)
    with pytest.raises(ConfigError) as error:
        parse({**table, "sead": 1})
    lines = str(error.value).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) < 300


def test_check_names_takes_what_is_known():
    check_names("here", ["a"], ["a", "b"])
    with refused("`here` has no thing `lear`. Did you mean `linear`? There are: linear, other."):
        check_names("here", ["linear", "lear"], ["other", "linear"], "thing")


# Files and overrides


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seeds = ", "is not valid TOML: Invalid value"),
        (b"[data]\n[data]\n", "is not valid TOML: Cannot declare"),
        (b"name = '\xff'", "is not valid TOML: 'utf-8' codec"),
        (b"seeds = 1" + b"0" * 5000, "is not valid TOML: Exceeds the limit"),
        (b"seeds = " + b"[" * 3000, "is not valid TOML: "),
        (b"", "`algorithms`: dictionary should have"),
    ],
    ids=["unfinished", "twice", "not UTF-8", "too large a number", "nested too deep", "empty"],
)
def test_a_file_that_is_not_valid_toml(tmp_path, content, said):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert said in str(error.value) and len(str(error.value)) < 300


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "no.toml"
    with refused(f"File not found: {path}. Write a starter with `personax init {path}`."):
        load(path)


@pytest.mark.parametrize(
    ("override", "place", "item"),
    [
        ("seeds=5", ["seeds"], 5),
        ("seeds = [1, 2]", ["seeds"], [1, 2]),
        ("name=two words", ["name"], "two words"),
        ("name='3'", ["name"], "3"),
        ("name=a=b", ["name"], "a=b"),
        ("data.path=mine.csv", ["data", "options", "path"], "mine.csv"),
        ("schedule.num_rounds=1_000", ["schedule", "num_rounds"], 1000),
        ("algorithms.Local.lr=1e-3", ["algorithms", "Local", "options", "lr"], 1e-3),
        ('algorithms."Per-FedAvg (HF)".adapt_lr=0.2', ["algorithms", "Per-FedAvg (HF)", "options", "adapt_lr"], 0.2),
        ("algorithms.'a.b'.recipe=fedavg", ["algorithms", "a.b", "recipe"], "fedavg"),
        ('algorithms."mix = 0".recipe=apfl', ["algorithms", "mix = 0", "recipe"], "apfl"),
        ("algorithms.New.hvp={kind='exact'}", ["algorithms", "New", "options", "hvp"], {"kind": "exact"}),
    ],
)
def test_an_override_changes_one_setting(override, place, item):
    needed = ["data={kind='file', path='x.csv'}"] if "data" in place else []
    needed += ["algorithms.New.recipe=fedavg"] if "New" in place else []
    found = load(None, [*needed, override])
    for name in place:
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == item  # TOML if possible, otherwise text


@pytest.mark.parametrize("override", ["seeds", "=3", "a..b=3", ".=3", "", "schedule.=1"])
def test_an_invalid_override(override):
    with refused("An override must look like `schedule.num_rounds=100`, got"):
        load(None, [override])


def test_an_override_below_a_value_or_of_an_unknown_setting():
    with refused("`seeds` in the override 'seeds.first=3' is not a table"):
        load(None, ["seeds.first=3"])
    with refused("`schedule` has no setting `rounds`. Did you mean `num_rounds`"):
        load(None, ["schedule.rounds=3"])
    with refused("`the file` has no setting `shedule`. Did you mean `schedule`"):
        load(None, ["shedule.num_rounds=3"])


def test_one_of_several_algorithms_is_chosen_by_name():
    several = parse({"algorithms": {**FEDAVG, "B": FEDAVG["A"]}})
    only = parse({"algorithms": FEDAVG})
    assert choose_algorithm(several, "A") == choose_algorithm(only, "A") == choose_algorithm(only, None) == only
    with refused("`the configuration` has 2 algorithms. Choose one with --algorithm: A, B."):
        choose_algorithm(several, None)
    with refused("`mine.toml` has no algorithm `a`. Did you mean `A`?"):
        choose_algorithm(several, "a", "mine.toml")


# Fuzzed tables are built, or raise an error that explains the mistake

TABLE = default() | {"model": {"kind": "mlp", "widths": [3]}}
NUMBERS = [0, 1, -1, 7, 2**31, 2**63, 2**64, 10**40, 0.5, -0.5, 1e-300, 1e300, math.nan, math.inf, True, False]
WORDS = ["", " ", "x", "exact", "all", "none", "adam", "synchronous", "fedavg", "Meta", "a\nb", "\0", "é"]
DATES = [datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4), datetime.time(5, 6)]
KINDS = ["Erm", "Meta", "Moreau", "Mixture", "Decay", "Polynomial", "Optimizer", "Server", "BatchSizes", "exact"]
KINDS += ["Local", "buffered", "synthetic", "iid", "shards", "dirichlet", "cnn2", "import", "Algorithm", "Scoring"]
LEAVES = st.sampled_from([*NUMBERS, *WORDS, *DATES])
JUNK = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "kind", "lr", "model", "recipe"]), inner, max_size=2)
        | st.builds(lambda kind, rest: {"kind": kind, **rest}, st.sampled_from(KINDS), st.fixed_dictionaries({}))
        | st.builds(lambda kind, lr: {"kind": kind, "lr": lr}, st.sampled_from(KINDS), inner)
    ),
    max_leaves=4,
)
NAMES = st.sampled_from(["lr", "kind", "recipe", "num_step", "mix", "hvp", "server", "optimizer", "options"])
NAMES |= st.sampled_from(["query_share", "num_epochs", "sampling", "clip_norm", "objective", "scores", "x"])


def places(table, prefix=()):
    """The path of every entry of nested tables."""
    for key, item in table.items():
        yield (*prefix, key)
        if isinstance(item, dict):
            yield from places(item, (*prefix, key))


@st.composite
def mutated(draw):
    """The default configuration with some entries removed, renamed, replaced or added."""
    table = copy.deepcopy(TABLE)
    for _ in range(draw(st.integers(1, 3))):
        *parents, key = draw(st.sampled_from(sorted(places(table))))
        place = table
        for parent in parents:
            place = place[parent]
        how = draw(st.sampled_from(["remove", "rename", "replace", "replace", "add"]))
        if how in ("remove", "rename"):
            item = place.pop(key)
            if how == "rename":
                place[draw(NAMES | st.just(key[:-1]) | st.just(f"{key}s"))] = item
        else:
            place[key if how == "replace" else draw(NAMES)] = draw(JUNK)
    return table


FITTING = {
    "lr": [0.1, 1, {"kind": "Decay", "initial": 0.1, "rate": 0.01}, {"kind": "InverseSqrt"}],
    "num_steps": [1, 3],
    "num_epochs": [1, 2],
    "batch_size": [1, 8, {"kind": "BatchSizes", "outer": 4, "adapt": 2}],
    "optimizer": ["adam", {"kind": "Optimizer", "name": "sgd", "options": [["momentum", 0.9]]}],
    "hvp": ["exact", "first_order", {"kind": "FiniteDifference", "radius": 0.1}],
    "server": ["synchronous", {"kind": "asynchronous", "lr": 0.5, "max_staleness": 3}, {"kind": "Server", "lr": 0.1}],
    "objective": [{"kind": "Meta", "adapt_lr": 0.1}, {"kind": "Mixture", "mix": 0.5}, "Erm", "Aruba"],
    "discount": ["Constant", {"kind": "Hinge", "slope": 1.0, "start": 2.0}],
    "num_adapt_steps": [1, 2],
    "num_prox_steps": [1, 2],
    "buffer_size": [1, 5],
    "option": [1, 2],
    "update_mix": ["never", "round", "step"],
    "adapt_on": ["training", "test"],
    "weighting": ["uniform", "samples"],
    "sampling": ["replacement", "shuffled"],
    "model": ["global", "localized", "adapted", "personal", "recomputed", "local"],
    "clients": ["all", "cohort", "held_out"],
    "score_on": ["test", "training", "both"],
}
SWAPPED = st.sampled_from([item for items in FITTING.values() for item in items])  # what fits elsewhere
PROTOCOL = [field.name for field in dataclasses.fields(personax.Scoring)]


@st.composite
def options(draw, names, needed=()):
    """The required settings and some others, a few of them with an invalid value."""
    others = st.lists(st.sampled_from([name for name in names if name not in needed]), unique=True, max_size=3)
    chosen = {name: draw(st.sampled_from(FITTING.get(name, [0.5, 0.01]))) for name in [*needed, *draw(others)]}
    for name in draw(st.lists(st.sampled_from(sorted(chosen)), max_size=1)) if chosen else ():
        chosen[name] = draw(SWAPPED | JUNK)
    return chosen


def needed_by(recipe):
    parameters = inspect.signature(RECIPES.kinds[recipe].make).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name != "lr"]


@st.composite
def composed(draw):
    """The default federation with algorithms of any recipe, with any options and scores."""
    table = copy.deepcopy(TABLE)
    table["local"] = draw(st.sampled_from([{"lr": 0.1, "num_steps": 2}] * 4 + [{}]))
    table["schedule"] = {"num_rounds": draw(st.integers(1, 3)), "cohort_size": draw(st.sampled_from([1, 2, 61, "all"]))}
    table["schedule"]["delays"] = draw(st.sampled_from(["none", "persafl", "persafl"]))
    table["split"] = {"num_held_out": draw(st.sampled_from([0, 6, 6, 6, 65, 66]))}
    recipes = draw(st.lists(st.sampled_from(sorted(RECIPES.kinds)), min_size=1, max_size=2))
    table["algorithms"] = {
        f"{i}": {
            "recipe": recipe,
            **draw(options(list(RECIPES.parameters({"kind": recipe}, "")), needed_by(recipe))),
            "scores": draw(scores(i)),
        }
        for i, recipe in enumerate(recipes)
    }
    return table


def scores(number):
    names = st.sampled_from([f"{number}", f"{number} again", "Local"])
    return st.dictionaries(names, options(PROTOCOL), max_size=2)


def is_small(config: Config) -> bool:
    """Return True if the federation and schedules of a configuration are quick to build."""
    sizes = [config.schedule.num_rounds, len(config.seed_list) * 30, *getattr(config.model, "widths", [])]
    sizes += [item for part in (config.data, config.partition) for item in vars(part or config.split).values()]
    small = all(size <= 300 for size in sizes if isinstance(size, int))
    return small and config.data.kind in ("digits", "synthetic") and config.model.kind != "import"


def build_all(table):
    """Do everything that a run does with a configuration before it trains."""
    config = parse(table)
    for baselines in (True, False):
        resolved = resolve(config, baselines=baselines)
        assert dump(read_again(resolved)) == dump(resolved)
        for name, entry in resolved.algorithms.items():
            make_training(name, entry)
        if is_small(config):
            work = prepare(resolved)
            make_task(resolved, outputs_of(resolved, work.plan.federation))


def check_that_it_is_built_or_refused(table):
    try:
        build_all(table)
    except ValueError as error:  # a ConfigError, or a value's own error
        lines = str(error).splitlines()
        assert 0 < len(lines) < 12 and max(map(len, lines)) < 1000, str(error)


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(mutated())
def test_any_table_is_built_or_refused_with_a_message(table):
    check_that_it_is_built_or_refused(table)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(composed())
def test_any_algorithms_are_built_or_refused_with_a_message(table):
    check_that_it_is_built_or_refused(table)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=QUIET)
@given(mutated() | composed())
def test_very_many_tables_are_built_or_refused_with_a_message(table):
    check_that_it_is_built_or_refused(table)
