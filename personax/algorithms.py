"""The named recipes: an objective, a way to descend, a server."""

from typing import Any

from personax.curvature import Hvp, relative_difference
from personax.local import Local
from personax.objectives import Aruba, Erm, LocalOnly, Meta, Mixture, Moreau, Objective, Proximal, Scaffold
from personax.server import Polynomial, Server, asynchronous, buffered, synchronous
from personax.step_sizes import StepSize
from personax.values import value

HESSIAN_FREE = relative_difference(1e-2)


@value
class Algorithm:
    """What a client minimises, how it descends, and when the server applies what it sends."""

    objective: Objective
    local: Local
    server: Server


def fedavg(lr: StepSize | float, server: Server = synchronous(), **local: Any) -> Algorithm:
    """FedAvg: McMahan 2017.

    Departures from the paper: the mean over the cohort is uniform, as in the four papers, unless the server says
    `weighting="samples"`; shuffled epochs are shuffled anew, not once a visit.

    >>> fedavg(0.1, num_steps=5).objective
    Erm()
    """
    return Algorithm(Erm(), Local(lr, **local), server)


def fedprox(strength: float, lr: StepSize | float, server: Server = synchronous(), **local: Any) -> Algorithm:
    """FedProx: Li 2020, Algorithm 2. Departures: see `Proximal`; cohorts are uniform, not by number of samples."""
    return Algorithm(Proximal(strength), Local(lr, **local), server)


def scaffold(lr: StepSize | float, option: int = 1, server: Server = synchronous(), **local: Any) -> Algorithm:
    """SCAFFOLD: Karimireddy 2020, Algorithm 1, whose global step size is the server's. Departures: none."""
    return Algorithm(Scaffold(option), Local(lr, **local), server)  # pyright: ignore[reportArgumentType]


def aruba(objective: Aruba = Aruba(), lr: float = 1.0, server: Server = synchronous(), **local: Any) -> Algorithm:
    """FedAvg with ARUBA's learned step sizes: Khodak 2019, Algorithm 2. Departures: see `Aruba`."""
    return Algorithm(objective, Local(lr, **local), server)


def local_only(lr: StepSize | float, server: Server = synchronous(), **local: Any) -> Algorithm:
    """Each client alone; the server only sets when. Departures from the paper: none."""
    return Algorithm(LocalOnly(), Local(lr, **local), server)


def per_fedavg(
    adapt_lr: float,
    lr: StepSize | float,
    hvp: Hvp = HESSIAN_FREE,
    num_adapt_steps: int = 1,
    server: Server = synchronous(),
    **local: Any,
) -> Algorithm:
    """Per-FedAvg: Fallah Algorithm 1; with several adaptation steps gMeta Algorithm 1.

    `hvp` is `exact`, `first_order` or a difference of gradients (Hessian-free).

    Departures from the paper: the Hessian-free default takes a radius relative to the vector, see `RelativeDifference`.
    """
    return Algorithm(Meta(adapt_lr, num_adapt_steps, hvp), Local(lr, **local), server)


def pfedme(
    strength: float,
    lr: StepSize | float,
    prox_lr: float,
    num_prox_steps: int = 5,
    server: Server = synchronous(),
    **local: Any,
) -> Algorithm:
    """pFedMe: Dinh 2020, Algorithm 1; the server's `lr` is its beta, `(1 - beta) w + beta mean`.

    All clients train and a sample is aggregated: run it on `rounds(n, ..., num_aggregated=...)`.
    Departures from the paper: none.
    """
    return Algorithm(Moreau(strength, prox_lr, num_prox_steps), Local(lr, **local), server)


def apfl(
    lr: StepSize | float,
    mix: float = 0.01,
    update_mix: str = "round",
    radius: float | None = None,
    server: Server = synchronous(),
    **local: Any,
) -> Algorithm:
    """APFL: Algorithm 1, (5), and with `update_mix` other than "never" (6). Departures from the paper: none."""
    return Algorithm(Mixture(mix, update_mix=update_mix, radius=radius), Local(lr, **local), server)  # pyright: ignore[reportArgumentType]


def fedasync(lr: StepSize | float, server: Server = asynchronous(), **local: Any) -> Algorithm:
    """FedAsync as PersA-FL states it, which adds deltas: Algorithms 1 and 2, Option A. Departures: none."""
    return Algorithm(Erm(), Local(lr, **local), server)


def fedasync_mixing(
    lr: StepSize | float,
    mixing: float = 0.6,
    strength: float = 0.0,
    discount: Any = Polynomial(0.5),
    max_staleness: int | None = None,
    **local: Any,
) -> Algorithm:
    """FedAsync as Xie 2019 states it, which mixes models: Algorithm 1.

    `w <- (1 - a) w + a w_i` with `a = mixing * discount(staleness)`; `strength` is its proximal rho.
    Departures from the paper: none. (A fresh update has staleness 0 and counts in full, as its section 5.2 wants.)
    """
    server = asynchronous(mixing, discount=discount, max_staleness=max_staleness, applies="models")
    return Algorithm(Proximal(strength), Local(lr, **local), server)


def fedbuff(
    lr: StepSize | float, buffer_size: int = 10, server_lr: float = 1.0, discount: Any = Polynomial(0.5), **local: Any
) -> Algorithm:
    """FedBuff: Nguyen 2022, Algorithms 1 and 2. Departures from the paper: none (no privacy noise)."""
    return Algorithm(Erm(), Local(lr, **local), buffered(buffer_size, server_lr, discount=discount))


def persafl(objective: Meta | Moreau, lr: StepSize | float, server: Server = asynchronous(), **local: Any) -> Algorithm:
    """PersA-FL: Algorithms 1 and 2, Option B with `Meta` (PersA-FL-MAML) or Option C with `Moreau` (PersA-FL-ME).

    Departures from the paper: none; (D1)'s missing factor 2 is a slip, see `FiniteDifference`.
    """
    return Algorithm(objective, Local(lr, **local), server)
