"""The contents of a run folder as data: the schema of `results.json` and of the tables beside it.

    config.toml       the resolved configuration; running it again gives the same numbers
    results.json      a `RunRecord`
    tuning.json       a `TuningRecord`, if the configuration was tuned; `results.json` includes it
    metrics.jsonl     one line for each evaluation, written during the run
    clients.parquet   one row for each client, seed and score at the end of a run; without numbers if the seed diverged
    checkpoints/      the last two states of each algorithm
    parts/            the results of each algorithm and their provenance, from which the files above are made
    models/           the shared model of each algorithm
    locks/            lock files, which one process at a time holds
    report.html       all of it for people

Numbers "for each seed" are lists in the order of `seeds`, with NaN for a seed that has diverged.
"""

import json
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from personax.data.schema import Schema
from personax.evaluation.scores import Interval, ScoreRow
from personax.experiment.config import require_same_version

SCHEMA_VERSION = 3
Numbers = list[float]

_KNOWN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True, config=_KNOWN)
class EvaluationRecord:
    """One evaluation under one scoring: statistics over clients by metric, each for each seed."""

    round: int  # rounds, or updates divided by the cohort's size where there are none
    events: list[int]
    time: Numbers  # virtual
    seconds: float  # of wall-clock time since the run began, compilation left out
    mean: dict[str, Numbers]
    std: dict[str, Numbers]
    worst_decile: dict[str, Numbers]
    best_decile: dict[str, Numbers]
    personal_number: Numbers | None = None  # its mean over clients, where the objective shows one
    stationarity: Numbers | None = None  # |grad F|^2 at the server's model, of the clients' mean objective
    iterate_stationarity: Numbers | None = None  # and at a random iterate of the last round: Fallah Remark 4.7


@dataclass(frozen=True, config=_KNOWN)
class BestRecord:
    """The best evaluation of each seed by one metric, over seeds: optimistic, because it is picked on the scores."""

    mean: Interval
    rounds: list[int]  # of each seed that did not diverge


@dataclass(frozen=True, config=_KNOWN)
class AdaptationRecord:
    """Newcomers: mean metrics against the number of adaptation steps, [steps][seeds]."""

    words: str
    steps: list[int]
    mean: dict[str, list[Numbers]]


@dataclass(frozen=True, config=_KNOWN)
class ClassesRecord:
    """Each class of the schema at the end of a run, on the scored samples of all clients together: [classes][seeds].

    `recall` is the share of its samples that were recognized, `precision` the share of its predictions that were right;
    NaN without samples or predictions.
    """

    num_samples: list[int]  # of each class, for the first seed that did not diverge
    recall: list[Numbers]
    precision: list[Numbers]


@dataclass(frozen=True, config=_KNOWN)
class ScoreRecord:
    """One scoring applied to one algorithm, from the first evaluation to the last.

    The last evaluation's numbers of each client are the rows of `clients.parquet` with this `score`. `evaluations` end
    when all seeds have diverged, and `best` is empty then.
    """

    name: str
    scoring: dict[str, Any]
    words: str
    flag: str
    evaluations: list[EvaluationRecord]
    best: dict[str, BestRecord]
    newcomers: AdaptationRecord | None = None
    classes: ClassesRecord | None = None  # of a classification


@dataclass(frozen=True, config=_KNOWN)
class BoundRecord:
    """A convergence theorem's bound after each of these numbers of rounds; without numbers the words say why."""

    words: str
    rounds: list[int]
    values: Numbers


@dataclass(frozen=True, config=_KNOWN)
class DivergenceRecord:
    """The first update of one seed that was not finite. The seed has no numbers from its event on: they are NaN."""

    seed: int
    round: int  # during which it arrived, from 1
    event: int  # from 0
    client: str
    stage: str  # which part of the update: "local steps", for example


@dataclass(frozen=True, config=_KNOWN)
class AlgorithmRecord:
    """One algorithm of a run: what it was, how long it took, how it was scored."""

    name: str
    recipe: str
    definition: dict[str, Any]
    citations: list[str]  # keys of BibTeX entries, or entries of what was imported
    mode: Literal["synchronous", "asynchronous"]
    num_rounds: int
    num_events: int
    seconds: dict[Literal["compile", "train", "evaluate"], float]
    bytes_up: float  # for each seed, in total
    bytes_down: float
    num_dropped: list[int]  # updates too stale, for each seed
    num_skipped: list[int]  # updates not finite
    scores: list[ScoreRecord]
    personal_number: str = ""  # the name of the personal number that is shown: APFL's mixing weight
    staleness: dict[str, list[int]] = field(default_factory=dict)  # "staleness" and "count", of the first seed
    active: dict[str, Numbers] = field(default_factory=dict)  # "time" and "share" of active clients, of the first seed
    bound: BoundRecord | None = None  # of the stationarity, where that was asked for
    divergences: list[DivergenceRecord] = field(default_factory=list)  # of the seeds that diverged


@dataclass(frozen=True, config=_KNOWN)
class TrialRecord:
    """One choice of options and its score on validation data: None if a seed diverged."""

    options: dict[str, Any]  # by dotted names: `lr`, `objective.strength`
    score: float | None  # the mean over seeds
    of_seeds: Numbers  # empty if a seed diverged
    loss: float | None  # on the same data: of equal scores the one with the lower loss is chosen


@dataclass(frozen=True, config=_KNOWN)
class TunedAlgorithm:
    """The search for the options of one algorithm: everything that was tried, in order, and what was chosen."""

    algorithm: str
    search: Literal["grid", "random"]
    num_combinations: int  # that the search began with; a random one tries a part of them
    metric: str
    words: str  # the model that was scored, and how
    before: dict[str, Any]  # the algorithm's own values of these options
    chosen: dict[str, Any]
    trials: list[TrialRecord]
    warnings: list[str]  # such as a chosen value at the edge of those that were tried

    def of(self, options: dict[str, Any]) -> TrialRecord | None:
        """The trial of these options, if there was one."""
        return next((trial for trial in self.trials if trial.options == options), None)


@dataclass(frozen=True, config=_KNOWN)
class TuningRecord:
    """`tuning.json`: a search on validation data, which was cut from the clients' training data."""

    share: float  # of each client's training data
    seed: int  # of the validation split
    seeds: list[int]  # of the runs
    algorithms: list[TunedAlgorithm]


@dataclass(frozen=True, config=_KNOWN)
class FederationRecord:
    """The data in words and numbers."""

    num_clients: int
    num_held_out: int
    num_samples: int
    num_test_samples: int
    summary: str
    citations: list[str]
    schema: Schema


@dataclass(frozen=True, config=_KNOWN)
class RunRecord:
    """`results.json`."""

    schema_version: Literal[3]
    personax: str
    name: str
    started: str  # ISO 8601, UTC
    machine: dict[str, str]
    seeds: list[int]
    metrics: list[str]
    headline: str  # the metric of the headline table
    federation: FederationRecord
    algorithms: list[AlgorithmRecord]
    local_baseline: str | None  # the scores that stand for local training and for the global model of all
    global_baseline: str | None
    table: list[ScoreRow]  # of each metric in turn
    tuning: TuningRecord | None = None


RUN = TypeAdapter(RunRecord)
TUNING = TypeAdapter(TuningRecord)


def read_results(folder: Path) -> RunRecord:
    """The results of a run folder; an error says what is wrong with it."""
    path = folder / "results.json"
    if not path.exists():
        raise ValueError(
            f"{folder} has no results.json. Give the folder of a finished run, or finish it: personax resume {folder}"
        )
    content = path.read_bytes()
    try:
        return RUN.validate_json(content)
    except ValidationError as error:
        found = _table(content)
        if "schema_version" in found:
            require_same_version(folder, str(found.get("personax")))
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is not what a run writes: {where}: {first['msg']}. Run it again.") from None


def _table(content: bytes) -> dict[str, Any]:
    """The table that a JSON file holds; empty if it holds none."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
