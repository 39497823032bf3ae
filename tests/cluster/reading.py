"""Run one round in one of two processes, and print the clients of the round and those whose samples were read.

python -m tests.cluster.reading FOLDER ADDRESS NUMBER
"""

import dataclasses
import json
import sys
from itertools import pairwise

import jax
import numpy as np


class Recorded(np.memmap):
    """A mapped array that records the slices that are read."""

    def __getitem__(self, place):
        if isinstance(place, slice):
            READ.append(place)
        return super().__getitem__(place)


READ = []


def main(folder, address, number):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=int(number))
    import personax as px

    key = jax.random.key(0)
    federation = px.Federation.open(folder)
    federation = dataclasses.replace(federation, x=federation.x.view(Recorded))
    schedule = px.rounds(federation.num_clients, 1, 6, key=key)
    algorithm = px.fedavg(lr=0.1, num_steps=2, batch_size=4)
    execution, task = px.Execution(devices=jax.devices()), px.classification(px.logistic_regression(10))
    READ.clear()
    jax.block_until_ready(px.simulate(algorithm, task, federation, schedule, key=key, execution=execution).params)
    rows = [tuple(pair) for pair in pairwise(np.asarray(federation.offsets).tolist())]  # of each client
    read = sorted({rows.index((place.start, place.stop)) for place in READ if (place.start, place.stop) in rows})
    print("READ " + json.dumps([sorted(np.asarray(schedule.client).ravel().tolist()), read]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
