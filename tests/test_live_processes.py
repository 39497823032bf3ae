"""Processes that are killed: the journal proves that no update was lost or applied twice."""

import random
import time

import pytest

from tests.live_processes import faulty

pytestmark = pytest.mark.xdist_group("live processes")


def test_killed_server_and_client_come_back_and_nothing_is_lost_or_done_twice(tmp_path):
    num = 130
    with faulty(tmp_path, ["anna", "bert"], num, rate=15) as live:
        for name in ("server", "anna", "bert"):
            live.begin(name)
        live.wait_for(4, of="anna")
        live.kill("anna")
        live.begin("anna")
        live.wait_for(len(live.uploads()) + 10)
        live.kill("server")
        live.begin("server")
        live.wait_for_end()
        assert "Goes on after" in live.parts.log("anna")
    live.prove(num)


@pytest.mark.slow
def test_ten_random_kills_and_nothing_is_lost_or_done_twice(tmp_path):
    num, rng = 4000, random.Random(0)
    names = ["anna", "bert", "cleo"]
    with faulty(tmp_path, names, num) as live:
        for name in ("server", *names):
            live.begin(name)
        live.wait_for(20)
        for _ in range(10):
            victim = rng.choice(["server", *names])
            live.kill(victim)
            time.sleep(rng.uniform(0, 1))
            live.begin(victim)
            if len(live.uploads()) >= num - 100:
                break
            live.wait_for(min(len(live.uploads()) + 20, num - 50))
        live.wait_for_end(300)
    live.prove(num)
