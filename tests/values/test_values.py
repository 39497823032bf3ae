"""Values: what is static and what is a leaf, how they compare, print and compile, and what is refused."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.client.local import LocalOptions
from personax.server.modes import ServerOptions
from personax.values import (
    DELAY_TIMES,
    DISCOUNTS,
    Axis,
    ConfigError,
    Kind,
    Static,
    call,
    construct,
    did_you_mean,
    imports_forbidden,
    imports_in,
    parameters_of,
    require,
    require_count,
    require_nonnegative,
    require_one_of,
    require_positive,
    to_dict,
    value,
)


@value
class Inner:
    scale: float = 2.0


@value
class Outer:
    lr: float
    num: Static[int] = 1
    inner: Inner = Inner()
    bound: float | None = None
    name: Static[str | None] = None

    def __post_init__(self):
        require_positive("lr", self.lr)


# pytrees


def test_static_fields_are_structure_and_the_others_leaves():
    one = Outer(0.1, num=3, name="a")
    assert jax.tree.leaves(one) == [0.1, 2.0]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(one)]
    assert paths == [".lr", ".inner.scale"]
    assert jax.tree.structure(one) == jax.tree.structure(Outer(0.7, 3, Inner(5.0), name="a"))
    for other in (Outer(0.1, 4, name="a"), Outer(0.1, 3, name="b"), Outer(0.1, 3, bound=1.0, name="a")):
        assert jax.tree.structure(one) != jax.tree.structure(other)


def test_flattening_and_back_is_the_identity():
    one = Outer(0.1, 3, Inner(4.0), 1.5, "a")
    assert jax.tree.unflatten(jax.tree.structure(one), jax.tree.leaves(one)) == one
    assert jax.tree.map(lambda leaf: 2 * leaf, one) == Outer(0.2, 3, Inner(8.0), 3.0, "a")


def test_what_jax_rebuilds_is_not_validated():
    assert jax.tree.map(lambda leaf: -leaf, Outer(0.1)).lr == -0.1
    assert jax.jit(lambda v: v.lr * v.inner.scale * v.num)(Outer(0.5, 3)) == 0.5 * 2.0 * 3
    assert jax.grad(lambda v: v.lr**2 * v.inner.scale)(Outer(3.0)) == Outer(12.0, inner=Inner(9.0))
    sweep = jax.vmap(lambda v: v.lr * v.num)(Outer(jnp.asarray([1.0, 2.0]), 3, Inner(jnp.zeros(2))))
    np.testing.assert_array_equal(sweep, [3.0, 6.0])


def test_another_number_does_not_recompile_and_another_static_field_does():
    traces = []
    run = jax.jit(lambda v: (traces.append(v.num), v.lr * v.inner.scale * v.num)[1])
    for numbers in (0.1, 0.2, 5.0):
        assert run(Outer(numbers, 2, Inner(1 / numbers))) == pytest.approx(2)
    assert traces == [2]
    run(Outer(0.1, 3))
    run(Outer(0.2, 3))
    assert traces == [2, 3]


# data


def test_values_compare_hash_and_print():
    assert Outer(0.1, 3) == Outer(0.1, 3) and hash(Outer(0.1, 3)) == hash(Outer(0.1, 3))
    different = {Outer(0.1), Outer(0.2), Outer(0.1, 3), Outer(0.1, inner=Inner(1.0)), Outer(0.1, name="a")}
    assert len(different) == 5 and Outer(0.1) in different
    assert repr(Outer(0.1, 3)) == "Outer(lr=0.1, num=3, inner=Inner(scale=2.0), bound=None, name=None)"
    assert eval(repr(Outer(0.1, 3))) == Outer(0.1, 3)


def test_values_are_frozen_and_replaced():
    one = Outer(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.lr = 0.2
    assert dataclasses.replace(one, lr=0.2) == Outer(0.2)
    with pytest.raises(ValueError, match=r"`lr` must be positive, got -0\.2"):
        dataclasses.replace(one, lr=-0.2)


def test_values_survive_as_plain_tables():
    for one in (Outer(0.1, 3, Inner(4.0), 1.5, "a"), Outer(0.2), Outer(1, inner=Inner(2))):
        plain = json.loads(json.dumps(to_dict(one)))
        assert construct(Outer, plain, "outer") == one
    inner = {"kind": "import", "path": f"{__name__}:Inner", "scale": 2.0}
    outer = {"kind": "import", "path": f"{__name__}:Outer", "lr": 0.1, "num": 3, "inner": inner}
    assert to_dict(Outer(0.1, 3)) == outer
    assert to_dict(Outer(np.array([0.1, 0.2])))["lr"] == [0.1, 0.2]


def test_tables_are_validated():
    with pytest.raises(ConfigError, match=r"`outer`: `lr` must be positive, got -1"):
        construct(Outer, {"lr": -1}, "outer")
    with pytest.raises(ConfigError, match=r"`outer` has no setting `lrr`. Did you mean `lr`?"):
        construct(Outer, {"lrr": 1}, "outer")


def test_values_are_final():
    """A class that inherits would inherit facts that need not hold for it."""
    with pytest.raises(TypeError, match="Inner is final"):
        type("Sub", (Inner,), {})


# axes


def test_a_name_is_taken_once_on_an_axis_and_may_be_used_on_another():
    shapes, sizes = Axis("shape"), Axis("size")

    @shapes.register()
    @sizes.register()
    def big(by: int = 1) -> int:
        return by

    with pytest.raises(ValueError, match=r"There are two kinds of shape called `big`. Rename one of them."):
        shapes.register()(big)
    with pytest.raises(ValueError, match="The name `import` is reserved"):
        shapes.register("import")(big)
    assert shapes.make("big", "here") == sizes.make({"kind": "big", "by": 1}, "here") == 1


def test_a_discount_and_a_delay_of_one_name_do_not_replace_each_other(monkeypatch):
    """All axes once shared one table: a discount called `Exponential` replaced the delay of that name."""
    monkeypatch.setattr(DISCOUNTS, "kinds", dict(DISCOUNTS.kinds))

    @DISCOUNTS.register()
    @value
    class Exponential:
        rate: float = 1.0

    assert DISCOUNTS.make("Exponential", "here") == Exponential()
    assert DELAY_TIMES.make({"kind": "Exponential", "mean": 2.0}, "here") == px.delays.Exponential(2.0)


def test_parameters_are_built_as_their_annotations_ask_for():
    axis = Axis("thing", supplied=("key",))

    @axis.register()
    def thing(
        num: int,
        *,
        key: str,
        scale: float | None = None,
        names: Sequence[str] = (),
        hvp: px.curvature.Hvp = px.curvature.exact,
        lr: px.step_sizes.StepSize | float = 0.1,
        **local: Unpack[px.LocalOptions],
    ) -> tuple:
        return num, key, scale, names, hvp, lr, local

    table = {"kind": "thing", "num": 3, "names": ["a"], "hvp": "first_order", "lr": {"kind": "Decay", "initial": 1.0}}
    with pytest.raises(ConfigError, match=r"`t.lr` needs `rate`. Add it."):
        axis.make(table, "t", key="k")
    table["lr"]["rate"] = 0.5
    made = axis.make({**table, "num_steps": 4}, "t", key="k")
    wanted = (px.curvature.first_order, px.step_sizes.Decay(1.0, 0.5), {"num_steps": 4})
    assert made == (3, "k", None, ("a",), *wanted)
    assert set(axis.parameters(table, "t")) >= {"num", "scale", "num_steps"} and "key" not in axis.parameters(
        table, "t"
    )


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"num": 1.5}, "`t.num` must be a whole number, got 1.5."),
        ({"num": True}, "`t.num` must be a whole number, got True."),
        ({"num": [1]}, "`t.num` must be one value, got the list"),
        ({"num": {"a": 1}}, "`t.num` must be one value, got the table"),
        ({"num": 1, "key": 2}, "`t` has no setting `key`. There are: num."),
        ({}, "`t` needs `num`. Add it."),
    ],
)
def test_wrong_options_are_refused(table, said):
    axis = Axis("thing", supplied=("key",))
    axis.register("thing")(lambda: None)
    made: list = []

    def thing(num: int, key: int = 0) -> None:
        made.append(num)

    axis.kinds["thing"] = Kind("thing", thing)
    with pytest.raises(ConfigError) as error:
        axis.make({"kind": "thing", **table}, "t")
    assert said in str(error.value) and not made


def test_an_import_is_a_kind_of_every_axis():
    table = {"kind": "import", "path": f"{__name__}:Inner", "scale": 3.0}
    assert DISCOUNTS.make(table, "d") == Inner(3.0)
    assert imports_in({"a": [table, {"optimizer": "mine:sgd"}], "b": {"kind": "Optimizer", "name": "o:adam"}}) == [
        f"{__name__}:Inner",
        "mine:sgd",
        "o:adam",
    ]
    for path, said in (
        ("nowhere_at_all:x", "cannot import 'nowhere_at_all:x': ModuleNotFoundError"),
        (3, "needs a `path`"),
    ):
        with pytest.raises(ConfigError) as error:
            DISCOUNTS.make({"kind": "import", "path": path}, "d")
        assert said in str(error.value)


# errors


@pytest.mark.parametrize(
    ("check", "given", "message"),
    [
        (require_positive, 0, "`a` must be positive, got 0."),
        (require_positive, -0.1, "`a` must be positive, got -0.1."),
        (require_positive, float("nan"), "`a` must be positive, got nan."),
        (require_positive, float("inf"), "`a` must be positive, got inf."),
        (require_positive, (0.1, 0.0), "`a` must be positive, got (0.1, 0.0)."),
        (require_positive, np.array([1.0, -1.0]), "`a` must be positive, got [ 1. -1.]."),
        (require_nonnegative, -1e-9, "`a` must not be negative, got -1e-09."),
        (require_nonnegative, float("nan"), "`a` must not be negative, got nan."),
        (require_count, 0, "`a` must be a whole number of at least 1, got 0."),
        (require_count, 2.0, "`a` must be a whole number of at least 1, got 2.0."),
        (require_count, True, "`a` must be a whole number of at least 1, got True."),
    ],
)
def test_errors_have_the_requirement_and_the_given_value(check, given, message):
    with pytest.raises(ValueError) as caught:
        check("a", given)
    assert str(caught.value) == message
    with pytest.raises(ValueError) as caught:
        check("a", given, hint="Do this.")
    assert str(caught.value) == f"{message} Do this."


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (require_positive, 1e-9),
        (require_positive, 3),
        (require_positive, np.array([0.1, 2.0])),
        (require_nonnegative, 0),
        (require_nonnegative, jnp.asarray([0.0, 1.0])),
        (require_count, 1),
        (require_count, np.int64(7)),
        *((check, None) for check in (require_positive, require_nonnegative, require_count)),
    ],
)
def test_what_holds_passes(check, given):
    check("a", given)


def test_counts_may_start_elsewhere():
    require_count("a", 0, least=0)
    with pytest.raises(ValueError, match="`a` must be a whole number of at least 3, got 2"):
        require_count("a", 2, least=3)


def test_options_are_listed():
    require_one_of("a", "x", ("x", "y"))
    with pytest.raises(ValueError, match=r"`a` must be one of 'x', 'y', got 'z'\.$"):
        require_one_of("a", "z", ("x", "y"))
    with pytest.raises(ValueError, match=r"got 'round'\. Did you mean `rounds`\?"):
        require_one_of("a", "round", ("rounds", "steps"))


@pytest.mark.parametrize(
    ("name", "hint"), [("CLIENT", " Did you mean `client`?"), ("label", " Did you mean `Label`?"), ("zzz", "")]
)
def test_the_nearest_name_is_suggested_whatever_its_case(name, hint):
    assert did_you_mean(name, ["client", "Label"]) == hint
    assert did_you_mean(name, []) == ""


def test_a_condition_must_hold_for_all_numbers():
    require(lambda v: v < 3, "a", [1, 2], "be below 3")
    with pytest.raises(ValueError, match=r"`a` must be below 3, got \[1, 4\]. Do this."):
        require(lambda v: v < 3, "a", [1, 4], "be below 3", "Do this.")


@pytest.mark.parametrize("check", [require_positive, require_nonnegative, require_count])
def test_text_in_the_place_of_a_number_is_refused_by_name(check):
    with pytest.raises(ValueError, match=r"`a` must .*, got 0\.1"):
        check("a", "0.1")


# extensions


def test_signatures_that_cannot_be_read_are_refused_with_a_message():
    def unknown(num: "OnlyForCheckers"): ...  # noqa: F821

    for make in (unknown, int):
        with pytest.raises(ConfigError, match="cannot be read"):
            parameters_of(make)
    assert set(parameters_of(functools.partial(lambda a, b=1: None, 3))) == {"b"}
    assert set(parameters_of(lambda a, **rest: None)) == {"a"}


def test_nothing_is_imported_where_imports_are_forbidden():
    with imports_forbidden():
        with pytest.raises(ConfigError, match="Importing 'os:system' is not allowed here"):
            DISCOUNTS.make({"kind": "import", "path": "os:system", "command": "false"}, "d")
        with pytest.raises(ValueError, match="not allowed here"):
            px.optimizer("os:system")
    assert DISCOUNTS.make({"kind": "import", "path": f"{__name__}:Inner"}, "d") == Inner()


def test_plain_types_are_checked_and_converted():
    def make(path: Path, pair: tuple[int, str] = (1, "a"), option: Literal[1, 2] = 1) -> tuple:
        return path, pair, option

    assert call(make, {"path": "a/b", "pair": [2, "c"]}, "t") == (Path("a/b"), (2, "c"), 1)
    for table in ({"path": 3}, {"path": "a", "pair": [1]}, {"path": "a", "option": True}, {"path": "a", "option": 3}):
        with pytest.raises(ConfigError, match=r"`t\.\w+"):
            call(make, table, "t")


def test_options_that_recipes_and_servers_pass_on_are_the_fields():
    fields = lambda cls: [field.name for field in dataclasses.fields(cls)]
    assert ["lr", *LocalOptions.__annotations__] == fields(px.Local)
    assert ["lr", "buffer_size", *ServerOptions.__annotations__] == fields(px.Server)


def test_an_objective_that_is_plain_has_the_plain_gradient():
    kept = {name: item for name, item in vars(px.Erm).items() if not name.startswith("__")}
    steeper = lambda self, loss, iterate, memory, visit, batches: (iterate, memory)
    mine = value(type("Mine", (), {**kept, "gradient": steeper}))()
    with pytest.raises(ValueError, match="Mine is `is_plain` but has its own `gradient`"):
        px.Algorithm(mine, px.Local(0.1, num_steps=1), px.synchronous())


def test_a_curvature_states_its_facts():
    with pytest.raises(ValueError, match="product function lacks `needs_batch`, `is_coordinate_free`, `given_norm`"):
        px.Meta(0.1, hvp=lambda loss, params, vector, batch: vector)


def test_missing_and_needless_quotes_are_named():
    with pytest.raises(px.values.ConfigError, match=r"`lr` must be a number, got '0\.1'\. Remove the quotes\."):
        px.values.construct(float, "0.1", "lr")
    with pytest.raises(px.values.ConfigError, match=r"`name` must be a string, got 3\. Put it in quotes\."):
        px.values.construct(str, 3, "name")
