"""Scoring as a value: the model, the clients, the adaptation and the data of an evaluation."""

from typing import Literal

from personax.objectives.divided import Divided
from personax.sharing import Patterns, Sharing, as_patterns, listed
from personax.values import Static, require_count, require_nonnegative, require_one_of, value

MODELS = {
    "global": "the shared model, unchanged",
    "localized": "the client's own iterate after the local steps of its next visit, before averaging",
    "adapted": "the shared model after {steps} of size {lr:g}{each}",
    "personal": "the client's personal model",
    "recomputed": "the objective's personal model, recomputed from the shared one in {rounds}, step size {lr:g}{each}",
    "local": "the client's own part of its mixture",
    "own_copy": "the client's mixture with its own copy of the shared model from before the average",
}
DIVIDED = {  # the same if a part of the model is personal: `whole` is the client's model
    "localized": "the client's own iterate, with its own {part}, after the local steps of its next visit",
    "adapted": "{whole} after {steps} of size {lr:g}{each}",
    "personal": "{whole}",
    "recomputed": "{whole}, after {part} is trained in {rounds}, step size {lr:g}{each}, with the shared part fixed",
}
KEPT = "the personal model that the client computed at its last step, from {whole}"  # replaces "personal" above
THEN = ", and the objective's personal model is then computed from there on the same batches"  # after "recomputed"
COMPUTED = ("localized", "adapted", "recomputed")  # available for every algorithm; `objective.models` has the others


@value
class Scoring:
    """A scoring: the model to score, the clients, the adaptation, and the data.

    `model`:

    - `"global"`: the shared model, unchanged.
    - `"localized"`: the client's own iterate after its local steps from the shared model, before averaging; SCAFFOLD's
      with its corrections (APFL section 5). The batches are those of the client's next visit in a run with this key.
    - `"adapted"`: the shared model after `num_steps` gradient steps of size `lr`: Fallah (3), gMeta (7), "FedAvg +
      update". With 0 steps, it is unchanged.
    - `"personal"`: the client's personal model: APFL's mixture, theta of the Moreau envelope, the model of local
      training.
    - `"recomputed"`: the objective's personal model, recomputed from the shared model and the client's state, if any,
      with `num_steps` fresh batches: the Moreau envelope's inner problem (with its own step size), steps of the
      client's v (APFL (7); a newcomer has the initial weight), ARUBA's refinement (`lr` multiplies its learned step
      sizes; 1 leaves them unchanged), or gradient steps of size `lr` for other objectives.
    - `"local"`: APFL's v alone.
    - `"own_copy"`: the mixture with the client's own copy of the shared model, for objectives that keep it.

    Adaptation uses shuffled batches of `batch_size` of the client's training data, or of the scored data with
    `adapt_on="test"`, as in Fallah's section 5 (see `fallah_scoring`). `clients` is `"all"`, the `"cohort"` of the last
    round, or `"held_out"`, the federation's newcomers. `score_on` is `"test"`, `"training"` (metrics are then named
    `train_...`) or `"both"`. `weighting` is the weighting of the mean over clients.

    `tunes` names the parameters that the steps of `"adapted"` change, including frozen ones; by default all trained
    ones, and those that the algorithm's `sharing` names as `tuned`.

    If a part of the model is personal (see `Sharing`), a client's model is the shared part with the client's own part.
    The shared part alone is not a complete model, so there is no `"global"` model. A newcomer's personal part starts at
    the common initial value and must be trained: `"recomputed"` does that with the shared part fixed.
    """

    model: Static[Literal["global", "localized", "adapted", "personal", "recomputed", "local", "own_copy"]] = "adapted"
    num_steps: Static[int] = 1
    lr: float = 0.01
    batch_size: Static[int] = 40
    adapt_on: Static[Literal["training", "test"]] = "training"
    clients: Static[Literal["all", "cohort", "held_out"]] = "all"
    score_on: Static[Literal["test", "training", "both"]] = "test"
    weighting: Static[Literal["uniform", "samples"]] = "uniform"
    tunes: Static[Patterns] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tunes", as_patterns(self.tunes, "tunes"))
        require_one_of("model", self.model, tuple(MODELS))
        require_count("num_steps", self.num_steps, 0)
        require_nonnegative("lr", self.lr)
        require_count("batch_size", self.batch_size)
        require_one_of("adapt_on", self.adapt_on, ("training", "test"))
        require_one_of("clients", self.clients, ("all", "cohort", "held_out"))
        require_one_of("score_on", self.score_on, ("test", "training", "both"))
        require_one_of("weighting", self.weighting, ("uniform", "samples"))
        if self.adapt_on == "test" and not self.can_adapt:
            raise ValueError(f"`adapt_on` applies only to adapted models, got {self.model!r}. Omit it.")
        if self.tunes and self.model != "adapted":
            raise ValueError(f"`tunes` applies only to 'adapted' models, got {self.model!r}. Omit it.")
        if self.is_kept and self.clients == "held_out":
            raise ValueError(
                f"Held-out clients have no {self.model!r} model. Score an 'adapted' or 'recomputed' model."
            )

    @property
    def can_adapt(self) -> bool:
        """Return True if the model takes adaptation steps, whose number may be zero."""
        return self.model in ("adapted", "recomputed")

    @property
    def adapts(self) -> bool:
        """Return True if the client's data changes the model before it is scored."""
        return self.model == "recomputed" or (self.can_adapt and self.num_steps > 0)

    @property
    def is_stateless(self) -> bool:
        """Return True if the model depends only on the shared model and plain steps, without any state."""
        return self.model in ("global", "adapted")

    @property
    def is_kept(self) -> bool:
        """Return True if the model is part of the client's state."""
        return self.model in ("personal", "local", "own_copy")

    @property
    def reads_test(self) -> bool:
        """Return True if a client's test data is scored or used for adaptation."""
        return self.score_on != "training" or self.adapt_on == "test"

    @property
    def flag(self) -> str:
        """Return a warning for readers, or an empty string."""
        leaks = self.adapts and self.adapt_on == "test" and self.score_on != "training"
        return "adapted on the scored data" if leaks else ""

    def describe(self, of: Divided | None = None) -> str:
        """Describe the scoring of the models of an objective, or by default of undivided models."""
        sharing = Sharing() if of is None else of.sharing
        count = lambda thing, plural="s": f"{self.num_steps} {thing}{'' if self.num_steps == 1 else plural}"
        each = f", each on {self.batch_size} of its {self.adapt_on} samples" if self.num_steps else ""
        steps = count("gradient step") + self._moved(sharing)
        words = {"steps": steps, "rounds": count("batch", "es"), "lr": self.lr, "each": each}
        model = self._form(of).format(**words, **_words_of_part(self, sharing))
        if sharing.frozen and not sharing.personal:
            before = "before these steps, " if self.adapts and self._moves_frozen(sharing) else ""
            model += f"; {before}{listed(sharing.frozen)} at its initial value"
        whose = {"all": "all clients", "cohort": "the last cohort", "held_out": "clients held out of training"}
        scored = {"both": "test and training data"}.get(self.score_on, f"{self.score_on} data")
        mean = {"uniform": "averaged equally over clients", "samples": "averaged over clients by their scored samples"}
        flagged = f" NOTE: {self.flag}." if self.flag else ""
        return f"{model}; scored on the {scored} of {whose[self.clients]}, {mean[self.weighting]}.{flagged}"

    def _form(self, of: Divided | None) -> str:
        """The words for the model, with fields for its numbers."""
        if of is None or not of.sharing.personal or self.model not in DIVIDED:
            return MODELS[self.model]
        if self.model == "personal" and of.objective.kept_model == "latest":
            return KEPT
        return DIVIDED[self.model] + (THEN if self.model == "recomputed" and not of.objective.is_at_iterate else "")

    def _moved(self, sharing: Sharing) -> str:
        """The words for the parameters that the steps move; "" for all that are trained."""
        if self.tunes == ("*",) or (not self.tunes and sharing.tuned and sharing.tuned == sharing.frozen):
            return " of all parameters"
        if self.tunes:
            return f" of {listed(self.tunes)} alone"
        return f" of the trained parameters and {listed(sharing.tuned)}" if sharing.tuned else ""

    def _moves_frozen(self, sharing: Sharing) -> bool:
        moved = self.tunes or sharing.tuned
        return moved == ("*",) or not set(moved).isdisjoint(sharing.frozen)


def _words_of_part(scoring: Scoring, sharing: Sharing) -> dict[str, str]:
    """Describe a personal part: the client's own, or that of a newcomer."""
    part = listed(sharing.personal)
    if scoring.clients == "held_out":
        whole = f"the shared part with the newcomer's {part}, which starts at the common initial value"
        return {"part": "that", "whole": whole}
    own = f"the shared part with the client's own {part} (at its initial value for a client that was never trained)"
    return {"part": part, "whole": own}


def fallah_scoring(lr: float = 0.01, num_steps: int = 1, batch_size: int = 40) -> Scoring:
    """Make the scoring of Fallah section 5: a step "with respect to the test data", scored on all of it, and flagged.

    >>> import personax as px
    >>> px.fallah_scoring(lr=0.01).flag
    'adapted on the scored data'
    """
    return Scoring("adapted", num_steps, lr, batch_size, adapt_on="test")
