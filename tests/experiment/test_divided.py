"""Divided models from TOML to the run folder: what is built, what is refused, what is resumed, what is written."""

import dataclasses
import json

import numpy as np
import pytest

import personax as px
from personax.experiment import checkpoint
from personax.experiment.build import build, make_training, resolve, with_scores
from personax.experiment.config import AlgorithmSection, parse
from personax.experiment.folders import Folder
from personax.experiment.newcomers import personalize_newcomer
from personax.experiment.records import read_results
from personax.experiment.runs import Silent, execute, prepare, snapshot_of, start
from personax.experiment.summaries import newcomer_scoring
from personax.values import ConfigError
from tests.experiment.test_config import refused

CONFIG = {
    "name": "divided",
    "seeds": 2,
    "data": {"kind": "synthetic", "num_clients": 6, "num_features": 3, "num_classes": 3, "num_samples": 12},
    "split": {"test_share": 0.25, "num_held_out": 1},
    "model": {"kind": "mlp", "widths": [4]},
    "schedule": {"num_rounds": 4, "cohort_size": 2},
    "evaluation": {"every": 1, "stationarity": True, "adaptation_steps": [0, 2]},
    "local": {"lr": 0.1, "num_steps": 2, "batch_size": 4},
    "algorithms": {
        "Head": {"recipe": "fedavg", "sharing": {"personal": ["dense_1"], "frozen": "dense_0.bias"}},
        "FedRep": {"recipe": "fedrep", "personal": "dense_1", "num_personal_steps": 3},
        "FedBABU": {"recipe": "fedbabu", "head": "dense_1"},
    },
}


def config_of(algorithms):
    return resolve(parse({**CONFIG, "algorithms": algorithms}), baselines=False)


class Stop(Silent):
    """A watch that interrupts at its second advance."""

    num = 0

    def advance(self, name, done, latest):
        self.num += 1
        if self.num == 2:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same run twice: uninterrupted, and interrupted and resumed."""
    root = tmp_path_factory.mktemp("divided")
    config = config_of(CONFIG["algorithms"])
    whole, resumed = start(config, root / "whole"), start(config, root / "resumed")
    execute(whole)
    with pytest.raises(KeyboardInterrupt):
        execute(resumed, Stop(), checkpoint_seconds=0.0)
    execute(resumed)
    return whole, resumed


def test_toml_builds_what_python_does():
    local = {"lr": 0.1, "num_steps": 3}
    build_one = lambda **options: (
        make_training(
            "A", AlgorithmSection(options.pop("recipe"), {**local, **options}, {"A": {"model": "localized"}})
        ).algorithm
    )
    own = px.Sharing(personal="dense_1")
    assert build_one(recipe="fedper", personal=["dense_1"]) == px.fedper(personal="dense_1", **local)
    avg = dataclasses.replace(px.fedavg(**local), sharing=own)
    assert build_one(recipe="fedavg", sharing={"personal": ["dense_1"]}) == avg
    phases = [{"trains": "dense_1", "num_steps": 2}, {"trains": ["*", "!dense_1"], "num_epochs": 1, "lr": 0.05}]
    made = make_training("A", AlgorithmSection("fedavg", {"lr": 0.1, "phases": phases}, {"A": {"model": "global"}}))
    expected = (px.Phase("dense_1", 2), px.Phase(("*", "!dense_1"), num_epochs=1, lr=0.05))
    assert made.algorithm.local == px.Local(0.1, phases=expected)
    maml = {"kind": "Meta", "adapt_lr": 0.1, "adapts": ["dense_1"]}
    assert build_one(recipe="persafl", objective=maml).objective == px.Meta(0.1, adapts="dense_1")


def test_defaults_score_the_clients_own_model():
    config = config_of({**CONFIG["algorithms"], "ANIL": {"recipe": "anil", "head": "dense_1", "adapt_lr": 0.1}})
    scores = {name: entry.scores for name, entry in config.algorithms.items()}
    assert scores["FedRep"] == {"FedRep": {"model": "personal"}} == {"FedRep": scores["Head"]["Head"]}
    assert scores["ANIL"]["ANIL"]["tunes"] == ["dense_1"]
    assert scores["FedBABU"] == {"FedBABU": {"model": "adapted", "num_steps": 2, "lr": 0.1}}
    assert config.algorithms["FedBABU"] == with_scores("FedBABU", config.algorithms["FedBABU"])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"recipe": "fedper", "personal": "head"}, "'head', which matches no parameter. Use the names dense_0.bias"),
        ({"recipe": "fedper", "personal": "dense_1", "sharing": {}}, "divides the model itself"),
        ({"recipe": "scaffold", "sharing": {"personal": "dense_1"}}, "uploads values for every trained parameter"),
        (
            {"recipe": "fedper", "personal": "dense_1", "scores": {"A": {"model": "global"}}},
            "so the shared part alone is not a complete model",
        ),
        (
            {"recipe": "fedper", "personal": "dense_1", "scores": {"A": {"model": "adapted", "clients": "held_out"}}},
            "is at its initial value and must be trained first",
        ),
        (
            {"recipe": "fedavg", "scores": {"A": {"model": "adapted", "tunes": "head"}}},
            "`tunes` has 'head', which matches no parameter",
        ),
        ({"recipe": "fedavg", "phases": [{"trains": "head", "num_steps": 1}]}, "`phases.0.trains` has 'head'"),
        ({"recipe": "fedrep", "personal": "!a", "num_personal_steps": 1}, "without `!` here"),
    ],
)
def test_what_cannot_be_trained_or_scored_is_refused_before_training(entry, said):
    with refused("algorithms.A", said):
        build(config_of({"A": entry}))


def test_an_interrupted_run_ends_in_the_same_bits(folders):
    whole, resumed = folders
    for name in CONFIG["algorithms"]:
        one, other = (checkpoint.read_model(folder.model(name))[0] for folder in folders)
        for layer, leaves in one["params"].items():
            for leaf, array in leaves.items():
                np.testing.assert_array_equal(array, other["params"][layer][leaf])
    numbers = lambda folder: [one.scores[0].evaluations[-1].mean for one in read_results(folder.root).algorithms]
    assert numbers(whole) == numbers(resumed)


def test_a_checkpoint_with_another_base_is_refused(folders):
    work = prepare(config_of(CONFIG["algorithms"]))
    run = work.runs["Head"]
    saved = checkpoint.load(folders[0].checkpoints("Head"), lambda about: run.state_shapes(about["events"]))
    assert snapshot_of(run, saved).unshared.fingerprint == saved.about["base"] != ""
    other = saved._replace(about={**saved.about, "base": "0" * 64})
    with refused("different frozen or initial personal", "000000000000", "Restore the base of the model"):
        snapshot_of(run, other)


def test_records_state_what_was_done(folders):
    *divided, babu = read_results(folders[0].root).algorithms
    assert "of all parameters" in babu.scores[0].words and "of all parameters" in babu.scores[0].newcomers.words
    for record in divided:
        (score,) = record.scores
        assert score.words.startswith("the shared part with the client's own `dense_1`")
        assert "the newcomer's `dense_1`, which starts at the common initial value" in score.newcomers.words
        assert "both need one model that all clients share completely" in record.bound.words
        assert all(one.stationarity is None for one in score.evaluations)
    assert all(0 not in one.scores[0].newcomers.steps for one in (*divided, babu))
    bytes_up = {record.name: record.bytes_up for record in read_results(folders[0].root).algorithms}
    assert bytes_up["Head"] == 8 * (3 * 4) * 8  # four rounds of two clients, the kernel of the first layer alone


def test_the_model_file_names_its_base_and_is_not_a_complete_model(folders):
    path = folders[0].model("Head")
    about = checkpoint.read_model(path)[1]
    assert len(about["base"]) == 64 and json.loads(about["untrained"]) == ["dense_1"]
    with refused("is not a complete model: dense_1 is personal"):
        px.load(path)
    with refused("Head has no shared model: dense_1 is personal"):
        px.load(folders[0].root, "Head")


def test_the_model_of_a_client_is_loaded_with_its_part(folders):
    found = px.load(folders[0].root, "FedRep", client="client 0")
    other = px.load(folders[0].root, "FedRep", client="client 1")
    assert "the client's own `dense_1`" in found.words
    np.testing.assert_array_equal(found.params["dense_0"]["kernel"], other.params["dense_0"]["kernel"])


def test_a_new_client_trains_its_part_and_has_no_model_before(folders, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "new.npz", x=rng.normal(size=(20, 3)), y=rng.integers(0, 3, 20))
    found = personalize_newcomer(Folder(folders[0].root), tmp_path / "new.npz", "FedRep", num_steps=4, lr=0.2)
    assert "the newcomer's `dense_1`" in found.words and "trained in 4 batches, step size 0.2" in found.words
    assert found.before == {} and set(found.after) == {"accuracy", "loss"}


def test_a_new_client_of_fedbabu_tunes_its_head(folders, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "new.npz", x=rng.normal(size=(20, 3)), y=rng.integers(0, 3, 20))
    start = checkpoint.read_model(folders[0].model("FedBABU"))[0]["params"]
    found = personalize_newcomer(Folder(folders[0].root), tmp_path / "new.npz", "FedBABU")
    for layer in ("dense_0", "dense_1"):
        assert np.any(np.asarray(found.params[layer]["kernel"]) != start[layer]["kernel"])
    assert found.before == {} and "after 2 gradient steps of all parameters of size 0.1" in found.words


def test_newcomers_of_any_score_of_fedbabu_are_fine_tuned():
    algorithm = px.fedbabu(head="dense_1", lr=0.3, num_steps=7)
    for scored in ("global", "localized"):
        found = newcomer_scoring(algorithm, px.Scoring(scored))
        assert (found.model, found.num_steps, found.lr) == ("adapted", 7, 0.3)
    tuned = newcomer_scoring(algorithm, px.Scoring("adapted", 2, 0.5, tunes="dense_1"))
    assert (tuned.num_steps, tuned.lr, tuned.tunes) == (2, 0.5, ("dense_1",))


def test_newcomers_train_for_as_long_as_a_visit():
    scoring = newcomer_scoring(
        px.fedrep(personal="a", lr=0.1, num_personal_steps=7, num_steps=2), px.Scoring("personal")
    )
    assert (scoring.model, scoring.num_steps, scoring.lr) == ("recomputed", 7, 0.1)
    assert newcomer_scoring(px.fedavg(lr=0.1, num_steps=7), px.Scoring("adapted", 2, tunes="a")).tunes == ("a",)


def test_advice_is_for_models_that_are_shared_as_a_whole(tmp_path):
    from personax.inspection import Effort, inspect_federation

    with pytest.raises(ConfigError, match="divides the model"):
        inspect_federation(config_of(CONFIG["algorithms"]), Effort())
