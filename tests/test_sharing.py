"""Parts of a model: selected by name, joined again, and distinguished by their digests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.sharing import fingerprint, join, like, names_of, only, over, require_patterns, without

PARAMS = px.mlp((4,), 3).init(jax.random.key(0), jnp.zeros((1, 5)))
NAMES = ["dense_0.bias", "dense_0.kernel", "dense_1.bias", "dense_1.kernel"]


def same(tree, other):
    return jax.tree.structure(tree) == jax.tree.structure(other) and names_of(tree) == names_of(other)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("dense_1", ["dense_1.bias", "dense_1.kernel"]),
        ("*.bias", ["dense_0.bias", "dense_1.bias"]),
        (("dense_0.kernel", "dense_1"), NAMES[1:]),
        (("*", "!dense_1"), NAMES[:2]),
        (("*", "!*.bias", "!dense_1"), ["dense_0.kernel"]),
    ],
)
def test_patterns_divide_a_tree_in_two_that_join_again(patterns, names):
    part, others = only(PARAMS, patterns), without(PARAMS, patterns)
    assert names_of(part) == names and names_of(others) == [name for name in NAMES if name not in names]
    assert same(join(part, others), PARAMS) and same(join(others, part), PARAMS)
    assert same(like(PARAMS, part), part)


def test_names_are_those_of_any_tree():
    tree = {"layers": [{"weight": 1.0}, {"weight": 2.0}], "scale": (3.0,)}
    assert names_of(tree) == ["layers.0.weight", "layers.1.weight", "scale.0"]
    assert names_of(only(tree, "layers.1")) == ["layers.1.weight"]


def test_a_leaf_of_two_parts_is_taken_from_the_first():
    assert join({"a": 1}, {"a": 2}) == {"a": 1} and join(None, {"a": 2}) == {"a": 2}


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("dense_2", "'dense_2', which matches no parameter. Use the names dense_0.bias, dense_0.kernel, dense_1.bias"),
        (("*", "!head"), "'!head', which matches no parameter"),
        (("dense_1", "*.bias"), r"'dense_1' and '\*.bias', which both match dense_1.bias. Remove one"),
    ],
)
def test_patterns_that_match_nothing_or_overlap_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        require_patterns(patterns, NAMES, "personal")


@pytest.mark.parametrize("given", [lambda name: True, (lambda name: True,), 3 * ("",), "!"])
def test_only_strings_select(given):
    with pytest.raises(ValueError, match="by strings"):
        px.Sharing(personal=given)


@pytest.mark.parametrize(
    ("sharing", "message"),
    [
        (px.Sharing("dense_1", "*.bias"), "personal or frozen, not both: dense_1.bias"),
        (px.Sharing("dense_0", "dense_1"), "All parameters are personal or frozen"),
        (px.Sharing("*"), "All parameters are personal or frozen"),
        (px.Sharing(frozen="dense_1", tuned="*.bias"), "`sharing.tuned` has dense_0.bias, not frozen"),
    ],
)
def test_a_division_that_cannot_be_trained_is_refused(sharing, message):
    with pytest.raises(ValueError, match=message):
        sharing.require_division(PARAMS)


def test_a_personal_part_needs_no_tuning():
    with pytest.raises(ValueError, match=r"`tuned` parameters \(`b`\) cannot be combined with personal ones"):
        px.Sharing("a", frozen="b", tuned="b")


def test_adaptation_moves_what_is_trained_or_tuned():
    of = lambda tuned: names_of(px.Sharing(frozen="dense_1", tuned=tuned).adapted(PARAMS))
    assert of(()) == NAMES[:2] and of("dense_1.bias") == NAMES[:3] and of("dense_1") == NAMES


def test_a_task_over_a_base_has_the_gradient_of_the_others_alone():
    task, batch = px.classification(px.mlp((4,), 3)), px.Batch(*map(jnp.asarray, _samples()), jax.random.key(0))
    base, others = only(PARAMS, "dense_0"), without(PARAMS, "dense_0")
    expected = jax.grad(task.loss)(PARAMS, batch)
    found = jax.grad(over(task, base).loss)(others, batch)
    assert same(found, others)
    jax.tree.map(np.testing.assert_array_equal, found, like(expected, others))
    assert over(task, only(PARAMS, ())) is task


def test_fingerprints_tell_values_types_and_names_apart():
    tree = {"a": np.arange(3.0), "b": None}
    others = [{"a": np.arange(3.0) + 1}, {"a": np.arange(3.0, dtype="f4")}, {"c": np.arange(3.0)}, {"a": None}]
    assert fingerprint(tree) == fingerprint({"a": np.arange(3.0)})
    assert len({fingerprint(one) for one in [tree, *others]}) == 5


def _samples():
    rng = np.random.default_rng(0)
    return rng.normal(size=(6, 5)), rng.integers(0, 3, 6), np.ones(6)
