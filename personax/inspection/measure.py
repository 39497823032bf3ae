"""Measurements of a federation: client heterogeneity, the papers' constants, and the best mixture."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from personax import theory
from personax.algorithms import HESSIAN_FREE, fedavg
from personax.curvature import exact, first_order
from personax.data.federation import Federation
from personax.evaluation.validation import validation_of
from personax.experiment.build import Study
from personax.experiment.config import Config
from personax.inspection.findings import ClientFinding, Estimator, MeasuredConstant, Measurements
from personax.keys import HostStream, InspectionStream, host_generator, inspection_key
from personax.objectives import Meta
from personax.objectives.mixture import Mixed, mix_models
from personax.objectives.objective import descent_step
from personax.schedules import rounds
from personax.simulation.execution import Monitor
from personax.simulation.results import NonFiniteUpdate
from personax.simulation.simulate import initial_params, simulate
from personax.typing import Array, Batch, Params, Task

PATH_ROUNDS, PATH_MODELS = 60, 4  # length of the short training, which must give a shared model worth mixing with
NUM_ADAPT_STEPS, NUM_ALONE_STEPS = 5, 200
MIXES = np.linspace(0, 1, 21)

CONSTANTS = {
    "smoothness": ("L", "the largest curvature of a client's loss"),
    "gradient_bound": ("B", "the largest gradient norm of a client's loss"),
    "hessian_lipschitz": ("rho", "the rate of change of the curvature"),
    "gradient_noise": ("sigma_G", "the deviation of a sample's gradient from its client's"),
    "hessian_noise": ("sigma_H", "the deviation of a sample's curvature from its client's"),
    "gradient_kurtosis": ("kappa_G", "the fourth moment of the gradient's noise"),
    "hessian_kurtosis": ("kappa_H", "the fourth moment of the curvature's noise"),
    "gradient_spread": ("gamma_G", "the deviation of clients' gradients from their mean"),
    "hessian_spread": ("gamma_H", "the deviation of clients' curvatures from their mean"),
}


@dataclass(frozen=True)
class Effort:
    """The amount of measurement: more is more certain and slower."""

    num_clients: int = 20
    num_samples: int = 32


def measure_federation(
    config: Config, plan: Study, effort: Effort = Effort(), notify: Callable[[str], None] = lambda text: None
) -> Measurements:
    """Measure everything that the advice needs, from a resolved configuration and its built parts."""
    key, task = jax.random.key(config.seed_list[0]), plan.task
    everyone = validation_of(with_two_samples(plan.federation), key)  # hold out a fifth
    federation = _some_clients(everyone, effort.num_clients, key)
    local = plan.trainings[0].algorithm.local
    num_steps = int(np.max(local.steps_of(federation.counts)))
    cohort = config.schedule.cohort_size
    size = everyone.num_clients if cohort == "all" else min(cohort, everyone.num_clients)
    notify("Short training run that provides the models to measure at")
    region, path_lr = _path(task, everyone, num_steps, local.size_of("outer"), size, key)
    notify("Constants of the losses")
    batches = theory.sample_clients(federation, effort.num_samples, key=inspection_key(key, InspectionStream.SAMPLES))
    measured = theory.measure(
        task.loss, region, batches, key=inspection_key(key, InspectionStream.MEASURED), num_steps=10
    )
    adapt_lr = 0.5 / measured["smoothness"].value
    notify("First-order, Hessian-free and exact meta gradients")
    last = jax.tree.map(lambda leaf: leaf[-1], region.models)
    estimators = _estimators(task, last, batches, adapt_lr)
    notify("Shared, adapted, local and mixed models on held-out data")
    first = jax.tree.map(lambda leaf: leaf[0], region.models)
    adapted, mixed = _held_out_losses(task, federation, first, last, adapt_lr, effort.num_samples, key)
    best = int(mixed.mean(axis=0).argmin())
    return Measurements(
        region=f"{region.description} of FedAvg, {PATH_ROUNDS} rounds with steps of {path_lr:.3g}",
        num_clients=plan.federation.num_clients,
        num_samples=effort.num_samples,
        num_steps=num_steps,
        num_rounds=config.schedule.num_rounds,
        num_updates=size * config.schedule.num_rounds,
        standardized=plan.federation.schema.feature_scaling is not None,
        path_lr=path_lr,
        constants=[
            MeasuredConstant(name, symbol, measured[name].value, measured[name].error, words)
            for name, (symbol, words) in CONSTANTS.items()
        ],
        adapt_lr=adapt_lr,
        estimators=estimators,
        mix=float(MIXES[best]),
        clients=_clients(federation, adapted, mixed, best),
    )


def with_two_samples(federation: Federation) -> Federation:
    """Select the clients that still have training data when a part is held out."""
    enough = np.flatnonzero(federation.counts >= 2)
    if len(enough) < 2:
        raise ValueError(f"Need at least 2 clients with 2 training samples each (got {len(enough)}). Add data.")
    return federation if len(enough) == federation.num_clients else federation.select(enough)


def _some_clients(federation: Federation, num: int, key: Array) -> Federation:
    """Return all clients, or `num` of them drawn at random."""
    if federation.num_clients <= num:
        return federation
    return federation.select(
        np.sort(host_generator(key, HostStream.INSPECTED_CLIENTS).permutation(federation.num_clients)[:num])
    )


def _path(
    task: Task, federation: Federation, num_steps: int, batch_size: int, cohort_size: int, key: Array
) -> tuple[theory.Region, float]:
    """Return models of a short FedAvg run with steps that suit the initial curvature, reduced if it diverges."""
    start = initial_params(task, federation, key=key)
    few = theory.sample_clients(federation.select(np.arange(min(8, federation.num_clients))), 32, key=key)
    lr = 0.5 / theory.smoothness(task.loss, theory.at(start), few, key=key, num_steps=10).value
    schedule = rounds(federation.num_clients, PATH_ROUNDS, cohort_size, key=key)
    keep = lambda snapshot: snapshot.params
    for shrink in (1, 4, 16, 64):
        try:
            algorithm = fedavg(lr=lr / shrink, num_steps=num_steps, batch_size=batch_size)
            every = PATH_ROUNDS // (PATH_MODELS - 1)
            found = simulate(algorithm, task, federation, schedule, key=key, monitor=Monitor(every=every, observe=keep))
            return theory.path(found.history), lr / shrink
        except NonFiniteUpdate:
            continue
    raise ValueError(
        f"FedAvg diverges even with steps of {lr / 64:.2g}. Scale the features, or check for nonfinite values."
    )


def _estimators(task: Task, params: Params, batches: Batch, adapt_lr: float) -> list[Estimator]:
    """Measure the bias of the mean meta gradient for each treatment of the Hessian, on all samples."""
    gradient = lambda hvp: _flat_mean(
        theory.client_gradients(Meta(adapt_lr, 1, hvp), task.loss, params, batches, as_trained=True)
    )
    true = gradient(exact)
    ways = {"first_order": first_order, "Hessian-free": HESSIAN_FREE}
    away = lambda found: float(np.linalg.norm(found - true) / max(np.linalg.norm(true), np.finfo(float).tiny))
    return [Estimator(name, away(gradient(hvp))) for name, hvp in ways.items()]


def _flat_mean(gradients: Params) -> np.ndarray:
    return np.concatenate([np.asarray(leaf.mean(axis=0), float).ravel() for leaf in jax.tree.leaves(gradients)])


def _held_out_losses(
    task: Task, federation: Federation, first: Params, last: Params, lr: float, num_samples: int, key: Array
) -> tuple[np.ndarray, np.ndarray]:
    """Return held-out losses of the adapted shared model, [clients], and of mixtures, [clients, weights]."""
    own = theory.sample_clients(federation, num_samples, key=key)
    assert federation.test_x is not None and federation.test_y is not None and federation.test_offsets is not None
    kept = replace(federation, x=federation.test_x, y=federation.test_y, offsets=federation.test_offsets)
    rest = theory.sample_clients(kept, num_samples, key=key)
    adapted, mixed = _losses(task, first, last, lr, own, rest)
    return np.asarray(adapted), np.asarray(mixed)


@partial(jax.jit, static_argnums=0)
def _losses(task: Task, first: Params, last: Params, lr: float, own: Batch, rest: Batch) -> tuple[Array, Array]:
    def of_client(own: Batch, rest: Batch) -> tuple[Array, Array]:
        step = lambda _, model: descent_step(model, jax.grad(task.loss)(model, own), lr)
        trained = lambda start, num_steps: jax.lax.fori_loop(0, num_steps, step, start)
        loss = lambda model: task.metrics(model, rest)["loss"]
        alone = trained(first, NUM_ALONE_STEPS)
        mixed = jax.lax.map(lambda mix: loss(mix_models(Mixed(alone, mix), last)), jnp.asarray(MIXES, float))
        return loss(trained(last, NUM_ADAPT_STEPS)), mixed

    return jax.lax.map(lambda pair: of_client(*pair), (own, rest))


def _clients(federation: Federation, adapted: np.ndarray, mixed: np.ndarray, best: int) -> list[ClientFinding]:
    labelled = np.issubdtype(federation.y.dtype, np.integer)
    distances = theory.total_variation(theory.label_distributions(federation)).tolist() if labelled else None
    found = []
    for at, (id, count) in enumerate(zip(federation.ids, federation.counts, strict=True)):
        losses = {"shared": mixed[at, 0], "adapted": adapted[at], "mixed": mixed[at, best], "alone": mixed[at, -1]}
        found.append(
            ClientFinding(
                id=int(id),
                num_samples=int(count),
                distance=None if distances is None else distances[at],
                mix=float(MIXES[mixed[at].argmin()]),
                losses={name: float(loss) for name, loss in losses.items()},
            )
        )
    return found
