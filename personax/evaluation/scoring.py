"""Scoring as a value: the model, the clients, the adaptation and the data of an evaluation."""

from typing import Literal

from personax.sharing import Patterns, Sharing, as_patterns
from personax.values import Static, require_count, require_nonnegative, require_one_of, value

MODELS = {
    "global": "the shared model as it is",
    "localized": "the client's own iterate after the local steps of its next visit, before any averaging",
    "adapted": "the shared model after {steps} of size {lr:g}{each}",
    "personal": "the personal model that the client keeps",
    "recomputed": "the objective's personal model, recomputed from the shared one in {rounds}, step size {lr:g}{each}",
    "local": "the part of the client's mixture that is its own",
    "own_copy": "the client's mixture with its own copy of the shared model, from before it was averaged",
}
DIVIDED = {  # the same where a part of the model is personal: `whole` is the client's model
    "localized": "the client's own iterate, with its own {part}, after the local steps of its next visit",
    "adapted": "{whole} after {steps} of size {lr:g}{each}",
    "personal": "{whole}",
    "recomputed": "{whole}, where {part} is first trained in {rounds}, step size {lr:g}{each}, with the shared part "
    "fixed",
}
COMPUTED = ("localized", "adapted", "recomputed")  # of every algorithm; the others are those of `objective.models`


@value
class Scoring:
    """The model that is scored, of which clients, on which data, after which adaptation.

    `model`:

    - `"global"`: the shared model as it is.
    - `"localized"`: the client's own iterate after its local steps from the shared model, before averaging; SCAFFOLD's
      with its corrections (APFL section 5). The batches are those of the client's next visit in a run with this key.
    - `"adapted"`: the shared model after `num_steps` gradient steps of size `lr`: Fallah (3), gMeta (7), "FedAvg +
      update". No steps leave it as it is.
    - `"personal"`: the personal model that the client keeps: APFL's mixture, theta of the Moreau envelope, the model of
      local training.
    - `"recomputed"`: the objective's own personal model, made from the shared one, and the client's state where it has
      one, with `num_steps` fresh batches: the Moreau envelope's inner problem (at its own step size), steps of the
      client's v (APFL (7); a newcomer's weight is the initial one), ARUBA's refinement (`lr` multiplies its learned
      step sizes: 1 leaves them), gradient steps of size `lr` for the others.
    - `"local"`: APFL's v alone.
    - `"own_copy"`: the mixture with the client's own copy of the shared model, of objectives that keep it.

    Adaptation takes shuffled batches of `batch_size` of the client's training data. `adapt_on="test"` takes them from
    the data that is scored, as Fallah's section 5 has it: see `fallah_scoring`. `clients` are `"all"`, the `"cohort"`
    of the last round, or those `"held_out"`, the federation's newcomers. `score_on` is the `"test"` data, the
    `"training"` data (metrics are then called `train_...`) or `"both"`. `weighting` is that of the mean over clients.

    `tunes` names the parameters that the steps of `"adapted"` move, frozen ones too; by default all that are trained.

    Where a part of the model is personal (see `Sharing`), a client's model is the shared part with the client's own
    part. The shared part alone is no model of anybody, so there is no `"global"` one. A newcomer's personal part starts
    at the common initial value and has to be trained: `"recomputed"` does that with the shared part fixed.
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
            raise ValueError(f"`adapt_on` is for models that are adapted, got {self.model!r}. Leave it out.")
        if self.tunes and self.model != "adapted":
            raise ValueError(f"`tunes` is for models that are 'adapted', got {self.model!r}. Leave it out.")
        if self.is_kept and self.clients == "held_out":
            raise ValueError(
                f"Clients held out of training keep no {self.model!r} model. "
                "Score one that is 'adapted' or 'recomputed'."
            )

    @property
    def can_adapt(self) -> bool:
        """True if the model takes adaptation steps; their number may be zero."""
        return self.model in ("adapted", "recomputed")

    @property
    def adapts(self) -> bool:
        """True if the client's data changes the model before it is scored."""
        return self.model == "recomputed" or (self.can_adapt and self.num_steps > 0)

    @property
    def is_stateless(self) -> bool:
        """True if the model is the shared one, or steps from it: no state of the client or the algorithm is needed."""
        return self.model in ("global", "adapted")

    @property
    def is_kept(self) -> bool:
        """True if the client keeps the model as its own state."""
        return self.model in ("personal", "local", "own_copy")

    @property
    def reads_test(self) -> bool:
        """True if a client's test data is scored or adapted to."""
        return self.score_on != "training" or self.adapt_on == "test"

    @property
    def flag(self) -> str:
        """A warning for readers, or nothing."""
        leaks = self.adapts and self.adapt_on == "test" and self.score_on != "training"
        return "adapted on the data that is scored" if leaks else ""

    def describe(self, sharing: Sharing = Sharing()) -> str:
        """State the scoring in words, for a model that is divided in this way."""
        count = lambda thing, plural="s": f"{self.num_steps} {thing}{'' if self.num_steps == 1 else plural}"
        each = f", each on {self.batch_size} of its {self.adapt_on} samples" if self.num_steps else ""
        tuned = f" of {_listed(self.tunes)} alone" if self.tunes else ""
        words = {"steps": count("gradient step") + tuned, "rounds": count("batch", "es"), "lr": self.lr, "each": each}
        words |= _words_of_part(self, sharing)
        form = DIVIDED[self.model] if sharing.personal and self.model in DIVIDED else MODELS[self.model]
        model = form.format(**words)
        if sharing.frozen and not sharing.personal:
            model += f"; {_listed(sharing.frozen)} as it was at the start" + (" but for these steps" if tuned else "")
        whose = {"all": "all clients", "cohort": "the last cohort", "held_out": "clients held out of training"}
        scored = {"both": "test and training data"}.get(self.score_on, f"{self.score_on} data")
        mean = {"uniform": "averaged equally over clients", "samples": "averaged over clients by their scored samples"}
        flagged = f" NOTE: {self.flag}." if self.flag else ""
        return f"{model}; scored on the {scored} of {whose[self.clients]}, {mean[self.weighting]}.{flagged}"


def _listed(patterns: Patterns) -> str:
    return ", ".join(f"`{pattern}`" for pattern in patterns)


def _words_of_part(scoring: Scoring, sharing: Sharing) -> dict[str, str]:
    """The words for a personal part: whose it is, and what becomes of a newcomer's."""
    part = _listed(sharing.personal)
    if scoring.clients == "held_out":
        return {"part": f"{part}, from the common initial value,", "whole": "the newcomer's model"}
    own = f"the shared part with the client's own {part} (at its initial value for a client that was never visited)"
    return {"part": part, "whole": own}


def fallah_scoring(lr: float = 0.01, num_steps: int = 1, batch_size: int = 40) -> Scoring:
    """Fallah section 5: a step "with respect to the test data", scored on all of it; flagged wherever it shows.

    >>> import personax as px
    >>> px.fallah_scoring(lr=0.01).flag
    'adapted on the data that is scored'
    """
    return Scoring("adapted", num_steps, lr, batch_size, adapt_on="test")
