"""The peers: a separate environment and process for each library that we compare with.

Their scripts are in `benchmarks/` of the repository. A peer runs in `.venv-peers/NAME` if it exists, otherwise in this
Python if its packages are installed, otherwise in a new `.venv-peers/NAME` that is installed from PyPI.
"""

import importlib.util
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS, ENVIRONMENTS = ROOT / "benchmarks", ROOT / ".venv-peers"
TORCH = "torch==2.13.0"


class CannotRun(Exception):
    """The reason why a peer is skipped."""


@dataclass(frozen=True)
class Peer:
    """A peer's script, the packages that it imports, and the requirements that provide them."""

    name: str
    script: str
    environment: str
    modules: tuple[str, ...]
    requirements: tuple[str, ...]
    work: str = "steps.npz"  # the work that it repeats: steps on given batches, or one batch of all samples


PEERS = {
    peer.name: peer
    for peer in (
        Peer("personax", "personax_peer.py", "personax", ("personax",), (), "steps.npz"),
        Peer("torch", "torch_loop.py", "torch", ("torch",), (TORCH, "numpy")),
        Peer("torch-vmap", "torch_vmap.py", "torch", ("torch",), (TORCH, "numpy")),
        Peer(
            "flower",
            "flower_peer.py",
            "flower",
            ("flwr", "ray", "torch"),
            ("flwr[simulation]==1.41.0", TORCH),
            "epoch.npz",
        ),
        Peer("pfl", "pfl_peer.py", "pfl", ("pfl", "torch"), ("pfl==0.6.0", TORCH), "epoch.npz"),
    )
}


def command_of(peer: Peer) -> list[str]:
    """Return the command that starts a peer, and create its environment if needed; raises `CannotRun`."""
    script = SCRIPTS / peer.script
    if not script.exists():
        raise CannotRun(f"its script {peer.script} is available only in the repository")
    python = ENVIRONMENTS / peer.environment / "bin" / "python"
    if (python.parent / "ready").exists():
        return [str(python), str(script)]
    if all(importlib.util.find_spec(module) for module in peer.modules):
        return [sys.executable, str(script)]
    _install(peer, python)
    return [str(python), str(script)]


def _install(peer: Peer, python: Path) -> None:
    venv.create(python.parents[1], with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.requirements]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        text = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
        raise CannotRun(f"not installed: {text[-1]}")
    (python.parent / "ready").touch()
