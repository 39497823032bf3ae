"""Empirical risk: federated averaging and local training."""

from collections.abc import Callable

from personax.objectives import objective
from personax.objectives.objective import Answer, Memory, Theorems, Visit
from personax.typing import Batch, Extra, LossFn, Params, Personal, Scalar, Shared, StatisticsFn
from personax.values import OBJECTIVES, value


@OBJECTIVES.register(
    summary="The client's own loss at the shared model",
    source="McMahan 2017; Fallah 2020, (1) and (2); PersA-FL 2023, Algorithm 2, Option A",
    citations=("mcmahan2017", "fallah2020", "toghani2023"),
)
@value
class Erm:
    """The client's loss at the shared model, `f_i(w)`: FedAvg.

    McMahan 2017; Fallah (1), (2); PersA-FL Algorithm 2, Option A.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.Erm().default_scoring()
    {'model': 'global'}
    """

    federated = True
    is_plain = True
    is_at_iterate = True
    kept_model = "none"
    default_scoring = objective.score_global
    newcomer_model = objective.newcomer_personalizes
    gradients_per_step = objective.one_gradient
    personal_number = objective.no_number
    citations = objective.no_citations
    roles = objective.outer_only
    init_personal = objective.nothing_kept
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed
    models = objective.only_global
    personalize = objective.fine_tune
    gradient = objective.loss_gradient

    def tracked(self) -> "Erm":
        return self

    def theorem(self, theorems: Theorems[Answer]) -> Answer:
        return theorems.plain()


@OBJECTIVES.register(
    summary="The client's own loss at its own model",
    source="A baseline, not from a paper",
    citations=(),
)
@value
class LocalOnly:
    """The client's loss at its own model, `f_i(v_i)`. Nothing is shared.

    v_i starts at the initial model. This is the baseline that every personalized method has to beat.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.LocalOnly().federated
    False
    """

    federated = False
    is_plain = True
    is_at_iterate = True
    kept_model = "trained"
    default_scoring = objective.score_personal
    newcomer_model = objective.newcomer_personalizes
    gradients_per_step = objective.one_gradient
    tracked = objective.no_single_function
    theorem = objective.no_theorem
    personal_number = objective.no_number
    citations = objective.no_citations
    roles = objective.outer_only
    init_shared = objective.nothing_kept
    project = objective.unconstrained
    absorb = objective.nothing_absorbed
    gradient = objective.loss_gradient

    def init_personal(self, params: Params) -> Personal:
        return params

    def begin(self, anchor: Params, personal: Personal) -> tuple[Params, Memory]:
        return personal, ()

    def finish(
        self, end: Params, memory: Memory, visit: Visit, full_gradient: Callable[[Params], Params]
    ) -> tuple[Personal, Extra]:
        return end, ()

    def models(self, params: Params, personal: Personal) -> dict[str, Params]:
        return {"global": params, "personal": personal}

    def personalize(
        self,
        loss: LossFn,
        params: Params,
        personal: Personal,
        shared: Shared,
        batches: Batch,
        lr: Scalar,
        statistics: StatisticsFn | None = None,
    ) -> Params:
        return objective.descend(loss, personal, batches, lr, statistics)[0]
