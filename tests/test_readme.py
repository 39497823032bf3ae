"""Every command of the README, as printed, from a copy of what a clone has."""

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer.main

from personax.cli import app
from tests.live.processes import free_port

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERSONAX = [sys.executable, "-c", "from personax.cli import app; app()"]
ELSEWHERE = {  # commands that a test cannot run, and the reasons
    "make demo": "installs from the network; its `personax compare` is here, too",
    "pip install -e .": "installs",
    'pip install "personax[export]"': "installs",
    'pip install "personax[live]"': "installs",
    'pip install "personax[flower]"': "installs",
    "flwr run mine SUPERLINK": "needs a Flower deployment: make test-flower",
}
ONLINE = {"personax data fetch mnist"}


def commands():
    """The command lines of the README in their order, without comments."""
    lines = re.findall(r"^    ((?:personax|make|pip|flwr) .*)$", README, flags=re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def test_every_command_of_the_readme_is_one_and_is_run():
    group = typer.main.get_command(app)
    for line in commands():
        program, *words = shlex.split(line)
        if program == "personax":
            context = group.make_context("personax", list(words), resilient_parsing=True)
            name, command, rest = group.resolve_command(context, words)
            while hasattr(command, "commands"):
                name, command, rest = command.resolve_command(context, rest)
            command.make_context(name, list(rest)).close()  # raises for an unknown option
        else:
            assert line in ELSEWHERE, f"run `{line}` in this test, or state why it cannot be"
    assert ELSEWHERE.keys() <= {*commands(), *re.findall(r"`(pip [^`]*)`", README)}


def test_the_people_are_generated(tmp_path):
    runpy.run_path(str(ROOT / "examples" / "generate_people.py"))["main"](tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (ROOT / "examples" / "generated" / path.name).read_bytes()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the files that the commands use, and their outputs."""
    place = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", place / "examples")
    port, processes, clients = str(free_port()), [], []
    try:
        for line in commands():
            if line in ELSEWHERE or line in ONLINE:
                continue
            process = begin(line.replace("7000", port), place)
            if line.startswith("personax serve"):
                assert process.stdout is not None and "Listening" in process.stdout.readline()
                processes.append(process)
            elif line.startswith("personax watch"):
                assert process.stdout is not None and "Following" in process.stdout.readline()
                process.send_signal(signal.SIGINT)
                end(process)
            elif line.startswith("personax join"):
                clients.append(process)
            else:
                end(process)
        for process in (*clients, *processes):
            end(process)
    finally:
        for process in (*clients, *processes):
            process.kill()
    return place


def begin(line, place):
    """Start one line of the README."""
    return start([*PERSONAX, *shlex.split(line)[1:]], place)


def start(command, place):
    """Start a program as a user has it: without the settings of conftest.py, and with a cache of compiled programs."""
    plain = {
        name: item for name, item in os.environ.items() if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    }
    own = {"PYTHONPATH": str(ROOT), "PERSONAX_DATA": str(place / "data"), "PERSONAX_COMPILED": str(place / "compiled")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=place, env={**plain, **own}, **pipes)


def end(process):
    """Wait for a command to succeed, and return its output."""
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, f"{process.args}\n{said}"
    return said


@pytest.mark.slow
def test_the_commands_run_as_printed(clone):
    assert (clone / "both.html").exists() and (clone / "anna.stablehlo").exists()
    assert len((clone / "predictions.csv").read_text().splitlines()) == 1 + 7
    assert len(list(clone.glob("certificates/clients/*/state/*/personal.safetensors"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_the_code_that_uses_a_run_works_after_the_commands(page, clone):
    text = (ROOT / page).read_text(encoding="utf-8")
    indented = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)]
    fenced = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if page != "README.md" else []  # test_docs.py
    blocks = [*(block for block in indented if block.startswith("import ")), *fenced]
    assert len(blocks) >= 2
    end(start([sys.executable, "-c", "\n".join(blocks)], clone))


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted(ONLINE))
def test_the_commands_that_need_the_network(line, tmp_path):
    process = begin(line, tmp_path)
    said, _ = process.communicate(timeout=900)
    if process.returncode and "could not be fetched" in said:
        pytest.skip("There is no network here.")
    assert process.returncode == 0, said
