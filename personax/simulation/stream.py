"""Runs with data on the host: only the clients of a few waves at a time are on the device.

The schedule is known before the run. Waves are processed in blocks: a block's clients form a small federation, with its
rows in a buffer of fixed size, and the compiled program is the same as for any run. While the device computes a block,
the host stores the personal states of the previous block and prepares the next one. A client in two consecutive blocks
takes its state from the first one on the device, because the host does not have it yet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from personax.data.arrays import ClientData
from personax.data.federation import Federation
from personax.simulation.engine import Procedure, SimulationRun, replicate
from personax.simulation.results import State
from personax.simulation.store import Store
from personax.simulation.waves import WavePlan, Waves
from personax.typing import Array, Personal
from personax.values import require_count

_BLOCK_BYTES = 32 << 20  # the target for a block's data and states; a block with a single wave may be larger
BLOCK_WAVES = 16  # longer blocks save no time


@dataclass(frozen=True)
class Stream:
    """Settings for the personal states of a streamed run, which exist for visited clients only.

    Up to `memory` bytes of them stay in memory. The others go to a file in `folder`, by default the system's folder for
    temporary files.
    """

    memory: int = 4 << 30
    folder: str | None = None

    def __post_init__(self) -> None:
        require_count("memory", self.memory, least=0)
        if self.folder is not None and not Path(self.folder).is_dir():
            raise ValueError(f"Folder not found: `folder` is {self.folder!r}. Create it first.")


class Sizes(NamedTuple):
    """The common shape of all blocks of a run; the rows are those of one device."""

    num_waves: int
    num_clients: int
    num_rows: int


class _Block(NamedTuple):
    """Consecutive waves, whose `client` is an index into the block's own clients."""

    num_waves: int
    waves: Waves
    clients: np.ndarray  # their positions in the federation, in order
    visited: np.ndarray  # True for visited clients, [places] or [seeds, places], padded beyond the clients


@dataclass(frozen=True)
class Streamed:
    """Everything that a streamed run needs to continue from any wave."""

    run: SimulationRun
    store: Store
    sizes: Sizes

    def advance(self, state: State, begin: int, stop: int) -> State:
        """Run waves `begin` to `stop`, with personal states from the store."""
        run, mesh = self.run, self.run.program.mesh
        state, before = replicate(mesh, state), None
        for block in self._blocks(begin, stop):
            now = state._replace(personal=self._states(block, before))
            data = self._data(block)
            key, waves, frozen = replicate(mesh, (run.key, block.waves, run.frozen))
            procedure = Procedure(run.algorithm, frozen)
            state = run.advance(procedure, data, key, waves, now, 0, block.num_waves)
            self._settle(before)
            before = block, state
        self._settle(before)
        return state._replace(personal=())

    def _blocks(self, begin: int, stop: int) -> Iterator[_Block]:
        for first, last in pairwise([*range(begin, stop, self.sizes.num_waves), stop]):
            yield _block(self.run.plan, self.run.program.has_seeds, self.sizes, first, last)

    def _data(self, block: _Block) -> ClientData:
        """The samples of a block's clients. With several devices each has those of the clients that it trains.

        A process reads from the federation only what its own devices train.
        """
        federation, sizes, mesh = self.run.federation, self.sizes, self.run.program.mesh
        if mesh is None:
            return federation.train_of(block.clients, sizes.num_rows, sizes.num_clients)
        devices = mesh.devices.ravel()
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        own = [
            self._part(block, clients)
            for device, clients in zip(devices, trained_by(block.waves, len(devices)), strict=True)
            if device.process_index == jax.process_index()
        ]
        here = [device for device in devices if device.process_index == jax.process_index()]

        def divided(parts: list[Any]) -> Array:
            shape = (len(devices) * len(parts[0]), *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, jax.device_put(parts, here))

        of_all = federation.train_of(block.clients[:0], 1, sizes.num_clients)  # no rows
        num = len(block.clients)
        of_all.num_samples[:num], of_all.ids[:num] = federation.counts[block.clients], federation.ids[block.clients]
        x, y, start = map(divided, map(list, zip(*own, strict=True)))
        return ClientData(x, y, start, *replicate(mesh, (of_all.num_samples, of_all.ids)))

    def _part(self, block: _Block, clients: np.ndarray) -> tuple[Array, Array, np.ndarray]:
        """The rows of one device, and where in them each of the block's clients begins."""
        part = self.run.federation.train_of(block.clients[clients], self.sizes.num_rows, self.sizes.num_clients)
        start = np.zeros_like(part.start)
        start[clients] = part.start[: len(clients)]
        return part.x, part.y, start

    def _states(self, block: _Block, before: tuple[_Block, State] | None) -> Personal:
        """The newest personal states of a block's clients."""
        if self.store.is_empty:
            return self.store.kept.default
        states = replicate(self.run.program.mesh, self.store.kept.read(self._positions(block)))
        if before is None:
            return states
        place = np.searchsorted(before[0].clients, block.clients).clip(max=len(before[0].clients) - 1)
        found = before[0].clients[place] == block.clients
        place = np.r_[np.where(found, place, -1), np.full(self.sizes.num_clients - len(place), -1)]
        return _newer(self.run.program.has_seeds, place, before[1].personal, states)

    def _settle(self, before: tuple[_Block, State] | None) -> None:
        """Wait for a block, so that the host does not run ahead, and store its states."""
        if before is None:
            return
        block, state = before
        if self.store.is_empty:
            jax.block_until_ready(state.faults)
            return
        self.store.write(self._positions(block), block.visited, jax.tree.map(np.asarray, state.personal))

    def _positions(self, block: _Block) -> np.ndarray:
        """The positions of the clients at all places of a block, for each seed; the last client pads the rest."""
        padded = np.pad(block.clients, (0, self.sizes.num_clients - len(block.clients)), mode="edge")
        return np.broadcast_to(padded, block.visited.shape)


@partial(jax.jit, static_argnums=0)
def _newer(has_seeds: bool, place: Array, before: Personal, states: Personal) -> Personal:
    """Update a block's states with those of the block before, where it has them (`place` is not -1)."""

    def choose(old: Array, new: Array) -> Array:
        return jnp.where((place >= 0).reshape((-1,) + (1,) * (new.ndim - 1)), old[place], new)

    return jax.tree.map(jax.vmap(choose) if has_seeds else choose, before, states)


def block_sizes(
    plan: WavePlan, federation: Federation, state_bytes: int, stops: list[int], begin: int, num_devices: int = 1
) -> Sizes:
    """The common shape of the blocks of a run that pauses at `stops`, so that all blocks share one program."""
    num_waves = _num_waves(plan, federation, state_bytes, [begin, *stops], num_devices)
    most_clients = most_rows = 1
    for begins, ends in pairwise([begin, *stops]):
        for first in range(begins, ends, num_waves):
            last = min(first + num_waves, ends)
            most_clients = max(most_clients, len(_clients(plan, first, last)))
            for clients in _trained(plan.waves.client[:, first:last], plan.waves.valid[:, first:last], num_devices):
                most_rows = max(most_rows, int(federation.counts[clients].sum()))
    return Sizes(num_waves, roomy(most_clients), roomy(most_rows))


def largest_sizes(
    plan: WavePlan, federation: Federation, state_bytes: int, stops: list[int], begin: int, num_devices: int = 1
) -> Sizes:
    """A shape for blocks with any cohorts, which a controller chooses during the run."""
    num_waves = _num_waves(plan, federation, state_bytes, [begin, *stops], num_devices)
    members = num_waves * plan.waves.client[:, 0].size
    largest = np.sort(federation.counts)[::-1][: members // num_devices]
    return Sizes(num_waves, roomy(min(members, federation.num_clients)), roomy(int(largest.sum())))


def _num_waves(plan: WavePlan, federation: Federation, state_bytes: int, pauses: list[int], num_devices: int) -> int:
    """The number of waves of a block, by the mean size of its data and states."""
    members = plan.waves.client[:, 0].size
    row_bytes = (federation.x.nbytes + federation.y.nbytes) / len(federation.x)
    wave_bytes = members * (federation.counts.mean() * row_bytes / num_devices + state_bytes)
    longest = max(b - a for a, b in pairwise(pauses))
    return int(min(max(_BLOCK_BYTES // wave_bytes, 1), BLOCK_WAVES, longest))


def _clients(plan: WavePlan, first: int, last: int) -> np.ndarray:
    return np.unique(plan.waves.client[:, first:last][plan.waves.valid[:, first:last]])


def trained_by(waves: Waves, num_devices: int) -> list[np.ndarray]:
    """The places of the clients that each device trains in these waves, whose members are divided evenly."""
    return _trained(np.asarray(waves.client), np.asarray(waves.valid), num_devices)


def _trained(client: np.ndarray, valid: np.ndarray, num_devices: int) -> list[np.ndarray]:
    parts = zip(np.split(client, num_devices, -1), np.split(valid, num_devices, -1), strict=True)
    return [np.unique(own[there]) for own, there in parts]


def _block(plan: WavePlan, has_seeds: bool, sizes: Sizes, first: int, last: int) -> _Block:
    clients, num = _clients(plan, first, last), last - first
    waves = Waves(*(np.zeros((len(array), sizes.num_waves, array.shape[2]), array.dtype) for array in plan.waves))
    for target, array in zip(waves, plan.waves, strict=True):
        target[:, :num] = array[:, first:last]
    place = np.searchsorted(clients, waves.client)
    waves = waves._replace(client=np.where(waves.valid, place, sizes.num_clients))
    visited = np.zeros((len(waves.client), sizes.num_clients + 1), bool)
    np.put_along_axis(visited, waves.client.reshape(len(visited), -1), True, axis=1)
    visited = visited[:, :-1]
    if has_seeds:
        return _Block(num, waves, clients, visited)
    return _Block(num, Waves(*(array[0] for array in waves)), clients, visited[0])


def roomy(least: int) -> int:
    """Round up slightly, so that similar numbers give the same result and similar runs share a program."""
    step = 1 << max(least.bit_length() - 4, 0)
    return -(-least // step) * step
