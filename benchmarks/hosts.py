"""One run over 1, 2 and 4 processes on this machine: the time of a round, and a model of communication.

`python benchmarks/hosts.py` runs FedAvg with a network of 784-WIDTH-10 and 16 clients per round in 1, 2 and 4 processes
of one device and one core each, in turns, and times sums over the processes (`psum`) of several sizes. Without a core
of its own, a process would use all of them, and two processes would gain nothing. The model of a round in P processes
on C cores is

    T(P) = T(1) / min(P, C) + num_exchanges * latency(P) + bytes * per_byte(P)

where num_exchanges are the collective operations of a round in the compiled program, bytes are those of the model, and
latency and per_byte are fitted to the sums alone, never to the rounds. It prints measured and predicted times,
the efficiency T(1) / (P T(P)), and the P at which communication takes as long as computation (a core for each process).
"""

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROCESSES = (1, 2, 4)
COHORT, ROUNDS, EVERY = 16, 60, 10
SIZES = (1, 1_000, 10_000, 100_000, 1_000_000)  # numbers in a sum
REPEATS = 20
CORES = os.cpu_count() or 1
EXCHANGE = re.compile(r"= .* (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(")


def worker(number: int, of: int, address: str, width: int) -> None:
    """Measure in one of the processes; the first prints JSON."""
    os.sched_setaffinity(0, {number % CORES})  # before JAX counts the cores (Linux)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=of, process_id=number)
    import personax as px

    mesh = Mesh(np.asarray(jax.devices()), ("clients",))
    whole = PartitionSpec()
    total = lambda x: jax.lax.psum(x, "clients")
    add = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))
    sums = {}
    for size in SIZES:
        spent = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            jax.block_until_ready(add(jnp.ones(size, jnp.float32)))
            spent.append(time.perf_counter() - began)
        sums[size] = statistics.median(spent[1:])
    key = jax.random.key(0)
    rng = np.random.default_rng(0)
    clients = [(rng.random((60, 784), np.float32), rng.integers(0, 10, 60)) for _ in range(64)]
    federation = px.Federation.from_clients(clients)
    task, algorithm = px.classification(px.mlp((width,), 10)), px.fedavg(lr=0.01, num_steps=10, batch_size=20)
    marks = []

    def observe(snapshot: px.Snapshot) -> None:
        jax.block_until_ready(snapshot.params)
        marks.append(time.perf_counter())

    schedule, monitor = px.rounds(64, ROUNDS, COHORT, key=key), px.Monitor(every=EVERY, observe=observe)
    execution = px.Execution(devices=jax.devices())
    result = px.simulate(algorithm, task, federation, schedule, key=key, monitor=monitor, execution=execution)
    leaves = jax.tree.leaves(result.params)
    if number == 0:
        each = statistics.median(np.diff(marks)[1:] / EVERY)  # the first one includes compilation
        found = {"round": each, "sums": sums, "bytes": sum(leaf.nbytes for leaf in leaves)}
        print("RESULT " + json.dumps(found), flush=True)


def run(of: int, width: int) -> dict:
    """Measure in this many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--width", str(width), "--address", address, "--worker"]
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_module_re=.*advance.*"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        started = [
            subprocess.Popen(
                [*command, str(number), str(of)],
                env={**environment, "XLA_FLAGS": "" if number else flags},
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(of)
        ]
        texts = [process.communicate()[0] for process in started]
        programs = [path.read_text() for path in Path(dump).glob("*cpu_after_optimizations.txt")]
    found = json.loads(next(line for line in texts[0].splitlines() if line.startswith("RESULT "))[7:])
    return {**found, "num_exchanges": max(len(EXCHANGE.findall(program)) for program in programs)}


def fitted(sums: dict[str, float]) -> tuple[float, float]:
    """Return the seconds of an empty sum, and of each additional byte."""
    import numpy as np

    sizes = np.asarray([4.0 * int(size) for size in sums])
    per_byte, latency = np.polyfit(sizes, np.asarray(list(sums.values())), 1, w=1 / np.asarray(list(sums.values())))
    return max(float(latency), 0.0), max(float(per_byte), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--address")
    parser.add_argument("--worker", type=int, nargs=2, metavar=("NUMBER", "OF"))
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.address, options.width[0])
        return
    print(f"{CORES} cores; {COHORT} clients per round; medians of {options.repeats} turns")
    for width in options.width:
        turns = [{of: run(of, width) for of in PROCESSES} for _ in range(options.repeats)]
        median = lambda of, what, turns=turns: statistics.median(turn[of][what] for turn in turns)
        size = turns[0][1]["bytes"]
        print(f"784-{width}-10, {size / 1e6:.2f} MB")
        single = median(1, "round")
        for of in PROCESSES:
            sums = {s: statistics.median(turn[of]["sums"][s] for turn in turns) for s in turns[0][of]["sums"]}
            latency, per_byte = fitted(sums)
            num_exchanges = turns[0][of]["num_exchanges"]
            sent = 0.0 if of == 1 else num_exchanges * latency + size * per_byte
            predicted, measured = single / min(of, CORES) + sent, median(of, "round")
            print(
                f"  {of} processes: {1e3 * measured:7.2f} ms per round, predicted {1e3 * predicted:7.2f}, efficiency "
                f"{single / (of * measured):4.2f}; {num_exchanges} exchanges of {1e6 * latency:.0f} us and "
                f"{1e9 * per_byte:.2f} ns per byte"
            )
            if of > 1:
                print(f"    with a core each, communication equals computation at P = {single / sent:.1f}")


if __name__ == "__main__":
    main()
