"""Processes that are killed: the journal proves that no update was lost or applied twice."""

import random
import re
import subprocess
import sys
import time

import pytest

from personax.live.journal import read_lines
from tests.live.processes import faulty

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
        assert "Continuing after" in live.parts.log("anna")
    live.prove(num)


def test_the_demonstration_is_one_command(tmp_path):
    words = ["live-demo", "--out", "demo", "--set", "schedule.num_rounds=2"]
    command = [sys.executable, "-c", "from personax.cli import app; app()", *words]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    told = re.findall(r"(\w+): accuracy [\d.]+ % at the start, [\d.]+ % shared, [\d.]+ % personal model", shown.stdout)
    assert told == ["anna", "bert", "cleo"]
    lines = read_lines(tmp_path / "demo" / "run")
    assert sum(line.get("outcome") == "applied" for line in lines) == 6
    assert "PersA-FL-ME" in (tmp_path / "demo" / "run" / "report.html").read_text()
    assert list(tmp_path.iterdir()) == [tmp_path / "demo"]


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
