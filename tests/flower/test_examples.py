"""The examples run, and the process of a ClientApp stays light."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from personax.experiment.records import read_results
from tests.flower.deployment import ENVIRONMENT, free_port, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples" / "flower"


@pytest.mark.parametrize("name", ["simulation", "deployment"])
def test_an_example_trains_and_leaves_nothing_running(name, tmp_path):
    (tmp_path / "runtime").mkdir(mode=0o700)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, **ENVIRONMENT, "PATH": path, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")}
    words = ["bash", str(EXAMPLES / f"{name}.sh"), str(tmp_path / "example"), "FedAvg"]
    ended = subprocess.run(
        words, env={**env, "PORT": str(free_port())}, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    (score,) = read_results(tmp_path / "example" / "run").algorithms[0].scores
    first, *_, last = (one.mean["accuracy"][0] for one in score.evaluations)
    assert last > first + 0.2
    assert (tmp_path / "example" / "run" / "report.html").exists()
    left = lambda: subprocess.run(["pgrep", "-fa", str(tmp_path / "example")], capture_output=True, text=True).stdout
    wait_until(lambda: not left(), 30, left)


def test_the_process_of_a_client_app_imports_no_jax_and_leaves_personax_whole():
    code = (
        "import sys; from personax_flower import client_app; light = 'jax' not in sys.modules; import personax as px; "
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}print(light, callable(px.fedavg), callable(client_app))"],
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "True True True\n", ended.stderr
