"""The head of a study: what it submits again, when it gives up, and how many jobs it starts at a time."""

from dataclasses import replace

import pytest

from personax.cluster.engine import Launch, typed
from personax.cluster.jobs import Job, JobRecord, read_record, write_record
from personax.cluster.study import ATTEMPTS, JobsFailed, Launched, follow, read_launched

NAMES = ["FedAvg", "APFL", "Local"]


class Scripted:
    """An engine without processes: each time a job is submitted, it writes the next record of its script."""

    pause = 0.0

    def __init__(self, root, scripts, room=None):
        self.root, self.scripts, self.room = root, {name: list(steps) for name, steps in scripts.items()}, room
        self.submitted, self.closed = [], False

    def submit(self, jobs):
        self.submitted.append([job.name for job in jobs])
        for job in jobs:
            write_record(self.root, replace(self.scripts[job.name].pop(0), name=job.name))
        return {job.name: str(len(self.submitted)) for job in jobs}

    def alive(self, ids):
        return {}

    def close(self, ids):
        self.closed = True


DIED = JobRecord("", "running", total=10)
FINISHED = JobRecord("", "finished", done=10, total=10)


def study(root, scripts, room=None):
    engine, said = Scripted(root, scripts, room), []
    jobs = [Job("train", str(root), name, "2026", str(root), "") for name in scripts]
    launched = Launched("local", None, {}, room, "train", "2026", list(scripts))
    follow(root, engine, jobs, launched, lambda found: None, said.append)
    return engine, said


def test_jobs_that_died_are_submitted_again(tmp_path):
    engine, said = study(tmp_path, {"FedAvg": [DIED, FINISHED], "APFL": [FINISHED]})
    assert engine.submitted == [["FedAvg", "APFL"], ["FedAvg"]] and engine.closed
    assert said == ["FedAvg died and is submitted again."]
    launched = read_launched(tmp_path)
    assert launched.ids == {"FedAvg": "2", "APFL": "1"} and launched.launch == Launch("local", None, {}, None)


def test_a_job_that_dies_without_progress_fails_in_the_end(tmp_path):
    with pytest.raises(JobsFailed, match=f"FedAvg: died {ATTEMPTS} times without progress"):
        study(tmp_path, {"FedAvg": [DIED] * ATTEMPTS, "APFL": [FINISHED]})
    assert read_record(tmp_path, "FedAvg").state == "failed"


def test_progress_counts_attempts_from_the_beginning(tmp_path):
    steps = [replace(DIED, done=done) for done in range(2 * ATTEMPTS)]
    engine, _ = study(tmp_path, {"FedAvg": [*steps, FINISHED]})
    assert len(engine.submitted) == 2 * ATTEMPTS + 1


def test_an_error_is_reported_and_not_repeated(tmp_path):
    failed = JobRecord("", "failed", words="ValueError: no such file")
    with pytest.raises(JobsFailed, match="APFL: ValueError: no such file"):
        study(tmp_path, {"FedAvg": [FINISHED], "APFL": [failed]})


def test_no_more_jobs_are_started_than_there_is_room(tmp_path):
    engine, _ = study(tmp_path, {name: [FINISHED] for name in NAMES}, room=1)
    assert engine.submitted == [["FedAvg"], ["APFL"], ["Local"]]


def test_options_of_jobs_are_numbers_where_they_look_like_them():
    assert typed({"time": "60", "num_gpus": "0.5", "mem": "4GB"}) == {"time": 60, "num_gpus": 0.5, "mem": "4GB"}
