"""Controllers: early stopping, targets and budgets, and the selection of clients by what is measured."""

from typing import Any

import numpy as np

from personax.simulation.control import Controller, Decision, Observed, State
from personax.values import CONTROLLERS, require, require_count, require_nonnegative, require_positive, value

__all__ = ["EarlyStopping", "Oort", "PowerOfChoice", "RunBudget", "Target", "Together"]


@CONTROLLERS.register(summary="Ends a run whose validation score no longer improves", source="common practice")
@value
class EarlyStopping:
    """End the run when the validation score has not improved for `patience` decisions.

    A score improves if it is better than the best before it by more than `least_gain`.

    >>> EarlyStopping(patience=3).needs_score
    True
    """

    patience: int = 5
    least_gain: float = 0.0

    needs_score = True
    needs_losses = False
    selects = False

    def __post_init__(self) -> None:
        require_count("patience", self.patience)
        require_nonnegative("least_gain", self.least_gain)

    def begin(self) -> State:
        """Return the state before the first score."""
        return {"best": None, "waited": 0}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Compare the score with the best before it."""
        improved = state["best"] is None or seen.gain > state["best"] + self.least_gain
        best, waited = (seen.gain, 0) if improved else (state["best"], state["waited"] + 1)
        words = f"the validation score has not improved for {waited} decisions"
        return Decision({"best": best, "waited": waited}, words if waited >= self.patience else "")


@CONTROLLERS.register(summary="Ends a run that has reached a validation score", source="common practice")
@value
class Target:
    """End the run when the validation score is at least `score` (at most, if lower is better).

    >>> Target(0.9).score
    0.9
    """

    score: float

    needs_score = True
    needs_losses = False
    selects = False

    def begin(self) -> State:
        """Return no state."""
        return {}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Compare the score with the target."""
        sign = 1 if seen.higher_is_better else -1
        return Decision(
            state, f"the validation score has reached {self.score:g}" if seen.gain >= sign * self.score else ""
        )


@CONTROLLERS.register(summary="Ends a run whose virtual time or bytes are spent", source="common practice")
@value
class RunBudget:
    """End the run at the first decision at which this virtual `time`, or this number of `bytes`, has been spent.

    Bytes are those of all clients together, up and down.

    >>> RunBudget(bytes=1e9).time is None
    True
    """

    time: float | None = None
    bytes: float | None = None

    needs_score = False
    needs_losses = False
    selects = False

    def __post_init__(self) -> None:
        require_positive("time", self.time)
        require_positive("bytes", self.bytes)
        if self.time is None and self.bytes is None:
            raise ValueError("A budget needs `time` or `bytes`. Give at least one.")

    def begin(self) -> State:
        """Return no state."""
        return {}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Compare what has been spent with the budget."""
        for spent, most, what in ((seen.time, self.time, "virtual time"), (seen.bytes, self.bytes, "bytes")):
            if most is not None and spent >= most:
                return Decision(state, f"the budget of {most:g} {what} is spent")
        return Decision(state)


@CONTROLLERS.register(
    summary="Selects the clients with the highest loss among candidates", source="Cho 2020", citations=("cho2020",)
)
@value
class PowerOfChoice:
    """Power-of-Choice (Cho 2020, pow-d): the cohort is the clients with the highest losses of `num_candidates`.

    The candidates are drawn without replacement with probabilities proportional to their numbers of samples; their
    losses are those of the server's model on their training data. With `every=1` this happens in each round.
    Departures from the paper: none known, but the rule was checked against summaries and other implementations, not
    against the paper itself. The candidates' downloads are not counted as bytes.

    >>> PowerOfChoice(num_candidates=20).selects
    True
    """

    num_candidates: int

    needs_score = False
    needs_losses = True
    selects = True

    def __post_init__(self) -> None:
        require_count("num_candidates", self.num_candidates)

    def begin(self) -> State:
        """Return no state."""
        return {}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Draw candidates and keep those with the highest losses."""
        least, most = seen.cohort_size, len(seen.samples)
        require(lambda v: (v >= least) & (v <= most), "num_candidates", self.num_candidates, f"lie in {least}..{most}")
        share = seen.samples / seen.samples.sum()
        candidates = seen.rng.choice(most, self.num_candidates, replace=False, p=share)
        order = np.argsort(-seen.losses(candidates).mean, kind="stable")
        return Decision(state, cohort=candidates[order[: seen.cohort_size]])


@CONTROLLERS.register(
    summary="Selects clients by their losses and their speed, and explores others",
    source="Lai 2021",
    citations=("lai2021",),
)
@value
class Oort:
    """Oort (Lai 2021): clients whose losses and speed promise the most, and a share of clients not seen before.

    A client i that took part in round L(i), for the last time and for t_i of virtual time, has at round R the utility

        (clip(U_i) - min) / (max - min) + sqrt(0.1 log R / L(i)),   U_i = n_i sqrt(mean of its squared losses),

    multiplied by (T / t_i)^penalty if t_i > T. U_i is clipped at its `clip` quantile, and T is the `preferred` quantile
    of the durations. A share of the cohort, which begins at `explore` and is multiplied by `decay` at each decision
    down to `least_explore`, consists of new clients, drawn in proportion to their numbers of samples. The others are
    drawn in proportion to the utility, among those with at least `cutoff` of that of the last that fits.

    Departures: U_i takes the losses of the server's model after the round and not those seen during local training, as
    the server measures them; T stays at its quantile (the pacer is left out), and nobody is blacklisted. The rule and
    the constant 0.1 are those of the authors' code (SymbioticLab/Oort); the paper's text was not available.

    >>> Oort().explore
    0.9
    """

    explore: float = 0.9
    decay: float = 0.98
    least_explore: float = 0.2
    penalty: float = 2.0
    preferred: float = 0.8
    clip: float = 0.95
    cutoff: float = 0.95

    needs_score = False
    needs_losses = True
    selects = True

    def __post_init__(self) -> None:
        for name in ("explore", "decay", "least_explore", "preferred", "clip", "cutoff"):
            require(lambda v: (v >= 0) & (v <= 1), name, getattr(self, name), "lie in [0, 1]")
        require_nonnegative("penalty", self.penalty)

    def begin(self) -> State:
        """Return the state before the first round: nobody is known."""
        return {"explore": self.explore, "client": [], "utility": [], "round": [], "duration": []}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Note the utility of the last cohort, then draw the next."""
        known = _noted(state, seen)
        explore = max(self.explore if not seen.round else state["explore"] * self.decay, self.least_explore)
        clients, size = np.asarray(known["client"], int), seen.cohort_size
        num = min(int(size * (1 - explore)), len(clients))
        chosen = self._exploited(known, num, seen) if num else np.zeros(0, int)
        new = np.setdiff1d(np.arange(len(seen.samples)), clients)
        fresh = _draw(seen.rng, new, seen.samples[new], min(size - num, len(new)))
        rest = np.setdiff1d(clients, chosen)
        others = _draw(seen.rng, rest, np.ones(len(rest)), size - len(chosen) - len(fresh))
        return Decision({**known, "explore": explore}, cohort=np.concatenate([chosen, fresh, others]))

    def _exploited(self, known: State, num: int, seen: Observed) -> np.ndarray:
        """Draw known clients by their utility."""
        utility, last, duration = (np.asarray(known[name], float) for name in ("utility", "round", "duration"))
        clipped = np.minimum(utility, np.quantile(utility, self.clip))
        spread = clipped.max() - clipped.min()
        score = (clipped - clipped.min()) / (spread if spread > 0 else 1.0)
        score = score + np.sqrt(0.1 * np.log(seen.round + 1) / np.maximum(last, 1))
        limit = np.quantile(duration, self.preferred)
        score = score * np.where(duration > limit, (limit / np.maximum(duration, 1e-12)) ** self.penalty, 1.0)
        order = np.argsort(-score, kind="stable")
        able = order[score[order] >= self.cutoff * score[order[num - 1]]]
        return np.asarray(known["client"], int)[_draw(seen.rng, able, score[able], num)]


def _noted(state: State, seen: Observed) -> State:
    """The state with the utilities, the rounds and the durations of the clients that have just reported."""
    table: dict[int, tuple[float, int, float]] = dict(
        zip(state["client"], zip(state["utility"], state["round"], state["duration"], strict=True), strict=True)
    )
    if len(seen.members):
        utility = seen.samples[seen.members] * seen.losses(seen.members).root_mean_square
        for client, *entry in zip(seen.members.tolist(), utility.tolist(), seen.durations.tolist(), strict=True):
            table[client] = (entry[0], seen.round, entry[1])
    columns = list(zip(*table.values(), strict=True)) or [(), (), ()]
    named = zip(("utility", "round", "duration"), map(list, columns), strict=True)
    return {**state, "client": list(table), **dict(named)}


def _draw(rng: np.random.Generator, among: np.ndarray, weight: np.ndarray, num: int) -> np.ndarray:
    """Draw `num` entries without replacement, in proportion to weights that may be zero."""
    weight = np.maximum(weight, 1e-12)
    return rng.choice(among, num, replace=False, p=weight / weight.sum()) if num else np.zeros(0, int)


@CONTROLLERS.register(
    summary="Several controllers: any of them ends the run, the last that selects does", source="personax"
)
@value
class Together:
    """Several controllers. Any of them ends the run; the last that chooses a cohort chooses it.

    >>> both = Together((EarlyStopping(patience=3), RunBudget(time=1000.0)))
    >>> both.needs_score, both.selects
    (True, False)
    """

    controllers: tuple[Controller, ...]

    def __post_init__(self) -> None:
        if not self.controllers:
            raise ValueError("`controllers` must name at least one controller.")

    @property
    def needs_score(self) -> bool:
        """True if one of them needs it."""
        return any(one.needs_score for one in self.controllers)

    @property
    def needs_losses(self) -> bool:
        """True if one of them needs them."""
        return any(one.needs_losses for one in self.controllers)

    @property
    def selects(self) -> bool:
        """True if one of them does."""
        return any(one.selects for one in self.controllers)

    def begin(self) -> State:
        """Return the states of all."""
        return {"states": [one.begin() for one in self.controllers]}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Ask each in turn."""
        found = [one.decide(own, seen) for one, own in zip(self.controllers, state["states"], strict=True)]
        cohorts: list[Any] = [decision.cohort for decision in found if decision.cohort is not None]
        end = next((decision.end for decision in found if decision.end), "")
        return Decision({"states": [decision.state for decision in found]}, end, cohorts[-1] if cohorts else None)
