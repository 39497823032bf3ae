"""Processes that are killed: the journal proves that no update was lost or applied twice."""

import random
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from personax.experiment.checkpoint import read_model
from personax.live.demo import wait_for_port
from personax.live.journal import read_lines
from tests.live.parts import write_base
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


@pytest.mark.slow
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
def test_adapters_over_a_base_on_the_command_line(tmp_path):
    base, mine = write_base(tmp_path / "base.safetensors", np.float32), tmp_path / "mine.safetensors"
    mine.write_bytes(base.read_bytes())
    with faulty(tmp_path, ["anna"], 3) as live:
        path = tmp_path / "config.toml"
        model = f'kind = "logistic_regression"\nbase = "{base}"\nlora = {{ rank = 2 }}'
        text = path.read_text().replace('kind = "logistic_regression"', model)
        path.write_text(text.replace('recipe = "apfl"\nmix = 0.5', 'recipe = "fedsa_lora"'))
        live.begin("server")
        wait_for_port(live.parts)
        live.begin("anna")
        assert live.parts.processes["anna"].wait(60) != 0
        assert "Ask its operator for the file, and give it with --base" in " ".join(live.parts.log("anna").split())
        live.begin("anna", "--base", str(mine))
        live.wait_for_end()
    trees, about = read_model(next((tmp_path / "anna").glob("*/personal.safetensors")))
    started = read_model(base)[0]["dense_0"]["kernel"]
    np.testing.assert_array_equal(trees["base"]["dense_0"]["kernel"], started)
    assert about["scoring"].startswith("the shared part with the client's own `lora.*.b`")


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
