"""Tests of `resume`: it refuses to mix results, extends runs, and rebuilds files."""

import dataclasses
import json
import os
import re
import stat
import tomllib

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import tomli_w

from personax.data.federation import Federation
from personax.data.locks import Taken, sole_user
from personax.experiment import runs
from personax.experiment.build import resolve
from personax.experiment.config import ConfigError, load, parse
from personax.experiment.folders import Folder
from personax.experiment.provenance import Provenance, digest_data, provenance_of
from personax.experiment.records import read_results
from personax.experiment.runs import execute, prepare, start
from personax.schedules import Schedule
from tests.experiment.test_config import refused
from tests.experiment.test_runs import TINY, Stop, json_of, lines_of, timeless

pytestmark = pytest.mark.xdist_group("runs")
NAMES = ["FedAvg", "APFL", "PersA-FL"]


def tiny(num_rounds=4, every=1, **sections):
    schedule = {**TINY["schedule"], "num_rounds": num_rounds}
    evaluation = {"every": every, "adaptation_steps": [0, 1]}
    return resolve(parse({**TINY, "schedule": schedule, "evaluation": evaluation, **sections}), baselines=False)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished run."""
    folder = start(tiny(), tmp_path_factory.mktemp("template") / "run")
    execute(folder)
    return folder


@pytest.fixture
def folder(template, tmp_path):
    """A separate finished run for a test, which is as cheap as a copy."""
    made = Folder(tmp_path / "run")
    for path in template.root.rglob("*"):
        if path.is_file():
            place = made.root / path.relative_to(template.root)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return made


def edit(folder, change):
    """Change the configuration of a run by hand."""
    table = tomllib.loads(folder.config.read_text())
    change(table)
    folder.config.write_text(tomli_w.dumps(table))


def set_lr(table):
    table["algorithms"]["APFL"]["lr"] = 0.2


def set_rounds(num_rounds):
    return lambda table: table["schedule"].update(num_rounds=num_rounds)


def bytes_of(folder):
    """Return everything that does not depend on time."""
    models = [folder.model(name).read_bytes() for name in NAMES]
    clients = pq.read_table(folder.clients).to_pylist()
    return models, clients, timeless(json_of(folder.results)), timeless(lines_of(folder.metrics))


# Changes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_lr, "`algorithms.APFL.lr` was 0.1 and is 0.2 (for APFL)"),
        (lambda t: t.update(seeds=[0, 5]), "`seeds` was [0, 1] and is [0, 5] (for FedAvg, APFL, PersA-FL)"),
        (lambda t: t["split"].update(seed=1), "`split.seed` was 0 and is 1"),
        (lambda t: t["data"].update(num_samples=24), "`data.num_samples` was 20 and is 24"),
        (lambda t: t["task"].update(l2=0.1), "`task.l2` was 0.0 and is 0.1"),
        (lambda t: t["schedule"].update(cohort_size=3), "`schedule.cohort_size` was 2 and is 3"),
        (lambda t: t["schedule"].update(delays="none"), '`schedule.delays` was "persafl" and is "none"'),
        (lambda t: t["evaluation"].update(every=2), "`evaluation.every` was 1 and is 2"),
        (lambda t: t.update(precision="float32"), '`precision` was "default" and is "float32"'),
        (
            lambda t: t["algorithms"]["FedAvg"]["scores"]["FedAvg, tuned"].update(lr=0.4),
            '`algorithms.FedAvg.scores."FedAvg, tuned".lr` was 0.3 and is 0.4 (for FedAvg)',
        ),
    ],
)
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_changed_setting_is_refused_by_name(folder, change, words, state):
    if state == "interrupted":  # only a checkpoint remains
        for path in (folder.results, *(folder.part(name) for name in NAMES)):
            path.unlink()
    edit(folder, change)
    if "none" in words:
        edit(folder, lambda table: table["algorithms"].pop("PersA-FL"))  # which needs delays
        words = words.split(" (for")[0]
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    with refused("would be mixed", words, "--fresh"):
        execute(folder)
    kept = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file() and "locks" not in path.parts}
    assert kept == {path: content for path, content in before.items() if "locks" not in path.parts}


def test_only_what_is_affected_is_trained_again(folder, template):
    edit(folder, set_lr)
    watch = Stop()
    execute(folder, watch, fresh=["APFL"])
    assert watch.begun == [("APFL", 4, 0)]
    expected = start(load(folder.config), folder.root.parent / "expected")
    execute(expected)
    assert bytes_of(folder) == bytes_of(expected) != bytes_of(template)


def test_settings_that_do_not_matter_may_change(folder, template):
    edit(folder, lambda table: table.update(name="another name", tune={"lr": [0.1]}))
    watch = Stop()
    execute(folder, watch)
    assert not watch.begun and read_results(folder.root).name == "another name"


def write_data(path, shift=0.0, test_shift=0.0):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), rng.integers(0, 3, 60)
    clients = np.repeat(np.arange(6), 10)
    x[5] += shift
    x[-1] += test_shift
    np.savez(path, x=x, y=y, client=clients)


def with_file(path):
    data = {"kind": "file", "path": str(path)}
    return tiny(data=data, algorithms={"FedAvg": TINY["algorithms"]["FedAvg"]}, split={"num_held_out": 1})


def test_changed_data_are_refused(tmp_path):
    write_data(tmp_path / "data.npz")
    folder = start(with_file(tmp_path / "data.npz"), tmp_path / "run")
    execute(folder)
    write_data(tmp_path / "data.npz", shift=1e-9)
    with refused("would be mixed", "data has changed", f"personax resume {folder.root} --fresh FedAvg"):
        execute(folder)
    write_data(tmp_path / "data.npz")
    (tmp_path / "data.npz").rename(tmp_path / "moved.npz")  # to another place with the same content
    edit(folder, lambda table: table["data"].update(path=str(tmp_path / "moved.npz")))
    watch = Stop()
    execute(folder, watch)
    assert not watch.begun


def test_each_part_of_the_data_has_a_digest(tmp_path):
    pairs = lambda: [(np.arange(6.0).reshape(3, 2) + i, np.array([0, 1, 1])) for i in range(3)]
    made = lambda train, test, **more: Federation.from_clients(train, test, **more).hold_out([2])
    plain = digest_data(made(pairs(), pairs()))
    changed = lambda other: {part for part in plain if digest_data(other)[part] != plain[part]}
    assert changed(made(pairs(), pairs())) == set()
    for at, part in ((0, "training data"), (2, "data of held-out clients")):
        train = pairs()
        train[at][0][1, 1] += 1e-12
        assert changed(made(train, pairs())) == {part}
    test = pairs()
    test[1][1][0] = 1
    assert changed(made(pairs(), test)) == {"test data"}
    assert changed(made(pairs(), pairs(), names=["a", "bc", "d"])) == {"list of clients", "data of held-out clients"}
    named = [digest_data(made(pairs(), pairs(), names=names)) for names in (["ab", "c", "d"], ["a", "bc", "d"])]
    assert named[0]["list of clients"] != named[1]["list of clients"]
    made(pairs(), pairs()).save(tmp_path / "files")
    assert digest_data(Federation.open(tmp_path / "files")) == plain


def test_a_provenance_has_only_the_settings_of_its_algorithm():
    config = tiny()
    of = {name: provenance_of(config, name, {}).settings for name in NAMES}
    assert of["APFL"]["algorithms.APFL.lr"] == 0.1 and not any("FedAvg" in name for name in of["APFL"])
    assert not {"name", "schedule.num_rounds", "local.lr"} & of["APFL"].keys()
    provenance = provenance_of(config, "APFL", {"training data": "00"})
    assert Provenance.from_table(provenance.table) == provenance
    longer = dataclasses.replace(provenance, num_rounds=9)
    assert provenance.digest == longer.digest != provenance_of(config, "FedAvg", {"training data": "00"}).digest


# Longer and shorter runs


DELAYS = {
    "persafl": "persafl",
    "fixed": {"kind": "Delays", "compute": {"kind": "Fixed", "mean": 1.0}},
    "gamma": {
        "kind": "Delays",
        "compute": {"kind": "Gamma", "mean": 1.0},
        "pause": {"kind": "Exponential", "mean": 2.0},
    },
    "log-normal": {"kind": "Delays", "upload": {"kind": "LogNormal", "mean": 1.0, "spread": 2.0}},
}


@pytest.mark.parametrize(("every", "seconds"), [(1, 0.0), (3, np.inf)])
def test_a_finished_run_is_continued_to_the_bits_of_a_longer_one(tmp_path, every, seconds):
    """With 3 rounds between evaluations, the last one of the short run is not one of the long run's."""
    longer = start(tiny(9, every), tmp_path / "longer")
    execute(longer)
    folder = start(tiny(4, every), tmp_path / "run")
    execute(folder, checkpoint_seconds=seconds)
    edit(folder, set_rounds(9))
    watch = Stop()
    execute(folder, watch, checkpoint_seconds=seconds)
    assert [(name, total) for name, total, _ in watch.begun] == [(name, 9) for name in NAMES]
    assert dict((name, done) for name, _, done in watch.begun[:2]) == dict.fromkeys(NAMES[:2], 4 if every == 1 else 3)
    assert bytes_of(folder) == bytes_of(longer)


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
def test_longer_schedules_of_all_delays_begin_with_shorter_ones(delays):
    plans = [
        prepare(tiny(rounds, schedule={"num_rounds": rounds, "cohort_size": 2, "delays": delays}))
        for rounds in (40, 97)
    ]
    for name in NAMES:
        shorter, longer = (plan.runs[name].schedules for plan in plans)
        assert all(map(Schedule.begins_with, longer, shorter))
        assert not any(map(Schedule.begins_with, shorter, longer))


@pytest.mark.parametrize("delays", [DELAYS["fixed"], DELAYS["log-normal"]], ids=["fixed", "log-normal"])
def test_an_asynchronous_run_is_continued_from_a_state_on_the_way(tmp_path, delays):
    """Its end lacks models that later updates start from; an earlier state may have them."""
    only = {"PersA-FL": TINY["algorithms"]["PersA-FL"]}
    config = lambda rounds: tiny(
        rounds, algorithms=only, schedule={"num_rounds": rounds, "cohort_size": 2, "delays": delays}
    )
    longer = start(config(30), tmp_path / "longer")
    execute(longer)
    folder = start(config(20), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        execute(folder, Stop(5), checkpoint_seconds=np.inf)
    edit(folder, set_rounds(30))
    watch = Stop()
    execute(folder, watch)
    if delays == DELAYS["log-normal"]:  # a client with a long absence starts from a model that the short run dropped
        assert watch.begun[0][2] == 0 and "from the beginning" in watch.said[0]
    else:
        assert watch.begun[0][2] > 0 and watch.said == []
    assert folder.model("PersA-FL").read_bytes() == longer.model("PersA-FL").read_bytes()
    assert timeless(json_of(folder.results)) == timeless(json_of(longer.results))


def test_a_run_may_not_become_shorter(folder):
    edit(folder, set_rounds(3))
    words = "`schedule.num_rounds` was 4 and is 3: a run can be extended but not shortened (for FedAvg, APFL, PersA-FL)"
    with refused(words, "--fresh all"):
        execute(folder)
    edit(folder, set_rounds(6))
    with pytest.raises(KeyboardInterrupt):
        execute(folder, Stop(1), checkpoint_seconds=0.0)
    edit(folder, set_rounds(5))
    with refused("`schedule.num_rounds` was 6 and is 5"):
        execute(folder)
    edit(folder, set_rounds(4))  # whose results are still there
    watch = Stop()
    execute(folder, watch)
    assert not watch.begun


def test_a_schedule_that_depends_on_its_length_is_not_continued(folder, monkeypatch):
    make = runs.make_schedules

    def shifted(config, algorithm, num_clients, work):
        return [
            dataclasses.replace(schedule, client=(schedule.client + config.schedule.num_rounds) % num_clients)
            for schedule in make(config, algorithm, num_clients, work)
        ]

    monkeypatch.setattr(runs, "make_schedules", shifted)
    edit(folder, set_rounds(5))
    with refused("`FedAvg` was trained for 4 rounds, but the schedule of the longer run starts differently"):
        execute(folder)


# One process at a time


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_of_a_run_has_one_process(folder, name):
    edit(folder, set_rounds(5))
    before = folder.metrics.read_bytes()
    with sole_user(folder.lock(name)):
        with pytest.raises(
            Taken, match=re.escape(f"`{name}` of the run {folder.root} is used by process {os.getpid()}")
        ):
            execute(folder)
        assert folder.metrics.read_bytes() == before and folder.results.exists()
    execute(folder)


# Damage


@pytest.mark.parametrize("what", ["part", "part_clients", "model"])
@pytest.mark.parametrize("harm", ["gone", "cut", "changed"])
def test_a_damaged_file_is_rebuilt_from_the_checkpoint(folder, template, what, harm):
    path = getattr(folder, what)("APFL")
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-7] if harm == "cut" else content.replace(content[-9:], b"123456789"))
        assert path.read_bytes() != content
    watch = Stop()
    execute(folder, watch)
    assert watch.begun == [("APFL", 4, 4)] and watch.num_advances == 0
    assert bytes_of(folder) == bytes_of(template)
    if (what, harm) != ("part", "gone"):  # as if the run had been interrupted
        assert (
            len(watch.said) == 1 and str(path) in watch.said[0] and "Rebuilding it from the checkpoint" in watch.said[0]
        )


@pytest.mark.parametrize("change", [b"", b"{", b'{"schema_version": 3}'])
def test_damaged_results_are_rebuilt_from_the_parts(folder, template, change):
    folder.results.write_bytes(change)
    folder.clients.unlink()
    folder.metrics.write_bytes(b"nothing")
    watch = Stop()
    execute(folder, watch)
    assert not watch.begun and "results.json is damaged. Rebuilding it" in watch.said[0]
    assert bytes_of(folder) == bytes_of(template)


def test_results_of_32_bits_are_the_same_when_they_are_read_back(tmp_path):
    """Means over clients are computed in the type of the clients' numbers, which the file has as 64 bits."""
    with jax.enable_x64(False):
        folder = start(tiny(algorithms={"APFL": TINY["algorithms"]["APFL"]}), tmp_path / "run")
        execute(folder)
        before = folder.results.read_bytes()
        execute(folder)
        assert folder.results.read_bytes() == before
        folder.results.unlink()
        execute(folder)
        assert timeless(json_of(folder.results)) == timeless(json.loads(before))


def test_a_changed_number_in_the_results_is_repaired(folder, template):
    text = folder.results.read_text()
    folder.results.write_text(re.sub(r'"num_samples": \d+', '"num_samples": 1', text))
    execute(folder)
    assert bytes_of(folder) == bytes_of(template)


def test_results_that_cannot_be_rebuilt_are_reported(folder, template):
    for path in folder.checkpoints("APFL").iterdir():
        path.unlink()
    folder.model("APFL").unlink()
    words = f"APFL` are lost. Restore the file from a copy, or retrain: personax resume {folder.root} --fresh APFL"
    with refused(f"{folder.model('APFL')} is missing.", words, kind=ValueError):
        execute(folder)
    execute(folder, fresh=["APFL"])
    assert bytes_of(folder) == bytes_of(template)


def test_states_that_are_all_damaged_are_reported(tmp_path):
    folder = start(tiny(), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        execute(folder, Stop(3), checkpoint_seconds=0.0)
    for path in folder.checkpoints("FedAvg").glob("*.safetensors"):
        path.write_bytes(b"")
    with refused(
        "All 2 checkpoints", f"To retrain it, run: personax resume {folder.root} --fresh FedAvg", kind=ValueError
    ):
        execute(folder)


# Files


def test_states_of_clients_are_readable_only_by_the_owner(template):
    modes = {name: {stat.S_IMODE(p.stat().st_mode) for p in template.checkpoints(name).iterdir()} for name in NAMES}
    assert modes["APFL"] == {0o600} and modes["FedAvg"] != {0o600}


def test_identical_runs_write_identical_models(template, tmp_path):
    again = start(tiny(), tmp_path / "again")
    execute(again)
    for name in NAMES:
        assert again.model(name).read_bytes() == template.model(name).read_bytes()


@pytest.mark.parametrize("name", ["..", "a\x1b[2J", "a\nb", " ", "x" * 81], ids=repr)
def test_names_of_algorithms_and_runs_are_checked(name):
    entry = TINY["algorithms"]["FedAvg"]
    for table in ({"name": name}, {"algorithms": {name: entry}}):
        with pytest.raises(ConfigError) as error:
            parse({**TINY, **table})
        assert "\x1b" not in str(error.value)
