"""Processes that run one side of the benchmark and communicate in lines of JSON."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import Any

FAREWELL = 10.0  # seconds to wait for a process to exit on its own


class ProcessFailed(Exception):
    """The process ended, or did not answer in time."""


class Side:
    """A process that prints one line of JSON when it is ready, and one in reply to each input line."""

    def __init__(self, command: Sequence[str], asked: dict[str, Any]) -> None:
        self.errors = TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen([*command, json.dumps(asked)], text=True, env=environment, **pipes)
        self.facts: dict[str, Any] = {}

    def get_ready(self, seconds: float) -> None:
        """Wait for the message that it is ready."""
        self.facts = self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return the next line of JSON, which must arrive within `seconds`; other output is ignored."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while selector.select(seconds):
                line = self.process.stdout.readline()
                if line.startswith("{"):
                    return json.loads(line)
                if not line:
                    raise ProcessFailed(self._last_words())
        raise ProcessFailed(f"no answer within {seconds:.0f} s")

    def run(self, seconds: float, patience: float) -> dict[str, Any]:
        """Run for about `seconds`, and return the number of rounds and the actual time."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{seconds}\n")
            self.process.stdin.flush()
        except OSError:
            raise ProcessFailed(self._last_words()) from None
        return self.answer(patience)

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        return f"ended: {lines[-1][:200]}" if lines else "ended without output"

    def close(self) -> None:
        """Close the input, and kill the process if it does not exit."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(FAREWELL)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker() -> list[str]:
    """Return the command that starts our side."""
    return [sys.executable, "-m", "personax.bench.worker"]
