"""Run folders with made-up but realistic numbers, for tests of their readers."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from personax.data.schema import Schema, numbered
from personax.evaluation.scores import Comparison, Evaluation, best_evaluations, interval
from personax.evaluation.scoring import Scoring
from personax.experiment.records import (
    RUN,
    SCHEMA_VERSION,
    AdaptationRecord,
    AlgorithmRecord,
    BestRecord,
    EvaluationRecord,
    FederationRecord,
    RunRecord,
    ScoreRecord,
)

ROUNDS = (0, 10, 20, 40, 60, 80, 100, 120, 150)
COHORT = 10
CONFIG = 'name = "{name}"\nseeds = {seeds}\n\n[federation]\ndataset = "synthetic"\nnum_clients = {num_clients}\n'


class Entry(NamedTuple):
    """A score to make up: its final level, the spread over clients, and the speed of learning."""

    score: str
    algorithm: str
    recipe: str
    scoring: Scoring
    level: float
    spread: float = 0.08
    rounds: float = 25.0
    mode: str = "synchronous"
    citation: str = "mcmahan2017"


KEPT, ADAPTED, ON_TEST = Scoring("personal"), Scoring("adapted"), Scoring("adapted", adapt_on="test")
FULL = (
    Entry("local training", "local training", "local_only", KEPT, 0.74, 0.14, 12, citation=""),
    Entry("FedAvg", "FedAvg", "fedavg", Scoring("global"), 0.79, 0.12, 35),
    Entry("FedAvg + update", "FedAvg", "fedavg", Scoring("adapted", lr=0.05), 0.84, 0.09, 35),
    Entry("Per-FedAvg (HF)", "Per-FedAvg (HF)", "per_fedavg", ADAPTED, 0.87, 0.07, 30, citation="fallah2020"),
    Entry("Per-FedAvg, paper's step", "Per-FedAvg (HF)", "per_fedavg", ON_TEST, 0.91, 0.05, 30, citation="fallah2020"),
    Entry("pFedMe", "pFedMe", "pfedme", KEPT, 0.855, 0.09, 45, citation="dinh2020"),
    Entry("APFL", "APFL", "apfl", KEPT, 0.873, 0.08, 28, citation="deng2020"),
    Entry("PersA-FL-MAML", "PersA-FL-MAML", "persafl", ADAPTED, 0.86, 0.08, 20, "asynchronous", "toghani2023"),
    Entry("PersA-FL-ME", "PersA-FL-ME", "persafl", Scoring("recomputed"), 0.85, 0.1, 24, "asynchronous", "toghani2023"),
)
ONE = (Entry("FedAvg", "FedAvg", "fedavg", Scoring("global"), 0.8),)
REGRESSION = (
    Entry("local", "local", "local_only", Scoring("personal"), 0.9, 0.3, citation=""),
    Entry("FedAvg", "FedAvg", "fedavg", Scoring("global"), 1.6, 0.5),
    Entry("APFL", "APFL", "apfl", Scoring("personal"), 0.62, 0.2, citation="deng2020"),
)


def write_full(folder: Path, name: str = "femnist, 62 classes", seeds: tuple[int, ...] = (0, 1, 2), **more) -> Path:
    """Nine scores of seven algorithms, three seeds, newcomers, two asynchronous algorithms, mixing weights."""
    return write_run(
        folder, name, FULL, seeds, local_baseline="local training", global_baseline="FedAvg", num_held_out=12, **more
    )


def write_minimal(folder: Path, name: str = "smallest", **more) -> Path:
    """One algorithm, one seed, nothing to compare it with."""
    return write_run(folder, name, ONE, (0,), **more)


def write_regression(folder: Path, name: str = "regression", **more) -> Path:
    """Errors, for which lower is better, with two seeds."""
    more = {"metrics": ("loss", "error"), "local_baseline": "local", "global_baseline": "FedAvg"} | more
    return write_run(folder, name, REGRESSION, (3, 4), **more)


def write_run(
    folder: Path,
    name: str,
    entries: tuple[Entry, ...],
    seeds: tuple[int, ...],
    *,
    metrics: tuple[str, ...] = ("loss", "accuracy"),
    local_baseline: str | None = None,
    global_baseline: str | None = None,
    num_clients: int = 120,
    num_held_out: int = 0,
    client_name: str = "client {}",
    config: str = CONFIG,
) -> Path:
    """Make up the numbers of a run and write its folder: config.toml, results.json and clients.parquet."""
    rng = np.random.default_rng(len(name))
    made = {entry.score: _evaluations(rng, entry, metrics, len(seeds), num_clients) for entry in entries}
    scores = {e.score: _score(rng, e, made[e.score], metrics, len(seeds), num_held_out) for e in entries}
    last = {score: evaluations[-1] for score, evaluations in made.items()}
    compared = Comparison(last, local_baseline, global_baseline, {e.score: e.algorithm for e in entries})
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        personax=version("personax"),
        name=name,
        started="2026-03-05T14:07:31+00:00",
        machine={"device": "NVIDIA H200", "cpu": "16 cores", "jax": "0.10.1", "python": "3.12.3"},
        seeds=list(seeds),
        metrics=list(metrics),
        headline=metrics[-1],
        federation=_federation(num_clients, num_held_out),
        algorithms=[_algorithm(rng, entry, entries, scores, len(seeds)) for entry in _first_of_each(entries)],
        local_baseline=local_baseline,
        global_baseline=global_baseline,
        table=[row for metric in metrics for row in compared.rows(metric)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_bytes(RUN.dump_json(record, indent=1))
    (folder / "config.toml").write_text(config.format(name=name, seeds=list(seeds), num_clients=num_clients))
    pq.write_table(_clients(rng, entries, last, seeds, client_name), folder / "clients.parquet")
    return folder


def edit_results(folder: Path, edit) -> None:
    """Change a folder's results.json: `edit` gets its content as plain data and changes it in place."""
    content = json.loads((folder / "results.json").read_text())
    edit(content)
    (folder / "results.json").write_text(json.dumps(content))


def _first_of_each(entries: tuple[Entry, ...]) -> list[Entry]:
    return list({entry.algorithm: entry for entry in reversed(entries)}.values())[::-1]


def _evaluations(rng, entry: Entry, metrics, num_seeds: int, num_clients: int) -> list[Evaluation]:
    talent, luck = np.random.default_rng(7).beta(5, 3, num_clients) - 0.62, rng.normal(0, 0.03, num_clients)
    of_seed = rng.normal(0, 0.006, (num_seeds, 1))
    counts = np.broadcast_to(np.random.default_rng(8).integers(8, 90, num_clients), (num_seeds, num_clients))
    found = []
    for num_round in ROUNDS:
        left = np.exp(-num_round / entry.rounds)
        noise = rng.normal(0, 0.02, (num_seeds, num_clients))
        if metrics[-1] == "accuracy":
            reached = entry.level + entry.spread / 0.15 * (talent + luck) + of_seed + noise
            quality = np.clip(reached * (1 - left) + 0.1 * left, 0, 1)
            numbers = {"loss": 2.4 * (1 - quality) ** 1.3 + 0.05, "accuracy": np.round(quality * counts) / counts}
        else:
            reached = entry.level * np.exp(entry.spread * (4 * (talent + luck) + noise)) + of_seed
            numbers = {"loss": reached + 3 * left + 0.01, "error": reached + 3 * left}
        pace = 0.6 if entry.mode == "asynchronous" else 1.0
        time = pace * num_round * np.linspace(1, 1.04, num_seeds)
        at = np.broadcast_to(np.arange(num_clients), (num_seeds, num_clients))
        events = np.full(num_seeds, num_round * COHORT)
        found.append(Evaluation(entry.scoring, {m: numbers[m] for m in metrics}, at, counts, counts, events, time))
    return found


def _score(rng, entry: Entry, evaluations: list[Evaluation], metrics, num_seeds: int, num_held_out: int) -> ScoreRecord:
    mixes = entry.recipe == "apfl"
    best = {metric: _best(evaluations, metric) for metric in metrics}
    records = [_evaluation(rng, at, e, metrics, mixes) for at, e in zip(ROUNDS, evaluations, strict=True)]
    newcomers = None
    if num_held_out and entry.scoring.adapts:
        steps, high = [0, 1, 2, 5, 10], evaluations[-1].mean(metrics[-1])
        noise = lambda: rng.normal(0, 0.01, num_seeds)
        rise = lambda end: [list(map(float, end - 0.12 * np.exp(-s / 2) + noise())) for s in steps]
        words = f"the shared model after gradient steps; scored on the test data of {num_held_out} held-out clients"
        newcomers = AdaptationRecord(words, steps, {m: rise(high if m == metrics[-1] else 1.0) for m in metrics})
    scoring = {"model": entry.scoring.model, "clients": entry.scoring.clients, "score_on": entry.scoring.score_on}
    words = entry.scoring.describe()
    return ScoreRecord(entry.score, scoring, words, entry.scoring.flag, records, best, newcomers)


def _best(evaluations: list[Evaluation], metric: str) -> BestRecord:
    means = np.stack([one.mean(metric) for one in evaluations])
    at = best_evaluations(means, metric)
    return BestRecord(interval(means[at, np.arange(len(at))]), [ROUNDS[position] for position in at])


def _evaluation(rng, at: int, evaluation: Evaluation, metrics, mixes: bool) -> EvaluationRecord:
    each = lambda statistic: {metric: list(map(float, statistic(metric))) for metric in metrics}
    e = evaluation
    mix = list(map(float, 0.3 + 0.4 * (1 - np.exp(-at / 40)) + rng.normal(0, 0.01, len(e.time)))) if mixes else None
    events, time = list(map(int, e.num_events)), list(map(float, e.time))
    numbers = map(each, (e.mean, e.std, e.worst_decile, e.best_decile))
    return EvaluationRecord(at, events, time, at * 0.11, *numbers, mix)


def _algorithm(rng, entry: Entry, entries, scores: dict[str, ScoreRecord], num_seeds: int) -> AlgorithmRecord:
    more = {}
    if entry.mode == "asynchronous":
        more["staleness"] = {"staleness": list(range(24)), "count": _counts(rng)}
        active = 0.35 + 0.1 * np.sin(np.arange(90) / 9)
        more["active"] = {"time": list(np.arange(90.0)), "share": list(map(float, active))}
    return AlgorithmRecord(
        name=entry.algorithm,
        recipe=entry.recipe,
        definition={"objective": {"kind": entry.recipe}, "local": {"num_steps": 10, "lr": 0.1}},
        citations=[entry.citation] if entry.citation else [],
        mode=entry.mode,  # pyright: ignore[reportArgumentType]
        num_rounds=ROUNDS[-1],
        num_events=ROUNDS[-1] * COHORT,
        seconds={"compile": 3.2, "train": ROUNDS[-1] * 0.11, "evaluate": 4.4},
        bytes_up=0.0 if entry.recipe == "local_only" else ROUNDS[-1] * COHORT * 824_000.0,
        bytes_down=0.0 if entry.recipe == "local_only" else ROUNDS[-1] * COHORT * 824_004.0,
        num_dropped=[int(entry.mode == "asynchronous") * 17] * num_seeds,
        num_skipped=[0] * num_seeds,
        scores=[scores[e.score] for e in entries if e.algorithm == entry.algorithm],
        **more,
    )


def _counts(rng) -> list[int]:
    return np.bincount(np.minimum(rng.poisson(7, 1500), 23), minlength=24).tolist()


def _federation(num_clients: int, num_held_out: int) -> FederationRecord:
    lines = [
        f"{num_clients:,} clients",
        f"training       {num_clients * 50:,} samples, 8 to 90 per client (median 49); 28 x 28, uint8",
        "labels         62 classes: 0: 4.1%, 1: 4.4%, 2: 4.0%, 3: 4.2%, 4: 3.9%, and 57 more",
        "heterogeneity  0.33 (total variation of labels, 0 is IID); 3 to 20 classes per client (median 9)",
    ]
    return FederationRecord(
        num_clients,
        num_held_out,
        num_clients * 50,
        num_clients * 10,
        "\n".join(lines),
        ["caldas2018"],
        Schema((28, 28), "uint8", classes=numbered(62)),
    )


def _clients(rng, entries, last: dict[str, Evaluation], seeds, client_name: str) -> pa.Table:
    """One row for each client, seed and score."""
    parts = []
    for entry in entries:
        found = last[entry.score]
        num_seeds, num = found.clients.shape
        rows = num_seeds * num
        columns = {
            "algorithm": [entry.algorithm] * rows,
            "score": [entry.score] * rows,
            "seed": np.repeat(seeds, num),
            "client": found.clients.ravel(),
            "name": [client_name.format(i) for i in found.clients.ravel()],
            "num_samples": found.num_samples.ravel(),
            **{metric: values.ravel() for metric, values in found.metrics.items()},
            "personal_number": pa.array(
                rng.beta(4, 2, rows) if entry.recipe == "apfl" else [None] * rows, pa.float64()
            ),
        }
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)
