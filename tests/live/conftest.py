"""A tally of attacks, which `make test-attacks` prints: how many of each kind were attempted, and how many refused."""

import contextlib
from collections import Counter

import pytest

from personax.live import log

ATTEMPTED, REFUSED = Counter(), Counter()
NOTES = []


@pytest.fixture(autouse=True)
def own_log():
    """Each test begins with all its lines of the log."""
    log.logged.clear()


@pytest.fixture
def attack():
    """Count attacks of a kind: `with attack(kind): ...` is refused if the checks inside pass."""

    @contextlib.contextmanager
    def attempt(kind, num=1):
        ATTEMPTED[kind] += num
        yield
        REFUSED[kind] += num

    return attempt


@pytest.fixture
def note():
    """Print a measured figure at the end of `make test-attacks`."""
    return NOTES.append


def pytest_runtest_logreport(report):
    """Count each test of `test_attacks.py` as one attack."""
    if report.when == "call" and "test_attacks.py" in report.nodeid:
        ATTEMPTED["certificates, streams and uploads, one for each test"] += 1
        REFUSED["certificates, streams and uploads, one for each test"] += report.passed


def pytest_terminal_summary(terminalreporter, config):
    if not (ATTEMPTED or NOTES) or "attack" not in (config.option.markexpr or ""):
        return
    terminalreporter.section("attacks")
    terminalreporter.line("| attack | attempted | refused or bounded |")
    terminalreporter.line("|---|---|---|")
    for kind in sorted(ATTEMPTED):
        terminalreporter.line(f"| {kind} | {ATTEMPTED[kind]} | {REFUSED[kind]} |")
    terminalreporter.line(f"| all | {ATTEMPTED.total()} | {REFUSED.total()} |")
    for line in NOTES:
        terminalreporter.line(line)
