"""Personal models for clients that were never seen in training, from a run and the client's own file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from personax.experiment.folders import Folder
from personax.experiment.records import RunRecord, read_results
from personax.experiment.summaries import newcomer_scoring
from personax.models.tasks import as_inputs
from personax.simulation.checks import check_model
from personax.typing import Batch, Params, Task


class PersonalModel(NamedTuple):
    """A personal model, the scoring that made it, and its metrics before and after on data kept apart."""

    params: Params
    algorithm: str
    words: str
    num_train: int
    num_test: int
    before: dict[str, float]
    after: dict[str, float]


def choose(record: RunRecord, trainings: Sequence[Training], algorithm: str | None = None) -> tuple[str, str | None]:
    """The algorithm and score with the best mean, of all or of one algorithm.

    Scores by which newcomers cannot adapt, or that carry a warning, are left out. Where the algorithm that was asked
    for has no score that is left, the score is None.
    """
    able = {
        score
        for training in trainings
        for score, scoring in training.scorings.items()
        if training.algorithm.objective.federated and newcomer_scoring(training.algorithm, scoring) is not None
    }
    rows = [row for row in record.table if row.metric == record.headline and row.score in able and not row.flag]
    rows = [row for row in rows if np.isfinite(row.mean.mean) and algorithm in (None, row.algorithm)]
    if not rows and algorithm is None:
        raise ConfigError(f"{record.name} has no algorithm that adapts to newcomers. Name one with --algorithm.")
    sign = 1 if higher_is_better(record.headline) else -1
    best: ScoreRow | None = max(rows, key=lambda row: sign * row.mean.mean, default=None)
    return (str(algorithm), None) if best is None else (best.algorithm, best.score)


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
    """Adapt one algorithm's shared model, by default the best's, to the client whose samples a file holds.

    A fifth of the samples is kept apart to score the model before and after. `notify` is called with what is ignored.
    """
    record = read_results(folder.root)
    config = load_run(folder.config)
    if algorithm is not None:
        config = choose_algorithm(config, algorithm, "the run")
    trainings = {name: make_training(name, entry) for name, entry in config.algorithms.items()}
    algorithm, score = choose(record, list(trainings.values()), algorithm)
    training = trainings[algorithm]
    scoring = _scoring(training, score, num_steps, lr)
    trees, about = checkpoint.read_model(folder.model(algorithm))
    schema = Schema.from_dict(json.loads(about["schema"]))
    task = task_of(config, schema)
    client = read_newcomer(data, config, schema, seed, notify)
    params = _restored(task, trees["params"], schema)
    check_model(task, client, params)
    objective = training.algorithm.objective
    shared = jax.tree.unflatten(
        jax.tree.structure(objective.init_shared(params)),
        [jnp.asarray(leaf) for _, leaf in sorted(trees.get("shared", {}).items(), key=lambda item: int(item[0]))],
    )
    adapted = personalize(
        training.algorithm, task, params, client.client(0), scoring, shared=shared, key=jax.random.key(seed)
    )
    before, after = (_metrics(task, model, *client.client_test(0)) for model in (params, adapted))
    sizes = (len(client.x), len(client.client_test(0)[1]))
    return PersonalModel(adapted, algorithm, scoring.describe(), *sizes, before, after)


def write(found: PersonalModel, path: Path) -> None:
    """The personal model as one safetensors file."""
    numbers = {"before": json.dumps(found.before), "after": json.dumps(found.after)}
    checkpoint.export(path, found.params, {"algorithm": found.algorithm, "scoring": found.words, **numbers})


def _scoring(training: Training, score: str | None, num_steps: int | None, lr: float | None) -> Scoring:
    first, *_ = training.scorings.values()
    able = None if score is None else newcomer_scoring(training.algorithm, training.scorings[score])
    base = able or Scoring("adapted", max(first.num_steps, 1), first.lr, first.batch_size)
    steps, size = base.num_steps if num_steps is None else num_steps, base.lr if lr is None else lr
    return Scoring(base.model, steps, size, base.batch_size)


def read_newcomer(path: Path, config: Config, schema: Schema, seed: int, notify: Notify) -> Federation:
    """The file's samples as one client, a fifth of them kept apart, as the model was trained on them."""
    names = {name: item for name, item in config.data.options.items() if name in ("client", "label")}
    read = datasets.read_client(path, **names, schema=schema, notify=notify)
    return read.split_tests(0.2, key=jax.random.key(seed)).conform(schema, notify)


def _restored(task: Task, tree: dict[str, Any], schema: Schema) -> Params:
    """The parameters in the structure that the task's model has."""
    x = jnp.zeros((1, *schema.shape), schema.dtype)
    shapes = jax.eval_shape(lambda: task.model.init(jax.random.key(0), as_inputs(x)))
    return checkpoint.in_structure_of(shapes, tree)


def _metrics(task: Task, params: Params, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(y)), jax.random.key(0))
    return {name: float(number) for name, number in task.metrics(params, batch).items()}
