"""The files of `examples/live`: the server starts as they start it, is healthy, and stops gracefully."""

import re
import shlex
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from personax.live import certificates
from personax.live.audit import read_audit
from personax.live.demo import Parts, wait_for_port
from tests.live.processes import free_port

pytestmark = pytest.mark.xdist_group("live processes")
EXAMPLES = Path(__file__).parents[2] / "examples" / "live"


def command_of(name):
    """The words after `personax serve` of a file."""
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    if name == "Containerfile":
        return re.findall(r'"([^"]+)"', text[text.index("\nCMD") :])
    return shlex.split(re.search(r"ExecStart=\S+ serve (.*)", text)[1])


def test_the_container_and_the_service_run_the_same_command():
    assert command_of("Containerfile") == command_of("personax-serve.service")


def test_the_server_of_the_example_is_healthy_and_stops_gracefully(tmp_path):
    certificates.create(tmp_path / "certificates", ["127.0.0.1"], ["anna"])
    port, metrics = free_port(), free_port()
    changed = {"federation.toml": str(EXAMPLES / "federation.toml"), "0.0.0.0:7000": f"127.0.0.1:{port}"}
    changed |= {"server": str(tmp_path / "certificates" / "server"), "run": str(tmp_path / "run"), "9100": str(metrics)}
    with Parts(tmp_path) as parts:
        parts.begin("server", "serve", *(changed.get(word, word) for word in command_of("personax-serve.service")))
        wait_for_port(parts, "server")
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/health", timeout=5) as answer:
                    assert answer.read() == b"healthy\n"
                break
            except OSError:
                time.sleep(0.1)
        parts.processes["server"].send_signal(signal.SIGTERM)
        assert parts.processes["server"].wait(60) == 0, parts.log("server")
    assert [line["what"] for line in read_audit(tmp_path / "run")] == ["start", "stop"]
