"""A base of the model: only its digest is on the wire, and each client has the file."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from personax.experiment import checkpoint
from personax.experiment.pretrained import digest_of
from personax.live.acceptance import read_recipe
from personax.live.limits import Limits, Refused, read_limits
from personax.live.results import open_run
from tests.live.parts import ADAPTERS, make_book, recipe, recipe_over, write_base

DITTO = {"recipe": "ditto", "strength": 1.0, "lr": 0.1, "num_steps": 2, "batch_size": 8}


def served(path):
    return recipe_over(path, {"Ditto": DITTO})


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base.safetensors")


def test_server_and_client_start_at_the_file(base, tmp_path):
    given = served(base)
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(base.read_bytes())
    found = read_recipe(given.to_text(), given.layout_text(), Limits(base=str(mine)))
    started = found.initial_params()
    jax.tree.map(np.testing.assert_array_equal, started, given.initial_params())
    expected = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, recipe().initial_params())
    jax.tree.map(np.testing.assert_array_equal, started["base"], expected)


def test_the_path_of_the_server_is_not_on_the_wire(base):
    text = served(base).to_text()
    assert str(base.parent) not in text and digest_of(base) in text


def test_a_client_needs_the_same_file(base, tmp_path):
    given = served(base)
    with pytest.raises(Refused, match=f"base file with the SHA-256 {digest_of(base)}. Ask its operator for the file"):
        read_recipe(given.to_text(), given.layout_text(), Limits())
    other = tmp_path / "other.safetensors"
    checkpoint.export(other, recipe().initial_params(), {})
    with pytest.raises(Refused, match=f"other.safetensors has {digest_of(other)}"):
        read_recipe(given.to_text(), given.layout_text(), Limits(base=str(other)))


def test_a_server_cannot_name_a_file_of_the_client(base):
    """A path in the recipe is ignored: nothing is read that the client's owner did not name."""
    given = served(base)
    content = json.loads(given.to_text())
    content["config"]["model"]["base"] = "/etc/hostname"
    found = read_recipe(json.dumps(content), given.layout_text(), Limits(base=str(base)))
    assert found.config.model.base == str(base)
    del content["config"]["model"]["base_digest"]
    without = read_recipe(json.dumps(content), given.layout_text(), Limits())
    assert without.config.model.base is None


def test_limits_name_the_file(base, tmp_path):
    (tmp_path / "limits.toml").write_text(f'base = "{base}"\n')
    assert read_limits(tmp_path / "limits.toml").base == str(base)


def test_only_the_shared_adapters_travel_over_a_base(base):
    """A of each layer; the frozen base and the personal B are on no message, and both sides compute the same ones."""
    given = recipe_over(base, ADAPTERS)
    found = read_recipe(given.to_text(), given.layout_text(), Limits(base=str(base)))
    for layout in (found.up, found.down):
        assert [leaf.name.rpartition(".")[2] for leaf in layout.leaves] == ["a"]
    expected = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, recipe().initial_params())
    jax.tree.map(np.testing.assert_array_equal, found.unshared["base"], expected)


def test_the_file_may_move_between_two_starts_of_a_server(base, tmp_path):
    open_run(tmp_path / "run", served(base), "live")
    moved = base.rename(tmp_path / "elsewhere.safetensors")
    assert open_run(tmp_path / "run", served(moved), "another")[1] == "live"
    checkpoint.export(base, recipe().initial_params(), {})
    with pytest.raises(ValueError, match="has a run with another configuration"):
        open_run(tmp_path / "run", served(base), "another")


def test_a_run_does_not_continue_over_other_parameters(base, tmp_path):
    """Another version of personax or jax might compute others from the same configuration."""
    given = recipe_over(base, ADAPTERS)
    open_run(tmp_path / "run", given, "live")
    book = make_book(tmp_path / "run", given)
    book.join("anna", 0)
    book.save()
    book.journal.close()
    assert len(given.unshared_fingerprint) == 64
    other = dataclasses.replace(given)
    vars(other)["unshared"] = jax.tree.map(lambda leaf: leaf + 1, given.unshared)
    with pytest.raises(ValueError, match="was trained with different frozen or initial personal parameters"):
        open_run(tmp_path / "run", other, "live")
    with pytest.raises(ValueError, match="Restore the base of the model, or begin another run"):
        make_book(tmp_path / "run", other)
