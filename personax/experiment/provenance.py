"""The provenance of results: a digest of the data, and the settings on which an algorithm's results depend.

Parts and checkpoints record it, and `resume` compares it with the folder's current configuration and data.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from personax.data.federation import Federation
from personax.experiment.config import Config, dump

_UNRELATED = ("name", "personax", "live", "local", "tune", "algorithms")  # do not affect one algorithm's results
_BLOCK = 1 << 22  # bytes to read at once
_WHOLE = 8 << 30  # largest memory-mapped array in bytes that is read completely; larger ones are sampled
_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Provenance:
    """The inputs of an algorithm's results: settings by dotted names, and digests of the parts of the data.

    `num_rounds` is separate, because a run may be extended.
    """

    num_rounds: int
    settings: dict[str, Any]
    data: dict[str, str]

    @property
    def digest(self) -> str:
        """Return a digest of everything except the number of rounds."""
        return hashlib.sha256(_plain([self.settings, self.data]).encode()).hexdigest()

    @property
    def table(self) -> dict[str, Any]:
        """Return the provenance as a table for a checkpoint."""
        return {**asdict(self), "digest": self.digest}

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "Provenance":
        """Read a provenance from a table."""
        return cls(int(table["num_rounds"]), table["settings"], table["data"])

    def changes_to(self, now: "Provenance") -> list[str]:
        """Describe each setting and each part of the data that has changed.

        >>> before = Provenance(60, {"algorithms.FedAvg.lr": 0.1}, {"training data": "51a0"})
        >>> before.changes_to(Provenance(80, {"algorithms.FedAvg.lr": 0.2}, {"training data": "77b3"}))
        ['`algorithms.FedAvg.lr` was 0.1 and is 0.2', 'the training data has changed']
        """
        names = dict.fromkeys([*self.settings, *now.settings])
        shown = lambda table, name: _plain(table[name]) if name in table else "not set"
        pairs = [(name, shown(self.settings, name), shown(now.settings, name)) for name in names]
        found = [f"`{name}` was {before} and is {after}" for name, before, after in pairs if before != after]
        parts = dict.fromkeys([*self.data, *now.data])
        return [*found, *(f"the {part} has changed" for part in parts if self.data.get(part) != now.data.get(part))]


def provenance_of(config: Config, name: str, data: dict[str, str]) -> Provenance:
    """Return the provenance of an algorithm of a resolved configuration, on data with these digests."""
    table = tomllib.loads(dump(config))
    kept = {key: item for key, item in table.items() if key not in _UNRELATED}
    kept["schedule"] = {key: item for key, item in kept["schedule"].items() if key != "num_rounds"}
    kept["evaluation"] = {key: item for key, item in kept["evaluation"].items() if key != "target"}
    if config.data.kind != "import":
        kept["data"] = {key: item for key, item in kept["data"].items() if key != "path"}  # its content has a digest
    kept["model"] = {key: item for key, item in kept["model"].items() if key != "base"}  # likewise
    settings = dict(_flat({**kept, "algorithms": {name: table["algorithms"][name]}}))
    return Provenance(config.schedule.num_rounds, settings, {**data, **_digest_traces(config.schedule.delays)})


def _digest_traces(delays: str | dict[str, Any]) -> dict[str, str]:
    """Digest the files of device traces, if the delays have any."""
    if not isinstance(delays, dict) or delays.get("kind") != "traces":
        return {}
    files = [Path(str(delays[name])) for name in ("devices", "availability") if name in delays]
    return {f"file {file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def digest_data(federation: Federation) -> dict[str, str]:
    """Digest a federation's schema, training data, test data, clients and held-out clients.

    Everything is read in blocks. For a memory-mapped array larger than 8 GiB, its length and 2048 evenly spaced blocks
    of 4 MiB are digested instead.
    """
    schema = hashlib.sha256(_plain(federation.schema.to_dict()).encode()).hexdigest()
    return {"schema": schema, **_digest_clients(federation)}


def _digest_clients(fed: Federation) -> dict[str, str]:
    parts = {"training data": (fed.x, fed.y, fed.offsets), "list of clients": (fed.ids,)}
    if fed.test_x is not None:
        parts["test data"] = (fed.test_x, fed.test_y, fed.test_offsets)
    found = {name: _digest(arrays) for name, arrays in parts.items()}
    names = hashlib.sha256(found["list of clients"].encode())
    for name in fed.names:
        names.update(f"{len(name)} {name}".encode())
    found["list of clients"] = names.hexdigest()
    if fed.newcomers is not None:
        held_out = _plain(_digest_clients(fed.newcomers))
        found["data of held-out clients"] = hashlib.sha256(held_out.encode()).hexdigest()
    return found


def _digest(arrays: tuple[Any, ...]) -> str:
    found = hashlib.sha256()
    for array in map(np.asanyarray, arrays):
        found.update(f"{array.dtype.str} {array.shape}".encode())
        for block in _blocks(array):
            found.update(block.data)
    return found.hexdigest()


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the bytes of an array, or a sample of them."""
    content = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    if isinstance(array, np.memmap) and len(content) > _WHOLE:
        begins = np.linspace(0, len(content) - _BLOCK, _WHOLE // _BLOCK).astype(int).tolist()
    else:
        begins = range(0, len(content), _BLOCK)
    yield from (content[begin : begin + _BLOCK] for begin in begins)


def _flat(table: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested tables by dotted names, as in TOML."""
    for key, item in table.items():
        name = before + (key if _BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False))
        if isinstance(item, dict):
            yield from _flat(item, f"{name}.")
        else:
            yield name, item


def _plain(item: Any) -> str:
    """Return a value as JSON, which is equal for equal values."""
    return json.dumps(item, ensure_ascii=False, sort_keys=True, default=str)
