"""Personal models for new clients, made from a run and the client's own file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.data import datasets
from personax.data.federation import Federation
from personax.data.schema import Notify, Schema
from personax.evaluation.evaluate import personalize
from personax.evaluation.scores import ScoreRow, higher_is_better
from personax.evaluation.scoring import Scoring
from personax.experiment import checkpoint
from personax.experiment.build import Training, make_training, task_of
from personax.experiment.config import Config, ConfigError, choose_algorithm, load_run
from personax.experiment.divergence import describe, has_numbers
from personax.experiment.folders import Folder
from personax.experiment.model_files import describe_model, restore, write_personal
from personax.experiment.records import RunRecord, read_results
from personax.experiment.summaries import newcomer_scoring
from personax.simulation.checks import check_model
from personax.typing import Batch, Params, Task


class PersonalModel(NamedTuple):
    """A personal model, the metadata of its file, its scoring, and its metrics before and after.

    The metrics are measured on held-out data.
    """

    params: Params
    about: dict[str, str]
    algorithm: str
    words: str
    num_train: int
    num_test: int
    before: dict[str, float]
    after: dict[str, float]


def choose(record: RunRecord, trainings: Sequence[Training], algorithm: str | None = None) -> tuple[str, str | None]:
    """Choose the algorithm and score with the best mean, among all or for one algorithm.

    Scores that newcomers cannot use, or that have a warning, are left out. Scores with a diverged seed are left out
    unless their algorithm was requested. If a requested algorithm has no score left, the score is None.
    """
    own = next((one for one in record.algorithms if one.name == algorithm), None)
    if own is not None and not has_numbers(own, len(record.seeds)):
        raise ConfigError(f"{own.name} {describe(own.divergences)} and has no model. Choose another algorithm.")
    able = {
        score
        for training in trainings
        for score, scoring in training.scorings.items()
        if training.algorithm.objective.federated and newcomer_scoring(training.algorithm, scoring) is not None
    }
    rows = [row for row in record.table if row.score in able and not row.flag]
    rows = [row for row in rows if (row.is_ranked if algorithm is None else row.algorithm == algorithm)]
    best = best_row(record, rows)
    if best is None and algorithm is None:
        raise ConfigError(f"No algorithm of {record.name} adapts to newcomers. Name one with --algorithm.")
    return (str(algorithm), None) if best is None else (best.algorithm, best.score)


def require_shared_model(training: Training) -> None:
    """Raise an error if an algorithm shares nothing, so that its shared model was never trained."""
    if not training.algorithm.objective.federated:
        raise ConfigError(
            f"{training.name} trains no shared model: its clients share nothing. Choose another algorithm, or "
            "load the model of one of its clients."
        )


def best_row(record: RunRecord, rows: Sequence[ScoreRow]) -> ScoreRow | None:
    """Return the row with the best finite mean of the run's headline metric."""
    sign = 1 if higher_is_better(record.headline) else -1
    rows = [row for row in rows if row.metric == record.headline and np.isfinite(row.mean.mean)]
    return max(rows, key=lambda row: sign * row.mean.mean, default=None)


def personalize_newcomer(
    folder: Folder,
    data: Path,
    algorithm: str | None = None,
    *,
    num_steps: int | None = None,
    lr: float | None = None,
    seed: int = 0,
    notify: Notify = lambda text: None,
) -> PersonalModel:
    """Adapt an algorithm's shared model, by default the best one's, to a client's file of samples.

    A fifth of the samples is held out to score the model before and after. `notify` is called about ignored columns.
    """
    record = read_results(folder.root)
    config = load_run(folder.config)
    if algorithm is not None:
        config = choose_algorithm(config, algorithm, "the run")
    trainings = {name: make_training(name, entry) for name, entry in config.algorithms.items()}
    algorithm, score = choose(record, list(trainings.values()), algorithm)
    training = trainings[algorithm]
    require_shared_model(training)
    scoring = _scoring(training, score, num_steps, lr)
    trees, about = checkpoint.read_model(folder.model(algorithm))
    schema = Schema.from_dict(json.loads(about["schema"]))
    task = task_of(config, schema)
    client = read_newcomer(data, config, schema, seed, notify)
    params = restore(task.model, trees["params"], schema)
    check_model(task, client, params)
    objective = training.algorithm.divided
    shared = jax.tree.unflatten(
        jax.tree.structure(objective.init_shared(params)),
        [jnp.asarray(leaf) for _, leaf in sorted(trees.get("shared", {}).items(), key=lambda item: int(item[0]))],
    )
    adapted = personalize(
        training.algorithm, task, params, client.client(0), scoring, shared=shared, key=jax.random.key(seed)
    )
    of = lambda model: _metrics(task, model, *client.client_test(0))
    # With an untrained part there is no model before.
    before, after = {} if training.algorithm.sharing.is_completed_by_clients else of(params), of(adapted)
    sizes = (len(client.x), len(client.client_test(0)[1]))
    about = describe_model(config, schema, algorithm)
    words = replace(scoring, clients="held_out").describe(objective)
    return PersonalModel(adapted, about, algorithm, words, *sizes, before, after)


def write(found: PersonalModel, path: Path) -> None:
    """Write the personal model to a safetensors file."""
    numbers = {"before": json.dumps(found.before), "after": json.dumps(found.after)}
    write_personal(path, {**found.about, "scoring": found.words, **numbers}, found.params)


def _scoring(training: Training, score: str | None, num_steps: int | None, lr: float | None) -> Scoring:
    first, *_ = training.scorings.values()
    able = None if score is None else newcomer_scoring(training.algorithm, training.scorings[score])
    able = able or newcomer_scoring(training.algorithm, first)
    base = able or Scoring("adapted", max(first.num_steps, 1), first.lr, first.batch_size)
    steps, size = base.num_steps if num_steps is None else num_steps, base.lr if lr is None else lr
    return Scoring(base.model, steps, size, base.batch_size, tunes=base.tunes)


def read_newcomer(path: Path, config: Config, schema: Schema, seed: int, notify: Notify) -> Federation:
    """Read a file's samples as one client, with a fifth of them held out, converted for the model."""
    names = {name: item for name, item in config.data.options.items() if name in ("client", "label")}
    read = datasets.read_client(path, **names, schema=schema, notify=notify)
    return read.split_tests(0.2, key=jax.random.key(seed)).conform(schema, notify)


def _metrics(task: Task, params: Params, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(y)), jax.random.key(0))
    return {name: float(number) for name, number in task.metrics(params, batch).items()}
