"""Studies as processes on this machine, by submitit's local executor, killed and continued."""

import json
import os
import pty
import signal
import time

import pytest

from tests.cluster.studies import (
    LONG,
    SHORT,
    Place,
    assert_same,
    kill,
    records,
    running_worker,
    saved_worker,
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
    assert [(row["job"], row["state"], row["round"]) for row in rows] == [
        (name, "finished", "20/20") for name in (row["job"] for row in rows)
    ]
    assert "short is finished" in place.run("resume", "short")


def test_a_search_for_options_equals_the_plain_loop(place):
    plain = place.plain("tuned", "--tune", **SHORT)
    place.run("compare", place.root / "tuned.toml", "--out", "tuned", "--tune", "--launcher", "local")
    assert_same(place.root / "tuned", plain)
    assert (place.root / "tuned" / "tuning.json").read_bytes() == (plain / "tuning.json").read_bytes()


def test_a_worker_that_is_killed_continues_from_its_checkpoint(place, plain):
    head = begin(place, "worker")
    name, pid = wait_for(lambda: saved_worker(place.root / "worker"), head=head)
    kill(pid)
    said = head.finish()
    assert f"{name} died" in said and "is submitted again" in said
    assert_same(place.root / "worker", plain)


def test_jobs_survive_the_head_of_the_study(place, plain):
    root = place.root / "head"
    head = begin(place, "head")
    _, worker = wait_for(lambda: running_worker(root), head=head)
    head.kill()
    os.kill(worker, 0)  # still there
    rows = json.loads(place.run("status", "head", "--json"))
    assert any(row["state"] == "running" and str(worker) in row["where"] for row in rows)
    place.run("resume", "head")
    assert_same(root, plain)


def test_a_second_head_is_refused(place, plain):
    head = begin(place, "two")
    wait_for(lambda: (place.root / "two" / "jobs" / "launched.json").exists(), head=head)
    said = place.run("resume", "two", status=1)
    assert "is used by process" in said
    head.process.send_signal(signal.SIGTERM)
    head.finish(130)
    place.run("resume", "two")
    assert_same(place.root / "two", plain)


@pytest.mark.parametrize("answer", ["y", "n"])
def test_ctrl_c_asks_whether_jobs_continue(place, plain, answer):
    root, (ours, theirs) = place.root / f"asked-{answer}", pty.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    head = place.start("compare", place.root / "long.toml", "--out", root, "--launcher", "local", **terminal)
    os.close(theirs)
    name, _ = wait_for(lambda: running_worker(root))
    head.process.send_signal(signal.SIGINT)
    said = b""
    while b"Leave them running?" not in said:
        said += os.read(ours, 10000)
    os.write(ours, f"{answer}\n".encode())
    deadline = time.monotonic() + 90
    while head.process.poll() is None and time.monotonic() < deadline:
        try:
            said += os.read(ours, 10000)
        except OSError:  # the other end is closed
            break
    assert head.process.wait(60) == 130, said.decode()
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
