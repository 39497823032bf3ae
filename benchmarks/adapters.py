"""Peak memory of adapters over a frozen base of 5 million parameters: `python benchmarks/adapters.py` on the CPU.

1,000 clients, a cohort of 100 in each round, adapters of rank 8. Each measurement has its own process, and so has
a control: the same program over a tiny base, which needs what Python, JAX and the compiler need. The difference of
their peak resident memory is compared with what the run has to hold:

    base         the bytes of its parameters, times 1.1
    adapters     those of all clients, once, and those of the server
    cohort       of each client that trains: its adapters and their gradient
    activations  of each client that trains: inputs, products, activations and derivatives of each layer for its batch

Fails if it is larger. With `--merged` each client of the cohort has its own W + A B, for comparison; there is no bound.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import personax as px

NUM_CLIENTS, COHORT, RANK, BATCH, NUM_STEPS, NUM_ROUNDS = 1000, 100, 8, 10, 5, 4
SIDE, CLASSES = 28, 10
WIDTHS = {"base": (1400, 1400, 1400), "control": (8, 8, 8)}
METHODS = {
    "fedsa_lora": "B of each client, A for all",
    "local_only": "A and B of each client",
    "fedavg": "one A and B for all",
}


def algorithm_of(method: str) -> px.Algorithm:
    options = {"num_steps": NUM_STEPS, "batch_size": BATCH}
    if method == "fedsa_lora":
        return px.fedsa_lora(lr=0.01, **options)
    objective = {"local_only": px.LocalOnly(), "fedavg": px.Erm()}[method]
    return px.Algorithm(objective, px.Local(0.01, **options), px.synchronous(), px.Sharing(frozen="base"))


def merged(model: px.Model, widths: tuple[int, ...]) -> px.Model:
    """The same model, computed as x (W + A B)."""
    plain = px.mlp(widths, CLASSES)

    def apply(params: px.Params, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        change = lambda name: params["lora"][name]["kernel"]["a"] @ params["lora"][name]["kernel"]["b"]
        base = {name: {**own, "kernel": own["kernel"] + change(name)} for name, own in params["base"].items()}
        return plain.apply(base, x)

    return px.Model(model.init, apply)


def measure(method: str, base: str, is_merged: bool) -> dict[str, float]:
    """Train in this process, and return its peak memory, the seconds of a round and the sizes in bytes."""
    rng, key, widths = np.random.default_rng(0), jax.random.key(0), WIDTHS[base]
    x = rng.integers(0, 256, (NUM_CLIENTS * BATCH, SIDE, SIDE), dtype=np.uint8)
    fed = px.Federation(x, rng.integers(0, CLASSES, len(x)), np.arange(NUM_CLIENTS + 1) * BATCH)
    model = px.lora(px.mlp(widths, CLASSES), RANK)
    algorithm = algorithm_of(method)
    shapes = jax.eval_shape(model.init, key, jnp.zeros((1, SIDE, SIDE)))
    task = px.classification(merged(model, widths) if is_merged else model)
    schedule = px.rounds(NUM_CLIENTS, NUM_ROUNDS, COHORT, key=key)
    together = px.Execution(cohort_chunk=COHORT if is_merged else None)  # large kernels would train in turn on a CPU
    run = lambda: px.simulate(algorithm, task, fed, schedule, key=key, execution=together)
    train = lambda: jax.block_until_ready(run().params)
    train()  # compiles
    begin = time.perf_counter()
    train()
    seconds = time.perf_counter() - begin
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    sides = (SIDE * SIDE, *widths, CLASSES)
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": seconds / NUM_ROUNDS,
        "num": sum(leaf.size for leaf in jax.tree.leaves(shapes["base"])),
        "base": size(shapes["base"]),
        "adapters": size(algorithm.divided.init_personal(shapes) if method != "fedavg" else ()),
        "trained": size(algorithm.sharing.trained(shapes)),
        "activations": 4 * 4 * BATCH * sum(sides),  # rows, products, activations and derivatives, in float32
    }


def in_process(*arguments: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def report(method: str, is_merged: bool) -> bool:
    """Print one measurement; return whether it is within the bound."""
    extra = ["--merged"] if is_merged else []
    found, control = (in_process("--measure", method, "--base", base, *extra) for base in ("base", "control"))
    added = found["peak"] - control["peak"]
    parts = {
        "base": 1.1 * found["base"],
        "adapters": NUM_CLIENTS * found["adapters"] + 2 * found["trained"],
        "cohort": 2 * COHORT * found["trained"],
        "activations": COHORT * found["activations"],
    }
    bound = sum(parts.values())
    listed = " + ".join(f"{name} {size / 1e6:.0f}" for name, size in parts.items())
    print(
        f"{method}{', merged' if is_merged else ''} ({METHODS[method]}), {found['num'] / 1e6:.2f} million parameters:"
    )
    print(
        f"  peak {found['peak'] / 1e6:.0f} MB, control {control['peak'] / 1e6:.0f} MB, {found['seconds']:.2f} s a round"
    )
    print(f"  difference {added / 1e6:.0f} MB; without W + A B at most {bound / 1e6:.0f} MB = {listed}", flush=True)
    return is_merged or added <= bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, help="one of the methods instead of all")
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--measure", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--base", choices=WIDTHS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure, given.base, given.merged)))
        return
    if not all([report(method, given.merged) for method in ([given.method] if given.method else METHODS)]):
        raise SystemExit("More memory than the bound.")


if __name__ == "__main__":
    main()
