"""The shared part of all peers of `personax bench`: receive a setting, prepare, and run for the requested time.

    python benchmarks/torch_loop.py '{"setting": {...}, "device": "cpu", "check": "work.npz"}'

A peer prints one line of JSON when it is ready: its version, notes, and how far its parameters are from ours after the
same work. Then, for each line with a number of seconds on its input, it runs about that long and prints the rounds and
the seconds. `personax/bench/setting.py` lists the contents of a setting.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Setting(NamedTuple):
    """The fields of a setting that a peer needs."""

    algorithm: str
    network: str
    input_shape: list[int]
    widths: list[int]
    activation: str
    num_clients: int
    num_samples: int
    cohort_size: int
    num_steps: int
    batch_size: int
    sampling: str
    asynchronous: bool
    lr: float
    adapt_lr: float
    radius: float
    mix: float
    strength: float
    prox_lr: float
    num_prox_steps: int


class Work(NamedTuple):
    """One of our rounds: `x[client, step, draw, batch, ...]`, `y`, and the layers of the models before and after."""

    setting: Setting
    x: np.ndarray
    y: np.ndarray
    start: list[np.ndarray]
    end: list[np.ndarray]


Ready = tuple[Callable[[int], None], dict[str, Any]]  # runs this many rounds and waits for them; facts to report


def setting_of(fields: dict[str, Any]) -> Setting:
    return Setting(**{name: fields[name] for name in Setting._fields})


def read_work(path: str) -> Work:
    with np.load(path) as held:
        layers = lambda name: [held[f"{name}_{i}"] for i in range(int(held["num_arrays"]))]
        setting = setting_of(json.loads(str(held["setting"])))
        return Work(setting, held["x"], held["y"], layers("start"), layers("end"))


def error_of(found: list[np.ndarray], work: Work) -> float:
    """Return the distance of the parameters from ours, relative to the change of ours."""
    flat = lambda arrays: np.concatenate([np.asarray(array, float).ravel() for array in arrays])
    start, end = flat(work.start), flat(work.end)
    return float(np.linalg.norm(flat(found) - end) / np.linalg.norm(end - start))


def random_clients(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes as images `[client, sample, ...]`, and random labels."""
    rng = np.random.default_rng(0)
    shape = (setting.num_clients, setting.num_samples)
    images = rng.integers(0, 256, (*shape, *setting.input_shape), dtype=np.uint8)
    return images, rng.integers(0, 10, shape)


def serve(prepare: Callable[[Setting, str, str], Ready]) -> None:
    """Prepare, report readiness, and run on request until the input ends: `prepare(setting, device, work path)`."""
    asked = json.loads(sys.argv[1])
    run, told = prepare(setting_of(asked["setting"]), asked["device"], asked["check"])
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_for(run, float(line))), flush=True)


def run_for(run: Callable[[int], None], seconds: float) -> dict[str, float]:
    """Run rounds until the time is over; each call doubles their number, so that few calls are timed."""
    num_rounds, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds:
        left = num_rounds * (seconds / took - 1) if num_rounds else 1
        now = max(1, round(min(left, num_rounds or 1)))
        run(now)
        num_rounds += now
    return {"rounds": num_rounds, "seconds": took}
