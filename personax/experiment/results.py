"""Write the results of a run into its folder. Simulated, live and Flower runs write the same files."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from personax.data.federation import Federation
from personax.data.schema import Schema
from personax.evaluation.scores import Comparison, Evaluation
from personax.evaluation.scoring import Scoring
from personax.experiment import checkpoint
from personax.experiment.build import Training
from personax.experiment.config import Config
from personax.experiment.folders import Folder
from personax.experiment.records import (
    RUN,
    SCHEMA_VERSION,
    AlgorithmRecord,
    EvaluationRecord,
    FederationRecord,
    RunRecord,
)
from personax.experiment.summaries import citations_of, headline_of, machine
from personax.typing import Params, Shared
from personax.values import to_dict

_PART = TypeAdapter(AlgorithmRecord)


class AlgorithmResult(NamedTuple):
    """The results of one algorithm: its record, its last scores by name, and its clients' numbers as a table."""

    record: AlgorithmRecord
    scores: dict[str, Evaluation]
    clients: pa.Table


def algorithm_record(training: Training, **facts: Any) -> AlgorithmRecord:
    """Record one algorithm; `facts` are the fields that its training does not determine."""
    algorithm = training.algorithm
    return AlgorithmRecord(
        name=training.name,
        recipe=training.recipe,
        definition=to_dict(algorithm),
        citations=citations_of(training.recipe, algorithm),
        mode="synchronous" if algorithm.server.is_synchronous else "asynchronous",
        **facts,
    )


def client_rows(
    score: tuple[str, str],
    seeds: Sequence[int],
    found: Evaluation,
    names: Sequence[str],
    personal_numbers: np.ndarray | None = None,
) -> pa.Table:
    """Make one row for each seed and client of a score, which is given as (algorithm, score).

    `names` and `personal_numbers` are in the order of the rows: all clients of the first seed, then of the next.
    """
    num = found.clients.size
    named = lambda text: pa.array([text] * num).dictionary_encode()
    own = pa.nulls(num, pa.float64()) if personal_numbers is None else pa.array(np.asarray(personal_numbers, float))
    columns = {
        "algorithm": named(score[0]),
        "score": named(score[1]),
        "seed": np.repeat(np.asarray(seeds), found.clients.shape[-1]),
        "client": found.clients.ravel(),
        "name": names,
        "num_samples": found.num_samples.ravel(),
        "num_train_samples": found.num_train_samples.ravel(),
        **{name: np.asarray(values, float).ravel() for name, values in found.metrics.items()},
        "personal_number": own,
    }
    return pa.table(columns)


def federation_rows(
    score: tuple[str, str],
    seeds: Sequence[int],
    federation: Federation,
    found: Evaluation,
    personal_numbers: np.ndarray | None,
) -> pa.Table:
    """Make the rows of a score of a federation's clients; `personal_numbers` of those that train, [seeds, clients]."""
    whose = federation.newcomers if found.scoring.clients == "held_out" else federation
    assert whose is not None  # or there would be no scores of newcomers
    order = np.argsort(whose.ids)
    positions = order[np.searchsorted(whose.ids, found.clients, sorter=order)]
    has_numbers = personal_numbers is not None and whose is federation
    own = np.take_along_axis(personal_numbers, positions, axis=-1).ravel() if has_numbers else None
    return client_rows(score, seeds, found, [whose.names[int(i)] for i in positions.ravel()], own)


def _evaluation_of(rows: pa.Table, score: str, scoring: Scoring, num_seeds: int) -> Evaluation:
    """Return the evaluation whose clients' numbers these rows are."""
    own = rows.filter(np.asarray(rows["score"].cast(pa.string())) == score)
    column = lambda name: own[name].to_numpy().reshape(num_seeds, -1)
    known = ("algorithm", "score", "seed", "client", "name", "num_samples", "num_train_samples", "personal_number")
    metrics = {name: column(name) for name in own.column_names if name not in known and not own[name].null_count}
    counts = (column("num_samples"), column("num_train_samples"))
    return Evaluation(scoring, metrics, column("client"), *counts, 0, 0.0)


def write_part(folder: Folder, result: AlgorithmResult) -> None:
    """Write the results of one algorithm, which count once its record is there."""
    folder.parts.mkdir(exist_ok=True)
    _write_table(folder.part_clients(result.record.name), result.clients)
    checkpoint.write_atomically(folder.part(result.record.name), _PART.dump_json(result.record))


def read_part(folder: Folder, training: Training, num_seeds: int) -> AlgorithmResult:
    """Read what `write_part` wrote."""
    record = _PART.validate_json(folder.part(training.name).read_bytes())
    clients = pq.read_table(folder.part_clients(training.name))
    found = {name: _evaluation_of(clients, name, scoring, num_seeds) for name, scoring in training.scorings.items()}
    return AlgorithmResult(record, found, clients)


def write_run(
    folder: Folder,
    config: Config,
    federation: FederationRecord,
    results: Sequence[AlgorithmResult],
    started: str,
    baselines: tuple[str | None, str | None] = (None, None),
) -> RunRecord:
    """Write `results.json` and `clients.parquet`; `baselines` name the scores of local training and FedAvg."""
    found = {name: one for result in results for name, one in result.scores.items()}
    algorithms = {name: result.record.name for result in results for name in result.scores}
    comparison = Comparison(found, *baselines, algorithms)
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        personax=version("personax"),
        name=config.name,
        started=started,
        machine=machine(),
        seeds=config.seed_list,
        metrics=comparison.metrics,
        headline=headline_of(comparison.metrics),
        federation=federation,
        algorithms=[result.record for result in results],
        local_baseline=baselines[0],
        global_baseline=baselines[1],
        table=[row for metric in comparison.metrics for row in comparison.rows(metric)],
    )
    _write_table(folder.clients, pa.concat_tables([one.clients for one in results], promote_options="default"))
    checkpoint.write_atomically(folder.results, RUN.dump_json(record, indent=1))
    return record


def metrics_lines(algorithm: str, histories: dict[str, list[EvaluationRecord]]) -> str:
    """Return a line of JSON for each evaluation, in the order in which they were made."""
    rows = zip(*histories.values(), strict=True)
    named = ((score, one) for records in rows for score, one in zip(histories, records, strict=True))
    return "".join(json.dumps({"algorithm": algorithm, "score": score, **asdict(one)}) + "\n" for score, one in named)


def export_model(folder: Folder, config: Config, algorithm: str, schema: Schema, model: tuple[Params, Shared]) -> None:
    """Write one shared model, for `personax personalize` and for other programs that read safetensors.

    `schema` describes the samples that it was trained on.
    """
    about = {
        "personax": version("personax"),
        "run": config.name,
        "algorithm": algorithm,
        "seed": str(config.seed_list[0]),
        "schema": json.dumps(schema.to_dict()),
    }
    params, shared = jax.tree.map(np.asarray, model)
    folder.models.mkdir(exist_ok=True)
    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(shared))}
    checkpoint.export(folder.model(algorithm), {"params": params, "shared": leaves}, about)


def _write_table(path: Path, table: pa.Table) -> None:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    checkpoint.write_atomically(path, buffer.getvalue().to_pybytes())
