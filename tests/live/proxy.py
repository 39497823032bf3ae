"""A bad network between clients and a server, without rights of any kind: a relay that delays, stalls and cuts.

A packet that is lost is sent again by TCP: whoever reads from the connection sees a pause. So a pause is loss.
"""

import contextlib
import queue
import random
import socket
import threading
import time


class Relay:
    """Passes bytes between its own port and another one, `delay` seconds later each way, with pauses at random."""

    def __init__(self, port, delay=0.0, pause=0.0, pauses=0.0, seed=0):
        self.target, self.delay, self.pause, self.pauses = port, delay, pause, pauses
        self.rng, self.open, self.is_cut, self.ended = random.Random(seed), set(), False, False
        self.num_pauses = self.num_cuts = 0
        self.recorded = bytearray()  # every byte from the clients
        self.threads = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self._start(self._accept)

    def cut(self):
        """Every connection breaks, and new ones break at once, until `heal`."""
        self.is_cut = True
        self.num_cuts += 1
        for one in list(self.open):
            self._drop(one)

    def heal(self):
        self.is_cut = False

    def close(self):
        self.ended = True
        self.cut()
        self.listener.close()
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self, do, *given):
        thread = threading.Thread(target=do, args=given, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _accept(self):
        self.listener.settimeout(0.1)
        while not self.ended:
            with contextlib.suppress(OSError):
                client, _ = self.listener.accept()
                self.open.add(client)
                server = socket.create_connection(("127.0.0.1", self.target), 5)
                self.open.add(server)
                if self.is_cut:
                    self._drop(client)
                    self._drop(server)
                    continue
                for source, sink, record in ((client, server, self.recorded), (server, client, bytearray())):
                    line = queue.Queue()
                    self._start(self._take_in, source, sink, line, record)
                    self._start(self._pass_on, sink, line)

    def _take_in(self, source, sink, line, record):
        """Note when each piece is due at the other end; the pieces after one that is late wait for it."""
        due = 0.0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                record += piece
                late = self.rng.random() < self.pauses
                self.num_pauses += late
                due = max(due, time.monotonic() + self.delay + late * self.pause)
                line.put((due, piece))
        line.put((due, b""))
        if self.is_cut:
            self._drop(sink)

    def _pass_on(self, sink, line):
        while True:
            due, piece = line.get()
            time.sleep(max(due - time.monotonic(), 0))
            if not piece:
                return self._drop(sink)
            with contextlib.suppress(OSError):
                sink.sendall(piece)

    def _drop(self, one):
        self.open.discard(one)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
