"""Attacks by a server on a client: too much work, damaged recipes, text for its terminal, its samples."""

import json
import random
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest
import typer

from personax.cli.errors import plain_errors
from personax.data.federation import Federation
from personax.live.acceptance import read_recipe, work
from personax.live.connection import RefusedByServer
from personax.live.limits import Limits, Refused, TooSlow, within
from personax.live.membership import Anchor, Assignment, Membership
from personax.live.messages import Mismatch
from personax.live.recipe import make_recipe
from tests.live.parts import FEDERATION, data_of, recipe

pytestmark = [pytest.mark.xdist_group("live"), pytest.mark.attack]


def changed(given, change):
    table = json.loads(given.to_text())
    change(table)
    return json.dumps(table)


def scores(num, num_steps):
    made = {f"score {i}": {"model": "adapted", "num_steps": num_steps, "lr": 0.1} for i in range(num)}

    def change(table):
        (entry,) = table["config"]["algorithms"].values()
        entry["scores"] = made

    return change


def network(**options):
    return lambda table: table["config"].update(model=options)


WORK = [
    (scores(500, 10_000), "500 scores"),
    (scores(15, 1000), "30004 gradients"),
    (network(kind="mlp", widths=[8] * 5000), "5000 layers"),
    (network(kind="mlp", widths=[8] * 101), "101 layers"),
    (network(kind="mlp", widths=[100_000, 100_000]), "10,000,900,003 parameters"),
    (network(kind="mlp", widths=[2**31 - 1] * 3), "parameters"),
]


@pytest.mark.parametrize("change, reason", WORK, ids=[reason for _, reason in WORK])
def test_the_total_work_is_bounded(change, reason, attack):
    given = recipe("PersA-FL-MAML")
    with attack("too much work"), pytest.raises(Refused, match=reason):
        read_recipe(changed(given, change), given.layout_text(), Limits())


def test_work_is_that_of_the_visit_the_scores_and_the_adaptation():
    given = recipe("PersA-FL-ME", num_steps=5)  # each step has three proximal steps
    (entry,) = given.training.scorings.values()
    assert entry.model == "recomputed" or entry.model == "personal"
    of_scores = 3 * entry.num_steps if entry.model == "recomputed" else 0
    assert work(given, 20) == 5 * given.algorithm.objective.gradients_per_step() + 2 * of_scores


def test_compilation_ends_in_time(tmp_path, attack):
    """A program that takes forever: here one that waits for an event."""
    given, event = recipe(), threading.Event()
    member = member_of(tmp_path, given, data_of(0))
    member.restore()
    member.limits = Limits(max_compile_seconds=0.05)
    member.visit = lambda start, update: event.wait(5)
    with (
        attack("too much work"),
        pytest.raises(TooSlow, match=r"did not compile within 0\.05 s.* `max_compile_seconds`"),
    ):
        member.train(Anchor(given.initial_params(), (), 0))
    event.set()


def test_what_fails_within_the_limit_fails_with_its_own_error():
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0)
    assert within(60.0, lambda: 5) == 5


# Damaged recipes


def nested(depth=9000):
    return "[" * depth + "]" * depth


OTHERS = ["5", "null", "[]", '"text"', "{}", nested(), '{"config": ' + nested() + "}", '{"config": null, "schema": 5}']


@pytest.mark.parametrize("text", OTHERS, ids=lambda text: text[:20])
def test_recipes_and_layouts_of_other_types_are_refused_with_a_message(text, attack):
    given = recipe()
    with attack("recipes of other types"), pytest.raises(Refused, match="recipe cannot be read"):
        read_recipe(text, given.layout_text(), Limits())
    with attack("layouts of other types"), pytest.raises((Refused, Mismatch)):
        read_recipe(given.to_text(), text, Limits())


@pytest.mark.parametrize("leaf", [5, None, [], ["delta"], ["delta", 3, 4], ["delta", ["x"], "float32"], {"a": 1}])
def test_layouts_with_other_leaves_are_refused_with_a_message(leaf, attack):
    given = recipe()
    for part in ("down", "up"):
        table = json.loads(given.layout_text())
        table[part].append(leaf)
        with attack("layouts of other types"), pytest.raises((Refused, Mismatch)):
            read_recipe(given.to_text(), json.dumps(table), Limits())


JUNK = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**70,
    1e308,
    -0.5,
    "",
    "x",
    "\x1b[2J",
    "os:system",
    [],
    [[]],
    {},
    {"kind": "import"},
]
JUNK += [[1] * 50, {"kind": "Meta"}, {"recipe": "fedavg"}, "import", "adam", float("nan"), "9" * 400]


def fuzzed(rng, node):
    """The same table with a few entries replaced, removed, repeated or added."""
    if isinstance(node, dict):
        found = {}
        for key, item in node.items():
            chance = rng.random()
            if chance < 0.03:
                continue
            name = rng.choice(["kind", "x", "\x00", key + key]) if chance < 0.05 else key
            found[name] = rng.choice(JUNK) if chance > 0.95 else fuzzed(rng, item)
        if rng.random() < 0.03:
            found[rng.choice(["kind", "path", "extra", "seeds"])] = rng.choice(JUNK)
        return found
    if isinstance(node, list):
        return [fuzzed(rng, item) for item in node for _ in range(2 if rng.random() < 0.03 else 1)]
    return rng.choice(JUNK) if rng.random() < 0.05 else node


@pytest.mark.parametrize("num", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_fuzzed_recipe_is_refused_or_within_the_limits(num, attack, note):
    rng, accepted = random.Random(1), 0
    for i in range(num):
        name = ["FedAsync", "PersA-FL-ME", "APFL", "SCAFFOLD", "FedAvg"][i % 5]
        given = recipe(name)
        table = json.loads(given.to_text())
        while (text := json.dumps(fuzzed(rng, table))) == given.to_text():
            pass
        layout = given.layout_text() if rng.random() < 0.8 else json.dumps(fuzzed(rng, json.loads(given.layout_text())))
        with attack("fuzzed recipes"):
            try:
                found = read_recipe(text, layout, Limits())
            except (Refused, Mismatch) as error:
                assert str(error).isprintable()
            else:
                accepted += 1
                assert work(found, 20) <= Limits().max_steps
    assert accepted < num / 2
    note(f"Of {num} fuzzed recipes {accepted} were harmless changes within the limits, and the others were refused.")


def test_a_hostile_file_of_leaf_is_an_error_with_its_place(tmp_path, attack):
    from personax.data.datasets import read_leaf

    good = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1.0]], "y": [0]}}}
    broken = [
        {**good, "users": None},
        {**good, "num_samples": None},
        {**good, "user_data": None},
        {**good, "user_data": {"a": None}},
        {**good, "user_data": {"a": {"x": None, "y": [0]}}},
        {**good, "user_data": {"a": {"x": [[None]], "y": [0]}}},
        {**good, "user_data": {"a": {"x": [[1.0]], "y": [None]}}},
        {**good, "user_data": {"a": {"x": [[1.0]], "y": None}}},
        {**good, "num_samples": [None]},
        {**good, "users": [None]},
        {**good, "users": 5},
        None,
        5,
    ]
    texts = [*map(json.dumps, broken), nested(), '{"users": ' + nested() + "}"]
    for i, text in enumerate(texts):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "data.json").write_text(text)
        with attack("hostile files of samples"), pytest.raises(ValueError, match=r"data\.json"):
            read_leaf(folder)


# Text


def test_the_words_of_a_server_are_escaped():
    assert "\x1b" not in str(RefusedByServer("no \x1b[2J", None)) and "\\x1b" in str(
        RefusedByServer("no \x1b[2J", None)
    )
    with pytest.raises(Refused) as caught:
        read_recipe('{"config": {"model": 5, "\x1b[2J": 1}}'.replace("\x1b", "\\u001b"), "{}", Limits())
    assert "\x1b" not in str(caught.value)


def test_an_error_with_the_words_of_a_server_is_escaped_on_the_terminal(capsys, attack):
    """A schema names its columns, and what does not fit names them again."""
    with attack("control characters"), pytest.raises(typer.Exit), plain_errors():
        raise ValueError("The column `\x1b[2J\x07` is missing.\nAdd it.")
    assert capsys.readouterr().err == "Error: The column `\\x1b[2J\\x07` is missing.\nAdd it.\n"


# Samples


def test_a_recipe_with_one_sample_or_one_step_is_refused_with_the_reason(tmp_path, attack):
    for options, reason in (({"batch_size": 1}, "limit `min_batch`"), ({"num_steps": 1}, "limit `min_steps`")):
        given = recipe(**options)
        with attack("recovery of a sample"), pytest.raises(Refused, match=reason):
            read_recipe(given.to_text(), given.layout_text(), Limits())
    few = Federation.from_clients([(np.ones((7, 4)), np.arange(7) % 3)], [(np.ones((2, 4)), np.zeros(2, int))])
    given = recipe()
    with attack("recovery of a sample"), pytest.raises(Refused, match=r"7 training samples, .* only with 8 or more"):
        member_of(tmp_path / "few", given, few).restore()
    given = recipe_of_one_epoch()
    with attack("recovery of a sample"), pytest.raises(Refused, match="visits of 1 steps"):
        member_of(tmp_path / "epoch", given, data_of(0)).restore()


def test_a_share_of_the_samples_is_not_too_few_of_them(tmp_path, attack):
    """A server chooses `query_share`: the outer batches are drawn from that part alone, here from one sample."""
    count = len(data_of(0).client(0)[0])
    given = recipe("PersA-FL-MAML", query_share=1 / count)
    with attack("recovery of a sample"), pytest.raises(Refused, match=r"some batches are drawn from 1 .* `min_batch`"):
        member_of(tmp_path / "one", given, data_of(0)).restore()
    member_of(tmp_path / "half", recipe("PersA-FL-MAML", query_share=0.5), data_of(0), Limits(min_batch=7)).restore()


def recipe_of_one_epoch():
    """The recipe of the other tests with passes over the data in place of a number of steps."""
    text = recipe(batch_size=30).config
    ((name, entry),) = text.algorithms.items()
    options = {key: item for key, item in entry.options.items() if key != "num_steps"} | {"num_epochs": 1}
    config = replace(text, algorithms={name: replace(entry, options=options)})
    return make_recipe(config, recipe().schema)


def member_of(folder, given, data, limits=Limits()):
    return Membership(Assignment("test-run", 0, given.to_text(), given.layout_text()), "anna", data, folder, limits)


def recovered(given, limits, folder, num_visits=40):
    """In how many visits a training record can be read off the upload of a logistic regression.

    The gradient for the kernel is the outer product of the sample and the error, that for the bias is the error: their
    quotient is the sample, if there was one sample and one step.
    """
    data = data_of(0, FEDERATION)
    member = member_of(folder, given, data, limits)
    member.restore()
    params, found = given.initial_params(), 0
    rows = np.asarray(data.client(0)[0])
    for version in range(num_visits):
        upload = member.train(Anchor(params, (), version))
        delta = given.up.unflatten(upload.vectors)["delta"]
        (kernel,) = (np.asarray(leaf) for leaf in jax.tree.leaves(delta) if leaf.ndim == 2)
        (bias,) = (np.asarray(leaf) for leaf in jax.tree.leaves(delta) if leaf.ndim == 1)
        largest = np.abs(bias).argmax()
        guess = kernel[:, largest] / bias[largest]
        found += bool(np.abs(rows - guess).max(axis=1).min() < 1e-3)
    return found


def test_no_record_is_recovered_at_the_defaults(tmp_path, attack, note):
    before = recovered(recipe(batch_size=1, num_steps=1), Limits(min_batch=1, min_steps=1), tmp_path / "one")
    assert before == 40, "the attack works where it may"
    with attack("recovery of a sample", 40):
        now = recovered(recipe(batch_size=8, num_steps=2), Limits(), tmp_path / "default")
        assert now == 0
    note(
        f"Records recovered from a logistic regression: {before} of 40 visits with one sample and one step, {now} of 40"
    )
    note("with the least that the default limits allow (8 samples, 2 steps).")
