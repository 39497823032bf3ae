"""Servers and clients that are killed at random: nothing is lost or applied twice, and the simulator agrees."""

import random
import time

import pytest

from tests.live.processes import faulty

pytestmark = [pytest.mark.xdist_group("live processes"), pytest.mark.slow, pytest.mark.attack]
NUM_KILLS = 20


@pytest.mark.parametrize("algorithm, num_updates", [("APFL", 2400), ("FedAvg", 600), ("SCAFFOLD", 600)])
def test_random_kills_lose_nothing_and_do_nothing_twice(algorithm, num_updates, tmp_path, attack, note):
    rng, names = random.Random(algorithm), ["anna", "bert", "cleo"]
    with faulty(tmp_path, names, num_updates, algorithm=algorithm, rate=20) as live:
        for name in ("server", *names):
            live.begin(name)
        live.wait_for(6)
        kills = 0
        while kills < NUM_KILLS and len(live.uploads()) < num_updates - 100:
            victim = rng.choice(["server", *names])
            live.kill(victim)
            kills += 1
            time.sleep(rng.uniform(0, 0.5))
            live.begin(victim)
            live.wait_for(min(len(live.uploads()) + rng.randrange(1, 20), num_updates - 50))
        live.wait_for_end(300)
    with attack(f"kills of a run of {algorithm}", kills):
        live.prove(num_updates)
    note(f"{algorithm}: {kills} kills in {num_updates} updates; nothing lost or applied twice, equal to the simulator.")
