"""Limits, a recommendation and a starting configuration, derived from measurements."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from personax.experiment.config import AlgorithmSection, Config, TuneSection, dump
from personax.inspection.findings import Advice, Limit, Measurements
from personax.theory import Constants, fallah, gmeta, persafl

SMALL_BIAS = 0.1  # relative bias up to which first-order meta gradients are recommended


def limits_of(found: Measurements) -> list[Limit]:
    """Compute the limits of the papers' theorems on step sizes, strengths and staleness."""
    constants = Constants(**{one.name: one.value for one in found.constants})
    steepest = constants.smoothness
    meta = gmeta.meta_smoothness(constants, found.adapt_lr, 1)
    lr = fallah.largest_local_lr(meta, found.num_steps)
    is_still = lr * steepest * found.num_steps * found.num_rounds < 1  # even along the steepest direction
    staleness = persafl.largest_staleness(steepest, found.num_steps, found.num_updates)
    needed = persafl.least_num_updates(steepest, found.num_steps, 0)
    return [
        Limit(
            "adapt_lr",
            fallah.largest_adapt_lr(steepest),
            "at most 1 / L",
            "Fallah Lemmas 4.2 to 4.4",
            "with a larger adaptation step, the meta loss may be less smooth than the loss",
        ),
        Limit(
            "lr",
            lr,
            "at most 1 / (10 tau L_F)",
            "Fallah Theorem 4.5, gMeta Theorem 8",
            f"required by the proof with {found.num_steps} local steps and L_F = {meta:.3g}; larger steps often work",
            f"with steps of {lr:.1g}, the model would hardly change in {found.num_rounds} rounds" if is_still else "",
        ),
        Limit(
            "strength, smooth",
            2 * steepest,
            "at least 2 L",
            "PersA-FL Corollary 2",
            "the envelope is then as smooth as its strength; above L its personal model is unique",
        ),
        Limit(
            "strength, PersA-FL-ME",
            7 * steepest,
            "at least 7 L",
            "PersA-FL Lemma 7, Theorem 3",
            "required by its bound on client heterogeneity",
        ),
        Limit(
            "staleness",
            staleness,
            "160 L (Q + 7) (staleness + 1)^3 at most the number of updates",
            "PersA-FL Theorem 1",
            f"with {found.num_updates} updates",
            f"it needs {needed:.3g} updates even without delays; this run has {found.num_updates}"
            if staleness < 0
            else "",
        ),
    ]


def advise(config: Config, found: Measurements, factor: int = 1) -> Advice:
    """Recommend a recipe with steps of `factor` / L: the reasons, the certainty, and a configuration with baselines."""
    lr = float(f"{factor / found.of('smoothness'):.2g}")
    losses = {name: np.array([client.losses[name] for client in found.clients]) for name in CANDIDATES}
    best, second, *_ = sorted(losses, key=lambda name: float(losses[name].mean()))
    candidate = CANDIDATES[best]
    options, reason = candidate.options(found, lr)
    text = ", ".join(f"{name} {values.mean():.3g}" for name, values in losses.items())
    why = [f"{candidate.words} has the lowest loss on held-out data: {text}.", *filter(None, [reason])]
    distances = [client.distance for client in found.clients if client.distance is not None]
    if distances:
        why.append(
            f"The mean total variation distance of a client's labels from the average is {np.mean(distances):.2f}."
        )
    steepest = found.of("smoothness")
    why.append(f"Steps of {lr:.3g} are {factor} / L, where L = {steepest:.3g} is the largest curvature found.")
    if found.standardized:
        why.append("Features were standardized first, as in the configuration.")
    sure = _sureness(found, best, second, losses[second] - losses[best])
    summary = f"Start with {candidate.name} (recipe {candidate.recipe})."
    return Advice(candidate.recipe, candidate.name, summary, why, sure, dump(_starter(config, candidate, options, lr)))


def _hessian(found: Measurements, lr: float) -> tuple[dict[str, Any], str]:
    """Choose first-order meta gradients if their bias is small."""
    bias = next(one.relative_bias for one in found.estimators if one.name == "first_order")
    if bias < SMALL_BIAS:
        text = f"First-order meta gradients have a bias of {bias:.1%}, which is small enough, and are the cheapest."
        return {"adapt_lr": lr, "hvp": "first_order"}, text
    return {
        "adapt_lr": lr
    }, f"First-order meta gradients have a bias of {bias:.0%}; Hessian-free ones are more accurate."


def _sureness(found: Measurements, best: str, second: str, gains: np.ndarray) -> list[str]:
    """Describe the certainty of the findings: the lead over the second best, and other limitations."""
    mean = float(gains.mean())
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else np.inf
    verdict = "clear" if mean > 2 * error else "too close to call, so compare both"
    return [
        f"'{best}' is ahead of '{second}' by {mean:.3g} ± {error:.2g} (standard error) over {len(gains)} of "
        f"{found.num_clients} clients: {verdict}.",
        f"Constants are maxima over {found.region}, on at most {found.num_samples} samples per client. They are "
        "lower estimates: other parts of training may be steeper.",
        "The theorems are sufficient, not necessary: their limits are safe, but not necessarily the best.",
    ]


def _starter(config: Config, candidate: "Candidate", options: dict[str, Any], lr: float) -> Config:
    """Make a configuration with the same federation, model and schedule, and the recommended recipe with baselines."""
    first = next(iter(config.algorithms.values())).options
    kept = {name: first[name] for name in ("num_steps", "num_epochs", "batch_size") if name in first}
    local = {"lr": lr, **(kept if {"num_steps", "num_epochs"} & set(kept) else {"num_steps": 5, **kept})}
    entries = {"Local": AlgorithmSection("local_only"), "FedAvg": AlgorithmSection("fedavg")}
    if candidate.name not in entries:
        scores = {candidate.name: {"model": "adapted", "num_steps": 5, "lr": lr}} if candidate.adapts else {}
        entries[candidate.name] = AlgorithmSection(candidate.recipe, options, scores)
    return dataclasses.replace(config, name=starter_name(config), local=local, tune=TuneSection(), algorithms=entries)


def starter_name(config: Config) -> str:
    """Return the name of the advised configuration, at most 80 characters long."""
    return f"{config.name[:72]}-starter"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A recipe that can be recommended: its name, its description, and the options that measurements suggest.

    `adapts` is True if clients adapt the shared model before it is scored.
    """

    recipe: str
    name: str
    words: str
    options: Callable[[Measurements, float], tuple[dict[str, Any], str]] = lambda found, lr: ({}, "")
    adapts: bool = False


def _mixing(found: Measurements, lr: float) -> tuple[dict[str, Any], str]:
    weight = (
        f"The best common weight of the client's own model is {found.mix:.2f}; learning of the weight starts there."
    )
    return {"mix": round(found.mix, 2)}, weight


CANDIDATES = {  # by the kind of model that clients use
    "shared": Candidate("fedavg", "FedAvg", "One model for all"),
    "adapted": Candidate(
        "per_fedavg", "Per-FedAvg", "A shared initialization that each client adapts", _hessian, adapts=True
    ),
    "alone": Candidate("local_only", "Local", "A separate model per client"),  # before the mixture, which includes it
    "mixed": Candidate("apfl", "APFL", "A mixture of the client's own model and the shared one", _mixing),
}
