"""Real hosts: network namespaces with addresses of their own, delay and loss, and one that is cut off."""

import contextlib
import os
import random
import shutil
import subprocess
import time

import pytest

from tests.live_processes import faulty

pytestmark = pytest.mark.xdist_group("live processes")
SERVER, NAMES = "10.77.0.1", ["anna", "bert", "cleo"]


def ip(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, text=True)


class Hosts:
    """A namespace for each host, all on one bridge in a namespace of its own: nothing reaches other networks."""

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


def test_a_host_that_is_cut_off_blocks_nobody_and_comes_back(tmp_path):
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
