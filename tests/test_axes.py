"""Values state their facts: no code outside an axis's own package asks which class a value has."""

import ast
import re

from personax.objectives.objective import Objective
from personax.values import CURVATURES, DELAY_TIMES, DISCOUNTS, OBJECTIVES, RECIPES, STEP_SIZES
from tests.sources import ROOT, trees

HOMES = {
    "objectives": OBJECTIVES,
    "curvature.py": CURVATURES,
    "server": DISCOUNTS,
    "schedules": DELAY_TIMES,
    "client": STEP_SIZES,
}


def names_in(node):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }


def asks_for_class(node):
    """The expression that a class is compared with: `isinstance(x, HERE)`, `type(x) in HERE`, `type(x) is HERE`."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
        return node.args[1]
    if isinstance(node, ast.Compare) and getattr(getattr(node.left, "func", None), "id", "") == "type":
        return node.comparators[0]
    return None


def test_no_code_outside_an_axis_asks_which_class_a_value_has():
    for path, tree in trees():
        for node in ast.walk(tree):
            asked = asks_for_class(node)
            if asked is None:
                continue
            for home, axis in HOMES.items():
                classes = {kind.make.__name__ for kind in axis.kinds.values() if isinstance(kind.make, type)}
                assert path.parts[0] == home or not names_in(asked) & classes, f"{path}:{node.lineno}"


def test_no_code_asks_which_recipe_made_an_algorithm():
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                texts = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
                about_recipe = any("recipe" in name for name in names_in(node))
                assert not (about_recipe and texts & set(RECIPES.kinds)), f"{path}:{node.lineno}"


def test_objectives_are_not_searched_for_attributes():
    pattern = re.compile(r"(hasattr|getattr)\((self\.)?(algorithm\.)?(objective|server|hvp|local)\b")
    for path in ROOT.rglob("*.py"):
        assert not pattern.search(path.read_text(encoding="utf-8")), path


def test_one_module_asks_for_the_backend():
    found = {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if "default_backend" in p.read_text(encoding="utf-8")}
    assert found == {"fast/backends.py"}


def test_one_module_asks_for_a_missing_buffer():
    pattern = re.compile(r"server\.buffer_size is (not )?None")
    assert not [path for path in ROOT.rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))]


def test_every_objective_answers_the_whole_contract():
    contract = {*Objective.__annotations__, *(name for name in vars(Objective) if name[0] != "_")}
    for kind in OBJECTIVES.kinds.values():
        assert contract <= set(dir(kind.make)), kind.name


def test_recipes_take_step_sizes_by_keyword():
    for kind in RECIPES.kinds.values():
        parameters = RECIPES.parameters({"kind": kind.name}, kind.name)
        steps = [one for name, one in parameters.items() if name == "lr" or name.endswith("_lr")]
        assert steps and all(one.kind is one.KEYWORD_ONLY for one in steps), kind.name


def test_no_function_takes_many_parameters():
    """About eight: those above are networks and tools whose options are independent of each other."""
    known = {"cnn": 10, "_cnn": 10, "serve": 11, "join": 11, "batch_indices": 10, "personalize": 9, "simulate": 9}
    known |= {"convolution": 11}  # the parameters of JAX's primitive
    known |= {"compare": 10, "reproduce": 9}  # commands; one option each
    known |= {"_client_model": 10, "_of_clients": 9, "_advance": 11, "local_update": 9, "bench": 9}
    known |= {"rounds": 9, "generated_delays": 10, "controlled": 9}  # schedules; one option each
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                num = len([one for one in given if one.arg not in ("self", "cls")])
                assert num <= known.get(node.name, 8), f"{path}:{node.lineno} {node.name} takes {num}"
