"""Fallah 2020, Table 1, MNIST: FedAvg + update, Per-FedAvg (FO) and (HF), end to end on the real data.

Get the data once with `personax data fetch mnist`, then `python examples/fallah_mnist.py [local steps] [seeds]`.
"""

import sys
import time

import jax

import personax as px

SPLIT = jax.random.key(2020)  # one split for all seeds
PAPER = {10: (75.96, 78.00, 79.85), 4: (60.18, 64.55, 70.94)}  # %, by local steps: FedAvg + update, FO, HF


def federation(num_clients: int = 50) -> px.Federation:
    """Half of the clients with 196 images of each of the digits 0 to 4; the others with 98 of one and 392 of another."""
    pool = px.datasets.mnist()
    train = px.partition.fallah_halves(pool.y, num_clients, 196, key=SPLIT)
    test = px.partition.fallah_halves(pool.test_y, num_clients, 32, key=SPLIT)
    tests = {"test_x": pool.test_x, "test_y": pool.test_y}
    return px.Federation.from_partition(pool.x, pool.y, train, test, **tests, origin="MNIST.")


def main(num_steps: int = 10, num_seeds: int = 5) -> None:
    """Train the three algorithms on the same cohorts and batches, and score them as the paper does and as one should."""
    fed = federation()
    print(fed, end="\n\n")
    task = px.classification(px.mlp((80, 60), num_outputs=10, activation="elu"))
    local = {"num_steps": num_steps, "batch_size": 40}
    contestants = {
        "FedAvg + update": px.fedavg(0.001, **local),
        "Per-FedAvg (FO)": px.per_fedavg(0.01, 0.001, px.first_order, **local),
        "Per-FedAvg (HF)": px.per_fedavg(0.01, 0.001, px.finite_difference(1e-3), **local),
    }
    keys = jax.random.split(jax.random.key(0), num_seeds)
    schedules = [px.rounds(fed.num_clients, 1000, 10, key=key) for key in keys]
    protocols = [px.fallah_protocol(lr=0.01), px.Protocol("adapted", lr=0.01), px.Protocol("global")]
    for protocol in protocols:
        print(protocol.describe())
    print(f"\n{num_steps} local steps, 1000 rounds, {num_seeds} seeds: accuracy in %, 95 % interval")
    print(f"{'':18}{'paper':>8}{'as the paper (!)':>18}{'on training data':>20}{'not adapted':>16}{'seconds':>10}")
    for (name, algorithm), paper in zip(contestants.items(), PAPER.get(num_steps, ("", "", "")), strict=True):
        begin = time.perf_counter()
        result = px.simulate(algorithm, task, fed, schedules, key=keys)
        scores = [px.evaluate(algorithm, task, fed, result, p, key=jax.random.key(1)) for p in protocols]
        cells = [score.interval("accuracy") for score in scores]
        shown = [f"{100 * cell.mean:.1f} ± {100 * (cell.high - cell.mean):.1f}" for cell in cells]
        took = time.perf_counter() - begin
        print(f"{name:18}{paper:>8}{shown[0]:>18}{shown[1]:>20}{shown[2]:>16}{took:>10.0f}")
        print(
            f"{'':26}{'std over seeds':>16}{scores[0].mean('accuracy').std(ddof=1):>10.4f}"
        ) if num_seeds > 1 else None


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
