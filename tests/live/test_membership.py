"""A client's part in a run without any transport: what is on its disk, what is sent again, what its owner reports."""

import json
import stat

import jax
import numpy as np
import pytest

from personax import evaluate, load, rounds, simulate
from personax.experiment import checkpoint
from personax.live.acceptance import read_recipe
from personax.live.limits import Limits, Refused
from personax.live.membership import Anchor, Assignment, Membership
from tests.live.parts import FEDERATION, assert_same, data_of, recipe

KEY = jax.random.key(3)


def assignment(given, run="test-run", id=0):
    return Assignment(run, id, given.to_text(), given.layout_text())


def member_of(folder, given, i=0, name="anna", report_every=None, run="test-run", limits=Limits(), authority="none"):
    member = Membership(assignment(given, run, i), name, data_of(i), folder, limits, report_every, authority)
    member.restore()
    return member


def anchor_of(given, version=0, shift=0.0):
    params = jax.tree.map(lambda leaf: np.asarray(leaf) + shift, given.initial_params())
    return Anchor(params, given.algorithm.objective.init_shared(params), version)


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name", ["APFL", "SCAFFOLD", "PersA-FL-ME"])
def test_a_client_that_is_killed_resumes_to_the_same_bits(name, tmp_path):
    given = recipe(name)
    anchors = [anchor_of(given, version, 0.1 * version) for version in range(4)]
    alive = member_of(tmp_path / "alive", given)
    kept = [alive.train(anchor) for anchor in anchors]
    killed = []
    for anchor in anchors:
        member = member_of(tmp_path / "killed", given)
        assert member.resume(len(killed)) is None
        killed.append(member.train(anchor))
    for one, other in zip(kept, killed, strict=True):
        assert (one.update, one.version) == (other.update, other.version)
        assert_same_bits(one.vectors, other.vectors)
    assert_same_bits(alive.held.personal, member_of(tmp_path / "killed", given).held.personal)


def test_an_upload_that_is_not_settled_is_the_same_when_it_is_sent_again(tmp_path):
    given = recipe("APFL")
    upload = member_of(tmp_path, given).train(anchor_of(given))
    for _ in range(2):
        again = member_of(tmp_path, given).resume(0)
        assert again._replace(vectors=[]) == upload._replace(vectors=[])
        assert_same_bits(again.vectors, upload.vectors)
    settled = member_of(tmp_path, given)
    assert settled.resume(1) is None and settled.train(anchor_of(given, 1, 0.1)).id != upload.id


def test_the_server_may_expect_a_later_update(tmp_path):
    """A client that lost its folder does not make an update again with another content."""
    given = recipe("APFL")
    member = member_of(tmp_path, given)
    assert member.resume(5) is None
    assert member.train(anchor_of(given)).update == 5


def test_an_upload_that_is_not_on_the_disk_is_not_held(tmp_path):
    """Otherwise it could leave, be lost with the process, and be made again with another content."""
    given, member = recipe("APFL"), member_of(tmp_path, recipe("APFL"))
    before = member.held
    (tmp_path / "test-run").write_text("in the way of the folder")
    with pytest.raises(OSError):
        member.train(anchor_of(given))
    assert member.held is before and member.resume(0) is None
    (tmp_path / "test-run").unlink()
    made = member.train(anchor_of(given, 1, 0.1))
    assert member_of(tmp_path, given).resume(0).id == made.id


def test_an_update_that_is_not_finite_changes_only_the_count(tmp_path):
    given = recipe(lr=1e308)
    member = member_of(tmp_path, given)
    before = member.held
    assert member.train(anchor_of(given)) is None
    assert member.held.update == 1 and member.held.personal is before.personal and member.held.upload is None
    assert not (tmp_path / "test-run").exists()


def test_a_folder_belongs_to_one_client(tmp_path):
    given = recipe("APFL")
    member_of(tmp_path, given).train(anchor_of(given))
    with pytest.raises(ValueError, match="has the state of client anna with number 0; this is bert with number 1"):
        member_of(tmp_path, given, 1, "bert")


def test_a_damaged_state_is_noticed(tmp_path):
    given = recipe("APFL")
    member_of(tmp_path, given).train(anchor_of(given))
    for path in (tmp_path / "test-run" / "state").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        member_of(tmp_path, given)


@pytest.mark.parametrize("run", ["", "../escape", "/tmp/escape", "a/b", "x" * 81])
def test_a_server_chooses_no_folder_outside(run, tmp_path):
    with pytest.raises(ValueError, match="letters, digits"):
        member_of(tmp_path, recipe(), run=run)
    assert not list(tmp_path.iterdir())


def test_the_owners_limits_hold(tmp_path):
    with pytest.raises(Refused, match="this client allows 1"):
        member_of(tmp_path, recipe(), limits=Limits(max_steps=1))


def test_numbers_are_reported_after_as_many_updates_as_the_owner_says(tmp_path):
    given = recipe("APFL")
    silent, member = member_of(tmp_path / "silent", given), member_of(tmp_path / "member", given, report_every=2)
    reported = []
    for version in range(5):
        anchor = anchor_of(given, version)
        assert silent.report(anchor) is None and silent.reported({}, version) is None
        found = member.report(anchor)
        assert found is None or found["numbers"] == member.score(anchor)
        reported.append(found and found["version"])
        member.train(anchor)
    assert reported == [0, None, 2, None, 4]
    x, _ = FEDERATION.client(0)
    assert found["train_samples"] == len(x) and found["samples"] == len(FEDERATION.client_test(0)[1])


@pytest.mark.parametrize("name", ["APFL", "SCAFFOLD", "FedAvg", "PersA-FL-ME"])
def test_a_client_scores_itself_as_the_simulator_does(name, tmp_path):
    given = recipe(name)
    result = simulate(given.algorithm, given.task, FEDERATION, rounds(3, 2, key=KEY), key=KEY)
    for i in range(3):
        member = member_of(tmp_path / str(i), given, i)
        personal = jax.tree.map(lambda leaf, i=i: leaf[i], result.personal)
        member.holding = type(member.held)(personal, 2)
        anchor = Anchor(result.params, result.shared, int(result.snapshot.state.server.version))
        for score, metrics in member.score(anchor).items():
            scoring = given.training.scorings[score]
            among = evaluate(given.algorithm, given.task, FEDERATION, result, scoring, key=given.key)
            assert_same(metrics, {metric: float(values[i]) for metric, values in among.metrics.items()}, 1e-12)


def test_the_end_of_a_client_and_of_a_newcomer(tmp_path):
    given = recipe("APFL")
    member = member_of(tmp_path / "member", given)
    member.train(anchor_of(given))
    path, numbers = member.finish(anchor_of(given, 1), {"start": {"accuracy": 0.5}})
    assert (
        set(numbers) == {"start", "shared", "shared_model", "scores", "personal"}
        and numbers["scores"]["APFL"] == numbers["personal"]
    )
    tree, _ = checkpoint.read_model(path)
    mixed = given.algorithm.objective.models(anchor_of(given).params, member.held.personal)["personal"]
    assert_same_bits(list(jax.tree.leaves(tree)), list(map(np.asarray, jax.tree.leaves(mixed))))
    x, y = data_of(0).client_test(0)
    assert np.mean(load(path).predict(x) == y) == pytest.approx(numbers["personal"]["accuracy"])
    newcomer = Membership(assignment(given), "bert", data_of(1), tmp_path / "bert", Limits())
    _, numbers = newcomer.finish(anchor_of(given, 1))
    assert set(numbers) == {"shared", "shared_model", "personal"}
    assert not (tmp_path / "bert" / "test-run" / "state").exists()


BAD_NAMES = ["../escape", "a/b", "a\\b", "..", ".", "", "a b", "a\n", "a\x1b[2J", "x" * 81, "a.b", "\u0661", None]


@pytest.mark.parametrize("run", BAD_NAMES, ids=repr)
def test_a_server_does_not_choose_where_a_client_writes(run, tmp_path):
    with pytest.raises(ValueError, match="The name of a run must have up to 80 letters, digits"):
        member_of(tmp_path / "state", recipe(), run=run)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_of_one_authority(tmp_path):
    given = recipe("APFL")
    member_of(tmp_path, given, authority="a" * 64).train(anchor_of(given))
    for run in ("test-run", "other-run"):
        with pytest.raises(ValueError, match=r"belongs to the federation of authority aaaa.*Nothing was sent"):
            member_of(tmp_path, given, run=run, authority="b" * 64)
    assert member_of(tmp_path, given, authority="a" * 64).held.upload is not None


@pytest.mark.parametrize("change", [{"run": "other-run"}, {"authority": "b" * 64}])
def test_an_upload_is_sent_only_to_the_run_and_the_authority_it_was_made_for(change, tmp_path):
    """Even where the state was moved there by hand."""
    given, now = recipe("APFL"), {"run": "test-run", "authority": "a" * 64, **change}
    member_of(tmp_path / "one", given, authority="a" * 64).train(anchor_of(given))
    (tmp_path / "two" / now["run"]).mkdir(parents=True)
    (tmp_path / "one" / "test-run" / "state").rename(tmp_path / "two" / now["run"] / "state")
    with pytest.raises(ValueError, match=r"has the state of run test-run of authority aaaa.*Nothing was sent"):
        member_of(tmp_path / "two", given, **now)


def test_only_the_owner_can_read_what_is_personal(tmp_path):
    given = recipe("APFL")
    member = member_of(tmp_path, given)
    member.train(anchor_of(given))
    member.finish(anchor_of(given))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5  # the authority, a checkpoint, the personal model and its numbers
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


@pytest.mark.parametrize("name", ["a/b", "..", "a\\b", "../../x", "a\x1b[2J"], ids=repr)
def test_names_in_a_recipe_are_checked(name):
    given = recipe()
    text = given.to_text().replace("FedAsync", json.dumps(name)[1:-1])
    with pytest.raises(Refused, match="name") as error:
        read_recipe(text, given.layout_text(), Limits())
    assert "\x1b" not in str(error.value)
