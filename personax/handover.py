"""A personal model for a client that nobody has seen in training, from a run and the client's own file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax import checkpoint, datasets
from personax.build import Outputs, Training, make_task, make_training
from personax.checks import check_model
from personax.config import Config, ConfigError, File, check_names, load
from personax.evaluate import personalize
from personax.federation import Federation
from personax.folders import Folder
from personax.protocol import Protocol
from personax.records import RunRecord, TableRow, read_results
from personax.scores import higher_is_better
from personax.summarise import newcomer_protocol
from personax.tasks import as_inputs
from personax.typing import Batch, Params, Task

_WHERE = "the run"


class Handover(NamedTuple):
    """A personal model, the protocol that made it, and its metrics before and after on data kept apart."""

    params: Params
    algorithm: str
    words: str
    num_train: int
    num_test: int
    before: dict[str, float]
    after: dict[str, float]


def choose(record: RunRecord, algorithm: str | None = None) -> tuple[str, str | None]:
    """The score with the best mean among those by which newcomers can adapt and that are not flagged, of all or of one.

    Its algorithm and its name; no name where the algorithm that was asked for has no such score.
    """
    able = {
        score.name
        for algorithm in record.algorithms
        for score in algorithm.scores
        if algorithm.recipe != "local_only" and score.protocol["model"] not in ("global", "local", "localized")
    }
    rows = [row for row in record.table if row.metric == record.headline and row.score in able and not row.flag]
    rows = [row for row in rows if np.isfinite(row.mean) and algorithm in (None, row.algorithm)]
    if not rows and algorithm is None:
        raise ConfigError(f"{record.name} has no algorithm that adapts to newcomers. Name one with --algorithm.")
    sign = 1 if higher_is_better(record.headline) else -1
    best: TableRow | None = max(rows, key=lambda row: sign * row.mean, default=None)
    return (str(algorithm), None) if best is None else (best.algorithm, best.score)


def hand_over(
    folder: Folder,
    data: Path,
    algorithm: str | None = None,
    *,
    num_steps: int | None = None,
    lr: float | None = None,
    seed: int = 0,
) -> Handover:
    """Adapt one algorithm's shared model, by default the best's, to the client whose samples a file holds.

    A fifth of the samples is kept apart to score the model before and after.
    """
    config, record = load(folder.config), read_results(folder.root)
    algorithm, score = choose(record, algorithm)
    check_names(_WHERE, [algorithm], config.algorithms, "algorithm")
    training = make_training(algorithm, config.algorithms[algorithm])
    protocol = _protocol(training, score, num_steps, lr)
    trees, about = checkpoint.read_model(folder.model(algorithm))
    task = make_task(config, Outputs(about["task"], int(about["num_outputs"])))
    client = _client(data, config, about, seed)
    _check_words(data, client, record)
    params = _restored(task, trees["params"], about)
    check_model(task, client, params)
    objective = training.algorithm.objective
    shared = jax.tree.unflatten(
        jax.tree.structure(objective.init_shared(params)),
        [jnp.asarray(leaf) for _, leaf in sorted(trees.get("shared", {}).items(), key=lambda item: int(item[0]))],
    )
    adapted = personalize(
        training.algorithm, task, params, client.client(0), protocol, shared=shared, key=jax.random.key(seed)
    )
    before, after = (_metrics(task, model, *client.client_test(0)) for model in (params, adapted))
    sizes = (len(client.x), len(client.client_test(0)[1]))
    return Handover(adapted, algorithm, protocol.describe(), *sizes, before, after)


def write(found: Handover, path: Path) -> None:
    """The personal model as one safetensors file."""
    numbers = {"before": json.dumps(found.before), "after": json.dumps(found.after)}
    checkpoint.export(path, found.params, {"algorithm": found.algorithm, "protocol": found.words, **numbers})


def _protocol(training: Training, score: str | None, num_steps: int | None, lr: float | None) -> Protocol:
    first, *_ = training.protocols.values()
    able = None if score is None else newcomer_protocol(training.protocols[score])
    base = able or Protocol("adapted", max(first.num_steps, 1), first.lr, first.batch_size)
    steps, size = base.num_steps if num_steps is None else num_steps, base.lr if lr is None else lr
    return Protocol(base.model, steps, size, base.batch_size)


def _client(path: Path, config: Config, about: dict[str, str], seed: int) -> Federation:
    """The file's samples as one client, a fifth of them kept apart, in the shape that the model was trained on."""
    names = {"client": config.data.client, "label": config.data.label} if isinstance(config.data, File) else {}
    read = datasets.read_client(path, **names, shape=tuple(json.loads(about["input_shape"])))
    if about["input_dtype"] == "uint8" and (read.x.min() < 0 or read.x.max() > 255 or np.any(read.x % 1)):
        raise ConfigError(
            f"{path.name}: the model was trained on bytes, whole numbers from 0 to 255, got others. Convert them."
        )
    read = replace(read, x=read.x.astype(about["input_dtype"]))  # bytes are images to a model, other numbers are not
    return read.split_tests(0.2, key=jax.random.key(seed))


def _check_words(path: Path, client: Federation, record: RunRecord) -> None:
    """Labels that are words were numbered in sorted order: the file must have the words that the run had."""
    words, of_run = (text.partition("Labels: ")[2] for text in (client.origin, record.federation.summary))
    if words and (words != of_run or "and so on" in words):
        told = f"labels must be the run's ({of_run or 'numbers'}), got others ({words})"
        raise ConfigError(f"{path.name}: {told}. Write the run's numbers in their place.")


def _restored(task: Task, tree: dict[str, Any], about: dict[str, str]) -> Params:
    """The parameters in the structure that the task's model has."""
    x = jnp.zeros((1, *json.loads(about["input_shape"])), about["input_dtype"])
    shapes = jax.eval_shape(lambda: task.model.init(jax.random.key(0), as_inputs(x)))
    return checkpoint.in_structure_of(shapes, tree)


def _metrics(task: Task, params: Params, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(len(y)), jax.random.key(0))
    return {name: float(number) for name, number in task.metrics(params, batch).items()}
