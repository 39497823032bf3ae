"""Oort: a controller that selects clients by their losses and their speed, and explores others."""

from typing import NamedTuple

import numpy as np

from personax.simulation.control import Decision, Observed, State, any_run
from personax.values import CONTROLLERS, require, require_count, require_nonnegative, value

__all__ = ["Oort"]


class Explored(NamedTuple):
    """The explored clients, with the utility, the round and the duration of their last visit."""

    client: np.ndarray
    utility: np.ndarray
    round: np.ndarray
    duration: np.ndarray


def scores_of(explored: Explored, round: int, preferred: float, clip: float, penalty: float) -> np.ndarray:
    """Return the scores of explored clients in a round, counted from 1, with a preferred duration.

    >>> explored = Explored(np.arange(2), np.array([1.0, 3.0]), np.array([1, 2]), np.array([8.0, 1.0]))
    >>> scores_of(explored, round=1, preferred=4.0, clip=1.0, penalty=2.0).tolist()  # log 1 = 0
    [0.0, 1.0]
    """
    utility, duration = explored.utility, explored.duration
    clipped = np.minimum(utility, _quantile(utility, clip))
    spread = utility.max() - utility.min()
    statistical = (clipped - utility.min()) / (spread if spread > 0 else 1.0)
    score = statistical + np.sqrt(0.1 * np.log(round) / np.maximum(explored.round, 1))
    slow = duration > preferred
    return np.where(slow, score * (preferred / np.where(slow, duration, 1.0)) ** penalty, score)


@CONTROLLERS.register(
    summary="Selects clients by their losses and their speed, and explores others",
    source="Lai 2021",
    citations=("lai2021",),
)
@value
class Oort:
    """Oort (Lai 2021): select clients with high losses and fast devices, and explore new ones.

    An explored client i with n_i samples, whose last visit was in round L(i) and took t_i of virtual time, has the
    statistical utility U_i = n_i sqrt(mean of its squared losses) and in round R the score

        ((min(U_i, c) - min U) / (max U - min U) + sqrt(0.1 log R / L(i))) (T / t_i)^penalty [t_i > T],

    where c is the `clip` quantile of the utilities and the preferred duration T a quantile of all clients' durations.
    The cohort has an explored part, drawn in proportion to the scores among the clients with at least `cutoff` times
    the score of the last one that fits, and a part of new clients, drawn in proportion to their expected speed. The
    share of new clients begins at `explore` and is multiplied by `decay` at each decision, down to `least_explore`; it
    is 0 when all clients have been explored.

    The pacer starts with the quantile `preferred`. Every `pace` decisions it compares the utility of the explored part
    in the last `pace` decisions with that in the `pace` before: it raises the quantile by `pace_gain` if the two differ
    by less than a tenth of the latter, and lowers it if they differ by more than five times.

    The rule, and all default values, are those of the authors' code (SymbioticLab/Oort); the paper's own text was not
    available. Departures from the code:

    - A client's losses are those of the model that it downloads, on all its training samples, before local training.
      The code takes them during local training.
    - New clients are drawn by their expected speed alone, as in the paper's Algorithm 1. The code draws them by numbers
      of samples, reduced for slow clients, among five times as many as are needed.
    - The last score that fits is that of the last client of the explored part; in the code, of the next one. The least
      utility is normalized to 0; in the code, to slightly more.
    - Clients that are stopped by a deadline or by over-selection count as explored, with the mean utility of the
      clients that reported, as in the code, and with their expected duration.
    - Only clients that are online are selected. No client is excluded after a number of rounds, as by default in the
      code.

    >>> Oort().explore
    0.9
    """

    explore: float = 0.9
    decay: float = 0.95
    least_explore: float = 0.2
    penalty: float = 2.0
    preferred: float = 0.1
    pace: int = 20
    pace_gain: float = 0.05
    clip: float = 0.98
    cutoff: float = 0.7

    needs_score = False
    needs_losses = True
    selects = True
    check = any_run

    def __post_init__(self) -> None:
        for name in ("explore", "decay", "least_explore", "preferred", "pace_gain", "clip", "cutoff"):
            require(lambda v: (v >= 0) & (v <= 1), name, getattr(self, name), "lie in [0, 1]")
        require_nonnegative("penalty", self.penalty)
        require_count("pace", self.pace)

    def begin(self) -> State:
        """Return the state before the first round, in which no client is known."""
        explored = {"client": [], "utility": [], "round": [], "duration": []}
        asked = {"asked": [], "losses": [], "exploited": [], "gains": []}
        return {"explore": self.explore, "preferred": self.preferred, **explored, **asked}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Record the utility of the last cohort, and draw the next one."""
        state, explored = self._paced(state, seen), _noted(state, seen)
        everyone, size = np.arange(len(seen.samples)), seen.cohort_size
        able = seen.available(size)
        new = np.setdiff1d(everyone, explored.client)
        explore = max(state["explore"] * self.decay, self.least_explore) if len(new) else 0.0
        num = min(int(size * (1 - explore)), len(np.intersect1d(explored.client, able)))
        exploited = self._exploited(explored, able, num, state["preferred"], seen)
        new = np.intersect1d(new, able)
        fresh = _draw(seen.rng, new, 1 / np.maximum(seen.expected(new), 1e-9), min(size - num, len(new)))
        rest = np.setdiff1d(able, np.concatenate([exploited, fresh]))
        others = _draw(seen.rng, rest, np.ones(len(rest)), size - num - len(fresh))
        cohort = np.concatenate([exploited, fresh, others])
        table = {name: column.tolist() for name, column in explored._asdict().items()}
        asked = {"asked": cohort.tolist(), "losses": seen.losses(cohort).root_mean_square.tolist()}
        return Decision({**state, **table, **asked, "explore": explore, "exploited": exploited.tolist()}, cohort=cohort)

    def _exploited(
        self, explored: Explored, able: np.ndarray, num: int, preferred: float, seen: Observed
    ) -> np.ndarray:
        """Draw `num` of the explored clients that are able to take part, by their scores."""
        if not num:
            return np.zeros(0, int)
        durations = np.asarray(seen.expected(np.arange(len(seen.samples))), float).copy()
        durations[explored.client] = explored.duration
        score = scores_of(explored, seen.round + 1, _quantile(durations, preferred), self.clip, self.penalty)
        there = np.isin(explored.client, able)
        client, score = explored.client[there], score[there]
        last = np.sort(score)[-num]
        kept = score >= self.cutoff * last
        return _draw(seen.rng, client[kept], score[kept], num)

    def _paced(self, state: State, seen: Observed) -> State:
        """Record the mean utility of the explored part, and adapt the preferred duration."""
        losses = dict(zip(state["asked"], state["losses"], strict=True))
        reported = np.intersect1d(seen.members, state["exploited"])
        utility = [float(seen.samples[client]) * losses[client] for client in reported.tolist()]
        gains = [*state["gains"], float(np.mean(utility)) if utility else 0.0]
        preferred, pace = state["preferred"], self.pace
        if len(gains) == 2 * pace:
            before, now = sum(gains[:pace]), sum(gains[pace:])
            if abs(now - before) <= 0.1 * before:
                preferred = min(1.0, preferred + self.pace_gain)
            elif abs(now - before) >= 5 * before:
                preferred = max(self.pace_gain, preferred - self.pace_gain)
            gains = gains[pace:]
        return {**state, "preferred": preferred, "gains": gains}


def _noted(state: State, seen: Observed) -> Explored:
    """The explored clients, with those of the last round: members that reported, and those that were stopped."""
    names = ("utility", "round", "duration")
    table = dict(zip(state["client"], zip(*(state[name] for name in names), strict=True), strict=True))
    losses = dict(zip(state["asked"], state["losses"], strict=True))
    durations = dict(zip(seen.members.tolist(), seen.durations.tolist(), strict=True))
    utility = {client: float(seen.samples[client]) * losses[client] for client in durations if client in losses}
    for client, its in utility.items():
        table[client] = (its, seen.round, durations[client])
    mean = float(np.mean(list(utility.values()))) if utility else 0.0
    for client, duration in zip(seen.stopped.tolist(), seen.expected(seen.stopped).tolist(), strict=True):
        table[client] = (mean, seen.round, duration)
    columns = zip(*table.values(), strict=True) if table else ((), (), ())
    return Explored(np.asarray(list(table), int), *(np.asarray(column, float) for column in columns))


def _quantile(values: np.ndarray, share: float) -> float:
    """The entry below which this share of the values lies."""
    return float(np.sort(values)[min(int(len(values) * share), len(values) - 1)])


def _draw(rng: np.random.Generator, among: np.ndarray, weight: np.ndarray, num: int) -> np.ndarray:
    """Draw `num` entries without replacement, in proportion to weights that may be zero."""
    weight = np.maximum(weight, 1e-12)
    return rng.choice(among, num, replace=False, p=weight / weight.sum()) if num else np.zeros(0, int)
