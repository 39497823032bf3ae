"""A reference round that peers repeat from the same initial model and batches, to show that they do the same work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import personax as px
from personax.bench.ours import first_batches, layers_of, make_algorithm, make_federation, make_schedule, make_task
from personax.bench.setting import SETTING, BenchSetting
from personax.models.tasks import as_inputs
from personax.typing import Params

STEPS, EPOCH = "steps.npz", "epoch.npz"  # the files of the two kinds of work
NUM_CLIENTS, NUM_SAMPLES, NUM_STEPS, BATCH = 3, 24, 2, 12


def small(setting: BenchSetting, epoch: bool) -> BenchSetting:
    """Reduce a setting to one round of a few clients that all participate, with the same algorithm and network.

    With `epoch`, each client sees all its samples in one batch, which a peer that draws its own batches can repeat.
    """
    num_steps, batch_size = (1, NUM_SAMPLES) if epoch else (NUM_STEPS, BATCH)
    return replace(
        setting,
        num_clients=NUM_CLIENTS,
        cohort_size=NUM_CLIENTS,
        num_samples=NUM_SAMPLES,
        num_steps=num_steps,
        batch_size=batch_size,
        sampling="shuffled",
        num_rounds=1,
        num_seeds=1,
        asynchronous=False,
        wave_width=None,
    )


def write_work(setting: BenchSetting, path: Path, epoch: bool = False) -> None:
    """Write one of our rounds in float32: its setting, batches, and the models before and after."""
    setting = small(setting, epoch)
    federation, task = make_federation(setting), make_task(setting)
    rows = first_batches(setting, federation, jax.random.key(0))
    start = task.model.init(jax.random.key(1), as_inputs(jnp.asarray(federation.x[:1])))
    before, after = layers_of(start), end_of(setting, start)
    before *= len(after) // len(before)
    arrays: dict[str, Any] = {
        f"{name}_{i}": array for name, of in (("start", before), ("end", after)) for i, array in enumerate(of)
    }
    x, y = federation.x[rows], federation.y[rows]
    np.savez(path, x=x, y=y, setting=SETTING.dump_json(setting).decode(), num_arrays=len(before), **arrays)


def end_of(setting: BenchSetting, start: Params) -> list[np.ndarray]:
    """Return the layers of the model after one round, followed by the clients' mean own model for APFL."""
    execution = px.Execution(precision="float32")
    run: dict[str, Any] = {"key": jax.random.key(0), "params": start, "execution": execution}
    schedule, federation = make_schedule(setting), make_federation(setting)
    end = px.simulate(make_algorithm(setting), make_task(setting), federation, schedule, **run)
    own = setting.algorithm == "apfl"
    return layers_of(end.params) + (
        layers_of(jax.tree.map(lambda leaf: leaf.mean(0), end.personal.model)) if own else []
    )
