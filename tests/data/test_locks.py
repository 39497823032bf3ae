"""Lock files: one holder at a time, in this process and in others."""

import os
import subprocess
import sys
import threading

import pytest

from personax.data.locks import Taken, sole_user, taking_turns

HOLD = """
import sys
from pathlib import Path
from personax.data.locks import sole_user
with sole_user(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_user(tmp_path):
    with sole_user(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(Taken, match=f"is used by process {os.getpid()}"), sole_user(tmp_path / "lock"):
            pass
    with sole_user(tmp_path / "lock"):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path):
    words = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Taken, match=f"is used by process {other.pid}"), sole_user(tmp_path / "lock"):
            pass
        other.kill()
        other.wait()
        with sole_user(tmp_path / "lock"):
            pass


def test_other_processes_wait_for_the_lock(tmp_path):
    path, waits, order = tmp_path / "lock", threading.Event(), []

    def second():
        with taking_turns(path, waits.set):
            order.append("second")

    with taking_turns(path, lambda: pytest.fail("nobody held it")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]
