"""Real hosts: network namespaces with addresses of their own, delay and loss, and one that is cut off.

Namespaces need rights and a kernel that has them; a relay that delays, pauses and cuts connections runs anywhere.
"""

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time

import pytest

from personax import simulate
from personax.live import certificates
from personax.live.certificates import read_credentials
from personax.live.client import take_part
from personax.live.connection import Connection
from personax.live.journal import read_lines
from personax.live.results import journal_schedule
from tests.live.parts import FEDERATION, assert_same, data_of, recipe, serving
from tests.live.processes import faulty
from tests.live.proxy import Relay

pytestmark = pytest.mark.xdist_group("live processes")
SERVER, NAMES = "10.77.0.1", ["anna", "bert", "cleo"]


def ip(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


class Hosts:
    """A namespace for each host, all on one bridge in a separate namespace: nothing reaches other networks."""

    def __init__(self, names):
        self.tag = f"px{os.getpid() % 10000}"
        self.hub = f"{self.tag}hub"
        self.made = []
        try:
            self.build(names)
        except BaseException:
            self.remove()
            raise

    def build(self, names):
        ip("ip", "netns", "add", self.hub)
        self.made.append(self.hub)
        self.at(self.hub, "ip", "link", "add", "bridge", "type", "bridge")
        self.at(self.hub, "ip", "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            space, here = self.space(name), f"v{i}"
            ip("ip", "netns", "add", space)
            self.made.append(space)
            self.at(self.hub, "ip", "link", "add", here, "type", "veth", "peer", "name", "eth", "netns", space)
            self.at(self.hub, "ip", "link", "set", here, "master", "bridge", "up")
            self.at(space, "ip", "address", "add", f"10.77.0.{1 if i == 0 else 10 + i}/24", "dev", "eth")
            self.at(space, "ip", "link", "set", "eth", "up")
            self.at(space, "ip", "link", "set", "lo", "up")
        self.ports = {name: f"v{i}" for i, name in enumerate(names)}

    def space(self, name):
        return f"{self.tag}{name}"

    def at(self, space, *words):
        return ip("ip", "netns", "exec", space, *words)

    def before(self, name):
        return ("ip", "netns", "exec", self.space(name))

    def disturb(self, name, *how):
        """Delay and loss on the way to a host."""
        try:
            self.at(self.hub, "tc", "qdisc", "add", "dev", self.ports[name], "root", "netem", *how)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or str(error)
            pytest.skip(f"this machine's kernel cannot delay or lose packets: {reason.strip()}")

    def cut(self, name):
        self.at(self.hub, "ip", "link", "set", self.ports[name], "down")

    def heal(self, name):
        self.at(self.hub, "ip", "link", "set", self.ports[name], "up")

    def remove(self):
        for space in reversed(self.made):
            ip("ip", "netns", "delete", space, check=False)


@contextlib.contextmanager
def hosts(names):
    if not shutil.which("ip") or os.geteuid():
        pytest.skip("network namespaces need root and the command ip")
    made = None
    try:
        made = Hosts(names)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.strip()}")
    try:
        yield made
    finally:
        made.remove()


@contextlib.contextmanager
def federation(folder, names, num_updates):
    with hosts(["server", *names]) as network:
        places = {name: network.before(name) for name in ("server", *names)}
        with faulty(folder, names, num_updates, host=SERVER, port=7000, places=places) as live:
            for name in ("server", *names):
                live.begin(name)
            yield network, live


@pytest.mark.parametrize("num_rounds", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_late_lost_and_cut_connections_change_nothing(num_rounds, tmp_path):
    """Every client behind its own relay: every update is applied once, and the simulator ends there, too."""
    place, given = tmp_path / "certificates", recipe("APFL", num_rounds=num_rounds)
    certificates.create(place, ["127.0.0.1"], NAMES)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(serving(tmp_path / "run", given, None, place, stay=False))
        bad = {"delay": 0.01, "pause": 0.2, "pauses": 0.05}
        relays = [stack.enter_context(Relay(running.port, **bad, seed=i)) for i in range(3)]
        found = {}

        def live(i, name):
            shown = read_credentials(place / "clients" / name)
            connection = Connection(f"127.0.0.1:{relays[i].port}", shown, patience=60.0, call_seconds=20.0)
            found[name] = take_part(connection, data_of(i), tmp_path / name)
            connection.close()

        threads = [threading.Thread(target=live, args=item) for item in enumerate(NAMES)]
        for thread in threads:
            thread.start()
        for relay in relays[:2]:
            before = running.book.ledger.num_events
            wait_until(lambda before=before: running.book.ledger.num_events >= before + 3)
            relay.cut()
            time.sleep(0.3)
            relay.heal()
        for thread in threads:
            thread.join(120)
        running.thread.join(30)
        assert running.error is None and not running.thread.is_alive()
        assert all(relay.num_cuts for relay in relays[:2]) and sum(relay.num_pauses for relay in relays) > 0
    uploads = [line for line in read_lines(tmp_path / "run") if line["what"] == "upload"]
    applied = [line for line in uploads if line["outcome"] == "applied"]
    assert len(applied) == 3 * num_rounds and set(found) == set(NAMES)
    for name in NAMES:
        own = [line["update"] for line in uploads if line["client"] == name]
        assert own == list(range(len(own)))
    schedule = journal_schedule(read_lines(tmp_path / "run"), NAMES)
    simulated = simulate(given.algorithm, given.task, FEDERATION, schedule, key=given.key)
    assert_same(running.book.state.params, simulated.params)


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_host_that_is_cut_off_blocks_no_other_and_comes_back(tmp_path):
    num = 160
    with federation(tmp_path, NAMES[:2], num) as (network, live):
        live.wait_for(2, of="anna")
        live.wait_for(2, of="bert")
        network.cut("bert")
        live.wait_for(len(live.uploads("anna")) + 10, of="anna", seconds=20)
        network.heal("bert")
        live.wait_for(len(live.uploads("bert")) + 2, of="bert", seconds=60)
        live.wait_for_end()
        assert live.uploads("bert") and live.uploads("anna")
    live.prove(num)


@pytest.mark.slow
def test_a_minute_without_network_and_ten_faults(tmp_path):
    num, rng = 6000, random.Random(1)
    with federation(tmp_path, NAMES, num) as (network, live):
        for name in NAMES:
            live.wait_for(2, of=name)
        network.cut("anna")
        time.sleep(60)
        network.heal("anna")
        live.wait_for(len(live.uploads("anna")) + 2, of="anna", seconds=120)
        for _ in range(10):
            victim = rng.choice(["server", *NAMES])
            if rng.random() < 0.5:
                live.kill(victim)
                time.sleep(rng.uniform(0, 2))
                live.begin(victim)
            else:
                network.cut(victim)
                time.sleep(rng.uniform(1, 5))
                network.heal(victim)
            if len(live.uploads()) > num - 500:
                break
            live.wait_for(len(live.uploads()) + 20, seconds=120)
        live.wait_for_end(600)
    live.prove(num)


@pytest.mark.slow
def test_delay_and_loss_slow_it_down_and_change_nothing(tmp_path):
    num = 100
    with hosts(["server", *NAMES]) as network:
        for name in ("server", *NAMES):
            network.disturb(name, "delay", "30ms", "10ms", "loss", "3%")
        places = {name: network.before(name) for name in ("server", *NAMES)}
        with faulty(tmp_path, NAMES, num, host=SERVER, port=7000, places=places) as live:
            for name in ("server", *NAMES):
                live.begin(name)
            live.wait_for_end(300)
    live.prove(num)
