"""Recipes whose objectives have a personal model: one that adapts the shared model, or one beside it."""

from typing import Literal, Unpack

from personax.algorithms.algorithm import Algorithm
from personax.client.local import Local, LocalOptions
from personax.client.step_sizes import StepSize
from personax.curvature import Hvp, relative_difference
from personax.objectives import Ditto, Meta, Mixture, Moreau, Objective
from personax.server import Server, asynchronous, synchronous
from personax.sharing import Patterns
from personax.values import RECIPES, Tuned, TunedShare

HESSIAN_FREE = relative_difference(1e-2)


@RECIPES.register(
    summary="An initialization that adapts well in a few steps: exact, first-order or Hessian-free",
    source="Fallah 2020, Algorithm 1",
    citations=("fallah2020",),
)
def per_fedavg(
    *,
    adapt_lr: Tuned[float],
    lr: Tuned[StepSize | float],
    hvp: Hvp = HESSIAN_FREE,
    num_adapt_steps: int = 1,
    curvature_on: Literal["own", "outer"] = "own",
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """Per-FedAvg: Fallah Algorithm 1; with several adaptation steps, gMeta Algorithm 1.

    `hvp` is `exact`, `first_order` or a finite difference of gradients (Hessian-free); see `px.curvature`. For
    `curvature_on` see `Meta`.

    Departures from the paper: the radius of the Hessian-free default is relative to the vector, see
    `RelativeDifference`.

    >>> import personax as px
    >>> px.per_fedavg(adapt_lr=0.1, lr=0.05, hvp=px.curvature.exact, num_steps=5).objective
    Meta(adapt_lr=0.1, num_adapt_steps=1, hvp=Exact(), curvature_on='own', adapts=())
    """
    return Algorithm(Meta(adapt_lr, num_adapt_steps, hvp, curvature_on), Local(lr, **local), server)


@RECIPES.register(
    summary="Per-FedAvg whose adaptation steps move the head alone",
    source="Raghu 2020; Fallah 2020, Algorithm 1",
    citations=("raghu2020", "fallah2020"),
)
def anil(
    *,
    head: Patterns,
    adapt_lr: Tuned[float],
    lr: Tuned[StepSize | float],
    hvp: Hvp = HESSIAN_FREE,
    num_adapt_steps: int = 1,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """ANIL: Raghu 2020, with Per-FedAvg (Fallah, Algorithm 1) as its outer loop. All parameters are shared.

        F_i(w) = f_i(w - a P grad f_i(w)),     P projects onto the head

    Departures from the paper: that paper is not federated; here each client takes local steps on its F_i, as in
    `per_fedavg`, with the same default `hvp`.

    >>> import personax as px
    >>> px.anil(head="dense_1", adapt_lr=0.1, lr=0.05, num_steps=5).objective.default_scoring()["tunes"]
    ['dense_1']
    """
    return Algorithm(Meta(adapt_lr, num_adapt_steps, hvp, adapts=head), Local(lr, **local), server)


@RECIPES.register(
    summary="Personal models kept near the shared one by a Moreau envelope",
    source="Dinh 2020, Algorithm 1",
    citations=("dinh2020",),
)
def pfedme(
    *,
    strength: Tuned[float],
    lr: Tuned[StepSize | float],
    prox_lr: Tuned[float],
    num_prox_steps: int = 5,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """pFedMe: Dinh 2020, Algorithm 1. The server's `lr` is the paper's beta, `(1 - beta) w + beta mean`.

    All clients train and a sample is aggregated, so use a schedule `rounds(n, ..., num_aggregated=...)`.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.pfedme(strength=1.0, lr=0.1, prox_lr=0.1, num_steps=5).objective
    Moreau(strength=1.0, prox_lr=0.1, num_prox_steps=5, tolerance=None)
    """
    return Algorithm(Moreau(strength, prox_lr, num_prox_steps), Local(lr, **local), server)


@RECIPES.register(
    summary="A mixture of a local and the shared model, with a fixed or learned weight",
    source="APFL 2020, Algorithm 1, (5) and (6)",
    citations=("deng2020",),
)
def apfl(
    *,
    lr: Tuned[StepSize | float],
    mix: TunedShare[float] = 0.01,
    update_mix: Literal["never", "round", "step"] = "round",
    radius: float | None = None,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """APFL: Algorithm 1 and (5), with (6) unless `update_mix` is "never". Departures from the paper: none.

    >>> import personax as px
    >>> px.apfl(lr=0.1, mix=0.5, num_steps=5).objective
    Mixture(mix=0.5, mix_lr=None, update_mix='round', local_lr=None, radius=None)
    """
    return Algorithm(Mixture(mix, update_mix=update_mix, radius=radius), Local(lr, **local), server)


@RECIPES.register(
    summary="A personal model pulled toward the shared one, which is trained beside it",
    source="Li 2021, Algorithm 1",
    citations=("li2021",),
)
def ditto(
    *,
    strength: Tuned[float],
    lr: Tuned[StepSize | float],
    local_lr: float | None = None,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """Ditto: Li 2021, Algorithm 1. Departures from the paper: see `Ditto`.

    >>> import personax as px
    >>> px.ditto(strength=0.5, lr=0.1, num_steps=5).objective
    Ditto(strength=0.5, local_lr=None)
    """
    return Algorithm(Ditto(strength, local_lr), Local(lr, **local), server)


@RECIPES.register(
    summary="Asynchronous personalization: PersA-FL-MAML with `Meta`, PersA-FL-ME with `Moreau`",
    source="PersA-FL 2023, Algorithms 1 and 2, Options B and C",
    citations=("toghani2023",),
)
def persafl(
    objective: Objective, *, lr: Tuned[StepSize | float], server: Server = asynchronous(), **local: Unpack[LocalOptions]
) -> Algorithm:
    """PersA-FL: Algorithms 1 and 2, Option B with `Meta` (PersA-FL-MAML) or Option C with `Moreau` (PersA-FL-ME).

    Departures from the paper: none. (The factor 2 missing from (D1) is a misprint, see `FiniteDifference`.)

    >>> import personax as px
    >>> px.persafl(px.Moreau(20.0, prox_lr=0.02, num_prox_steps=10), lr=0.05, num_steps=5).server.buffer_size
    1
    """
    return Algorithm(objective, Local(lr, **local), server)
