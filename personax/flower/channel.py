"""The connection from a ClientApp, which lives for one message, to the long-lived worker of its node.

A worker listens on a Unix socket in a folder that only its user can enter. The first message that needs it starts it;
it survives the SuperNode and ends after an idle period. A request and its answer each consist of a JSON header and
arrays; each connection carries one request.
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

PROTOCOL = 2  # version of the requests to a worker, which must be the same on both sides
_HEAD = struct.Struct("<Q")  # the length of the header
_MOST_WORDS = 1 << 26
_START = 120.0  # seconds within which a worker must listen
_started: dict[Path, "subprocess.Popen[bytes]"] = {}  # workers started by this process (long-lived in simulations)
_starting = threading.Lock()


class WorkerFailed(RuntimeError):
    """A worker that does not start or that reports an error, with its message."""


def ask(folder: Path, about: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    """Return the answer of a node's worker, starting it if necessary. `folder` has the node's state."""
    try:
        answer, found = _exchange(folder, about, arrays)
    except (EOFError, ConnectionError):  # the worker ended meanwhile; its work is on disk and is settled only once
        answer, found = _exchange(folder, about, arrays)
    if "error" in answer:
        raise WorkerFailed(answer["error"])
    return answer, found


def socket_of(folder: Path) -> Path:
    """The address of a node's worker. The path is short, because the length of socket paths is limited."""
    return private_folder() / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}.sock"


def private_folder() -> Path:
    """A folder that only this user can enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    place = Path(runtime) / "personax" if runtime else Path(tempfile.gettempdir()) / f"personax-{os.getuid()}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise WorkerFailed(f"{place} must be a folder of user {os.getuid()} with mode 0o700, got {mode}. Delete it.")
    return place


def send(link: socket.socket, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Send one request or answer."""
    described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    words = json.dumps({"about": dict(about), "arrays": described}).encode()
    link.sendall(_HEAD.pack(len(words)) + words)
    for array in arrays.values():
        if array.size:
            link.sendall(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)


def receive(link: socket.socket) -> tuple[dict[str, Any], Arrays]:
    """Receive one request or answer."""
    (length,) = _HEAD.unpack(_read(link, _HEAD.size))
    if length > _MOST_WORDS:
        raise ValueError(f"The header of a message must have at most {_MOST_WORDS} bytes, got {length}.")
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
            raise EOFError(f"The other side closed the connection with {len(view)} of {length} bytes missing.")
        view = view[got:]
    return content


def _exchange(folder: Path, about: Mapping[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    with _connect(folder) as link:
        send(link, about, arrays)
        return receive(link)


def _connect(folder: Path) -> socket.socket:
    """Connect to the worker. If several are started at once, one of them remains and all callers find it."""
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
                raise WorkerFailed(f"The worker of {folder} does not start. Its output:\n{text}")
            if process is None or process.returncode is not None:
                _started[folder], fresh = _start(folder), True
        time.sleep(0.05)


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A worker waits most of the time and must not reserve a GPU's whole memory meanwhile.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    command = [sys.executable, "-m", "personax.flower.worker", str(folder)]
    with (folder / "worker.log").open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
