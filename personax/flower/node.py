"""Settings of a node's owner, in the SuperNode's `--node-config`. No server can change them. Imports no JAX."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

_OWN = ("name", "client-id", "data", "label", "shape", "folder", "report", "idle-minutes")
_LIMITS = ("objectives", "max-steps", "max-batch", "max-bytes", "allow-imports", "base", "share-moments")
KEYS = (*_OWN, *_LIMITS, "partition-id", "num-partitions")  # Flower's simulation sets the last two


def read_node(given: Mapping[str, Any], recipe: Path) -> tuple[Path, dict[str, Any]]:
    """The folder with a node's state, and its settings.

    >>> read_node({"name": "anna", "data": "/data/anna.npz", "folder": "/state"}, Path("recipe.toml"))[1]
    {'name': 'anna', 'data': '/data/anna.npz', 'folder': '/state'}
    """
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ValueError(f"--node-config must have keys among {', '.join(KEYS)}, got {unknown[0]!r}.")
    node = dict(given)
    if "data" not in node:
        if "partition-id" not in node:
            raise ValueError(
                '--node-config must name the samples. Add data="FILE", or partition-id=N for a part of the data in '
                "the recipe."
            )
        node["recipe"] = str(recipe.resolve())
        node.setdefault("name", f"partition-{node['partition-id']}")
        node.setdefault("report", 1)  # these samples are known to the author of the recipe anyway
    name = str(node.setdefault("name", ""))
    if not name or not name.replace("-", "").replace("_", "").isalnum() or len(name) > 63:
        raise ValueError(f"--node-config must have a `name` of up to 63 letters, digits, - and _, got {name!r}.")
    folder = Path(node["folder"]) if "folder" in node else user_state_path("personax") / "flower" / name
    return folder.expanduser().resolve(), node


def request_of(node: Mapping[str, Any], task: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Make the request to a node's worker. A server's message cannot replace the owner's settings or the task.

    >>> request_of({"max-steps": 10}, "train", {"node": {"max-steps": 10**9}, "task": "query", "run": "mine"})
    {'node': {'max-steps': 10}, 'task': 'train', 'run': 'mine'}
    """
    return {**about, "node": dict(node), "task": task}
