"""A live server beside a bare gRPC echo with the same mutual TLS, in turns on the same machine; and 1000 clients.

`python benchmarks/live.py` prints exchanges a second (an upload and the newest model back) of 3 clients at 280 KB and
10 MB, and the ratio of the two; then the memory of a server with 1000 connected clients that hold a 280 KB model.
The clients do not train, so that the server and the protocol are all that is measured: every upload is checked,
journaled and applied, every model encoded, both sides verify layouts. The echo is plain gRPC: bytes in, the same
bytes out, one call each, from a pool of threads or from an event loop.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

NAMES = ("a", "b", "c")
SIZES = {"280 KB": 280_000, "10 MB": 10_000_000}
FEATURES, OUTPUTS = 54, 10
LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def recipe_of(num_bytes):
    """FedAsync on a network of about this size."""
    from personax.data.schema import Schema, numbered
    from personax.experiment.build import resolve
    from personax.experiment.config import parse
    from personax.live.recipe import make_recipe

    width = num_bytes // 4 // (FEATURES + OUTPUTS)
    algorithm = {"recipe": "fedasync", "lr": 0.1, "num_steps": 2, "server": {"kind": "asynchronous", "lr": 1e-6}}
    table = {"seeds": 1, "model": {"kind": "mlp", "widths": [width]}, "algorithms": {"FedAsync": algorithm}}
    schedule = {"num_rounds": 10**8, "cohort_size": 1}
    config = resolve(parse({**table, "schedule": schedule}), baselines=False)
    return make_recipe(config, Schema((FEATURES,), "float32", classes=numbered(OUTPUTS)))


def credentials_of(folder, who):
    from personax.live.certificates import read_credentials

    return read_credentials(folder / "certificates" / who)


def serve(folder, num_bytes):
    """The server under test; prints its port."""
    from personax.live.processes import keep_modules, set_up_server

    set_up_server()
    from personax.experiment.config import Terms
    from personax.live.book import Book
    from personax.live.certificates import Revocations
    from personax.live.journal import Journal
    from personax.live.serving import run_service

    terms, run = Terms(rate=1e6, max_connections=5000), folder / "run"
    book = Book(recipe_of(num_bytes), terms, Journal(run), run / "checkpoints", "benchmark")
    shown = credentials_of(folder, "server")
    revoked = Revocations(folder / "certificates" / "server" / "revoked.pem", shown.authority)
    keywords = {"credentials": shown, "revocations": revoked, "stop": asyncio.Event()}
    opened = lambda port, service: print(port, flush=True)
    keep_modules()
    asyncio.run(run_service(book, terms, "127.0.0.1:0", opened=opened, **keywords))


def echo(folder):
    """An echo server with a thread pool; prints its port."""
    import grpc

    server = grpc.server(ThreadPoolExecutor(8), options=LARGE)
    port = opened(server, credentials_of(folder, "server"), lambda request, context: request)
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


def async_echo(folder):
    """An echo server with an event loop; prints its port."""
    import grpc

    async def same(request, context):
        return request

    async def main():
        server = grpc.aio.server(options=LARGE)
        port = opened(server, credentials_of(folder, "server"), same)
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(main())


def opened(server, shown, answer):
    import grpc

    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Echo", {"echo": handler}),))
    made = grpc.ssl_server_credentials([(shown.key, shown.certificate)], shown.authority, True)
    return server.add_secure_port("127.0.0.1:0", made)


def client(folder, name, port):
    """One client of the server under test."""
    from personax.live.processes import keep_modules, set_up_client

    set_up_client()
    from personax.live.acceptance import read_recipe
    from personax.live.connection import Connection
    from personax.live.limits import Limits

    connection = Connection(f"127.0.0.1:{port}", credentials_of(folder, f"clients/{name}"))
    welcome = connection.register()
    recipe = read_recipe(welcome.recipe, welcome.layout, Limits())
    welcome = connection.register(recipe.digest)
    newest, update = connection.fetch(), welcome.next_update
    delta = recipe.up.vectors(recipe.up.encode({"delta": recipe.down.decode(newest.content)["params"], "extra": ()}))

    def exchange():
        nonlocal newest, update
        newest = connection.send(f"{name}-{update}", update, newest.version, recipe.up.buffers_of(delta))
        assert newest.outcome == "applied", newest.words
        recipe.down.require(newest.content)
        update += 1

    keep_modules()
    take_turns(exchange)


def echo_client(folder, name, port, num_bytes):
    """One client of an echo server."""
    import grpc

    shown = credentials_of(folder, f"clients/{name}")
    made = grpc.ssl_channel_credentials(shown.authority, shown.key, shown.certificate)
    call = grpc.secure_channel(f"127.0.0.1:{port}", made, options=LARGE).unary_unary("/Echo/echo")
    plain = os.urandom(num_bytes)

    def exchange():
        assert len(call(plain)) == num_bytes

    take_turns(exchange)


def take_turns(exchange):
    """Print the exchanges per second for each input line with a number of seconds."""
    exchange()
    print("ready", flush=True)
    for line in sys.stdin:
        num, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < float(line):
            exchange()
            num += 1
        print(num / (time.perf_counter() - begin), flush=True)


def crowd(folder, port, num):
    """Many registered clients that hold the model and stay connected; prints when they are ready."""
    import grpc

    from personax.live import certificates, wire

    place, digest = folder / "certificates", recipe_of(SIZES["280 KB"]).digest  # of samples, whatever the size
    for i in range(num):
        certificates.add(place, f"crowd-{i}")

    async def one(i, together):
        shown = credentials_of(folder, f"clients/crowd-{i}")
        made = grpc.ssl_channel_credentials(shown.authority, shown.key, shown.certificate)
        alone = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", made, options=alone)
        call = lambda name, kind: getattr(channel, kind)(
            wire.METHODS[name].path, wire.METHODS[name].coders[0], wire.METHODS[name].coders[3]
        )
        async with together:
            hello = wire.Hello(protocol=wire.PROTOCOL, schema=digest)
            welcome = await call("Register", "unary_unary")(hello)
            async for _ in call("Fetch", "unary_stream")(wire.Ask(run=welcome.run, have=-1)):
                pass
        return channel, call("Exchange", "stream_stream")()  # stays open while a client trains

    async def main():
        together = asyncio.Semaphore(50)
        channels = await asyncio.gather(*(one(i, together) for i in range(num)))
        print(len(channels), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(main())


class Process:
    """A part of the benchmark in its own process."""

    def __init__(self, *words):
        command = [sys.executable, __file__, *map(str, words)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self):
        return self.process.stdout.readline().strip()

    def write(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def memory(self):
        """Return the current memory in bytes."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def certify(folder):
    from personax.live import certificates

    certificates.create(folder / "certificates", ["127.0.0.1", "localhost"], NAMES)


def measure(num_bytes, seconds=1.0, turns=10):
    """Exchanges a second of the server and of the echoes, each in its best turn, and their ratio.

    The turns alternate. Other work on the machine slows a turn down and speeds none up: the best is what counts. The
    server is also compared turn by turn (the median).
    """
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder, clients = Path(place), {}
        certify(folder)
        begin = lambda *words: stack.enter_context(Process(*words))
        for kind in ("live", "echo", "async_echo"):
            server = begin("serve", folder, num_bytes) if kind == "live" else begin(kind, folder)
            port = server.read()
            role, size = ("client", ()) if kind == "live" else ("echo_client", (num_bytes,))
            clients[kind] = [begin(role, folder, name, port, *size) for name in NAMES]
        assert all(one.read() == "ready" for of_kind in clients.values() for one in of_kind)
        rates = {kind: [] for kind in clients}
        for turn in range(turns + 1):
            for kind, found in rates.items():
                for one in clients[kind]:
                    one.write(str(seconds))
                total = sum(float(one.read()) for one in clients[kind])
                if turn:  # the first one warms up
                    found.append(total)
    best = {kind: max(of_turns) for kind, of_turns in rates.items()}
    ratios = {"ratio": best["live"] / best["echo"], "async_ratio": best["live"] / best["async_echo"]}
    return {**best, **ratios, "median_ratio": float(np.median(np.divide(rates["live"], rates["echo"])))}


def measure_crowd(num=1000):
    """Measure a server's memory in bytes before and with this many connected clients."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        certify(folder)
        with Process("serve", folder, SIZES["280 KB"]) as server:
            port = server.read()
            before, most, stop = server.memory(), [0], threading.Event()

            def watch():
                while not stop.wait(0.05):
                    most[0] = max(most[0], server.memory())

            threading.Thread(target=watch, daemon=True).start()
            with Process("crowd", folder, port, num) as many:
                connected = int(many.read())
                time.sleep(1.0)
                stop.set()
    return {"connected": connected, "before": before, "most": most[0]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="all")
    parser.add_argument("given", nargs="*")
    asked = parser.parse_args()
    parts = {part.__name__: part for part in (serve, echo, async_echo, client, echo_client, crowd)}
    if asked.part in parts:
        folder, *given = asked.given
        parts[asked.part](Path(folder), *(int(item) if item.isdecimal() else item for item in given))
    else:
        for words, num_bytes in SIZES.items():
            found = measure(num_bytes)
            rates = ", ".join(f"{kind} {found[kind]:.1f}/s" for kind in ("live", "echo", "async_echo"))
            ratios = ", ".join(f"{found[kind]:.2f}" for kind in ("ratio", "async_ratio", "median_ratio"))
            print(f"{words}: {rates}; ratio to echo, to async_echo, to echo turn by turn: {ratios}", flush=True)
        if asked.part == "all":
            print(json.dumps(measure_crowd()), flush=True)


if __name__ == "__main__":
    main()
