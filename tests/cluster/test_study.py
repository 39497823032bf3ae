"""The coordinator of a study: resubmission, giving up, unavailable engines, and limits on concurrent jobs."""

from dataclasses import replace

import pytest

from personax.cluster.engine import EngineUnavailable, Launch, typed
from personax.cluster.jobs import ATTEMPTS, Job, JobRecord, read_record, write_record
from personax.cluster.study import JobsFailed, Launched, continued, follow, read_launched

NAMES = ["FedAvg", "APFL", "Local"]
DIED = JobRecord("", "running", total=10)
FINISHED = JobRecord("", "finished", done=10, total=10)
FAILED = JobRecord("", "failed", message="ValueError: no such file")
AWAY = EngineUnavailable("squeue failed: no controller.")


class Scripted:
    """An engine without processes.

    Each time a job is submitted, it writes the next record of its script. Queries give the answers of `answers` first:
    the jobs that are alive, or an error.
    """

    pause = 0.0

    def __init__(self, root, scripts, max_jobs=None, answers=(), refusals=()):
        self.root, self.scripts, self.max_jobs = root, {name: list(steps) for name, steps in scripts.items()}, max_jobs
        self.answers, self.refusals, self.submitted, self.closed = list(answers), list(refusals), [], False

    def submit(self, jobs):
        if self.refusals and (refusal := self.refusals.pop(0)):
            raise refusal
        self.submitted.append([job.name for job in jobs])
        for job in jobs:
            write_record(self.root, replace(self.scripts[job.name].pop(0), name=job.name))
        return {job.name: str(len(self.submitted)) for job in jobs}

    def alive(self, ids):
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, EngineUnavailable):
            raise answer
        return answer

    def close(self):
        self.closed = True


def launched(names, **changes):
    return replace(Launched("local", None, {}, None, "train", "2026", list(names)), **changes)


def study(root, scripts, engine=None, state=None, max_jobs=None):
    engine, said, shown = engine or Scripted(root, scripts, max_jobs), [], []
    jobs = [Job("train", str(root), name, "2026", str(root), "") for name in scripts]
    show = lambda found: shown.append({view.name: view.state for view in found})
    follow(root, engine, jobs, state or launched(scripts), show, said.append)
    return engine, said, shown


def test_jobs_that_died_are_submitted_again(tmp_path):
    engine, said, _ = study(tmp_path, {"FedAvg": [DIED, FINISHED], "APFL": [FINISHED]})
    assert engine.submitted == [["FedAvg", "APFL"], ["FedAvg"]] and engine.closed
    assert said == ["FedAvg died and is resubmitted."]
    state = read_launched(tmp_path)
    assert state.ids == {"FedAvg": "2", "APFL": "1"} and state.launch == Launch("local", None, {}, None)


def test_a_job_that_dies_without_progress_fails_in_the_end(tmp_path):
    with pytest.raises(JobsFailed, match=f"FedAvg: died {ATTEMPTS} times without progress"):
        study(tmp_path, {"FedAvg": [DIED] * ATTEMPTS, "APFL": [FINISHED]})
    assert read_record(tmp_path, "FedAvg").state == "failed"


def test_progress_counts_attempts_from_the_beginning(tmp_path):
    steps = [replace(DIED, done=done) for done in range(2 * ATTEMPTS)]
    engine, *_ = study(tmp_path, {"FedAvg": [*steps, FINISHED]})
    assert len(engine.submitted) == 2 * ATTEMPTS + 1


def test_an_error_is_reported_and_not_repeated(tmp_path):
    engine = Scripted(tmp_path, {"FedAvg": [FINISHED], "APFL": [FAILED]})
    with pytest.raises(JobsFailed, match="APFL: ValueError: no such file"):
        study(tmp_path, engine.scripts, engine)
    assert engine.closed  # nothing is left in the cluster


def test_no_more_jobs_are_started_than_allowed(tmp_path):
    engine, *_ = study(tmp_path, {name: [FINISHED] for name in NAMES}, max_jobs=1)
    assert engine.submitted == [["FedAvg"], ["APFL"], ["Local"]]


def test_finished_jobs_stay_in_the_study(tmp_path):
    write_record(tmp_path, replace(FINISHED, name="APFL"))
    _, _, shown = study(tmp_path, {"FedAvg": [FINISHED]}, state=launched(["APFL", "FedAvg"]))
    assert shown[-1] == {"APFL": "finished", "FedAvg": "finished"}
    assert read_launched(tmp_path).names == ["APFL", "FedAvg"]


def test_jobs_of_an_unavailable_engine_are_left_alone(tmp_path):
    """A new coordinator that cannot ask its engine must not assume that the jobs died."""
    running = replace(DIED, name="FedAvg", done=5)
    write_record(tmp_path, running)
    engine = Scripted(tmp_path, {"FedAvg": [FINISHED]}, answers=[AWAY])
    with pytest.raises(EngineUnavailable):
        study(tmp_path, engine.scripts, engine, launched(["FedAvg"], ids={"FedAvg": "1"}))
    assert not engine.submitted and read_record(tmp_path, "FedAvg") == running


def test_a_coordinator_survives_an_outage_of_its_engine(tmp_path):
    """Queries and submissions fail for a while, and the job that is alive then is not submitted again."""
    state = launched(["FedAvg", "APFL"], ids={"FedAvg": "1"})
    scripts, alive = {"FedAvg": [FINISHED], "APFL": [FINISHED]}, {"FedAvg": ""}
    engine = Scripted(tmp_path, scripts, answers=[alive, alive, AWAY, alive], refusals=[None, AWAY])
    write_record(tmp_path, replace(DIED, name="FedAvg", done=5))
    _, said, _ = study(tmp_path, scripts, engine, state)
    assert engine.submitted == [["APFL"], ["FedAvg"]]  # the latter when it has died
    assert sum("no controller. Trying again" in line for line in said) == 2


def test_jobs_with_other_settings_are_not_mixed(tmp_path):
    """Seeds of a reproduction, for example: wait for the old jobs, then forget what they reported."""
    study(tmp_path, {"FedAvg": [FINISHED]}, state=launched(["FedAvg"], setting={"num_seeds": 3}))
    other = launched(["FedAvg"], setting={"num_seeds": 5})
    with pytest.raises(ValueError, match=r"FedAvg\. Wait for their end"):
        continued(tmp_path, Scripted(tmp_path, {}, answers=[{"FedAvg": ""}]), other)
    assert read_record(tmp_path, "FedAvg").state == "finished"
    assert continued(tmp_path, Scripted(tmp_path, {}), other) == other
    assert read_record(tmp_path, "FedAvg") is None


def test_jobs_of_another_machine_are_not_looked_for_here(tmp_path):
    study(tmp_path, {"FedAvg": [FINISHED]}, state=launched(["FedAvg"], host="elsewhere"))
    assert read_launched(tmp_path).is_elsewhere
    assert continued(tmp_path, Scripted(tmp_path, {}), launched(["FedAvg"])).ids == {}


def test_options_of_jobs_are_numbers_where_they_look_like_them():
    assert typed({"time": "60", "num_gpus": "0.5", "mem": "4GB"}) == {"time": 60, "num_gpus": 0.5, "mem": "4GB"}
