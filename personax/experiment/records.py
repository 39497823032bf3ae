"""The contents of a run folder: the schema of `results.json` and of the tables beside it.

    config.toml       the resolved configuration; rerunning it gives the same numbers
    results.json      a `RunRecord`
    tuning.json       a `TuningRecord`, if the configuration was tuned; `results.json` includes it
    metrics.jsonl     one line per evaluation, written during the run
    clients.parquet   one row per client, seed and score at the end of a run; without values if the seed diverged
    checkpoints/      the last two states of each algorithm
    parts/            the results of each algorithm and their provenance, from which the files above are made
    models/           the shared model of each algorithm
    locks/            lock files, held by one process at a time
    report.html       the report

Values "for each seed" are lists in the order of `seeds`, with NaN for a seed that has diverged.
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
    """One evaluation with one scoring: statistics over clients by metric, for each seed."""

    round: int  # rounds, or updates divided by the cohort's size for asynchronous runs
    events: list[int]
    time: Numbers  # virtual
    seconds: float  # wall-clock time since the start of the run, without compilation
    mean: dict[str, Numbers]
    std: dict[str, Numbers]
    worst_decile: dict[str, Numbers]
    best_decile: dict[str, Numbers]
    personal_number: Numbers | None = None  # its mean over clients, if the objective shows one
    stationarity: Numbers | None = None  # |grad F|^2 at the server's model, of the clients' mean objective
    iterate_stationarity: Numbers | None = None  # and at a random iterate of the last round: Fallah Remark 4.7
    bytes_up: Numbers = field(default_factory=list)  # sent so far; empty if not counted
    bytes_down: Numbers = field(default_factory=list)


@dataclass(frozen=True, config=_KNOWN)
class BestRecord:
    """The best evaluation of each seed by one metric, which is picked on test scores and therefore optimistic."""

    mean: Interval
    rounds: list[int]  # for each seed that did not diverge


@dataclass(frozen=True, config=_KNOWN)
class AdaptationRecord:
    """Newcomers' mean metrics by number of adaptation steps, [steps][seeds]."""

    words: str
    steps: list[int]
    mean: dict[str, list[Numbers]]


@dataclass(frozen=True, config=_KNOWN)
class ClassesRecord:
    """Results per class at the end of a run, pooled over the scored samples of all clients: [classes][seeds].

    `recall` is the share of a class's samples that were predicted correctly, `precision` the share of its predictions
    that were correct; NaN without samples or predictions.
    """

    num_samples: list[int]  # per class, for the first seed that did not diverge
    recall: list[Numbers]
    precision: list[Numbers]


@dataclass(frozen=True, config=_KNOWN)
class ScoreRecord:
    """One scoring applied to one algorithm, from the first evaluation to the last.

    The clients' values in the last evaluation are the rows of `clients.parquet` with this `score`. If all seeds
    diverge, `evaluations` end there and `best` is empty.
    """

    name: str
    scoring: dict[str, Any]
    words: str
    flag: str
    evaluations: list[EvaluationRecord]
    best: dict[str, BestRecord]
    newcomers: AdaptationRecord | None = None
    classes: ClassesRecord | None = None  # for a classification


@dataclass(frozen=True, config=_KNOWN)
class BoundRecord:
    """A convergence theorem's bound after these numbers of rounds; if empty, `words` gives the reason."""

    words: str
    rounds: list[int]
    values: Numbers


@dataclass(frozen=True, config=_KNOWN)
class DivergenceRecord:
    """The first nonfinite update of one seed. From that event on, the seed's values are NaN."""

    seed: int
    round: int  # in which it arrived, from 1
    event: int  # from 0
    client: str
    stage: str  # the part of the update, such as "local steps"


@dataclass(frozen=True, config=_KNOWN)
class EndRecord:
    """A seed that a controller ended, with the round and the reason. Its numbers do not change afterwards."""

    seed: int
    round: int
    reason: str


@dataclass(frozen=True, config=_KNOWN)
class AlgorithmRecord:
    """One algorithm of a run: its configuration, its cost and its scores."""

    name: str
    recipe: str
    definition: dict[str, Any]
    citations: list[str]  # keys of BibTeX entries, or the entries of imported code
    mode: Literal["synchronous", "asynchronous"]
    num_rounds: int
    num_events: int
    seconds: dict[Literal["compile", "train", "evaluate"], float]
    bytes_up: float  # in total, averaged over seeds
    bytes_down: float
    num_dropped: list[int]  # updates that were too stale, for each seed
    num_skipped: list[int]  # nonfinite updates, for each seed
    scores: list[ScoreRecord]
    personal_number: str = ""  # the name of the shown personal number, such as APFL's mixing weight
    staleness: dict[str, list[int]] = field(default_factory=dict)  # "staleness" and "count", for the first seed
    active: dict[str, Numbers] = field(default_factory=dict)  # "time" and "share" of active clients, for the first seed
    bound: BoundRecord | None = None  # on the stationarity, if requested
    divergences: list[DivergenceRecord] = field(default_factory=list)  # one for each seed that diverged
    ended: list[EndRecord] = field(default_factory=list)  # one for each seed that a controller ended early


@dataclass(frozen=True, config=_KNOWN)
class TrialRecord:
    """One choice of options and its score on validation data: None if a seed diverged."""

    options: dict[str, Any]  # by dotted names: `lr`, `objective.strength`
    score: float | None  # the mean over seeds
    of_seeds: Numbers  # empty if a seed diverged
    loss: float | None  # on the same data; among equal scores, the lowest loss is chosen


@dataclass(frozen=True, config=_KNOWN)
class TunedAlgorithm:
    """The search for the options of one algorithm: all trials in order, and the choice."""

    algorithm: str
    search: Literal["grid", "random"]
    num_combinations: int  # at the start of the search; a random search tries a part of them
    metric: str
    words: str  # a description of the scoring
    before: dict[str, Any]  # the algorithm's own values of these options
    chosen: dict[str, Any]
    trials: list[TrialRecord]
    warnings: list[str]  # for example, if a chosen value is at the edge of its range

    def of(self, options: dict[str, Any]) -> TrialRecord | None:
        """Return the trial of these options, if there was one."""
        return next((trial for trial in self.trials if trial.options == options), None)


@dataclass(frozen=True, config=_KNOWN)
class TuningRecord:
    """The contents of `tuning.json`: a search on validation data, split off the clients' training data."""

    share: float  # of each client's training data
    seed: int  # of the validation split
    seeds: list[int]  # of the runs
    algorithms: list[TunedAlgorithm]


@dataclass(frozen=True, config=_KNOWN)
class ReachedRecord:
    """The cost of reaching a target by one score: means over the seeds that reached it, None if none did.

    `time` is virtual, and `bytes` are those sent up and down; None if they were not counted.
    """

    algorithm: str
    score: str
    num_reached: int  # seeds
    rounds: Interval | None
    time: Interval | None
    bytes: Interval | None


@dataclass(frozen=True, config=_KNOWN)
class TargetRecord:
    """A value of a metric, its origin, and the cost at which each score reached it.

    A seed reaches it at the first evaluation that is as good, so more frequent evaluations give more precise costs.
    """

    metric: str
    value: float
    words: str
    scores: list[ReachedRecord]


@dataclass(frozen=True, config=_KNOWN)
class FederationRecord:
    """A summary of the data."""

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
    local_baseline: str | None  # the scores of local training and of the global model
    global_baseline: str | None
    table: list[ScoreRow]  # for each metric in turn
    tuning: TuningRecord | None = None
    target: TargetRecord | None = None  # by the headline metric


RUN = TypeAdapter(RunRecord)
TUNING = TypeAdapter(TuningRecord)


def read_results(folder: Path) -> RunRecord:
    """Read the results of a run folder, or raise an error that describes the problem."""
    path = folder / "results.json"
    if not path.exists():
        raise ValueError(
            f"No results.json in {folder}. Give the folder of a finished run, or finish it: personax resume {folder}"
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
        raise ValueError(f"Invalid results in {path}: {where}: {first['msg']}. Rerun the experiment.") from None


def _table(content: bytes) -> dict[str, Any]:
    """Return the table in a JSON file; empty if there is none."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
