"""Studies as processes on this machine, by submitit's local executor, killed and continued."""

import json
import os
import signal

import pytest
from pydantic import TypeAdapter

from personax.cluster.jobs import ATTEMPTS, Attempts, Job, JobRecord, write_record
from personax.cluster.on_submitit import ResumableJob
from personax.cluster.study import Launched
from personax.experiment.folders import Folder
from tests.cluster.studies import (
    LONG,
    SEARCH,
    SHORT,
    Place,
    Typed,
    assert_same,
    kill,
    records,
    running_worker,
    saved_worker,
    timeless,
    wait_for,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def plain(place):
    return place.plain("long", **LONG)


def begin(place, out, *words):
    return place.start("compare", place.root / "long.toml", "--out", out, "--launcher", "local", *words)


def test_jobs_equal_the_plain_loop(place):
    plain = place.plain("short", **SHORT)
    said = place.run("compare", plain.parent / "short.toml", "--out", "short", "--launcher", "local")
    assert_same(place.root / "short", plain)
    assert all(f"{name}: finished on" in said for name in ("FedAvg", "APFL", "Local"))
    rows = json.loads(place.run("status", "short", "--json"))
    assert [(row["job"], row["state"], row["progress"]) for row in rows] == [
        (name, "finished", "20/20") for name in (row["job"] for row in rows)
    ]
    assert "short is finished" in place.run("resume", "short")


def test_an_interrupted_search_equals_the_plain_loop(place):
    """A worker and the coordinator are killed while they search, and another study is refused in the same folder."""
    plain, root = place.plain("searched", "--tune", **SEARCH), place.root / "search"
    words = ["compare", place.root / "searched.toml", "--out", root, "--tune", "--launcher", "local"]
    coordinator = place.start(*words)
    _, pid = wait_for(lambda: running_worker(root), coordinator=coordinator)
    coordinator.kill()
    kill(pid)
    rows = lambda: json.loads(place.run("status", root, "--json"))
    [search] = wait_for(lambda: [row for row in rows() if row["state"] == "killed"])
    assert search["progress"] in ("0/2", "1/2")
    assert "already has a run" in place.run(*words, "--set", "seeds=1", status=1)
    place.run("resume", root)
    assert_same(root, plain)
    assert (root / "tuning.json").read_bytes() == (plain / "tuning.json").read_bytes()


def test_trainings_of_a_paper_equal_the_plain_loop(place):
    """The second command has other seeds: nothing that the first one has trained is valid."""
    words, root = ["reproduce", "apfl-figure6", "--quick"], place.root / "paper"
    for seeds in (2, 1):
        place.run(*words, "--seeds", seeds, "--out", root, "--launcher", "local")
    place.run(*words, "--seeds", 1, "--out", place.root / "plain-paper")
    cells = lambda folder: timeless(json.loads((folder / "results.json").read_text())["cells"])
    assert cells(root) == cells(place.root / "plain-paper")
    rows = json.loads(place.run("status", root, "--json"))
    assert all(row["state"] == "finished" and row["progress"] == "5/5" for row in rows)


def test_a_worker_that_is_killed_continues_from_its_checkpoint(place, plain):
    coordinator = begin(place, "worker")
    name, pid = wait_for(lambda: saved_worker(place.root / "worker"), coordinator=coordinator)
    kill(pid)
    said = coordinator.finish()
    assert f"{name} died" in said and "is resubmitted" in said
    assert_same(place.root / "worker", plain)


def test_jobs_survive_the_coordinator(place, plain):
    root = place.root / "survived"
    coordinator = begin(place, "survived")
    _, worker = wait_for(lambda: running_worker(root), coordinator=coordinator)
    coordinator.kill()
    os.kill(worker, 0)  # still running
    rows = json.loads(place.run("status", "survived", "--json"))
    assert {row["state"] for row in rows} <= {"waiting", "running", "finished"}
    place.run("resume", "survived")
    assert_same(root, plain)


def test_a_second_coordinator_is_refused_and_jobs_outlive_the_first(place, plain):
    coordinator = begin(place, "two")
    _, worker = wait_for(lambda: running_worker(place.root / "two"), coordinator=coordinator)
    assert "is used by process" in place.run("resume", "two", status=1)
    coordinator.process.send_signal(signal.SIGINT)  # without a terminal no one can be asked
    assert "The jobs keep running. To check on them: personax status" in coordinator.finish(130)
    os.kill(worker, 0)  # still running
    place.run("resume", "two")
    assert_same(place.root / "two", plain)


@pytest.mark.parametrize("answer", ["y", "n"])
def test_ctrl_c_asks_whether_to_leave_jobs_running(place, plain, answer):
    root = place.root / f"asked-{answer}"
    terminal = Typed(place, "compare", place.root / "long.toml", "--out", root, "--launcher", "local")
    name, worker = wait_for(lambda: running_worker(root), coordinator=terminal.command)
    terminal.type("\x03")
    terminal.wait_for("Leave them running?")
    os.kill(worker, 0)  # Ctrl-C has not reached it
    terminal.type(f"{answer}\n")
    assert ("The jobs keep running" if answer == "y" else "Jobs canceled.") in terminal.finish(130)
    states = {name: one["state"] for name, one in records(root).items()}
    if answer == "y":
        assert states[name] in ("running", "finished")
    else:
        assert set(states.values()) <= {"waiting", "stopped", "finished"}
    place.run("resume", root)
    assert_same(root, plain)


def test_a_job_that_fails_is_reported_with_its_error(place):
    config = place.write("bad", **SHORT)
    config.write_text('on_nonfinite = "raise"\n' + config.read_text() + "lr = 1e308\nnum_steps = 30\n")
    said = place.run("compare", config, "--out", "bad", "--launcher", "local", status=1)
    assert "APFL: NonFiniteUpdate" in said and "jobs/log" in said
    states = {name: one["state"] for name, one in records(place.root / "bad").items()}
    assert states == {"FedAvg": "finished", "APFL": "failed", "Local": "finished"}


def test_a_job_that_is_interrupted_without_progress_is_not_queued_again(tmp_path):
    """The method that submitit calls at a time limit: five attempts that reach the same round are enough."""
    job = ResumableJob(Job("train", str(tmp_path), "APFL", "2026", str(tmp_path), ""))
    write_record(tmp_path, JobRecord("APFL", done=10, total=20))
    for _ in range(ATTEMPTS):  # the first one has made progress
        job = job.checkpoint().function
    with pytest.raises(TimeoutError, match=f"{ATTEMPTS} times without progress"):
        job.checkpoint()
    write_record(tmp_path, JobRecord("APFL", done=11, total=20))
    assert job.checkpoint().function.attempts == Attempts(0, 11)


def test_status_of_jobs_of_another_machine_is_their_last_report(place, plain, tmp_path):
    launched = Launched("local", None, {}, None, "train", "2026", ["APFL"], ids={"APFL": "1"}, host="elsewhere")
    Folder(tmp_path).jobs.mkdir()
    (Folder(tmp_path).jobs / "launched.json").write_bytes(TypeAdapter(Launched).dump_json(launched))
    write_record(tmp_path, JobRecord("APFL", host="elsewhere", pid=1, done=5, total=10))
    said = place.run("status", tmp_path)
    assert "processes of elsewhere" in said and "running" in said and "killed" not in said
