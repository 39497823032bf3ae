"""Recipes that train one model for all clients, and local training without a server."""

from typing import Literal, Unpack

from personax.algorithms.algorithm import Algorithm
from personax.client.local import Local, LocalOptions
from personax.client.step_sizes import StepSize
from personax.objectives import Aruba, Erm, LocalOnly, Proximal, Scaffold
from personax.server import Server, asynchronous, buffered, synchronous
from personax.server.discounts import Discount, Polynomial
from personax.values import RECIPES, Tuned, TunedShare


@RECIPES.register(
    summary="Clients train the shared model; the server averages the updates",
    source="McMahan 2017, Algorithm 1",
    citations=("mcmahan2017",),
)
def fedavg(*, lr: Tuned[StepSize | float], server: Server = synchronous(), **local: Unpack[LocalOptions]) -> Algorithm:
    """FedAvg: McMahan 2017, Algorithm 1.

    Departures from the paper: the mean over the cohort is uniform, as in the four papers, unless the server has
    `weighting="samples"`; data is reshuffled for every epoch, not once per visit.

    >>> fedavg(lr=0.1, num_steps=5).objective
    Erm()
    """
    return Algorithm(Erm(), Local(lr, **local), server)


@RECIPES.register(
    summary="FedAvg with each client kept near the model it downloaded",
    source="Li 2020, Algorithm 2",
    citations=("li2020",),
)
def fedprox(
    *,
    strength: Tuned[float],
    lr: Tuned[StepSize | float],
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedProx: Li 2020, Algorithm 2.

    Departures from the paper: see `Proximal`; cohorts are drawn uniformly, not by number of samples.

    >>> import personax as px
    >>> px.fedprox(strength=0.1, lr=0.1, num_steps=5).objective
    Proximal(strength=0.1)
    """
    return Algorithm(Proximal(strength), Local(lr, **local), server)


@RECIPES.register(
    summary="FedAvg with control variates that correct client drift",
    source="Karimireddy 2020, Algorithm 1, options I and II",
    citations=("karimireddy2020",),
)
def scaffold(
    *,
    lr: Tuned[StepSize | float],
    option: Literal[1, 2] = 1,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """SCAFFOLD: Karimireddy 2020, Algorithm 1. The paper's global step size is the server's `lr`.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.scaffold(lr=0.1, option=2, num_steps=5).objective
    Scaffold(option=2)
    """
    return Algorithm(Scaffold(option), Local(lr, **local), server)


@RECIPES.register(
    summary="FedAvg with step sizes for each coordinate, learned across clients",
    source="Khodak 2019, Algorithm 2",
    citations=("khodak2019",),
)
def aruba(
    objective: Aruba = Aruba(), *, lr: Tuned[float] = 1.0, server: Server = synchronous(), **local: Unpack[LocalOptions]
) -> Algorithm:
    """FedAvg with ARUBA's learned step sizes, multiplied by `lr`: Khodak 2019, Algorithm 2.

    Departures from the paper: see `Aruba`.

    >>> import personax as px
    >>> px.aruba(num_steps=5).local.lr
    1.0
    """
    return Algorithm(objective, Local(lr, **local), server)


@RECIPES.register(summary="Each client trains alone; nothing is shared", source="A baseline, not from a paper")
def local_only(
    *, lr: Tuned[StepSize | float], server: Server = synchronous(), **local: Unpack[LocalOptions]
) -> Algorithm:
    """Local training: each client trains alone; the server only decides when. A baseline, not from a paper.

    >>> import personax as px
    >>> px.local_only(lr=0.1, num_epochs=1).objective
    LocalOnly()
    """
    return Algorithm(LocalOnly(), Local(lr, **local), server)


@RECIPES.register(
    summary="Asynchronous averaging that adds deltas as they arrive",
    source="PersA-FL 2023, Algorithms 1 and 2, Option A; after Xie 2019",
    citations=("toghani2023", "xie2019"),
)
def fedasync(
    *, lr: Tuned[StepSize | float], server: Server = asynchronous(), **local: Unpack[LocalOptions]
) -> Algorithm:
    """FedAsync as in PersA-FL, which adds deltas: Algorithms 1 and 2, Option A.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.fedasync(lr=0.1, num_steps=5).server.is_synchronous
    False
    """
    return Algorithm(Erm(), Local(lr, **local), server)


@RECIPES.register(
    summary="Asynchronous averaging that mixes in models, with less weight for stale ones",
    source="Xie 2019, Algorithm 1 and section 5.2",
    citations=("xie2019",),
)
def fedasync_mixing(
    *,
    lr: Tuned[StepSize | float],
    mixing: TunedShare[float] = 0.6,
    strength: float = 0.0,
    discount: Discount = Polynomial(0.5),
    max_staleness: int | None = None,
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedAsync as in Xie 2019, which mixes models: Algorithm 1.

        w <- (1 - a) w + a w_i,     a = mixing * discount(staleness)

    `strength` is the paper's proximal rho. A fresh update has staleness 0 and full weight, as in section 5.2.

    Departures from the paper: none.

    >>> import personax as px
    >>> px.fedasync_mixing(lr=0.1, mixing=0.6, num_steps=5).server.applies
    'models'
    """
    server = asynchronous(mixing, discount=discount, max_staleness=max_staleness, applies="models")
    return Algorithm(Proximal(strength), Local(lr, **local), server)


@RECIPES.register(
    summary="Asynchronous averaging with a buffer of updates",
    source="Nguyen 2022, Algorithms 1 and 2",
    citations=("nguyen2022",),
)
def fedbuff(
    *,
    lr: Tuned[StepSize | float],
    buffer_size: int = 10,
    server_lr: Tuned[float] = 1.0,
    discount: Discount = Polynomial(0.5),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedBuff: Nguyen 2022, Algorithms 1 and 2. Departures from the paper: none (without privacy noise).

    >>> import personax as px
    >>> px.fedbuff(lr=0.1, buffer_size=4, num_steps=5).server.discount
    Polynomial(power=0.5)
    """
    return Algorithm(Erm(), Local(lr, **local), buffered(buffer_size, server_lr, discount=discount))
