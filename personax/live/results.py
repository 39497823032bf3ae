"""The run folder of a live run. It has the same files as a simulation's, for `personax report` and `personalize`."""

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from personax.evaluation.scores import Evaluation
from personax.experiment import checkpoint
from personax.experiment.config import dump_run, load_run
from personax.experiment.folders import Folder
from personax.experiment.names import require_run_name
from personax.experiment.records import EvaluationRecord, FederationRecord, RunRecord
from personax.experiment.results import (
    AlgorithmResult,
    algorithm_record,
    client_rows,
    export_model,
    metrics_lines,
    write_run,
)
from personax.experiment.summaries import activity_of, evaluation_record, score_record
from personax.live.book import Book
from personax.live.journal import read_lines
from personax.live.recipe import Recipe
from personax.schedules import Schedule
from personax.sharing import join, require_same_base


def open_run(root: Path, recipe: Recipe, name: str) -> tuple[Folder, str]:
    """Create a run folder or open that of an earlier server with the same configuration; also return the run's name."""
    folder = Folder(root)
    about = root / "live.json"
    if not folder.config.exists():
        root.mkdir(parents=True, exist_ok=True)
        checkpoint.write_atomically(about, _about(recipe, name))
        checkpoint.write_atomically(folder.config, dump_run(recipe.config).encode())
        return folder, name
    if not about.exists():
        raise ValueError(f"{root} has a run that is not a live run. Choose another folder with --out.")
    # The operator may change the terms from one start to the next.
    before = load_run(folder.config)
    moved = replace(before.model, base=recipe.config.model.base)  # the file may move; its digest is compared
    if replace(before, live=recipe.config.live, model=moved) != recipe.config:
        raise ValueError(
            f"{root} has a run with another configuration. Use that configuration, or choose another --out."
        )
    try:
        known = json.loads(about.read_text())
        run, schema = known["run"], known["schema"]
    except (KeyError, TypeError, ValueError):
        what = "Restore it from a backup: clients identify their states by the name `run` in it"
        raise ValueError(f"{about} is damaged. {what}.") from None
    if schema != json.loads(_about(recipe, name))["schema"]:
        raise ValueError(
            f"{root} has a run on other samples (columns, classes, shape or type). Use the same `[live.sample]` or "
            "data, or choose another --out."
        )
    remedy = "Restore the base and the versions of personax and jax, or choose another --out."
    require_same_base(recipe.unshared_fingerprint, known.get("unshared", ""), str(root), remedy)
    return folder, require_run_name(run)


def _about(recipe: Recipe, run: str) -> bytes:
    """The run's name, its schema and the fingerprint of its base, which must not change when the run continues."""
    facts = {"run": run, "schema": recipe.schema.to_dict(), "unshared": recipe.unshared_fingerprint}
    return json.dumps(facts, indent=1).encode()


def write_results(folder: Folder, book: Book, bytes_up: float, bytes_down: float) -> RunRecord | None:
    """Write the files that a simulation writes at its end; return None if no client reported any number."""
    recipe, ledger = book.recipe, book.ledger
    model, base = (join(book.state.params, recipe.unshared), book.state.shared), recipe.unshared_fingerprint
    export_model(folder, recipe.config, recipe.training, recipe.schema, model, base=base)
    if not ledger.reports:
        return None
    result = _algorithm_result(book, read_lines(folder.root), bytes_up, bytes_down)
    histories = {score.name: score.evaluations for score in result.record.scores}
    checkpoint.write_atomically(folder.metrics, metrics_lines(result.record.name, histories).encode())
    total = lambda key: sum(int(one[key]) for one in ledger.reports.values())
    summary = f"{len(ledger.seats)} clients, each on its own machine; {len(ledger.reports)} of them report numbers"
    counts = (len(ledger.seats), 0, total("train_samples"), total("samples"))
    federation = FederationRecord(*counts, summary, [], recipe.schema)
    began = datetime.fromtimestamp(ledger.began, UTC).isoformat(timespec="seconds")
    return write_run(folder, recipe.config, federation, [result], began)


def _algorithm_result(book: Book, lines: list[dict[str, Any]], bytes_up: float, bytes_down: float) -> AlgorithmResult:
    """The results of the algorithm, from the journal and from the numbers that clients reported."""
    training, ledger, config = book.recipe.training, book.ledger, book.recipe.config
    history = history_of(lines, book.is_synchronous, config.evaluation.every, book.cohort_size)
    last = {name: found for name in training.scorings if (found := _evaluation(book, name, history[-1]))}
    found = {name: [(entry, _evaluation(book, name, entry)) for entry in history] for name in last}
    histories = {name: [_record(book, at, one) for at, one in of if one is not None] for name, of in found.items()}
    record = algorithm_record(
        training,
        num_rounds=config.schedule.num_rounds,
        num_events=ledger.num_events,
        seconds={"compile": 0.0, "train": book.now, "evaluate": 0.0},
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        num_dropped=[int(book.state.num_dropped)],
        num_skipped=[sum(line.get("outcome") == "refused" for line in lines)],
        scores=[
            score_record(name, training.scorings[name], history, None, of=training.algorithm.divided)
            for name, history in histories.items()
        ],
        staleness={} if book.is_synchronous else staleness_histogram(lines),
        active=activity_of(_schedule(book, lines)) if ledger.num_events else {},
    )
    named = {seat.id: name for name, seat in ledger.seats.items()}
    rows = [
        client_rows((training.name, name), config.seed_list, one, [named[int(id)] for id in one.clients.ravel()])
        for name, one in last.items()
    ]
    return AlgorithmResult(record, last, pa.concat_tables(rows, promote_options="default"))


def history_of(lines: list[dict[str, Any]], is_synchronous: bool, every: int, cohort_size: int) -> list[dict[str, Any]]:
    """The history of the reported numbers, as often as the configuration evaluates."""
    events = version = 0
    reports: dict[str, Any] = {}
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        events += line.get("outcome") == "applied"
        if "state" in line:
            version = line["version"]
        if line["what"] == "rollback":
            events = line["events"]
            reached = version if is_synchronous else events
            found = {key: entry for key, entry in found.items() if entry["position"] <= reached}
        if line["what"] == "report":
            reports = {**reports, line["client"]: line["numbers"]}
            position = version if is_synchronous else events
            entry = {"events": events, "version": version, "time": line["time"], "reports": reports}
            found[position // (every * (1 if is_synchronous else cohort_size))] = {**entry, "position": position}
    return list(found.values())


def journal_schedule(lines: list[dict[str, Any]], names: list[str]) -> Schedule:
    """The table of events in a journal: the applied uploads, in the order in which they were applied."""
    applied = applied_lines(lines)
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


def applied_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The uploads that led to the model, without those undone by a rollback."""
    applied: list[dict[str, Any]] = []
    for line in lines:
        if line.get("outcome") == "applied":
            applied.append(line)
        elif line["what"] == "rollback":
            del applied[line["events"] :]
    return applied


def staleness_histogram(lines: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The distribution of staleness, in versions, over the applied uploads of a journal."""
    found = Counter(line["staleness"] for line in applied_lines(lines))
    return {"staleness": sorted(found), "count": [found[value] for value in sorted(found)]}


def _schedule(book: Book, lines: list[dict[str, Any]]) -> Schedule:
    return journal_schedule(lines, sorted(book.ledger.seats, key=lambda name: book.ledger.seats[name].id))


def _evaluation(book: Book, name: str, entry: dict[str, Any]) -> Evaluation | None:
    """The numbers that clients reported under one score, as an evaluation with one seed; None if there are none."""
    seats, reports = book.ledger.seats, book.ledger.reports
    reporting = sorted((c for c in entry["reports"] if name in entry["reports"][c]), key=lambda c: seats[c].id)
    if not reporting:
        return None
    common = set.intersection(*(set(entry["reports"][client][name]) for client in reporting))
    first = [metric for metric in entry["reports"][reporting[0]][name] if metric in common]
    metrics = {m: np.array([[entry["reports"][client][name][m] for client in reporting]]) for m in first}
    counts = lambda key: np.array([[max(int(reports[client][key]), 1) for client in reporting]])
    ids = np.array([[seats[client].id for client in reporting]])
    events = np.array([entry["events"]])
    own, when = replace(book.recipe.training.scorings[name], clients="all"), np.array([entry["time"]])
    of = book.recipe.algorithm.divided
    return Evaluation(own, metrics, ids, counts("samples"), counts("train_samples"), events, when, of)


def _record(book: Book, entry: dict[str, Any], found: Evaluation) -> EvaluationRecord:
    position = entry["position"] if book.is_synchronous else entry["events"] // book.cohort_size
    return evaluation_record(found, position, entry["time"])
