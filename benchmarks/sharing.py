"""Compare methods that divide the parameters of a model on the digits: `python benchmarks/sharing.py`.

Does what `personax compare examples/sharing.toml --tune` does, with 60 clients of 4 classes and with 20 clients of 2
classes: chooses the options of each algorithm on validation data, trains it with 5 seeds, and scores it on test data.
Writes the accuracy of every seed and all trials to `sharing.json` beside this file, and prints the table of
docs/sharing.md. What is in the file already is not computed again. With `--table` it prints the table alone.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from personax.evaluation.scores import Evaluation, interval, show
from personax.experiment.build import Study, build, make_training, resolve
from personax.experiment.config import Config, load
from personax.experiment.records import TunedAlgorithm
from personax.experiment.tuning import (
    TuningStudy,
    evaluations,
    prepare_tuning,
    show_options,
    tune_algorithm,
    with_options,
)
from personax.fast.compilation_cache import keep_compiled

STUDY = Path(__file__).resolve().parents[1] / "examples" / "sharing.toml"
RECORD = Path(__file__).with_suffix(".json")
SETTINGS = {"60 clients of 4 classes": (60, 4), "20 clients of 2 classes": (20, 2)}
BASELINE, ACCURACY = "FedAvg, fine-tuned", "accuracy"


def changes_of(setting: str) -> tuple[str, str]:
    """Return the overrides of the study for a setting."""
    num_clients, num_classes = SETTINGS[setting]
    return f"partition.num_clients={num_clients}", f"partition.num_classes_each={num_classes}"


def run(setting: str, record: dict[str, dict[str, Any]]) -> None:
    """Add the algorithms of one setting to the record that it does not have."""
    config = resolve(load(STUDY, changes_of(setting)), baselines=True)
    plan, tuning = build(config), prepare_tuning(config)
    for name in config.algorithms:
        if name in record.setdefault(setting, {}):
            continue
        begin = time.perf_counter()
        found = record[setting][name] = result_of(config, plan, tuning, name)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        seconds = time.perf_counter() - begin
        print(f"{seconds:6.0f} s  {setting}: {name}, {show_options(found['chosen'])}", flush=True)
        jax.clear_caches()


def result_of(config: Config, plan: Study, tuning: TuningStudy, name: str) -> dict[str, Any]:
    """Tune, train and score one algorithm."""
    tuned = tune_algorithm(tuning, name)
    training = make_training(name, with_options(name, config.algorithms[name], tuned.chosen))
    (found,) = evaluations(config, plan, [training])
    if found is None:
        raise SystemExit(f"{name} diverged with {show_options(tuned.chosen)}.")
    return {**accuracy_of(found), **trials_of(tuned)}


def accuracy_of(found: Evaluation) -> dict[str, list[float]]:
    """The test accuracy of each seed: the mean over clients, and over the worst tenth of them."""
    rounded = lambda numbers: [round(float(number), 5) for number in numbers]
    return {"mean": rounded(found.mean(ACCURACY)), "worst_tenth": rounded(found.worst_decile(ACCURACY))}


def trials_of(tuned: TunedAlgorithm) -> dict[str, Any]:
    """The chosen options, those at an edge of their list, and the validation accuracy of every trial."""
    tried = {name: {trial.options[name] for trial in tuned.trials} for name in tuned.chosen}
    inside = lambda name, item: len(tried[name]) < 3 or min(tried[name]) < item < max(tried[name])
    edges = [name for name, item in tuned.chosen.items() if not inside(name, item)]
    shown = lambda trial: "diverged" if trial.score is None else f"{trial.score:.5f}"
    trials = {show_options(trial.options): shown(trial) for trial in tuned.trials}
    return {"chosen": tuned.chosen, "at_edge": edges, "search": tuned.search, "trials": trials}


def table(record: dict[str, dict[str, Any]]) -> str:
    """The Markdown table of all scores in both settings; differences are paired by seed."""
    titles = "".join(f" {setting} | over fine-tuned FedAvg | worst tenth |" for setting in record)
    lines = [f"| |{titles}", f"|---|{'---|---|---|' * len(record)}"]
    for name in next(iter(record.values())):
        cells = [cell for found in record.values() for cell in cells_of(found, name)]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def cells_of(found: dict[str, Any], name: str) -> list[str]:
    """The cells of one algorithm in one setting, in %."""
    own, baseline = (np.asarray(found[one]["mean"]) for one in (name, BASELINE))
    over = "" if name == BASELINE else show(interval(own - baseline), ACCURACY)
    return [show(interval(own), ACCURACY), over, show(float(np.mean(found[name]["worst_tenth"])), ACCURACY)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the record")
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    if not parser.parse_args().table:
        keep_compiled()
        for setting in SETTINGS:
            run(setting, record)
    print(table(record))


if __name__ == "__main__":
    main()
