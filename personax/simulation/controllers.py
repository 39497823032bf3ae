"""Controllers: early stopping, targets, budgets, and the selection of clients by their losses."""

from typing import Any

import numpy as np

from personax.simulation.control import Controller, Decision, Observed, State, any_run
from personax.simulation.oort import Oort
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
    check = any_run

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
        words = f"the validation score has not improved for {waited} decision{'s' if waited > 1 else ''}"
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
    check = any_run

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
    check = any_run

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

    The candidates are drawn without replacement with probabilities proportional to their numbers of samples, and each
    reports the loss of the server's model on its training data. With `every=1` this happens in each round. The model
    is sent to all candidates, which counts as traffic.

    Departures from the paper: candidates are drawn among the clients that are online, so there are fewer if fewer are
    online. Reporting a loss takes no virtual time. The rule was checked against summaries of the paper and other
    implementations, because its full text was not available.

    >>> PowerOfChoice(num_candidates=20).selects
    True
    """

    num_candidates: int

    needs_score = False
    needs_losses = True
    selects = True

    def __post_init__(self) -> None:
        require_count("num_candidates", self.num_candidates)

    def check(self, num_clients: int, cohort_size: int) -> None:
        """Require at least as many candidates as the cohort has, and at most all clients."""
        within = lambda v: (v >= cohort_size) & (v <= num_clients)
        must = f"be between the cohort size, {cohort_size}, and the number of clients, {num_clients}"
        require(within, "num_candidates", self.num_candidates, must)

    def begin(self) -> State:
        """Return no state."""
        return {}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Draw candidates and keep those with the highest losses."""
        able = seen.available(seen.cohort_size)
        share = seen.samples[able] / seen.samples[able].sum()
        candidates = seen.rng.choice(able, min(self.num_candidates, len(able)), replace=False, p=share)
        order = np.argsort(-seen.losses(candidates).mean, kind="stable")
        return Decision(state, cohort=candidates[order[: seen.cohort_size]])


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

    def check(self, num_clients: int, cohort_size: int) -> None:
        """Check all of them."""
        for one in self.controllers:
            one.check(num_clients, cohort_size)

    def begin(self) -> State:
        """Return the states of all."""
        return {"states": [one.begin() for one in self.controllers]}

    def decide(self, state: State, seen: Observed) -> Decision:
        """Ask each in turn."""
        found = [one.decide(own, seen) for one, own in zip(self.controllers, state["states"], strict=True)]
        cohorts: list[Any] = [decision.cohort for decision in found if decision.cohort is not None]
        end = next((decision.end for decision in found if decision.end), "")
        return Decision({"states": [decision.state for decision in found]}, end, cohorts[-1] if cohorts else None)
