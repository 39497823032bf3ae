"""A model of 25 million parameters and a cohort of 20 in 64 GB: `python benchmarks/large_model.py` on an accelerator.

Prints, for slices of a batch in chunks of the cohort, for chunks alone and for neither, the device's peak memory up to
then (so they come in the order of their needs) and the time of a round. Fails if the first needs more than 64 GB.
"""

import time

import jax
import numpy as np

import personax as px

COHORT, BATCH, SIDE, CLASSES, LIMIT = 20, 64, 32, 10, 64e9


def main() -> None:
    rng, key = np.random.default_rng(0), jax.random.key(0)
    x, y = rng.integers(0, 256, (BATCH, SIDE, SIDE, 3)).astype(np.uint8), rng.integers(0, CLASSES, BATCH)
    fed = px.Federation.from_clients([(x, y)] * COHORT)
    task = px.classification(px.cnn((64, 128, 256), (4096, 2048), CLASSES, kernel_size=3))
    algorithm, schedule = px.fedavg(lr=0.01, num_steps=5, batch_size=BATCH), px.rounds(COHORT, 3, key=key)
    device, marks = jax.devices()[0], []
    observe = lambda snapshot: marks.append((jax.block_until_ready(snapshot.params), time.perf_counter())[1])
    for chunk, slice_size in ((5, 16), (5, BATCH), (None, BATCH)):
        sliced = px.rematerialize(task, slice_size)
        how = {"monitor": px.Monitor(observe, every=1), "execution": px.Execution(cohort_chunk=chunk)}
        params = px.simulate(algorithm, sliced, fed, schedule, key=key, **how).params
        num = sum(leaf.size for leaf in jax.tree.leaves(params))
        peak = (device.memory_stats() or {"peak_bytes_in_use": float("nan")})["peak_bytes_in_use"]
        took = marks[-1] - marks[-2]
        what = f"{num / 1e6:.1f} million parameters, {COHORT} clients in chunks of {chunk or COHORT}"
        print(f"{what}, batches of {BATCH} in slices of {slice_size}: {peak / 1e9:.1f} GB, {took:.3f} s a round")
        if chunk and slice_size < BATCH and peak > LIMIT:
            raise SystemExit(f"More than {LIMIT / 1e9:.0f} GB.")


if __name__ == "__main__":
    main()
