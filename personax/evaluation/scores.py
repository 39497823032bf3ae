"""Scores per client and seed, with intervals, paired differences and the scoring that produced them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from personax.evaluation.scoring import Scoring
from personax.sharing import Sharing
from personax.values import optional_import
from personax.values.notebook import html_table


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % confidence interval; None for one seed, and for means that are not finite.

    `num_seeds` is the number of seeds that the mean is over: seeds that diverged are left out.

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
        """Half the width of the interval."""
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
    from scipy.special import stdtrit  # an eighth of a second to import

    with np.errstate(over="ignore"):  # of a model that is about to diverge
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
    half = "" if number.half is None else f" ± {scale * number.half:{form}}"
    return f"{scale * number.mean:{form}}{half}"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Each metric of each scored client, [clients] or [seeds, clients], and the scoring that gave it.

    `clients` are their stable ids, `num_samples` how many samples of each were scored (`num_train_samples` those of
    metrics called `train_...`), `num_events` and `time` (virtual) where the run stood.

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
    sharing: Sharing = Sharing()

    @property
    def words(self) -> str:
        """The scoring in words."""
        return self.scoring.describe(self.sharing)

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
        with np.errstate(over="ignore", invalid="ignore"):  # of a model that is about to diverge
            away = np.square(self.of(name) - self.mean(name)[..., None])
            return np.sqrt(np.average(away, axis=-1, weights=self._weights(name)))

    def worst_decile(self, name: str) -> np.ndarray:
        """The mean over the tenth of the clients (at least one) with the worst numbers."""
        return self._tenth(name, best=False)

    def best_decile(self, name: str) -> np.ndarray:
        """The mean over the tenth of the clients (at least one) with the best numbers."""
        return self._tenth(name, best=True)

    def interval(self, name: str) -> Interval:
        """The mean and its 95 % confidence interval over the seeds whose means are finite."""
        return _finite_interval(self.mean(name))

    def difference(self, other: "Evaluation", name: str) -> Interval:
        """By how much this mean is above the other's, with its 95 % interval, paired over the seeds that both have.

        A seed whose mean is not finite, such as one that diverged, is in neither.
        """
        self._require_paired(other)
        mine, theirs = self.mean(name), other.mean(name)
        paired = np.isfinite(mine) & np.isfinite(theirs)
        return _finite_interval(np.subtract(mine, theirs, out=np.full_like(mine, np.nan), where=paired))

    def share_better(self, other: "Evaluation", name: str) -> np.ndarray:
        """The share of clients that are strictly better off than under the other; ties count for neither.

        NaN for a seed whose mean is not finite in either.
        """
        self._require_paired(other)
        paired = np.isfinite(self.mean(name)) & np.isfinite(other.mean(name))
        mine, theirs = self.of(name), other.of(name)
        better = mine > theirs if higher_is_better(name) else mine < theirs
        return np.where(paired, better.mean(axis=-1), np.nan)

    def without_seeds(self, seeds: Sequence[int]) -> "Evaluation":
        """The same with NaN in place of the numbers of these seeds, given by their positions."""
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
        """The mean over seeds with its interval, and the means over finite seeds of three others."""
        others = (self.std(name), self.worst_decile(name), self.best_decile(name))
        return self.interval(name), *map(_mean_of_finite, others)  # pyright: ignore[reportReturnType]

    def to_pandas(self) -> Any:
        """Return the numbers of clients as a data frame of pandas: a row for each client, and seed where there are."""
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
            raise ValueError(f"Only the same seeds can be paired, got {mine} and {theirs}. Run both with one set.")
        if not np.array_equal(self.clients, other.clients):
            raise ValueError("Only evaluations of the same clients can be paired. Score both with the same `clients`.")


def _finite_interval(of_seeds: np.ndarray) -> Interval:
    """The interval over the seeds with finite means; without any, a mean of NaN over no seeds."""
    seeds = np.atleast_1d(of_seeds)
    finite = seeds[np.isfinite(seeds)]
    return interval(finite) if len(finite) else Interval(np.nan, None, None, 0)


def _mean_of_finite(of_seeds: np.ndarray) -> float:
    """The mean over the seeds with finite numbers; NaN without any."""
    seeds = np.atleast_1d(of_seeds)
    finite = seeds[np.isfinite(seeds)]
    return float(np.mean(finite)) if len(finite) else np.nan


def best_evaluations(means: np.ndarray, metric: str) -> np.ndarray:
    """Return the position of each seed's best mean among its evaluations; `means` is [evaluations, seeds].

    It is picked by the scores themselves and is therefore optimistic: report it beside the last, never instead.
    """
    return np.nan_to_num(means if higher_is_better(metric) else -means, nan=-np.inf).argmax(axis=0)


@dataclass(frozen=True)
class ScoreRow:
    """One score by one metric: its mean over seeds, spread over clients, and paired comparison with the baselines.

    `over_local` and `over_global` are differences of means, `better_than_local` and `better_than_global` shares of
    clients that are better off; None where there is no baseline of the same clients. `num_lost` is how many seeds have
    no finite mean, for example because they diverged: they are left out of all numbers, and the row is not ranked.
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
        """Return True if the row may be compared with others: it has no flag and all its seeds."""
        return not (self.flag or self.num_lost)

    @property
    def seeds_left(self) -> str:
        """The number of seeds that the numbers are of, such as "2 of 3 seeds"; empty if of all or none."""
        left = self.mean.num_seeds
        return f"{left} of {left + self.num_lost} seeds" if left and self.num_lost else ""

    def numbers(self) -> dict[str, Any]:
        """The row as plain numbers and strings, by column: an interval gives its mean, `..._low` and `..._high`."""
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
        """The row as text, by column; "(!)" marks a flagged score."""
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
    """Explain the columns of a table of one metric, and warn if its intervals are of too few seeds."""
    metric, num_seeds = rows[0].metric, max(row.mean.num_seeds for row in rows)
    unit = ", in %" if is_share(metric) else ""
    over = "; ± half of the 95 % interval over seeds" if num_seeds > 1 else ", of one seed"
    words = [f"{metric}: mean over clients{unit}{over}.", "std: across clients."]
    words.append("worst, best: mean of the tenth of the clients at either end.")
    if any(row.better_than_local is not None or row.better_than_global is not None for row in rows):
        words.append("> local, > global: clients that are better off than with local training, with FedAvg's model.")
    return [" ".join(words), *few_seeds(rows)]


def few_seeds(rows: Sequence[ScoreRow]) -> list[str]:
    """A note if there are intervals over two seeds, which hardly limit the mean; else nothing.

    The t-interval of two seeds is 12.7 standard errors to either side, of three 4.3, of five 2.8.
    """
    if not any(row.mean.num_seeds == 2 for row in rows):
        return []
    return [
        "NOTE: two seeds are too few for an interval, which is then 12.7 standard errors wide to either side. Use at "
        "least three; five have 2.8."
    ]


def explain_scores(described: Sequence[tuple[str, str]]) -> list[str]:
    """One line for each protocol, with the names of the scores that it applies to.

    >>> explain_scores([("A", "the shared model."), ("B", "the personal model."), ("C", "the shared model.")])
    ['A, C: the shared model.', 'B: the personal model.']
    """
    names: dict[str, list[str]] = {}
    for name, words in described:
        names.setdefault(words, []).append(name)
    return [f"{', '.join(scores)}: {words}" for words, scores in names.items()]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of algorithms on the same federation and seeds, beside local training and the global model.

    `local` and `shared` name the evaluations of local training's models and of the shared model of all; None if they
    were not trained. `algorithms` gives the algorithm of a score that is not named after it.

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
                raise ValueError(f"`{field_name}` names no evaluation: {name!r}. The evaluations are {known}.")
            if name is not None and (scored := self.evaluations[name].scoring.model) != model:
                raise ValueError(f"`{field_name}` must name a score of the {model!r} model; {name!r} is of {scored!r}.")

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
        """The metric to show where there is room for one."""
        return "accuracy" if "accuracy" in self.metrics else self.metrics[0]

    def to_pandas(self) -> Any:
        """Return the rows of all metrics as a data frame of pandas; intervals are columns `..._low` and `..._high`."""
        rows = [row.numbers() for metric in self.metrics for row in self.rows(metric)]
        return optional_import("pandas", "`to_pandas`", "pandas").DataFrame(rows)

    @property
    def metrics(self) -> list[str]:
        """The metrics of all scores."""
        return list(dict.fromkeys(name for found in self.evaluations.values() for name in found.metrics))

    def rows(self, metric: str = "accuracy") -> list[ScoreRow]:
        """One row for each score that has the metric, in the order given."""
        if metric not in self.metrics:
            raise ValueError(f"There is no metric {metric!r}; there are {', '.join(self.metrics)}.")
        return [self._row(name, found, metric) for name, found in self.evaluations.items() if metric in found.metrics]

    def table(self, metric: str = "accuracy") -> str:
        """The rows as text, accuracies in %, followed by what each score measures."""
        rows = [row.cells() for row in self.rows(metric)]
        width = max([len(name) + 6 for name in self.evaluations] + [len(row[""]) + 2 for row in rows])
        layout = "{:{width}}{:>13}{:>8}{:>8}{:>8}{:>14}{:>14}{:>10}{:>10}".format
        lines = [layout(*rows[0], width=width), *(layout(*row.values(), width=width) for row in rows)]
        return "\n".join([*lines, "", *self._notes(metric)])

    def _notes(self, metric: str) -> list[str]:
        """Sentences that explain the columns and what each score measures."""
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
        """The baseline of this name if it scores the same clients by the same metric, in a seed that both have."""
        other = None if name is None else self.evaluations[name]
        if other is None or metric not in other.metrics or not np.array_equal(other.clients, found.clients):
            return None
        return other if np.any(np.isfinite(found.mean(metric)) & np.isfinite(other.mean(metric))) else None
