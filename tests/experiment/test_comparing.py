"""`px.compare` runs what `personax compare` and `personax run` run."""

import pytest

import personax as px
from personax.experiment.config import load_run


class Stopped(Exception):
    pass


@pytest.mark.parametrize("algorithm", [None, "FedAvg"])
def test_compare_starts_a_run_and_calls_back(algorithm, tmp_path):
    seen = []

    def stop(event):
        seen.append(event)
        raise Stopped

    settings = ["seeds=1", "name=mine"]
    with pytest.raises(Stopped):
        px.compare(None, tmp_path / "run", settings=settings, algorithm=algorithm, callbacks=[stop])
    names = list(load_run(tmp_path / "run" / "config.toml").algorithms)
    assert names == ["FedAvg"] if algorithm else {"Local", "FedAvg"} < set(names)
    assert isinstance(seen[0], px.events.TrainingStarted)
    assert (seen[0].run, seen[0].algorithm, seen[0].settings["seeds"]) == ("mine", names[0], [0])
    with pytest.raises(ValueError, match="already has a run"):
        px.compare(None, tmp_path / "run", settings=settings, algorithm=algorithm)


def test_compare_of_an_invalid_configuration_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="cohort"):
        px.compare(None, tmp_path / "run", settings=["schedule.cohort_size=1000"])
    assert not (tmp_path / "run").exists()
