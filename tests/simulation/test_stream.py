"""Streamed runs are plain runs: the same batches, states, snapshots and scores, from data and states on the host."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

import personax
from personax import Stream, simulate
from personax.experiment.build import make_federation, resolve
from personax.experiment.config import ConfigError, parse
from personax.experiment.runs import execute, start
from personax.simulation import engine, stream
from personax.simulation.results import State
from personax.simulation.store import Kept
from tests import closed_forms
from tests.experiment.test_runs import Stop
from tests.recipes import RECIPES, STEPS
from tests.simulation.options import grouped
from tests.test_contract import FED, NUM, TASK, assert_close, assert_same_bits, data, end, schedule_for

KEY = jax.random.key(0)
MORE = ["fedavg", "scaffold_1", "per_fedavg_hf", "pfedme", "persafl_me"]
SOME = [
    "fedavg_epochs",
    "apfl",
    "fedbuff",
    "scaffold_async",
    *(pytest.param(one, marks=pytest.mark.slow) for one in MORE),
]


def run(name, streams=None, fed=FED, seed=0, schedule=None, **options):
    schedule = schedule_for(name, seed) if schedule is None else schedule
    options.setdefault("key", jax.random.key(seed))
    return simulate(RECIPES[name](1.0), TASK, fed, schedule, **grouped(stream=streams, wave_width=4, **options))


@pytest.mark.parametrize("name", SOME)
def test_a_streamed_run_is_the_plain_run(name, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_WAVES", 2)
    assert_close(end(run(name)), end(run(name, Stream())), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_waves", [1, 3])
def test_blocks_may_have_any_length(num_waves, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_WAVES", num_waves)
    assert_close(end(run("apfl")), end(run("apfl", Stream())), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["apfl", "scaffold_async"])
def test_streamed_seeds_are_the_plain_seeds(name):
    seeds = {"key": jax.random.split(KEY, 3), "schedule": [schedule_for(name, seed) for seed in range(3)]}
    assert_close(end(run(name, **seeds)), end(run(name, Stream(), **seeds)), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("memory", [0, 500, 1 << 20], ids=["on disk", "both", "in memory"])
def test_states_come_back_from_the_disk(memory, tmp_path):
    result = run("apfl", Stream(memory, str(tmp_path)))
    assert_same_bits(end(run("apfl", Stream())), end(result))
    kept = list(result.snapshot.state.personal.records.values())
    on_disk = sum(not isinstance(record, np.ndarray) for record in kept)
    most = memory // result.snapshot.state.personal.layout.num_bytes
    assert on_disk == max(len(kept) - most, 0)


@pytest.mark.parametrize("name", ["apfl", "scaffold_async"])
def test_a_streamed_run_resumes_from_any_snapshot_and_through_files(name, tmp_path):
    snapshots = []
    whole = run(name, Stream(600), every=6, observe=snapshots.append)
    for cut in snapshots[:-1]:
        leaves, structure = jax.tree.flatten(cut.state)
        np.savez(tmp_path / "state.npz", *leaves)
        with np.load(tmp_path / "state.npz") as stored:
            state = jax.tree.unflatten(structure, [stored[f"arr_{i}"] for i in range(len(leaves))])
        for begin in (cut, dataclasses.replace(cut, state=state)):
            assert_same_bits(end(whole), end(run(name, Stream(600), start=begin)))


def test_snapshots_do_not_change_when_the_run_continues():
    seen = []
    observe = lambda snapshot: seen.append((snapshot, jax.tree.map(np.array, snapshot.personal)))
    run("apfl", Stream(0), every=2, observe=observe)
    for snapshot, personal in seen:
        assert_same_bits(snapshot.personal, personal)


def test_places_on_the_disk_are_used_again():
    result = run("apfl", Stream(0), every=1, observe=lambda snapshot: None)
    kept = result.snapshot.state.personal
    file = next(iter(kept.records.values())).file
    assert file.num_rows <= NUM + 1 and len(file.free) == file.num_rows - len(kept.records)


def test_only_visited_clients_have_states_of_their_own():
    schedule = personax.rounds(NUM, 2, 1, key=KEY)
    result = run("apfl", Stream(), schedule=schedule)
    assert isinstance(result.snapshot.state.personal, Kept)
    assert sorted(result.snapshot.state.personal.records) == sorted(set(schedule.client.tolist()))
    assert_same_bits(result.personal, run("apfl", schedule=schedule).personal)


# Federations in files


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "federation"
    FED.save(folder)
    return personax.Federation.open(folder)


def test_a_mapped_federation_streams_by_itself(mapped, monkeypatch):
    monkeypatch.setattr(personax.Federation, "train", None)  # nothing asks for all of it
    result = run("apfl", fed=mapped)
    monkeypatch.undo()
    assert isinstance(result.snapshot.state.personal, Kept)
    assert_close(end(run("apfl")), end(result), rtol=1e-12, atol=1e-14)


PROTOCOLS = [
    personax.Scoring("personal"),
    personax.Scoring("localized", clients="cohort", score_on="both"),
    personax.Scoring("adapted", num_steps=2, clients="cohort"),
    personax.Scoring("recomputed", num_steps=2, score_on="training"),
]


@pytest.mark.parametrize(
    ("scoring", "num_seeds"),
    [
        (PROTOCOLS[1], 2),
        (PROTOCOLS[3], 0),
        pytest.param(PROTOCOLS[0], 2, marks=pytest.mark.slow),
        pytest.param(PROTOCOLS[2], 0, marks=pytest.mark.slow),
    ],
)
def test_scores_of_mapped_and_resident_federations_agree(scoring, num_seeds, mapped, monkeypatch):
    key = jax.random.split(KEY, num_seeds) if num_seeds else KEY
    schedule = [schedule_for("apfl", seed) for seed in range(num_seeds)] if num_seeds else schedule_for("apfl")
    plain = run("apfl", key=key, schedule=schedule)
    monkeypatch.setattr(sys.modules["personax.evaluation.evaluate"], "MOST_MAPPED", 2)
    streamed = run("apfl", fed=mapped, key=key, schedule=schedule)
    score = lambda fed, result: personax.evaluate(RECIPES["apfl"](1.0), TASK, fed, result, scoring, key=KEY)
    here, there = score(FED, plain), score(mapped, streamed)
    assert_close(here.metrics, there.metrics, rtol=1e-10)
    for name in ("clients", "num_samples", "num_train_samples"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name))


def test_updates_that_are_not_finite_are_named_and_skipped():
    data = closed_forms.clients()
    data[2] = (data[2][0] * 1e200, data[2][1])
    fed = personax.Federation.from_clients(data, names=["ada", "bob", "cyd", "dan"])
    algorithm, schedule = personax.apfl(lr=0.05, mix=0.5, **STEPS), personax.rounds(4, 5, 2, key=KEY)
    attempt = lambda streams, how: simulate(
        algorithm, closed_forms.TASK, fed, schedule, key=KEY, **grouped(stream=streams, on_nonfinite=how)
    )
    event = int(np.flatnonzero(schedule.client == 2)[0])
    with pytest.raises(personax.NonFiniteUpdate, match=f"The update of cyd at event {event} is not finite"):
        attempt(Stream(), "raise")
    plain, streamed = attempt(None, "skip"), attempt(Stream(), "skip")
    assert plain.num_skipped == streamed.num_skipped > 0
    assert_close(end(plain), end(streamed), rtol=1e-12, atol=1e-14)


def test_trackers_follow_streamed_runs_or_are_refused():
    plain, streamed = (run("fedavg", streams, tracker=personax.RandomIterate()) for streams in (None, Stream()))
    assert_close(plain.tracked, streamed.tracked, rtol=1e-12)
    with pytest.raises(ValueError, match="`WeightedAverage` follows all clients"):
        run("apfl", Stream(), tracker=personax.WeightedAverage(1.0))


def test_a_snapshot_continues_in_the_way_it_was_made():
    for made, continued, where in ((None, Stream(), "device"), (Stream(), None, "host")):
        snapshots = []
        run("apfl", made, every=3, observe=snapshots.append)
        with pytest.raises(ValueError, match=f"states on the {where}. Continue it in the same way"):
            run("apfl", continued, start=snapshots[1])


def test_blocks_of_a_run_share_one_program():
    compiled = personax.simulation.engine.advance._cache_size()
    run("fedprox", Stream())
    assert personax.simulation.engine.advance._cache_size() == compiled + 1
    run("fedprox", Stream(), seed=1)
    assert personax.simulation.engine.advance._cache_size() == compiled + 1


@pytest.mark.parametrize("num", [1, 2, 15, 16, 17, 100, 1000, 12345])
def test_room_is_at_most_an_eighth_too_large(num):
    assert num <= stream.roomy(num) <= num * 9 / 8


# Run folders


def test_a_run_folder_from_files_is_that_from_memory_and_resumes_in_the_same_bits(tmp_path):
    data = {"kind": "synthetic", "num_clients": 6, "num_features": 5, "num_samples": 20}
    table = {
        "name": "streamed",
        "seeds": 2,
        "data": data,
        "model": {"kind": "mlp", "widths": [4]},
        "schedule": {"num_rounds": 4, "cohort_size": 2, "cohort_chunk": 1},
        "evaluation": {"every": 1, "adaptation_steps": []},
        "local": {"lr": 0.05, "num_steps": 2, "batch_size": 4},
        "algorithms": {"FedAvg": {"recipe": "fedavg"}, "APFL": {"recipe": "apfl"}},
    }
    config = lambda data: resolve(parse({**table, "data": data}), baselines=False)
    make_federation(config(data)).save(tmp_path / "data")
    mapped = config({"kind": "folder", "path": str(tmp_path / "data")})
    plain = execute(start(config(data), tmp_path / "plain"))
    whole = execute(start(mapped, tmp_path / "whole"))
    folder = start(mapped, tmp_path / "cut")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            execute(folder, Stop(3), checkpoint_seconds=np.inf)
    resumed = execute(folder)
    assert resumed.table == whole.table
    for row, other in zip(whole.table, plain.table, strict=True):
        assert row.mean == pytest.approx(other.mean, rel=1e-9)


def test_folders_are_divided_before_they_are_saved(tmp_path):
    personax.Federation.from_clients([data(i) for i in range(3)]).save(tmp_path / "no tests")
    FED.save(tmp_path / "tests")
    table = {"algorithms": {"FedAvg": {"recipe": "fedavg", "lr": 0.1, "num_steps": 1}}}
    place = lambda name: {"kind": "folder", "path": str(tmp_path / name)}
    made = lambda name, **split: make_federation(parse({**table, "data": place(name), "split": split}))
    with pytest.raises(ConfigError, match="has no test data"):
        made("no tests")
    with pytest.raises(ConfigError, match="cannot be held out"):
        made("tests", num_held_out=1)


def test_what_is_on_the_device_does_not_depend_on_the_number_of_clients(monkeypatch):
    """A million clients, whose data is one row seen ten million times: nothing is computed, and the inputs counted."""
    seen = []
    state_of = lambda inputs: next(one for one in inputs if isinstance(one, State))
    monkeypatch.setattr(engine, "advance", lambda *inputs: seen.append(inputs) or state_of(inputs))
    num, cohort = 1_000_000, 20
    x, y = np.broadcast_to(np.zeros((1, 6), np.uint8), (10 * num, 6)), np.broadcast_to(np.zeros(1, int), 10 * num)
    fed = personax.Federation(x, y, np.arange(0, 10 * num + 1, 10))
    schedule = personax.rounds(num, 40, cohort, key=KEY)
    simulate(RECIPES["fedavg"](1.0), TASK, fed, schedule, key=KEY, **grouped(stream=Stream()))
    most = stream.roomy(stream.BLOCK_WAVES * cohort)
    for inputs in seen:
        arrays = [leaf.shape for leaf in jax.tree.leaves(inputs[1:]) if np.ndim(leaf)]
        assert len(inputs[2].x) <= stream.roomy(10 * most) and len(inputs[2].start) <= most
        assert max(shape[0] for shape in arrays) == len(inputs[2].x)
    assert len(seen) == -(-40 // stream.BLOCK_WAVES)


def test_a_folder_that_is_not_there_is_refused_before_a_run(tmp_path):
    with pytest.raises(ValueError, match="Folder not found"):
        Stream(folder=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="`devices` is empty"):
        run("fedavg", devices=[])
