"""Open connections of a server, limited per certificate. (gRPC only limits their total number.)

gRPC does not expose its connections, but they are open sockets of this process. If a peer is over its limit, its socket
is shut down here, and gRPC treats that as the end of the connection.
"""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Iterator

SILENT = 10.0  # seconds after which a connection without a request is closed, if there are many connections


class Connections:
    """A count of connections by the name of their certificate, which closes excess connections."""

    def __init__(self, most_each: int, most: int) -> None:
        self.most_each, self.most, self.port = most_each, most, 0
        self.peers: dict[str, dict[str, None]] = {}  # addresses by name, the oldest first
        self.silent: dict[str, float] = {}  # addresses without any request, and since when

    def saw(self, name: str, peer: str) -> None:
        """Record a request from this address, as gRPC writes it."""
        self.peers.setdefault(name, {})[peer] = None

    def close_excess(self) -> list[str]:
        """Close connections over the limits; return the names of their clients, or "" for silent connections."""
        crowded = any(len(peers) > self.most_each for peers in self.peers.values())
        if not crowded and len(_open_files()) <= self.most // 2:
            self.silent = {}
            return []
        there = dict(_connections(self.port))
        self.peers = {n: {p: None for p in peers if p in there} for n, peers in self.peers.items()}
        known = {peer for peers in self.peers.values() for peer in peers}
        now = time.monotonic()
        self.silent = {peer: self.silent.get(peer, now) for peer in there if peer not in known}
        closed = [(name, peer) for name, peers in self.peers.items() for peer in list(peers)[self.most_each :]]
        closed += [("", peer) for peer, since in self.silent.items() if now - since > SILENT]
        for name, peer in closed:
            _shut_down(there[peer], peer)
            self.peers.get(name, {}).pop(peer, None)
        return [name for name, _ in closed]


def _open_files() -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir("/dev/fd")
    return []  # without such a folder, nothing is limited


def _connections(port: int) -> Iterator[tuple[str, int]]:
    """The connections to a port of this process: each peer as gRPC writes it, with its file descriptor."""
    for file in map(int, _open_files()):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(file).st_mode):
                with socket.socket(fileno=os.dup(file)) as one:
                    if one.getsockname()[1:2] == (port,):
                        yield _written(one.getpeername()), file


def _shut_down(file: int, peer: str) -> None:
    """Shut down a connection if the file descriptor still belongs to it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as one:
        if _written(one.getpeername()) == peer:
            one.shutdown(socket.SHUT_RDWR)


def _written(address: tuple[str, int]) -> str:
    host, port = address[:2]
    if host.startswith("::ffff:"):
        host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
