"""The run folder of a live run: the same files as a simulation's, so `personax report` and `personalize` read them."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from personax.evaluation.scores import Evaluation
from personax.evaluation.scoring import Scoring
from personax.experiment import checkpoint
from personax.experiment.config import dump_run, load_run
from personax.experiment.folders import Folder
from personax.experiment.records import (
    RUN,
    SCHEMA_VERSION,
    AlgorithmRecord,
    EvaluationRecord,
    FederationRecord,
    RunRecord,
)
from personax.experiment.summaries import activity_of, citations_of, headline_of, machine, score_record, table_rows
from personax.live.book import Book, staleness_histogram
from personax.live.journal import read_lines
from personax.live.recipe import Recipe
from personax.schedules import Schedule
from personax.values import to_dict


def open_run(root: Path, recipe: Recipe, name: str) -> tuple[Folder, str]:
    """A new run folder, or one that a server with the same configuration left; and the run's name on the wire."""
    folder = Folder(root)
    about = root / "live.json"
    if not folder.config.exists():
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomically(about, json.dumps({"run": name, "spec": recipe.spec}, indent=1).encode())
        checkpoint.write_atomically(folder.config, dump_run(recipe.config).encode())
        return folder, name
    if not about.exists():
        raise ValueError(f"{root} has a run that was not live. Choose another folder with --out.")
    # The operator may change the terms from one start to the next.
    if replace(load_run(folder.config), live=recipe.config.live) != recipe.config:
        raise ValueError(
            f"{root} has a run with another configuration. Continue it with that one, or choose another --out."
        )
    return folder, json.loads(about.read_text())["run"]


def write_results(folder: Folder, book: Book, bytes_up: float, bytes_down: float) -> RunRecord | None:
    """Write what a simulation writes at its end; None where no client reported any number."""
    export_model(folder, book)
    history = book.ledger.history
    if not history:
        return None
    reported = {name: one for name, one in book.recipe.training.scorings.items() if _reports(history[-1], name)}
    found = {name: _evaluation(book, scoring, history[-1], name) for name, scoring in reported.items()}
    record = _run_record(book, found, _algorithm_record(book, reported, read_lines(folder.root), bytes_up, bytes_down))
    rows = pa.concat_tables([_rows(book, name, one) for name, one in found.items()], promote_options="default")
    _write_all(folder, record, rows)
    return record


def _algorithm_record(
    book: Book, scorings: dict[str, Scoring], lines: list[dict[str, Any]], bytes_up: float, bytes_down: float
) -> AlgorithmRecord:
    """What the algorithm did, from the journal and from the numbers that clients reported."""
    training, ledger = book.recipe.training, book.ledger
    histories = {
        name: [_evaluation_record(book, scoring, entry, name) for entry in ledger.history if _reports(entry, name)]
        for name, scoring in scorings.items()
    }
    return AlgorithmRecord(
        name=training.name,
        recipe=training.recipe,
        definition=to_dict(training.algorithm),
        citations=citations_of(training.recipe, training.algorithm),
        mode="synchronous" if book.is_synchronous else "asynchronous",
        num_rounds=book.recipe.config.schedule.num_rounds,
        num_events=ledger.num_events,
        seconds={"compile": 0.0, "train": book.now, "evaluate": 0.0},
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        num_dropped=[int(book.state.num_dropped)],
        num_skipped=[sum(line.get("outcome") == "refused" for line in lines)],
        scores=[score_record(name, scoring, histories[name], None) for name, scoring in scorings.items()],
        staleness={} if book.is_synchronous else staleness_histogram(lines),
        active=activity_of(_schedule(book, lines)) if ledger.num_events else {},
    )


def _run_record(book: Book, found: dict[str, Evaluation], algorithm: AlgorithmRecord) -> RunRecord:
    config, ledger = book.recipe.config, book.ledger
    metrics = list(dict.fromkeys(metric for one in found.values() for metric in one.metrics))
    total = lambda key: sum(int(one[key]) for one in ledger.reports.values())
    summary = f"{len(ledger.seats)} clients on machines of their own; {len(ledger.reports)} of them report numbers"
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        personax=version_of("personax"),
        name=config.name,
        started=datetime.fromtimestamp(ledger.began, UTC).isoformat(timespec="seconds"),
        machine=machine(),
        seeds=config.seed_list,
        metrics=metrics,
        headline=headline_of(metrics),
        federation=FederationRecord(len(ledger.seats), 0, total("train_samples"), total("samples"), summary, []),
        algorithms=[algorithm],
        local_baseline=None,
        global_baseline=None,
        table=table_rows({name: algorithm.name for name in found}, found, None, None),
    )


def export_model(folder: Folder, book: Book) -> None:
    """The shared model, for `personax personalize` and for anyone who reads safetensors."""
    recipe, spec = book.recipe, book.recipe.spec
    shared = dict(enumerate(jax.tree.leaves(book.state.shared)))
    about = {
        "personax": version_of("personax"),
        "run": recipe.config.name,
        "algorithm": recipe.training.name,
        "seed": str(recipe.config.seed_list[0]),
        "task": spec.outputs.kind,
        "num_outputs": str(spec.outputs.num),
        "input_shape": json.dumps(spec.input_shape),
        "input_dtype": spec.input_dtype,
    }
    plain = lambda tree: jax.tree.map(np.asarray, tree)
    trees = {"params": plain(book.state.params), "shared": {str(i): np.asarray(leaf) for i, leaf in shared.items()}}
    checkpoint.export(folder.model(recipe.training.name), trees, about)


def journal_schedule(lines: list[dict[str, Any]], names: list[str]) -> Schedule:
    """The table of events that a journal tells of: the applied uploads, in the order in which they were applied."""
    applied = [line for line in lines if line.get("outcome") == "applied"]
    column = lambda key, kind: np.asarray([line[key] for line in applied], kind)
    received, time = column("received", float), column("time", float)
    return Schedule(
        num_clients=len(names),
        client=np.asarray([names.index(line["client"]) for line in applied], np.int32),
        started_at=np.minimum(column("started_at", int), np.arange(len(applied))),
        requested=received,
        received=np.minimum(received, time),
        time=time,
        aggregated=np.ones(len(applied), bool),
        round_ends=np.zeros(len(applied), bool),
    )


def _schedule(book: Book, lines: list[dict[str, Any]]) -> Schedule:
    return journal_schedule(lines, sorted(book.ledger.seats, key=lambda name: book.ledger.seats[name].id))


def _reports(entry: dict[str, Any], name: str) -> bool:
    return any(name in numbers for numbers in entry["reports"].values())


def _evaluation(book: Book, scoring: Scoring, entry: dict[str, Any], name: str) -> Evaluation:
    """The numbers of the clients that report, as an evaluation of one seed."""
    seats, reports = book.ledger.seats, book.ledger.reports
    reporting = sorted((c for c in entry["reports"] if name in entry["reports"][c]), key=lambda c: seats[c].id)
    common = set.intersection(*(set(entry["reports"][client][name]) for client in reporting))
    first = [metric for metric in entry["reports"][reporting[0]][name] if metric in common]
    metrics = {m: np.array([[entry["reports"][client][name][m] for client in reporting]]) for m in first}
    counts = lambda key: np.array([[max(int(reports[client][key]), 1) for client in reporting]])
    ids = np.array([[seats[client].id for client in reporting]])
    events = np.array([entry["events"]])
    own, when = replace(scoring, clients="all"), np.array([entry["time"]])
    return Evaluation(own, metrics, ids, counts("samples"), counts("train_samples"), events, when)


def _evaluation_record(book: Book, scoring: Scoring, entry: dict[str, Any], name: str) -> EvaluationRecord:
    found = _evaluation(book, scoring, entry, name)
    numbers = lambda statistic: {m: [float(v) for v in getattr(found, statistic)(m)] for m in found.metrics}
    position = entry["position"] if book.is_synchronous else entry["events"] // book.cohort_size
    return EvaluationRecord(
        round=position,
        events=[entry["events"]],
        time=[entry["time"]],
        seconds=entry["time"],
        mean=numbers("mean"),
        std=numbers("std"),
        worst_decile=numbers("worst_decile"),
        best_decile=numbers("best_decile"),
    )


def _rows(book: Book, score: str, found: Evaluation) -> pa.Table:
    names = {seat.id: name for name, seat in book.ledger.seats.items()}
    num = found.clients.size
    columns = {
        "algorithm": pa.array([book.recipe.training.name] * num).dictionary_encode(),
        "score": pa.array([score] * num).dictionary_encode(),
        "seed": np.repeat(np.asarray(book.recipe.config.seed_list), num),
        "client": found.clients.ravel(),
        "name": [names[int(id)] for id in found.clients.ravel()],
        "num_samples": found.num_samples.ravel(),
        "num_train_samples": found.num_train_samples.ravel(),
        **{name: np.asarray(values, float).ravel() for name, values in found.metrics.items()},
        "personal_number": pa.nulls(num, pa.float64()),
    }
    return pa.table(columns)


def _write_all(folder: Folder, record: RunRecord, rows: pa.Table) -> None:
    lines = []
    for score in record.algorithms[0].scores:
        for one in score.evaluations:
            line = {"algorithm": record.algorithms[0].name, "score": score.name, **asdict(one)}
            lines.append(json.dumps(line))
    checkpoint.write_atomically(folder.metrics, "".join(f"{line}\n" for line in lines).encode())
    buffer = pa.BufferOutputStream()
    pq.write_table(rows, buffer)
    checkpoint.write_atomically(folder.clients, buffer.getvalue().to_pybytes())
    checkpoint.write_atomically(folder.results, RUN.dump_json(record, indent=1))
