"""The named recipes. Each combines an objective, local training and a server.

Pass step sizes and other options by keyword. Every recipe also accepts the options of `Local`.
"""

from dataclasses import fields, replace
from typing import Literal, Unpack

import jax

from personax.client.local import Local, LocalOptions, Phase
from personax.client.step_sizes import StepSize
from personax.curvature import Hvp, relative_difference
from personax.objectives import Aruba, Ditto, Erm, LocalOnly, Meta, Mixture, Moreau, Objective, Proximal, Scaffold
from personax.objectives.divided import Divided
from personax.objectives.objective import require_objective
from personax.server import Server, ServerState, asynchronous, buffered, synchronous
from personax.server.discounts import Discount, Polynomial
from personax.sharing import Patterns, Sharing, as_patterns
from personax.typing import Params
from personax.values import RECIPES, Tuned, TunedShare, short_repr, to_dict, value
from personax.values.notebook import html_table, settings

HESSIAN_FREE = relative_difference(1e-2)


@value
class Algorithm:
    """An objective, the local training that minimizes it, the server that applies the updates, and what is shared.

    By default all parameters are shared.

    >>> import personax as px
    >>> algorithm = px.Algorithm(px.Meta(adapt_lr=0.1), px.Local(0.05, num_steps=5, batch_size=10), px.buffered(4))
    >>> algorithm.server.buffer_size
    4
    """

    objective: Objective
    local: Local
    server: Server
    sharing: Sharing = Sharing()

    def __post_init__(self) -> None:
        require_objective(self.objective)
        self.local.draws(self.objective)  # raises if the batch sizes do not fit the objective's batches

    @property
    def divided(self) -> Divided:
        """The objective over a whole model, as `sharing` divides it."""
        return Divided(self.objective, self.sharing)

    def require_model(self, params: Params) -> None:
        """Raise unless the parameters that this algorithm names are those of a model, and can be used in this way."""
        if self.sharing.divides:
            self.divided.require_division(params)
        if self.local.phases:
            self.local.require_parts(self.sharing.trained(params))
            self.divided.require_phases(params)

    def init_server(self, params: Params) -> ServerState:
        """Return the server's state before the first update, of a whole model."""
        extra = jax.eval_shape(self.divided.first_extra, params)
        return self.server.init(self.objective, self.sharing.shared(params), extra)

    def __repr__(self) -> str:
        """Show the constructor without defaults; `print` shows them too."""
        return short_repr(self)

    def __str__(self) -> str:
        return f"Algorithm({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields(self))})"

    def _repr_html_(self) -> str:
        return html_table("Algorithm", settings(to_dict(self)))


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
    """Local training: each client trains alone, and the server only determines when. A baseline, not from a paper.

    >>> import personax as px
    >>> px.local_only(lr=0.1, num_epochs=1).objective
    LocalOnly()
    """
    return Algorithm(LocalOnly(), Local(lr, **local), server)


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
    Meta(adapt_lr=0.1, num_adapt_steps=1, hvp=Exact(), curvature_on='own')
    """
    return Algorithm(Meta(adapt_lr, num_adapt_steps, hvp, curvature_on), Local(lr, **local), server)


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
    summary="FedAvg with personal normalization layers",
    source="Li 2021 (FedBN), Algorithm 1",
    citations=("li2021fedbn",),
)
def fedbn(
    *,
    norm: Patterns = "*[Nn]orm*",
    lr: Tuned[StepSize | float],
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedBN: Li 2021 (FedBN), Algorithm 1. FedAvg in which each client keeps its own batch normalization.

    `norm` names the normalization layers: scale, bias and running statistics. The default selects every name with
    "norm" or "Norm" in it.

    Departures from the paper: not all clients train in each round, but the cohort of the schedule; a newcomer trains
    normalization of its own, where the paper averages that of all clients.

    >>> import personax as px
    >>> px.fedbn(lr=0.1, num_steps=5).sharing
    Sharing(personal=('*[Nn]orm*',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(norm))


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
    """FedSA-LoRA: Guo 2025. Clients train A and B of `lora`; the server averages A, and B never leaves its client.

    Departures from the paper: the mean over the cohort is uniform, unless the server has `weighting="samples"`. In the
    paper's experiments the output layer is trained, too, and stays with its client: `personal=("lora.*.b",
    "base.output")` and `frozen=("base", "!base.output")`. Its text was not at hand; the division into a shared A and a
    personal B is that of its abstract and its figure 1, the output layer that of its configurations.

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
    """FedDPA-T: Yang 2024. In each visit a client trains its own adapter, then the shared one, which is averaged.

    The model is `dual_lora`, whose `mix` is the weight of the personal adapter. `num_steps` or `num_epochs` is the
    length of the second part, and of the first unless it has `num_personal_steps`.

    Departures from the paper: it trains the shared adapter alone and mixes for the personal one; here both are trained
    as parts of the mixture, an option of the published code. The weight at inference is `mix` for every sample, where
    the paper computes one from the similarity of a sample to those of the client. The first round has both parts, and
    the mean over the cohort is uniform unless the server has `weighting="samples"`. Its text was not at hand; the order
    of the parts and the weights are those of the published code.

    >>> feddpa(lr=0.1, num_steps=5).local.phases
    (Phase(trains=('local',), num_steps=5), Phase(trains=('global',), num_steps=5))
    """
    whole = Local(lr, **local)
    steps = (whole.num_steps, whole.num_epochs)
    own = steps if num_personal_steps is None else (num_personal_steps, None)
    phases = (Phase(personal, *own), Phase(shared, *steps))
    in_turn = replace(whole, num_steps=None, num_epochs=None, phases=phases)
    return Algorithm(Erm(), in_turn, server, Sharing(personal, frozen))


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
    summary="FedAvg with personal lower layers, whose representations the shared upper layers take",
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
    """LG-FedAvg: Liang 2020, Algorithm 1. The steps are those of `fedper`; `personal` names the lower layers.

    Departures from the paper: all clients start at the same model (their code starts from one that FedAvg trained); no
    auxiliary losses on the representations. A newcomer trains lower layers of its own with the upper ones fixed, where
    the paper averages the predictions of all clients' models.

    >>> import personax as px
    >>> px.lg_fedavg(personal="dense_0", lr=0.1, num_steps=5).objective
    Erm()
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal))


@RECIPES.register(
    summary="A shared body below personal heads, where a visit trains first the head, then the body",
    source="Collins 2021, Algorithm 1",
    citations=("collins2021",),
)
def fedrep(
    *,
    personal: Patterns,
    lr: Tuned[StepSize | float],
    num_personal_steps: int | None = None,
    num_personal_epochs: int | None = None,
    personal_lr: StepSize | float | None = None,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedRep: Collins 2021, Algorithm 1. With the shared body w and the client's head v_i, a visit takes

        v_i <- v_i - eta_v grad_v f_i(w, v_i)       num_personal_steps (or num_personal_epochs) times, with w fixed
        w_i <- w_i - eta grad_w f_i(w_i, v_i)       num_steps (or num_epochs) times, with the new v_i fixed

    eta_v is `personal_lr`, by default `lr`. The server averages w.

    Departures from the paper: the mean is uniform, as in its Algorithm 1; the paper's representation is initialized by
    the method of moments in the linear case, here as the model is.

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
    personal_lr: StepSize | float | None = None,
    server: Server = synchronous(),
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedAlt: Pillutla 2022, its alternating update. The steps are those of `fedrep`, with any personal part.

    The paper's v_i and u are the personal and the shared part, tau_v = `num_personal_steps` and tau_u = `num_steps`.

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
    """FedSim: Pillutla 2022, its simultaneous update. The steps are those of `fedper`, with any personal part.

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
    """FedBABU: Oh 2022, Algorithm 1. The head stays at its random start while FedAvg trains the body.

    Its personal models are fine-tuned after training: score `Scoring("adapted", ..., tunes="*")`, or `tunes="dense_1"`
    for the head alone. The steps of a scoring without `tunes` move what was trained, the body.

    Departures from the paper: the mean is uniform, not by samples, unless the server has `weighting="samples"`.

    >>> import personax as px
    >>> px.fedbabu(head="dense_1", lr=0.1, num_steps=5).sharing
    Sharing(frozen=('dense_1',))
    """
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(frozen=head))


@RECIPES.register(
    summary="Per-FedAvg whose adaptation steps move the head alone",
    source="Raghu 2020; Fallah 2020, Algorithm 1",
    citations=("raghu2020",),
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


def _alternating(own: Phase, lr: StepSize | float, server: Server, local: LocalOptions) -> Algorithm:
    """Train the personal part, then the shared one, whose number of steps the local options have."""
    personal = as_patterns(own.trains, "personal")
    if "phases" in local:
        raise ValueError("The phases of this recipe are its own. Leave out `phases`.")
    if any(pattern.startswith("!") for pattern in personal):
        raise ValueError(f"`personal` must name the parameters without `!` here, got {personal}. List them.")
    num_steps, num_epochs = local.pop("num_steps", None), local.pop("num_epochs", None)
    others = Phase(("*", *(f"!{pattern}" for pattern in personal)), num_steps, num_epochs)
    local["phases"] = (own, others)
    return Algorithm(Erm(), Local(lr, **local), server, Sharing(personal))
