"""Every named recipe is in the contract table, which applies every invariant to it."""

from personax.values import RECIPES
from tests import recipes


def test_every_recipe_has_a_row_in_the_contract_table():
    called = {name for make in recipes.RECIPES.values() for name in make.__code__.co_names}
    assert set(RECIPES.kinds) - called == set()
