"""The way from a ClientApp, which lives for one message, to the worker of its node, which stays.

A worker listens on a Unix socket in a folder that only its user can enter. It is started by the first message that
needs it, survives the SuperNode, and ends when nothing has come for a while. A request and its answer are each some
words of JSON and arrays; one connection carries one request.
"""

import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from personax.flower.arrays import Arrays

PROTOCOL = 2  # of what a server asks a worker; both must have the same
_HEAD = struct.Struct("<Q")  # the length of the words
_MOST_WORDS = 1 << 26
_START = 120.0  # seconds that a worker may take to listen
_started: dict[Path, "subprocess.Popen[bytes]"] = {}  # by this process, which in Flower's simulation lives on
_starting = threading.Lock()


class WorkerFailed(RuntimeError):
    """A worker that does not start, or that refuses what it is asked; in its own words."""


def ask(folder: Path, about: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    """What the worker of a node answers; it is started if it does not run. `folder` is where the node has its state."""
    try:
        answer, found = _exchange(folder, about, arrays)
    except (EOFError, ConnectionError):  # it ended in the middle; what it had done is on its disk, and counts once
        answer, found = _exchange(folder, about, arrays)
    if "error" in answer:
        raise WorkerFailed(answer["error"])
    return answer, found


def socket_of(folder: Path) -> Path:
    """Where the worker of a node listens; the path is short, as sockets want it."""
    return private_folder() / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.sock"


def private_folder() -> Path:
    """A folder of this user alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    place = Path(runtime) / "personax" if runtime else Path(tempfile.gettempdir()) / f"personax-{os.getuid()}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise WorkerFailed(f"{place} must be a folder of user {os.getuid()} with mode 0o700, got {mode}. Remove it.")
    return place


def send(link: socket.socket, about: Mapping[str, Any], arrays: Arrays) -> None:
    """One request or answer."""
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    words = json.dumps({"about": dict(about), "arrays": described}).encode()
    link.sendall(_HEAD.pack(len(words)) + words)
    for array in arrays.values():
        if array.size:
            link.sendall(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)


def receive(link: socket.socket) -> tuple[dict[str, Any], Arrays]:
    """What `send` sent."""
    (length,) = _HEAD.unpack(_read(link, _HEAD.size))
    if length > _MOST_WORDS:
        raise ValueError(f"A message must have at most {_MOST_WORDS} bytes of words, got {length}.")
    header = json.loads(_read(link, length))
    arrays = {}
    for name, kind, shape in header["arrays"]:
        dtype = np.dtype(kind)
        arrays[name] = np.frombuffer(_read(link, dtype.itemsize * prod(shape)), dtype).reshape(shape)
    return header["about"], arrays


def _read(link: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        got = link.recv_into(view)
        if not got:
            raise EOFError(f"The other side ended with {len(view)} of {length} bytes to come.")
        view = view[got:]
    return content


def _exchange(folder: Path, about: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    with _connect(folder) as link:
        send(link, about, arrays)
        return receive(link)


def _connect(folder: Path) -> socket.socket:
    """A connection to the worker. Of several that are started at once one stays, and all callers find it."""
    path, until, fresh = socket_of(folder), time.monotonic() + _START, False
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(str(path))
            return link
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
        with _starting:
            process = _started.get(folder)
            if (process is not None and process.poll() and fresh) or time.monotonic() > until:
                text = (folder / "worker.log").read_text(errors="replace")[-1500:]
                raise WorkerFailed(f"The worker of {folder} does not start. It said:\n{text}")
            if process is None or process.returncode is not None:
                _started[folder], fresh = _start(folder), True
        time.sleep(0.05)


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A worker waits most of the time: it must not keep a GPU's whole memory meanwhile.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    command = [sys.executable, "-m", "personax.flower.worker", str(folder)]
    with (folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
