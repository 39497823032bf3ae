"""Empirical risk: plain federated averaging, and training alone."""

from collections.abc import Callable

import jax

from personax.objectives import objective
from personax.objectives.objective import Batches, Memory, Visit
from personax.typing import Batch, Extra, LossFn, Params, Personal, Scalar, Shared
from personax.values import value


@value
class Erm:
    """`f_i(w)`: FedAvg (McMahan 2017); Fallah (1), (2); PersA-FL Algorithm 2, Option A.

    Departures from the paper: none.
    """

    federated = True
    roles = objective.outer_only
    init_personal = objective.nothing_kept
    init_shared = objective.nothing_kept
    begin = objective.from_anchor
    project = objective.unconstrained
    finish = objective.keep_memory
    absorb = objective.nothing_absorbed
    models = objective.only_global
    personalize = objective.fine_tune

    def gradient(
        self, loss: LossFn, iterate: Params, memory: Memory, visit: Visit, batches: Batches
    ) -> tuple[Params, Memory]:
        return jax.grad(loss)(iterate, objective.only_batch(batches, "outer")), memory


@value
class LocalOnly:
    """`f_i(v_i)` from the client's own v_i, which starts at the initial model; nothing is shared.

    The baseline of every personalized method. Departures from the paper: none.
    """

    federated = False
    roles = objective.outer_only
    init_shared = objective.nothing_kept
    project = objective.unconstrained
    absorb = objective.nothing_absorbed
    gradient = Erm.gradient

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
        self, loss: LossFn, params: Params, personal: Personal, shared: Shared, batches: Batch, lr: Scalar
    ) -> Params:
        return objective.descend(loss, personal, batches, lr)[0]
