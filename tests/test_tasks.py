"""The tasks of the site, as a new user types them, against the built wheel in an empty folder and a new environment."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.processes import free_port

ROOT = Path(__file__).parents[1]


def tasks():
    """The scripts, by name, of the module that extracts them from the pages."""
    spec = importlib.util.spec_from_file_location("tasks", ROOT / "docs" / "extensions" / "tasks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tasks()


SCRIPTS = tasks()
EXPECTED = {  # the files that each task leaves
    "csv": ["runs/patients/report.html", "anna.safetensors", "predictions.csv"],
    "flax": ["runs/network/results.json"],
    "algorithm": ["runs/fair/results.json"],
    "number": ["runs/check/clients.parquet"],
    "live": ["runs/live/report.html", "anna.log"],
}


def test_every_task_is_on_a_page():
    assert SCRIPTS.keys() == EXPECTED.keys()
    assert all("personax" in script for script in SCRIPTS.values())


def run_with_network(command):
    """Run a command of pip, which downloads packages; skip the tests if it cannot."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("There is no network here.")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The variables of a shell in a new virtual environment that has the wheel and nothing else of this project."""
    place = tmp_path_factory.mktemp("environment")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run_with_network([*pip, "wheel", "--no-deps", "--wheel-dir", place / "wheel", ROOT])
    (wheel,) = (place / "wheel").glob("personax-*.whl")
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    install = [place / "venv" / "bin" / "python", *pip[1:], "install", "--constraint", ROOT / "constraints.txt"]
    run_with_network([*install, f"{wheel}[flax,live]"])
    plain = {name: os.environ[name] for name in ("HOME", "LANG", "JAX_PLATFORMS") if name in os.environ}
    path = f"{place / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    return {**plain, "PATH": path, "PERSONAX_COMPILED": str(place / "compiled")}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_task_runs_as_printed(name, environment, tmp_path):
    script = SCRIPTS[name].replace("7000", str(free_port()))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path for path in EXPECTED[name] if not (tmp_path / path).is_file()]
    if name == "live":
        models = list(tmp_path.glob("certificates/clients/*/state/*/personal.safetensors"))
        assert len(models) == 3
        assert "personal model" in (tmp_path / "anna.log").read_text()
