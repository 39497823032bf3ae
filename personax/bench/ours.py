"""Our implementation of a benchmark setting: federation, task, algorithm and schedule, from the public interface."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import personax as px
from personax.bench.setting import BenchSetting
from personax.typing import Array, Params, Task

CHANNELS = (32, 64)
NUM_CLASSES = 10
SEQUENCES = ("lstm", "transformer")  # networks with token inputs


def make_federation(setting: BenchSetting) -> px.Federation:
    """Make the benchmark's data: random bytes as images or tokens, and random labels."""
    rng, num_rows = np.random.default_rng(0), setting.num_clients * setting.num_samples
    images = rng.integers(0, 256, (num_rows, *setting.input_shape), dtype=np.uint8)
    labels = rng.integers(0, NUM_CLASSES, num_rows)
    if setting.network in SEQUENCES:
        images = images.astype(np.int32)
    return px.Federation(images, labels, np.arange(setting.num_clients + 1) * setting.num_samples)


def make_task(setting: BenchSetting) -> Task:
    """Return the task with the setting's network."""
    if setting.network == "cnn":
        # pfl-research's small network without dropout, so that all sides end with the same model.
        shape = {"kernel_size": 3, "padding": "VALID", "pooling": "last"}
        return px.classification(px.cnn(CHANNELS, setting.widths, NUM_CLASSES, **shape))
    if setting.network == "mlp":
        return px.classification(px.mlp(setting.widths, NUM_CLASSES, setting.activation))
    own = importlib.import_module("personax.bench.own")  # imported late because it needs Flax, which is optional
    return px.classification(own.own_model(setting.network, CHANNELS, setting.widths, NUM_CLASSES))


def make_algorithm(setting: BenchSetting) -> px.Algorithm:
    """Return the setting's algorithm; asynchronous ones apply each update on arrival."""
    epochs = {"num_epochs": 1} if setting.sampling == "shuffled" else {"num_steps": setting.num_steps}
    local: dict[str, Any] = {"batch_size": setting.batch_size, "sampling": setting.sampling, **epochs}
    local["server"] = px.asynchronous(0.1) if setting.asynchronous else px.synchronous()
    meta = lambda hvp: px.per_fedavg(adapt_lr=setting.adapt_lr, lr=setting.lr, hvp=hvp, **local)
    moreau = lambda: px.Moreau(setting.strength, setting.prox_lr, setting.num_prox_steps)
    recipes: dict[str, Callable[[], px.Algorithm]] = {
        "fedavg": lambda: px.fedavg(lr=setting.lr, **local),
        "first_order": lambda: meta(px.curvature.first_order),
        "hessian_free": lambda: meta(px.curvature.relative_difference(setting.radius)),
        "exact": lambda: meta(px.curvature.exact),
        "apfl": lambda: px.apfl(lr=setting.lr, mix=setting.mix, update_mix="step", **local),
        "moreau": lambda: px.persafl(moreau(), lr=setting.lr, **local),
    }
    return recipes[setting.algorithm]()


def make_schedule(setting: BenchSetting, seed: int = 0) -> px.Schedule:
    """Return rounds of a cohort, or arrivals with PersA-FL's delays."""
    key = jax.random.key(seed)
    if setting.asynchronous:
        delays = px.delays.persafl_delays(setting.num_clients, key=key)
        return px.arrivals(setting.num_clients, setting.num_rounds, delays=delays, key=key)
    return px.rounds(setting.num_clients, setting.num_rounds, setting.cohort_size, key=key)


def make_run(setting: BenchSetting) -> Callable[[], Params]:
    """Return a function that runs the setting's rounds once and waits for the final model."""
    federation, task, algorithm = make_federation(setting), make_task(setting), make_algorithm(setting)
    schedules = [make_schedule(setting, seed) for seed in range(setting.num_seeds)]
    several = setting.num_seeds > 1
    key = jax.random.split(jax.random.key(0), setting.num_seeds) if several else jax.random.key(0)
    schedule = schedules if several else schedules[0]
    execution = px.Execution(wave_width=setting.wave_width, devices=jax.devices() if setting.divided else None)

    def run() -> Params:
        result = px.simulate(algorithm, task, federation, schedule, key=key, execution=execution)
        return jax.block_until_ready((result.params, result.personal))[0]

    return run


def layers_of(params: Params) -> list[np.ndarray]:
    """Return kernel, bias, kernel, bias, ... from the first layer to the last, or the leaves of other networks."""
    names = sorted(params, key=lambda name: (name.lower().startswith("dense"), name))
    if any(not isinstance(params[name], dict) or set(params[name]) != {"kernel", "bias"} for name in names):
        return list(map(np.asarray, jax.tree.leaves(params)))
    return [np.asarray(params[name][part]) for name in names for part in ("kernel", "bias")]


def from_layers(params: Params, layers: list[np.ndarray]) -> Params:
    """Return a tree like `params` with these layers, the inverse of `layers_of`."""
    numbers = iter(range(len(layers)))
    places = layers_of(jax.tree.map(lambda leaf: next(numbers), params))
    order = np.argsort([int(place) for place in places])
    return jax.tree.unflatten(jax.tree.structure(params), [layers[at] for at in order])


def first_batches(setting: BenchSetting, federation: px.Federation, key: Array) -> np.ndarray:
    """Return the rows that each client's first visit sees, `[client, step, draw, batch]`."""
    roles = {"first_order": ("adapt", "outer"), "fedavg": ("outer",), "apfl": ("outer",), "moreau": ("outer",)}
    names = roles.get(setting.algorithm, ("adapt", "outer", "curvature"))
    at = lambda role: (
        lambda client, step: px.batch_indices(
            federation, key, client, 0, step, role, setting.batch_size, sampling=setting.sampling
        )
    )
    over = lambda role: jax.vmap(jax.vmap(at(role), (None, 0)), (0, None))
    clients, steps = jnp.arange(setting.num_clients), jnp.arange(setting.num_steps)
    return np.stack([np.asarray(jax.jit(over(role))(clients, steps)) for role in names], axis=2)
