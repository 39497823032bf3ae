"""Scores per client and seed, with intervals, paired differences and the scoring that produced them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from personax.evaluation.scoring import Scoring
from personax.objectives.divided import Divided
from personax.values import optional_import
from personax.values.notebook import html_table


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % confidence interval, which is None for one seed and for nonfinite means.

    `num_seeds` is the number of averaged seeds; seeds that diverged are left out.

    >>> import personax as px
    >>> interval = px.Interval(mean=0.92, low=0.90, high=0.94, num_seeds=5)
    >>> round(interval.half, 3), interval.is_above(0.89)
    (0.02, True)
    """

    mean: float
    low: float | None
    high: float | None
    num_seeds: int

    @property
    def half(self) -> float | None:
        """Return half the width of the interval."""
        return None if self.high is None else self.high - self.mean

    def is_above(self, number: float) -> bool:
        """Return True if the whole interval is known and lies above a number."""
        return self.low is not None and self.low > number

    def is_below(self, number: float) -> bool:
        """Return True if the whole interval is known and lies below a number."""
        return self.high is not None and self.high < number


def interval(of_seeds: Sequence[float] | np.ndarray | float, level: float = 0.95) -> Interval:
    """Return the t-interval of a mean: `m ± t s / sqrt(n)`, s the standard deviation of n seeds, t of n - 1 degrees.

    >>> show(interval(np.array([0.91, 0.93, 0.92])), "accuracy")
    '92.0 ± 2.5'
    """
    seeds = np.atleast_1d(of_seeds)
    mean, num = float(seeds.mean()), len(seeds)
    if num == 1 or not np.isfinite(mean):
        return Interval(mean, None, None, num)
    from scipy.special import stdtrit  # takes an eighth of a second to import

    with np.errstate(over="ignore"):  # the model may be about to diverge
        half = float(stdtrit(num - 1, (1 + level) / 2) * seeds.std(ddof=1) / np.sqrt(num))
    return Interval(mean, mean - half, mean + half, num)


def higher_is_better(metric: str) -> bool:
    """Return True if higher is better: for all metrics except those whose names end in loss or error."""
    return not metric.endswith(("loss", "error"))


def is_share(metric: str) -> bool:
    """Return True if a metric is a share, shown in %: its name ends in accuracy."""
    return metric.endswith("accuracy")


def show(number: Interval | float | None, metric: str) -> str:
    """Format a number, or a mean with half its interval; accuracies are in %."""
    if number is None:
        return ""
    scale, form = (100, ".1f") if is_share(metric) else (1, ".4g")
    if not isinstance(number, Interval):
        return f"{scale * number:{form}}"
    half = "" if number.half is None else f" ± {scale * number.half:{form}}"
    return f"{scale * number.mean:{form}}{half}"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of each scored client, [clients] or [seeds, clients], and the scoring that produced them.

    `clients` are their stable ids; `num_samples` is the number of scored samples of each (`num_train_samples` for
    metrics named `train_...`); `num_events` and the virtual `time` are the state of the run.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2)
    >>> schedule, keys = px.rounds(3, num_rounds=2, key=jax.random.key(0)), jax.random.split(jax.random.key(0), 2)
    >>> result = px.simulate(algorithm, task, fed, schedule, key=keys)
    >>> scores = px.evaluate(algorithm, task, fed, result, px.Scoring("global"), key=jax.random.key(1))
    >>> scores.of("accuracy").shape, scores.mean("accuracy").shape  # [seeds, clients], [seeds]
    ((2, 3), (2,))
    """

    scoring: Scoring
    metrics: dict[str, np.ndarray]
    clients: np.ndarray
    num_samples: np.ndarray
    num_train_samples: np.ndarray
    num_events: int | np.ndarray
    time: float | np.ndarray
    divided: Divided | None = None  # the scored objective; None if models are whole

    @property
    def words(self) -> str:
        """Describe the scoring."""
        return self.scoring.describe(self.divided)

    def of(self, name: str) -> np.ndarray:
        """Return one metric of each client."""
        if name not in self.metrics:
            raise ValueError(f"Unknown metric {name!r}. The metrics are {', '.join(self.metrics)}.")
        return self.metrics[name]

    def mean(self, name: str) -> np.ndarray:
        """Return the mean over clients for each seed, with the scoring's weighting."""
        return np.average(self.of(name), axis=-1, weights=self._weights(name))

    def std(self, name: str) -> np.ndarray:
        """Return the standard deviation across clients for each seed, with the scoring's weighting."""
        with np.errstate(over="ignore", invalid="ignore"):  # the model may be about to diverge
            away = np.square(self.of(name) - self.mean(name)[..., None])
            return np.sqrt(np.average(away, axis=-1, weights=self._weights(name)))

    def worst_decile(self, name: str) -> np.ndarray:
        """Return the mean over the worst tenth of the clients (at least one)."""
        return self._tenth(name, best=False)

    def best_decile(self, name: str) -> np.ndarray:
        """Return the mean over the best tenth of the clients (at least one)."""
        return self._tenth(name, best=True)

    def interval(self, name: str) -> Interval:
        """Return the mean and its 95 % confidence interval over the seeds with finite means."""
        return _finite_interval(self.mean(name))

    def difference(self, other: "Evaluation", name: str) -> Interval:
        """Return this mean minus the other's with its 95 % interval, paired over the seeds that both have.

        Seeds with a nonfinite mean, such as those that diverged, are left out.
        """
        self._require_paired(other)
        mine, theirs = self.mean(name), other.mean(name)
        paired = np.isfinite(mine) & np.isfinite(theirs)
        return _finite_interval(np.subtract(mine, theirs, out=np.full_like(mine, np.nan), where=paired))

    def share_better(self, other: "Evaluation", name: str) -> np.ndarray:
        """Return the share of clients that are strictly better off than with the other; ties do not count.

        It is NaN for seeds with a nonfinite mean in either.
        """
        self._require_paired(other)
        paired = np.isfinite(self.mean(name)) & np.isfinite(other.mean(name))
        mine, theirs = self.of(name), other.of(name)
        better = mine > theirs if higher_is_better(name) else mine < theirs
        return np.where(paired, better.mean(axis=-1), np.nan)

    def without_seeds(self, seeds: Sequence[int]) -> "Evaluation":
        """Replace the values of these seeds, given by position, by NaN."""
        lost = np.isin(np.arange(len(self.clients)), seeds)[:, None]
        return replace(self, metrics={name: np.where(lost, np.nan, of) for name, of in self.metrics.items()})

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {show(self.interval(name), name)}" for name in self.metrics)
        return f"<Evaluation: {means}; {self._size()}>"

    def _repr_html_(self) -> str:
        rows = [(name, *(show(of, name) for of in self._statistics(name))) for name in self.metrics]
        heads = ("", "mean", "std over clients", "worst tenth", "best tenth")
        return html_table(f"Evaluation: {self._size()}", rows, heads, [self.words])

    def _size(self) -> str:
        clients, seeds = self.clients.shape[-1], self.clients.size // self.clients.shape[-1]
        return f"{clients:,} clients" + (f", {seeds} seeds" if self.clients.ndim > 1 else "")

    def _statistics(self, name: str) -> tuple[Interval, float, float, float]:
        """Return the mean over seeds with its interval, and three other statistics averaged over finite seeds."""
        others = (self.std(name), self.worst_decile(name), self.best_decile(name))
        return self.interval(name), *map(_mean_of_finite, others)  # pyright: ignore[reportReturnType]

    def to_pandas(self) -> Any:
        """Return a pandas data frame with a row for each client, and for each seed if there are several."""
        clients = self.clients.shape[-1]
        seeds = {"seed": np.repeat(np.arange(self.clients.shape[0]), clients)} if self.clients.ndim > 1 else {}
        counts = {"client": self.clients, "num_samples": self.num_samples, "num_train_samples": self.num_train_samples}
        columns = {name: np.ravel(of) for name, of in {**counts, **self.metrics}.items()}
        return optional_import("pandas", "`to_pandas`", "pandas").DataFrame({**seeds, **columns})

    def __str__(self) -> str:
        lines = [f"{name:15}{show(self.interval(name), name)}" for name in self.metrics]
        return "\n".join([self.words, *lines])

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
            raise ValueError(
                f"Only evaluations of the same seeds can be paired, got {mine} and {theirs}. Use the same seeds."
            )
        if not np.array_equal(self.clients, other.clients):
            raise ValueError("Only evaluations of the same clients can be paired. Score both with the same `clients`.")


def _finite_interval(of_seeds: np.ndarray) -> Interval:
    """Return the interval over the seeds with finite means, or a mean of NaN over no seeds."""
    seeds = np.atleast_1d(of_seeds)
    finite = seeds[np.isfinite(seeds)]
    return interval(finite) if len(finite) else Interval(np.nan, None, None, 0)


def _mean_of_finite(of_seeds: np.ndarray) -> float:
    """Return the mean over the seeds with finite values; NaN if there are none."""
    seeds = np.atleast_1d(of_seeds)
    finite = seeds[np.isfinite(seeds)]
    return float(np.mean(finite)) if len(finite) else np.nan


def best_evaluations(means: np.ndarray, metric: str) -> np.ndarray:
    """Return the position of each seed's best mean among its evaluations; `means` is [evaluations, seeds].

    The best round is picked on test scores and is therefore optimistic: report it beside the last, never instead.
    """
    return np.nan_to_num(means if higher_is_better(metric) else -means, nan=-np.inf).argmax(axis=0)


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one score: its mean over seeds, spread over clients, and paired comparison with the baselines.

    `over_local` and `over_global` are differences of means, `better_than_local` and `better_than_global` shares of
    clients that are better off; they are None without a baseline for the same clients. `num_lost` is the number of
    seeds without a finite mean, for example because they diverged: they are left out of all numbers, and the row is not
    ranked.
    """

    algorithm: str
    score: str
    metric: str
    mean: Interval
    std: float
    worst_decile: float
    best_decile: float
    over_local: Interval | None
    over_global: Interval | None
    better_than_local: float | None
    better_than_global: float | None
    flag: str
    num_lost: int = 0

    @property
    def is_ranked(self) -> bool:
        """Return True if the row may be ranked: it has no flag, and no seed is missing."""
        return not (self.flag or self.num_lost)

    @property
    def seeds_left(self) -> str:
        """Return the number of remaining seeds, such as "2 of 3 seeds"; empty if all or none remain."""
        left = self.mean.num_seeds
        return f"{left} of {left + self.num_lost} seeds" if left and self.num_lost else ""

    def numbers(self) -> dict[str, Any]:
        """Return the row as plain values by column; an interval becomes its mean, `..._low` and `..._high`."""
        table: dict[str, Any] = {}
        for one in fields(self):
            found = getattr(self, one.name)
            if not one.name.startswith(("mean", "over")):
                table[one.name] = found
                continue
            ends = (None, None, None) if found is None else (found.mean, found.low, found.high)
            table |= zip((one.name, f"{one.name}_low", f"{one.name}_high"), ends, strict=True)
        return {**table, "num_seeds": self.mean.num_seeds}

    def cells(self) -> dict[str, str]:
        """Return the row as text by column; "(!)" marks a flagged score."""
        mean = show(self.mean, self.metric) if self.mean.num_seeds else "not finite"
        numbers = {"std": self.std, "worst": self.worst_decile, "best": self.best_decile}
        numbers = {title: number if self.mean.num_seeds else None for title, number in numbers.items()}
        numbers |= {"over local": self.over_local, "over global": self.over_global}
        shares = {"> local": self.better_than_local, "> global": self.better_than_global}
        return {
            "": self.score + (" (!)" if self.flag else "") + (f" ({self.seeds_left})" if self.seeds_left else ""),
            self.metric: mean,
            **{title: show(number, self.metric) for title, number in numbers.items()},
            **{title: "" if share is None else f"{share:.0%}" for title, share in shares.items()},
        }


def explain_columns(rows: Sequence[ScoreRow]) -> list[str]:
    """Explain the columns of a metric's table, and warn if its intervals have too few seeds."""
    metric, num_seeds = rows[0].metric, max(row.mean.num_seeds for row in rows)
    unit = ", in %" if is_share(metric) else ""
    over = "; ± half of the 95 % interval over seeds" if num_seeds > 1 else ", for one seed"
    words = [f"{metric}: mean over clients{unit}{over}.", "std: across clients."]
    words.append("worst, best: mean over the worst and the best tenth of the clients.")
    if any(row.better_than_local is not None or row.better_than_global is not None for row in rows):
        words.append(
            "> local, > global: share of clients that are better off than with local training or with FedAvg's model."
        )
    return [" ".join(words), *few_seeds(rows)]


def few_seeds(rows: Sequence[ScoreRow]) -> list[str]:
    """Return a note if intervals are over only two seeds, which makes them very wide.

    The t-interval extends 12.7 standard errors to either side for two seeds, 4.3 for three, and 2.8 for five.
    """
    if not any(row.mean.num_seeds == 2 for row in rows):
        return []
    return [
        "NOTE: two seeds are too few for an interval, which extends 12.7 standard errors to either side. Use at least "
        "three seeds; with five, it extends 2.8."
    ]


def explain_scores(described: Sequence[tuple[str, str]]) -> list[str]:
    """Return one line per scoring, with the names of its scores.

    >>> explain_scores([("A", "the shared model."), ("B", "the personal model."), ("C", "the shared model.")])
    ['A, C: the shared model.', 'B: the personal model.']
    """
    names: dict[str, list[str]] = {}
    for name, words in described:
        names.setdefault(words, []).append(name)
    return [f"{', '.join(scores)}: {words}" for words, scores in names.items()]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of algorithms on the same federation and seeds, with the baselines of local training and the global model.

    `local` and `shared` name the evaluations of local training and of the global model; None if they were not trained.
    `algorithms` gives the algorithm of a score that is not named after it.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> task = px.classification(px.logistic_regression(10))
    >>> schedule = px.rounds(3, num_rounds=2, key=jax.random.key(0))
    >>> def score(algorithm, model):
    ...     result = px.simulate(algorithm, task, fed, schedule, key=jax.random.key(0))
    ...     return px.evaluate(algorithm, task, fed, result, px.Scoring(model), key=jax.random.key(1))
    >>> local = score(px.local_only(lr=0.1, num_steps=2), "personal")
    >>> shared = score(px.fedavg(lr=0.1, num_steps=2), "global")
    >>> px.Comparison({"Local": local, "FedAvg": shared}, local="Local", shared="FedAvg").local
    'Local'
    """

    evaluations: dict[str, Evaluation]
    local: str | None
    shared: str | None
    algorithms: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for field_name, name, model in (("local", self.local, "personal"), ("shared", self.shared, "global")):
            if name is not None and name not in self.evaluations:
                known = ", ".join(self.evaluations)
                raise ValueError(f"Unknown evaluation {name!r} in `{field_name}`. The evaluations are {known}.")
            if name is not None and (scored := self.evaluations[name].scoring.model) != model:
                raise ValueError(
                    f"`{field_name}` must name a score of the {model!r} model, but {name!r} scores {scored!r}."
                )

    def __repr__(self) -> str:
        metric = self._headline
        shown = [f"{row.score} {show(row.mean, metric)}" for row in self.rows(metric)]
        return f"<Comparison: {metric} of {', '.join(shown)}>"

    def _repr_html_(self) -> str:
        rows = [row.cells() for row in self.rows(self._headline)]
        return html_table(
            "Comparison", [list(row.values()) for row in rows], list(rows[0]), self._notes(self._headline)
        )

    @property
    def _headline(self) -> str:
        """Return the headline metric."""
        return "accuracy" if "accuracy" in self.metrics else self.metrics[0]

    def to_pandas(self) -> Any:
        """Return a pandas data frame with the rows of all metrics; intervals are columns `..._low` and `..._high`."""
        rows = [row.numbers() for metric in self.metrics for row in self.rows(metric)]
        return optional_import("pandas", "`to_pandas`", "pandas").DataFrame(rows)

    @property
    def metrics(self) -> list[str]:
        """Return the metrics of all scores."""
        return list(dict.fromkeys(name for found in self.evaluations.values() for name in found.metrics))

    def rows(self, metric: str = "accuracy") -> list[ScoreRow]:
        """Return one row for each score that has the metric, in the given order."""
        if metric not in self.metrics:
            raise ValueError(f"Unknown metric {metric!r}. The metrics are {', '.join(self.metrics)}.")
        return [self._row(name, found, metric) for name, found in self.evaluations.items() if metric in found.metrics]

    def table(self, metric: str = "accuracy") -> str:
        """Format the rows as text, with accuracies in %, followed by a description of each score."""
        rows = [row.cells() for row in self.rows(metric)]
        width = max([len(name) + 6 for name in self.evaluations] + [len(row[""]) + 2 for row in rows])
        layout = "{:{width}}{:>13}{:>8}{:>8}{:>8}{:>14}{:>14}{:>10}{:>10}".format
        lines = [layout(*rows[0], width=width), *(layout(*row.values(), width=width) for row in rows)]
        return "\n".join([*lines, "", *self._notes(metric)])

    def _notes(self, metric: str) -> list[str]:
        """Return sentences that explain the columns and the scores."""
        notes = explain_scores([(name, found.words) for name, found in self.evaluations.items()])
        return [*explain_columns(self.rows(metric)), *notes]

    def _row(self, name: str, found: Evaluation, metric: str) -> ScoreRow:
        left = np.isfinite(np.atleast_1d(found.mean(metric)))
        number: Callable[[np.ndarray], float] = lambda of_seeds: _mean_of_finite(np.where(left, of_seeds, np.nan))
        local, shared = (self._baseline(baseline, found, metric) for baseline in (self.local, self.shared))
        over = lambda other: None if other is None else found.difference(other, metric)
        better = lambda other: None if other is None else _mean_of_finite(found.share_better(other, metric))
        return ScoreRow(
            self.algorithms.get(name, name),
            name,
            metric,
            found.interval(metric),
            number(found.std(metric)),
            number(found.worst_decile(metric)),
            number(found.best_decile(metric)),
            over(local),
            over(shared),
            better(local),
            better(shared),
            found.scoring.flag,
            int(np.sum(~left)),
        )

    def _baseline(self, name: str | None, found: Evaluation, metric: str) -> Evaluation | None:
        """Return this baseline if it scores the same clients with the same metric in a common seed, otherwise None."""
        other = None if name is None else self.evaluations[name]
        if other is None or metric not in other.metrics or not np.array_equal(other.clients, found.clients):
            return None
        return other if np.any(np.isfinite(found.mean(metric)) & np.isfinite(other.mean(metric))) else None
