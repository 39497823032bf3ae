"""Scores per client and seed, with intervals, paired differences and the scoring that produced them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from personax.evaluation.scoring import Scoring


class Interval(NamedTuple):
    """A mean over seeds and its confidence interval, which one seed does not have (NaN)."""

    mean: float
    low: float
    high: float
    num_seeds: int


def interval(of_seeds: np.ndarray | float, level: float = 0.95) -> Interval:
    """The t-interval of a mean: `m ± t s / sqrt(n)`, with s the standard deviation of n seeds, t of n - 1 degrees.

    >>> show(interval(np.array([0.91, 0.93, 0.92])), "accuracy")
    '92.0 ± 2.5'
    """
    seeds = np.atleast_1d(of_seeds)
    mean, num = float(seeds.mean()), len(seeds)
    if num == 1:
        return Interval(mean, np.nan, np.nan, 1)
    from scipy.special import stdtrit  # an eighth of a second to import

    half = float(stdtrit(num - 1, (1 + level) / 2) * seeds.std(ddof=1) / np.sqrt(num))
    return Interval(mean, mean - half, mean + half, num)


def higher_is_better(metric: str) -> bool:
    """Return True if a larger value of a metric is better: not for names that end in loss or error."""
    return not metric.endswith(("loss", "error"))


def is_share(metric: str) -> bool:
    """Return True if a metric is a share, which people read in %: its name ends in accuracy."""
    return metric.endswith("accuracy")


def show(number: Interval | float | None, metric: str) -> str:
    """A number, or a mean with half its interval, for people: accuracies in %."""
    if number is None:
        return ""
    scale, form = (100, ".1f") if is_share(metric) else (1, ".4g")
    if not isinstance(number, Interval):
        return f"{scale * number:{form}}"
    half = f" ± {scale * (number.high - number.mean):{form}}" if number.num_seeds > 1 else ""
    return f"{scale * number.mean:{form}}{half}"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Each metric of each scored client, [clients] or [seeds, clients], and the scoring that gave it.

    `clients` are their stable ids, `num_samples` how many samples of each were scored (`num_train_samples` those of
    metrics called `train_...`), `num_events` and `time` (virtual) where the run stood.
    """

    scoring: Scoring
    metrics: dict[str, np.ndarray]
    clients: np.ndarray
    num_samples: np.ndarray
    num_train_samples: np.ndarray
    num_events: int | np.ndarray
    time: float | np.ndarray

    def of(self, name: str) -> np.ndarray:
        """One metric of each client."""
        if name not in self.metrics:
            raise ValueError(f"There is no metric {name!r}; there are {', '.join(self.metrics)}.")
        return self.metrics[name]

    def mean(self, name: str) -> np.ndarray:
        """The mean over clients, by the scoring's weighting; one number for each seed."""
        return np.average(self.of(name), axis=-1, weights=self._weights(name))

    def std(self, name: str) -> np.ndarray:
        """The standard deviation across clients, by the same weighting."""
        away = np.square(self.of(name) - self.mean(name)[..., None])
        return np.sqrt(np.average(away, axis=-1, weights=self._weights(name)))

    def worst_decile(self, name: str) -> np.ndarray:
        """The mean over the tenth of the clients (at least one) with the worst numbers."""
        return self._tenth(name, best=False)

    def best_decile(self, name: str) -> np.ndarray:
        """The mean over the tenth of the clients (at least one) with the best numbers."""
        return self._tenth(name, best=True)

    def interval(self, name: str) -> Interval:
        """The mean and its 95 % confidence interval over seeds."""
        return interval(self.mean(name))

    def difference(self, other: "Evaluation", name: str) -> Interval:
        """By how much this mean is above the other's, seed by seed (paired), with its 95 % interval."""
        self._require_paired(other)
        return interval(self.mean(name) - other.mean(name))

    def share_better(self, other: "Evaluation", name: str) -> np.ndarray:
        """The share of clients that are strictly better off than under the other; ties count for neither."""
        self._require_paired(other)
        gain = self.of(name) - other.of(name)
        return ((gain > 0) if higher_is_better(name) else (gain < 0)).mean(axis=-1)

    def __str__(self) -> str:
        lines = [f"{name:15}{show(self.interval(name), name)}" for name in self.metrics]
        return "\n".join([self.scoring.describe(), *lines])

    def _weights(self, name: str) -> np.ndarray:
        if self.scoring.weighting == "uniform":
            return np.ones_like(self.of(name))
        counts = self.num_train_samples if name.startswith("train_") else self.num_samples
        return np.broadcast_to(counts, self.of(name).shape)

    def _tenth(self, name: str, best: bool) -> np.ndarray:
        ascending = np.sort(self.of(name), axis=-1)
        num = -(-ascending.shape[-1] // 10)
        high_end = best == higher_is_better(name)
        return (ascending[..., -num:] if high_end else ascending[..., :num]).mean(axis=-1)

    def _require_paired(self, other: "Evaluation") -> None:
        mine, theirs = self.clients.shape[:-1], other.clients.shape[:-1]
        if mine != theirs:
            raise ValueError(f"Only the same seeds can be paired, got {mine} and {theirs}. Run both with one set.")
        if not np.array_equal(self.clients, other.clients):
            raise ValueError("Only evaluations of the same clients can be paired. Score both with the same `clients`.")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """Evaluations of one run under one scoring, in order of time: the last beside the best.

    `simulate(..., monitor=Monitor(observer(...), every=...))` leaves them in `result.history`.
    """

    evaluations: Sequence[Evaluation]

    def __post_init__(self) -> None:
        if not self.evaluations:
            raise ValueError("A trajectory needs at least one evaluation. Give `simulate` a `Monitor(observe=...)`.")

    @property
    def last(self) -> Evaluation:
        """The end of the run: what a deployment would have."""
        return self.evaluations[-1]

    def means(self, name: str) -> np.ndarray:
        """The mean over clients at each evaluation, [evaluations] or [evaluations, seeds]."""
        return np.stack([evaluation.mean(name) for evaluation in self.evaluations])

    def best(self, name: str) -> tuple[Interval, np.ndarray]:
        """The best mean of each seed, over seeds, and the number of events at which each seed had it.

        It is chosen by the scored data and so is no estimate of what comes: report it beside the last, not for it.
        """
        means = self.means(name)
        means = np.where(np.isnan(means), -np.inf if higher_is_better(name) else np.inf, means)
        at = means.argmax(axis=0) if higher_is_better(name) else means.argmin(axis=0)
        events = np.stack([np.asarray(evaluation.num_events) for evaluation in self.evaluations])
        pick = lambda table: np.take_along_axis(table, np.expand_dims(at, 0), axis=0)[0]
        return interval(pick(means)), pick(events)


class ScoreRow(NamedTuple):
    """One score of a run: means over seeds; shares of clients that are better off. None: not compared."""

    name: str
    mean: Interval
    std: float
    worst_decile: float
    best_decile: float
    over_local: Interval | None  # paired difference of means
    over_global: Interval | None
    better_than_local: float | None
    better_than_global: float | None
    flag: str


def row_of(name: str, found: Evaluation, local: Evaluation | None, shared: Evaluation | None, metric: str) -> ScoreRow:
    """The row of one evaluation, beside those of local training and of the global model where there are any."""
    number: Callable[[np.ndarray], float] = lambda of_seeds: float(np.mean(of_seeds))
    over = lambda other: None if other is None else found.difference(other, metric)
    better = lambda other: None if other is None else number(found.share_better(other, metric))
    return ScoreRow(
        name,
        found.interval(metric),
        number(found.std(metric)),
        number(found.worst_decile(metric)),
        number(found.best_decile(metric)),
        over(local),
        over(shared),
        better(local),
        better(shared),
        found.scoring.flag,
    )


@dataclass(frozen=True, eq=False)
class Comparison:
    """Algorithms on the same federation and seeds, always beside local training and the global model.

    `local` and `shared` name the evaluations of the models of training alone and of the shared model of all.
    """

    evaluations: dict[str, Evaluation]
    local: str
    shared: str

    def __post_init__(self) -> None:
        for role, name in (("local training", self.local), ("the global model", self.shared)):
            if name not in self.evaluations:
                raise ValueError(
                    f"A comparison always has {role} in it, got {', '.join(self.evaluations)} without {name!r}."
                )
        scored = self.evaluations[self.local].scoring.model, self.evaluations[self.shared].scoring.model
        if scored != ("personal", "global"):
            raise ValueError(
                "Local training is scored by its 'personal' model and the shared one as 'global', "
                f"got {scored[0]!r} of {self.local} and {scored[1]!r} of {self.shared}."
            )

    def rows(self, metric: str = "accuracy") -> list[ScoreRow]:
        """A row for each algorithm, in the order given."""
        beside = (self.evaluations[self.local], self.evaluations[self.shared], metric)
        return [row_of(name, found, *beside) for name, found in self.evaluations.items()]

    def table(self, metric: str = "accuracy") -> str:
        """The rows as text, accuracies in %, and below it what each measured."""
        width = max(map(len, self.evaluations)) + 2
        layout = "{:{width}}{:>13}{:>8}{:>8}{:>8}{:>14}{:>14}{:>10}{:>10}{}".format
        titles = (metric, "std", "worst", "best", "over local", "over global", "> local", "> global", "")
        lines = [layout("", *titles, width=width)]
        for row in self.rows(metric):
            numbers = [row.mean, row.std, row.worst_decile, row.best_decile, row.over_local, row.over_global]
            shares = [
                "" if share is None else f"{share:.0%}" for share in (row.better_than_local, row.better_than_global)
            ]
            flag = f"  ! {row.flag}" if row.flag else ""
            lines.append(layout(row.name, *(show(n, metric) for n in numbers), *shares, flag, width=width))
        measured: dict[str, list[str]] = {}
        for name, found in self.evaluations.items():
            measured.setdefault(found.scoring.describe(), []).append(name)
        notes = [f"{', '.join(names)}: {words}" for words, names in measured.items()]
        return "\n".join([*lines, "", "worst, best: the tenth of the clients at either end.", *notes])
