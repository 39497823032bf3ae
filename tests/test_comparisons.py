"""The tables of docs/ that come from records in `benchmarks/`."""

import json
import runpy
from pathlib import Path

from personax.experiment.config import load

ROOT = Path(__file__).parents[1]


def test_the_table_of_divided_models_is_that_of_its_record():
    study = runpy.run_path(str(ROOT / "benchmarks" / "sharing.py"))
    record = json.loads(study["RECORD"].read_text(encoding="utf-8"))
    assert study["table"](record) in (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8")
    assert list(record) == list(study["SETTINGS"])
    config = load(study["STUDY"])
    for found in record.values():
        assert list(found) == list(config.algorithms)
        for one in found.values():
            assert all(item in config.tune.options[name] for name, item in one["chosen"].items())
            assert len(one["mean"]) == len(one["worst_tenth"]) == len(config.seed_list)
            best = max(float(score) for score in one["trials"].values() if score != "diverged")
            chosen = ", ".join(f"{name} = {item}" for name, item in one["chosen"].items())
            assert float(one["trials"][chosen]) == best
