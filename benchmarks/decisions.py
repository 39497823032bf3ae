"""The cost of choosing a cohort in each round, for runs of different lengths.

`python benchmarks/decisions.py` trains FedAvg on 100 clients with the delays of devices, without a controller, with
Power-of-Choice and with Oort, and prints the CPU seconds of a whole run after compilation. They grow in proportion to
the number of rounds, because a decision computes only the rounds until the next one.
"""

import argparse
import time

import jax

import personax as px

CONTROLLERS = {"none": None, "PowerOfChoice": px.controllers.PowerOfChoice(20), "Oort": px.controllers.Oort()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, nargs="+", default=[100, 200, 400, 800])
    key = jax.random.key(0)
    fed = px.datasets.synthetic(0.5, 0.5, num_clients=100, num_samples=20, key=key)
    task, fedavg = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2, batch_size=5)
    delays = px.traces.generate(200, key=key).delays(px.work_of(fedavg, task, fed), key=key)
    for num_rounds in parser.parse_args().rounds:
        schedule = px.rounds(100, num_rounds, 10, key=key, delays=delays)
        for name, controller in CONTROLLERS.items():
            control = controller and px.controlled(controller, fedavg, task, training=fed, key=key)
            for _ in range(2):  # the first run compiles
                begin = time.process_time()
                result = px.simulate(fedavg, task, fed, schedule, key=key, monitor=px.Monitor(control=control))
                jax.block_until_ready(result.params)
                seconds = time.process_time() - begin
            print(f"{num_rounds} rounds, {name}: {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
