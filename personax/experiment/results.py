"""Write the results of a run into its folder. Simulated, live and Flower runs write the same files."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

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
from personax.experiment.model_files import describe_model, write_shared
from personax.experiment.provenance import Provenance
from personax.experiment.records import (
    RUN,
    SCHEMA_VERSION,
    TUNING,
    AlgorithmRecord,
    EvaluationRecord,
    FederationRecord,
    RunRecord,
    ScoreRecord,
    read_results,
)
from personax.experiment.summaries import citations_of, headline_of, machine
from personax.experiment.targets import target_of
from personax.objectives.divided import Divided
from personax.typing import Params, Shared
from personax.values import to_dict

_PART = TypeAdapter(AlgorithmRecord)


class AlgorithmResult(NamedTuple):
    """The results of one algorithm: its record, its final scores by name, and a table of its clients' values."""

    record: AlgorithmRecord
    scores: dict[str, Evaluation]
    clients: pa.Table


class Part(NamedTuple):
    """The stored results of one algorithm, with their provenance."""

    result: AlgorithmResult
    provenance: Provenance


class DamagedPart(ValueError):
    """A file with results of one algorithm is missing or damaged."""


def algorithm_record(training: Training, citations: Sequence[str] = (), **facts: Any) -> AlgorithmRecord:
    """Make the record of an algorithm; `facts` are the fields that its training does not determine.

    `citations` are those of its controller.
    """
    algorithm = training.algorithm
    return AlgorithmRecord(
        name=training.name,
        recipe=training.recipe,
        definition=to_dict(algorithm),
        citations=list(dict.fromkeys([*citations_of(training.recipe, algorithm), *citations])),
        mode="synchronous" if algorithm.server.is_synchronous else "asynchronous",
        **facts,
    )


def client_rows(
    score: tuple[str, str],
    seeds: Sequence[int],
    found: Evaluation,
    names: Sequence[str],
    personal_numbers: np.ndarray | None = None,
    diverged: Sequence[int] = (),
) -> pa.Table:
    """Make one row per seed and client for a score, given as (algorithm, score).

    `names` and `personal_numbers` are in the order of the rows: all clients of the first seed, then of the next. Rows
    of the seeds at the positions `diverged` have no values.
    """
    num = found.clients.size
    named = lambda text: pa.array([text] * num).dictionary_encode()
    lost = np.repeat(np.isin(np.arange(len(seeds)), diverged), found.clients.shape[-1])
    numbers = lambda values: pa.array(np.asarray(values, float).ravel(), mask=lost)
    columns = {
        "algorithm": named(score[0]),
        "score": named(score[1]),
        "seed": np.repeat(np.asarray(seeds), found.clients.shape[-1]),
        "client": found.clients.ravel(),
        "name": names,
        "num_samples": found.num_samples.ravel(),
        "num_train_samples": found.num_train_samples.ravel(),
        **{name: numbers(values) for name, values in found.metrics.items()},
        "personal_number": pa.nulls(num, pa.float64()) if personal_numbers is None else numbers(personal_numbers),
    }
    return pa.table(columns)


def federation_rows(
    score: tuple[str, str],
    seeds: Sequence[int],
    federation: Federation,
    found: Evaluation,
    personal_numbers: np.ndarray | None,
    diverged: Sequence[int] = (),
) -> pa.Table:
    """Make the rows of a federation's score; `personal_numbers` of training clients are [seeds, clients]."""
    whose = federation.newcomers if found.scoring.clients == "held_out" else federation
    assert whose is not None  # otherwise there would be no scores of newcomers
    order = np.argsort(whose.ids)
    positions = order[np.searchsorted(whose.ids, found.clients, sorter=order)]
    has_numbers = personal_numbers is not None and whose is federation
    own = np.take_along_axis(personal_numbers, positions, axis=-1).ravel() if has_numbers else None
    return client_rows(score, seeds, found, [whose.names[int(i)] for i in positions.ravel()], own, diverged)


def _evaluation_of(rows: pa.Table, score: ScoreRecord, scoring: Scoring, of: Divided, num_seeds: int) -> Evaluation:
    """Restore the evaluation from the rows of its clients."""
    own = rows.filter(np.asarray(rows["score"].cast(pa.string())) == score.name)
    column = lambda name: own[name].to_numpy().reshape(num_seeds, -1)
    metrics = {name: column(name).astype(float) for name in score.evaluations[-1].mean}
    counts = (column("num_samples"), column("num_train_samples"))
    return Evaluation(scoring, metrics, column("client"), *counts, 0, 0.0, of)


def write_part(folder: Folder, result: AlgorithmResult, provenance: Provenance) -> None:
    """Write the results of one algorithm after its model; they are complete once the record exists."""
    name = result.record.name
    _write_table(folder.part_clients(name), result.clients)
    record = {
        "provenance": provenance.table,
        "record": _PART.dump_python(result.record, mode="json"),
        "files": {file: _sha256(path) for file, path in _files(folder, result.record).items()},
    }
    checkpoint.write_atomically(folder.part(name), checkpoint.seal(record))


def read_part(folder: Folder, training: Training, num_seeds: int) -> Part | None:
    """Read the results written by `write_part`, if any; raise `DamagedPart` if a file is missing or damaged."""
    path = folder.part(training.name)
    if not path.exists():
        return None
    table = checkpoint.unseal(path.read_bytes())
    if table is None:
        raise DamagedPart(f"{path} is damaged: its digest does not match.")
    record = _PART.validate_python(table["record"])
    for file, place in _files(folder, record).items():
        if not place.exists():
            raise DamagedPart(f"{place} is missing.")
        if _sha256(place) != table["files"][file]:
            raise DamagedPart(f"{place} is damaged: its digest does not match.")
    provenance = Provenance.from_table(table["provenance"])
    clients = pq.read_table(folder.part_clients(training.name))
    given = lambda score: (clients, score, training.scorings[score.name], training.algorithm.divided, num_seeds)
    found = {score.name: _evaluation_of(*given(score)) for score in record.scores}
    return Part(AlgorithmResult(record, found, clients), provenance)


def _files(folder: Folder, record: AlgorithmRecord) -> dict[str, Path]:
    """Return the files beside the record of an algorithm; there is no model if all seeds diverged."""
    has_model = len(record.divergences) < len(record.num_skipped)
    model = {"model": folder.model(record.name)} if has_model else {}
    return {"clients": folder.part_clients(record.name), **model}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_run(
    folder: Folder,
    config: Config,
    federation: FederationRecord,
    results: Sequence[AlgorithmResult],
    started: str,
    baselines: tuple[str | None, str | None] = (None, None),
) -> RunRecord:
    """Write `results.json` and `clients.parquet`, unless they already have these results.

    `baselines` name the scores of local training and FedAvg.
    """
    # Use 64 bits, as in `clients.parquet`, so that stored results give the same table.
    found = {
        name: replace(one, metrics={metric: np.asarray(values, float) for metric, values in one.metrics.items()})
        for result in results
        for name, one in result.scores.items()
    }
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
        target=target_of(
            [result.record for result in results], headline_of(comparison.metrics), config.evaluation.target
        ),
        tuning=TUNING.validate_json(folder.tuning.read_bytes()) if folder.tuning.exists() else None,
    )
    clients = pa.concat_tables([one.clients for one in results], promote_options="default")
    known = _known(folder, clients)
    if known is not None:
        unchanged = replace(record, started=known.started, machine=known.machine)
        if RUN.dump_json(unchanged) == RUN.dump_json(known):
            return known
    _write_table(folder.clients, clients)
    checkpoint.write_atomically(folder.results, RUN.dump_json(record, indent=1))
    return record


def _known(folder: Folder, clients: pa.Table) -> RunRecord | None:
    """Read the results of a folder, if they are valid and match this table of clients."""
    try:
        same = _table_bytes(_plain(pq.read_table(folder.clients))) == _table_bytes(_plain(clients))
        return read_results(folder.root) if same else None
    except (OSError, ValueError):  # including Arrow's errors
        return None


def metrics_lines(algorithm: str, histories: dict[str, list[EvaluationRecord]]) -> str:
    """Return a line of JSON for each evaluation, in order."""
    rows = zip(*histories.values(), strict=True)
    named = ((score, one) for records in rows for score, one in zip(histories, records, strict=True))
    return "".join(json.dumps({"algorithm": algorithm, "score": score, **asdict(one)}) + "\n" for score, one in named)


def export_model(
    folder: Folder,
    config: Config,
    training: Training,
    schema: Schema,
    model: tuple[Params, Shared],
    seed: int = 0,
    base: str = "",
) -> None:
    """Write a shared model for `px.load`, `personax personalize` and other programs that read safetensors.

    `schema` describes the samples that it was trained on, `seed` is the position of its seed, and `base` is the
    fingerprint of its frozen parameters and of the initial personal ones.
    """
    algorithm, sharing = training.name, training.algorithm.sharing
    about = {**describe_model(config, schema, algorithm), "run": config.name, "seed": str(config.seed_list[seed])}
    if sharing.divides:
        about |= {"base": base, "sharing": sharing.describe(), "untrained": json.dumps(sharing.personal)}
    folder.models.mkdir(exist_ok=True)
    write_shared(folder.model(algorithm), about, *model)


def _write_table(path: Path, table: pa.Table) -> None:
    checkpoint.write_atomically(path, _table_bytes(table))


def _table_bytes(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


def _plain(table: pa.Table) -> pa.Table:
    """Normalize a table: a single chunk, without dictionary encoding."""
    decoded = lambda column: column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
    columns = {name: decoded(table[name]).combine_chunks() for name in table.column_names}
    return pa.table(columns)
