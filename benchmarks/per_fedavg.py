"""Per-FedAvg in Fallah's MNIST setting, against an eager PyTorch loop in the same run: `make bench`.

50 clients of 980 images, 10 a round, 10 local steps, three batches of 40, MLP 784-80-60-10 with ELU. Random images
serve for timing. The two sides run in turn, several times; a figure is the median, and the peer's is the better of its
medians with one thread and with all (two threads that share a busy machine stall each other).
"""

import argparse
import itertools
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch_loop import TorchLoop

import personax as px

NUM_CLIENTS, NUM_SAMPLES, COHORT, BATCH = 50, 980, 10, 40
WIDTHS = (784, 80, 60, 10)
LOCAL = {"num_steps": 10, "batch_size": BATCH}
ALGORITHMS = {  # name: (algorithm, gradients that a local step amounts to; a Hessian product counts as two)
    "fedavg": (px.fedavg(1e-3, **LOCAL), 1),
    "first_order": (px.per_fedavg(0.01, 1e-3, px.first_order, **LOCAL), 2),
    "hessian_free": (px.per_fedavg(0.01, 1e-3, **LOCAL), 4),
    "exact": (px.per_fedavg(0.01, 1e-3, px.exact, **LOCAL), 4),
}


def flops_per_round(num_gradients: int) -> float:
    """Multiplications and additions of the matrix products of a round."""
    products = [a * b for a, b in itertools.pairwise(WIDTHS)]
    per_example = 2 * (
        sum(products) + sum(products) + sum(products[1:])
    )  # forward, weights, inputs of all but the first
    return COHORT * LOCAL["num_steps"] * num_gradients * BATCH * per_example


def federation() -> px.Federation:
    """Random images of MNIST's shape."""
    rng = np.random.default_rng(0)
    make = lambda: (rng.integers(0, 256, (NUM_SAMPLES, WIDTHS[0])).astype(np.uint8), rng.integers(0, 10, NUM_SAMPLES))
    return px.Federation.from_clients([make() for _ in range(NUM_CLIENTS)])


def ours(algorithm: px.Algorithm, fed: px.Federation, num_rounds: int) -> Callable[[], float]:
    """A function that runs the rounds and returns seconds for each."""
    task = px.classification(px.mlp(WIDTHS[1:-1], WIDTHS[-1]))
    schedule = px.rounds(NUM_CLIENTS, num_rounds, COHORT, key=jax.random.key(0))

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(px.simulate(algorithm, task, fed, schedule, key=jax.random.key(0)).params)
        return (time.perf_counter() - begin) / num_rounds

    return run


def theirs(variant: str, device: str, num_threads: int, num_rounds: int) -> Callable[[], float]:
    """The same of the PyTorch loop."""
    loop = TorchLoop(variant, device)
    loop.run(2)

    def run() -> float:
        torch.set_num_threads(num_threads)
        return loop.run(num_rounds) / num_rounds

    return run


def rested(run: Callable[[], float]) -> float:
    """Run after a pause, in which the other side's threads stop spinning."""
    time.sleep(0.3)
    return run()


def matrix_peak() -> float:
    """Operations a second of the best of several large matrix products, at JAX's default precision."""
    size = 2048 if jax.default_backend() == "cpu" else 8192
    matrix = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()

    def once() -> float:
        begin = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        return time.perf_counter() - begin

    return 2 * size**3 / min(once() for _ in range(10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rounds", type=int, default=None, help="rounds of a repeat; default 150 on a CPU, 500 on a GPU"
    )
    options = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    num_rounds = options.rounds or (150 if on_cpu else 500)
    fed, peak = federation(), matrix_peak()
    print(f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores; jax {jax.__version__}, torch {torch.__version__}")
    print(f"largest matrix product: {peak / 1e9:.0f} GFLOP/s\n")
    print(f"{'':14}{'ms a round':>12}{'first call s':>14}{'GFLOP/s':>10}{'of peak':>9}{'torch ms':>10}{'ratio':>7}")
    for name, (algorithm, num_gradients) in ALGORITHMS.items():
        mine = ours(algorithm, fed, num_rounds)
        first = mine() * num_rounds
        device, counts = ("cpu", {1, torch.get_num_threads()}) if on_cpu else ("cuda", {1})
        peers = [theirs(name, device, count, 5) for count in sorted(counts)]
        rows = [[rested(run) for run in (mine, *peers)] for _ in range(options.repeats)]
        seconds, *others = np.median(rows, axis=0)
        rate = flops_per_round(num_gradients) / seconds
        figures = f"{1e3 * seconds:>12.2f}{first:>14.1f}{rate / 1e9:>10.0f}{rate / peak:>9.0%}"
        print(f"{name:14}{figures}{1e3 * min(others):>10.1f}{min(others) / seconds:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
