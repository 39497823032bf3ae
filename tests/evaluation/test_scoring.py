"""Tests of the properties and descriptions of scorings."""

import pytest

from personax.evaluation.scoring import COMPUTED, MODELS, Scoring

# True if the model takes adaptation steps, if it needs no state, and if the client keeps it.
FACTS = {
    "global": (False, True, False),
    "localized": (False, False, False),
    "adapted": (True, True, False),
    "personal": (False, False, True),
    "recomputed": (True, False, False),
    "local": (False, False, True),
    "own_copy": (False, False, True),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_facts_of_each_model(model):
    scoring = Scoring(model)
    assert (scoring.can_adapt, scoring.is_stateless, scoring.is_kept) == FACTS[model]
    assert (model in COMPUTED) == (model not in ("global", "personal", "local", "own_copy"))


@pytest.mark.parametrize(
    ("model", "num_steps", "adapts"),
    [
        ("global", 3, False),
        ("adapted", 0, False),
        ("adapted", 1, True),
        ("recomputed", 0, True),
        ("personal", 3, False),
    ],
)
def test_a_scoring_adapts_where_data_changes_the_model(model, num_steps, adapts):
    assert Scoring(model, num_steps).adapts is adapts
