"""Recipes that divide the parameters of a model into shared, personal and frozen ones."""

from dataclasses import replace
from typing import Unpack

from personax.algorithms.algorithm import Algorithm
from personax.client.local import Local, LocalOptions, Phase
from personax.client.step_sizes import StepSize
from personax.objectives import Erm
from personax.server import Server, synchronous
from personax.sharing import Patterns, Sharing, as_patterns
from personax.values import RECIPES, Tuned


@RECIPES.register(
    summary="FedAvg with personal parameters, such as a head for each client",
    source="Arivazhagan 2019, Algorithms 1 and 2",
    citations=("arivazhagan2019",),
)
def fedper(
    *,
    personal: Patterns,
    lr: Tuned[StepSize | float],
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedPer: Arivazhagan 2019, Algorithms 1 and 2.

    Each step moves the shared part w and the client's personal part v_i together, and the server averages w:

        (w_i, v_i) <- (w_i, v_i) - eta grad f_i(w_i, v_i)

    `personal` names v_i, the paper's personalization layers: the last ones. See `Sharing` for the patterns.

    Departures from the paper: the mean is uniform, not by samples, unless the server has `weighting="samples"`; all v_i
    start at the same values.

    >>> import personax as px
    >>> px.fedper(personal="dense_1", lr=0.1, num_steps=5).sharing
    Sharing(personal=('dense_1',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal))


@RECIPES.register(
    summary="FedAvg with personal lower layers below shared upper layers",
    source="Liang 2020, Algorithm 1",
    citations=("liang2020",),
)
def lg_fedavg(
    *,
    personal: Patterns,
    lr: Tuned[StepSize | float],
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """LG-FedAvg: Liang 2020, Algorithm 1. Each client has its own lower layers v_i below the shared upper layers w:

        (w_i, v_i) <- (w_i, v_i) - eta grad f_i(w_i, v_i),     the server averages w.

    `personal` names v_i. These are the steps of `fedper`, with the other end of the network personal.

    Departures from the paper: all clients start at the same model (their code starts from one that FedAvg trained); no
    auxiliary losses on the representations. A newcomer trains its own lower layers with the upper ones fixed; the paper
    averages the predictions of all clients' models.

    >>> import personax as px
    >>> px.lg_fedavg(personal="dense_0", lr=0.1, num_steps=5).objective
    Erm()
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal))


@RECIPES.register(
    summary="A shared body with personal heads; a visit trains first the head, then the body",
    source="Collins 2021, Algorithm 1",
    citations=("collins2021",),
)
def fedrep(
    *,
    personal: Patterns,
    lr: Tuned[StepSize | float],
    num_personal_steps: int | None = None,
    num_personal_epochs: int | None = None,
    personal_lr: Tuned[StepSize | float | None] = None,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedRep: Collins 2021, Algorithm 1. With the shared body w and the client's head v_i, a visit takes

        v_i <- v_i - eta_v grad_v f_i(w, v_i)       num_personal_steps (or num_personal_epochs) times, with w fixed
        w_i <- w_i - eta grad_w f_i(w_i, v_i)       num_steps (or num_epochs) times, with the new v_i fixed

    eta_v is `personal_lr`, by default `lr`. The server averages w.

    Departures from the paper: the mean is uniform, as in its Algorithm 1; in the linear case the paper initializes the
    representation by the method of moments, and here the model's own initialization is used.

    >>> import personax as px
    >>> [phase.trains for phase in px.fedrep(personal="head", lr=0.1, num_personal_steps=9, num_steps=1).local.phases]
    [('head',), ('*', '!head')]
    """
    own = Phase(personal, num_personal_steps, num_personal_epochs, personal_lr)
    return _alternating(own, lr, server, local)


@RECIPES.register(
    summary="Partial personalization by alternating steps: the personal part, then the shared one",
    source="Pillutla 2022, FedAlt",
    citations=("pillutla2022",),
)
def fedalt(
    *,
    personal: Patterns,
    lr: Tuned[StepSize | float],
    num_personal_steps: int | None = None,
    num_personal_epochs: int | None = None,
    personal_lr: Tuned[StepSize | float | None] = None,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedAlt: Pillutla 2022, its alternating update. With the shared part u and any personal part v_i, a visit takes

        v_i <- v_i - gamma_v grad_v f_i(u, v_i)         tau_v times, with u fixed
        u_i <- u_i - gamma_u grad_u f_i(u_i, v_i)       tau_u times, with the new v_i fixed

    tau_v is `num_personal_steps` (or `num_personal_epochs`), tau_u is `num_steps` (or `num_epochs`), gamma_v is
    `personal_lr`, by default `lr`, and gamma_u is `lr`. The server averages u.

    Departures from the paper: the mean is uniform, not by samples, unless the server has `weighting="samples"`.

    >>> import personax as px
    >>> px.fedalt(personal="*.bias", lr=0.1, num_personal_steps=5, num_steps=5).sharing
    Sharing(personal=('*.bias',))
    """
    own = Phase(personal, num_personal_steps, num_personal_epochs, personal_lr)
    return _alternating(own, lr, server, local)


@RECIPES.register(
    summary="Partial personalization by simultaneous steps of the personal and the shared part",
    source="Pillutla 2022, FedSim",
    citations=("pillutla2022",),
)
def fedsim(
    *,
    personal: Patterns,
    lr: Tuned[StepSize | float],
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedSim: Pillutla 2022, its simultaneous update. Each step moves the shared part u and any personal part v_i:

        (u_i, v_i) <- (u_i, v_i) - (gamma_u grad_u f_i(u_i, v_i), gamma_v grad_v f_i(u_i, v_i))

    The server averages u.

    Departures from the paper: one step size for both parts (the paper's gamma_v and gamma_u); the mean is uniform, not
    by samples, unless the server has `weighting="samples"`.

    >>> import personax as px
    >>> px.fedsim(personal="*.bias", lr=0.1, num_steps=5).sharing
    Sharing(personal=('*.bias',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal))


@RECIPES.register(
    summary="FedAvg that trains the body alone; each client fine-tunes the result with its head",
    source="Oh 2022, Algorithm 1",
    citations=("oh2022",),
)
def fedbabu(
    *, head: Patterns, lr: Tuned[StepSize | float], server: Server = synchronous(), **local: Unpack[LocalOptions]
) -> Algorithm:
    """FedBABU: Oh 2022, Algorithm 1. The head h keeps its random initial values while FedAvg trains the body w:

        w_i <- w_i - eta grad_w f_i(w_i, h),     the server averages w.

    Its personal models are fine-tuned after training, body and head together: `Scoring("adapted", ...)`, by default
    with the steps of a visit. For the head alone use `tunes="dense_1"`.

    Departures from the paper: the mean is uniform, not by samples, unless the server has `weighting="samples"`.

    >>> import personax as px
    >>> px.fedbabu(head="dense_1", lr=0.1, num_steps=5).sharing
    Sharing(frozen=('dense_1',), tuned=('dense_1',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(frozen=head, tuned=head))


@RECIPES.register(
    summary="FedAvg with personal normalization layers",
    source="FedBN 2021, Algorithm 1",
    citations=("lix2021",),
)
def fedbn(
    *,
    norm: Patterns = "*[Nn]orm*",
    lr: Tuned[StepSize | float],
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedBN: Li 2021 (FedBN), Algorithm 1. FedAvg in which each client keeps its own batch normalization v_i:

        (w_i, v_i) <- (w_i, v_i) - eta grad f_i(w_i, v_i),     the server averages w, all other parameters.

    `norm` names the normalization layers: scale, bias and running statistics. The default selects every name with
    "norm" or "Norm" in it.

    Departures from the paper: only the cohort of the schedule trains in each round, not all clients; a newcomer trains
    its own normalization, and the paper averages that of all clients.

    >>> import personax as px
    >>> px.fedbn(lr=0.1, num_steps=5).sharing
    Sharing(personal=('*[Nn]orm*',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(norm))


@RECIPES.register(
    summary="Adapters over a frozen base: A is shared, B stays with its client",
    source="Guo 2025, with the adapters of Hu 2022",
    citations=("guo2025", "hu2022"),
)
def fedsa_lora(
    *,
    lr: Tuned[StepSize | float],
    personal: Patterns = "lora.*.b",
    frozen: Patterns = "base",
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedSA-LoRA: Guo 2025. All kernels of `lora` have a shared A and a personal B_i over a frozen W:

        (A_i, B_i) <- (A_i, B_i) - eta grad f_i(W + A_i B_i),     the server averages A.

    Departures from the paper: the mean over the cohort is uniform, unless the server has `weighting="samples"`. The
    published configuration also trains the output layer and keeps it on its client: `personal=("lora.*.b",
    "base.output")` and `frozen=("base", "!base.output")`.

    >>> fedsa_lora(lr=0.1, num_steps=5).sharing
    Sharing(personal=('lora.*.b',), frozen=('base',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal, frozen))


@RECIPES.register(
    summary="A shared and a personal adapter over a frozen base, trained in turn and mixed",
    source="Yang 2024 (FedDPA-T), with the adapters of Hu 2022",
    citations=("yang2024", "hu2022"),
)
def feddpa(
    *,
    lr: Tuned[StepSize | float],
    num_personal_steps: int | None = None,
    personal: Patterns = "local",
    shared: Patterns = "global",
    frozen: Patterns = "base",
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedDPA-T: Yang 2024. Over a frozen base, a visit trains the client's own adapter v_i, then the shared one w:

        v_i <- v_i - eta grad_v f_i(w, v_i)       num_personal_steps times, with w fixed
        w_i <- w_i - eta grad_w f_i(w_i, v_i)     num_steps (or num_epochs) times, with the new v_i fixed

    The server averages w. The model is `dual_lora`, whose `mix` is the weight of v_i. The first part is as long as the
    second unless it has `num_personal_steps`.

    Departures from the paper: its code trains the shared adapter alone by default; here both are trained as parts of
    the mixture, an option of that code. Its first round trains the shared adapter only. At inference it computes a
    weight for each sample from the similarity to those of the client; here it is `mix`. The mean over the cohort is
    uniform unless the server has `weighting="samples"`.

    >>> feddpa(lr=0.1, num_steps=5).local.phases
    (Phase(trains=('local',), num_steps=5), Phase(trains=('global',), num_steps=5))
    """
    whole = Local(lr, **local)
    steps = (whole.num_steps, whole.num_epochs)
    own = steps if num_personal_steps is None else (num_personal_steps, None)
    phases = (Phase(personal, *own), Phase(shared, *steps))
    in_turn = replace(whole, num_steps=None, num_epochs=None, phases=phases)
    return Algorithm(Erm(), in_turn, server, Sharing(personal, frozen))


def _alternating(own: Phase, lr: StepSize | float, server: Server, local: LocalOptions) -> Algorithm:
    """Train the personal part, then the shared one, whose number of steps is in the local options."""
    personal = as_patterns(own.trains, "personal")
    if "phases" in local:
        raise ValueError("The phases of this recipe are its own. Leave out `phases`.")
    if any(pattern.startswith("!") for pattern in personal):
        raise ValueError(f"`personal` must name the parameters without `!` here, got {personal}. List them.")
    num_steps, num_epochs = local.pop("num_steps", None), local.pop("num_epochs", None)
    others = Phase(("*", *(f"!{pattern}" for pattern in personal)), num_steps, num_epochs)
    local["phases"] = (own, others)
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal))
