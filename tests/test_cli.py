"""The command line: what it prints where, and how it ends."""

import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from personax.cli import app
from personax.datasets import decode
from personax.datasets.sources import SOURCES, Archive, Package
from tests.test_fetch import cifar_like, cifar_tar, closed_address, serving, source


def personax(*words):
    return CliRunner().invoke(app, words)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSONAX_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PATH", "")  # no npm
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.fixture
def tiny(monkeypatch):
    """A small CIFAR-10 in place of the real one, on a server of its own."""
    arrays = cifar_like()
    with serving() as web:
        web.files["tiny.tar.gz"] = cifar_tar(arrays)
        archive = Archive((web.url("tiny.tar.gz"),), decode.cifar_archive)
        monkeypatch.setitem(SOURCES, "cifar10", source(arrays, archive, name="cifar10"))
        yield web


def test_fetch_says_where_the_data_is(tiny, place):
    for _ in range(2):
        ended = personax("data", "fetch", "cifar10")
        assert (ended.exit_code, ended.stdout) == (0, f"cifar10 is in {place / 'cifar10.npz'}\n")
    assert len(tiny.asked) == 1
    with np.load(place / "cifar10.npz") as arrays:
        assert arrays["x"].shape == (20, 32, 32, 3)


def test_a_failed_fetch_is_one_message(monkeypatch, place):
    origins = Archive((closed_address() + "a",), decode.cifar_archive), Package("b@1", decode.cifar_package)
    monkeypatch.setitem(SOURCES, "mnist", source(cifar_like(), *origins, name="mnist"))
    ended = personax("data", "fetch", "mnist")
    assert ended.exit_code == 1 and ended.stdout == "" and isinstance(ended.exception, SystemExit)
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert lines[0] == "Error: Tiny could not be fetched. Tried:" and str(place) in lines[-1]


def test_a_folder_that_is_a_file_is_one_message(monkeypatch, place):
    (place / "file").write_text("")
    monkeypatch.setenv("PERSONAX_DATA", str(place / "file"))
    ended = personax("data", "fetch", "mnist")
    assert ended.exit_code == 1 and "Error: [Errno" in ended.stderr and isinstance(ended.exception, SystemExit)


def test_ctrl_c_says_that_one_can_go_on(tiny, monkeypatch):
    def interrupt(files):
        raise KeyboardInterrupt

    archive = Archive((tiny.url("tiny.tar.gz"),), interrupt)
    monkeypatch.setitem(SOURCES, "cifar10", source(cifar_like(), archive, name="cifar10"))
    ended = personax("data", "fetch", "cifar10")
    assert ended.exit_code == 130 and "Interrupted. Run the same command again to go on from here." in ended.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minst", "`name` must be one of 'mnist', 'cifar10', got 'minst'. Did you mean 'mnist'?"),
        ("digits", "digits is not fetched (embedded). See `personax.datasets.digits`."),
        ("femnist", "femnist is not fetched (needs a folder). See `personax.datasets.femnist`."),
    ],
)
def test_names_that_cannot_be_fetched(name, said):
    ended = personax("data", "fetch", name)
    assert ended.exit_code == 2 and said in ended.stderr and ended.stdout == ""


def test_list_shows_what_is_here(tiny):
    rows = lambda: {line.split()[0]: line for line in personax("data", "list").stdout.splitlines() if line.strip()}
    before = rows()
    assert {"digits", "mnist", "cifar10", "synthetic", "femnist"} <= set(before)
    assert " not here " in before["cifar10"] and " embedded " in before["digits"] and "Krizhevsky" in before["cifar10"]
    personax("data", "fetch", "cifar10")
    after = rows()
    assert " here " in after["cifar10"] and " not here " not in after["cifar10"] and " not here " in after["mnist"]


@pytest.mark.parametrize("words", [(), ("data",), ("data", "fetch"), ("data", "list")])
def test_help_has_an_example(words):
    ended = personax(*words, "--help")
    assert ended.exit_code == 0 and "Example: personax data" in ended.stdout


@pytest.mark.parametrize("words", [("nothing",), ("data", "nothing"), ("data", "fetch"), ("data", "list", "more")])
def test_usage_errors(words):
    assert personax(*words).exit_code == 2


def test_the_command_runs_by_itself():
    command = [sys.executable, "-W", "error", "-c", "from personax.cli import app; app()", "data", "fetch", "mnst"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and "Did you mean 'mnist'?" in ended.stderr and ended.stdout == ""
