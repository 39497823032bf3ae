"""Arrays as safetensors bytes: one layout for what goes down and one for what goes up, known to both sides beforehand.

A layout fixes the names, shapes and types of a pytree's leaves, and so every byte of a safetensors header. Whatever
arrives with another header is not what was agreed, and is refused before any of it is looked at.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import xxhash

from personax.experiment.tensors import DTYPE_NAMES, dotted, leaves_by_name
from personax.typing import PyTree

ALIGNMENT = 64  # bytes: XLA copies what begins elsewhere
FRAME = 1 << 20  # bytes of HTTP/2 that are passed on together; the 16 KB of gRPC's default are slower
PIECE = 16 << 20  # bytes of data in one message; what is longer travels in several
Content = bytes | memoryview
Buffers = list[Any]  # bytes, memoryviews or arrays of bytes, one after another


class Mismatch(ValueError):
    """A difference between what was agreed and what the other side has or sent."""


class Broken(ValueError):
    """What arrived is not what was sent: too short, too long, or with another checksum."""


class TooLong(Broken):
    """More arrived than was announced, which no accident on the way does."""


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a layout."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name} of shape {self.shape}"


@dataclass(frozen=True)
class Layout:
    """The leaves of a pytree, in the order of the tree."""

    leaves: tuple[ArrayLayout, ...]
    structure: Any

    @classmethod
    def of(cls, tree: PyTree) -> "Layout":
        """The layout of a pytree of arrays or of their shapes.

        >>> Layout.of({"delta": np.zeros(3, np.float32)}).describe()
        [['delta', [3], 'float32']]
        """
        leaves = []
        for name, leaf in leaves_by_name(tree, dotted).items():
            kind = np.dtype(leaf.dtype)
            if kind not in DTYPE_NAMES or np.issubdtype(kind, np.complexfloating):
                raise ValueError(f"`{name}` must be of a real type that safetensors has, got {kind}. Convert it.")
            leaves.append(ArrayLayout(name, tuple(leaf.shape), kind))
        return cls(tuple(leaves), jax.tree.structure(tree))

    def describe(self) -> list[list[Any]]:
        """The layout as JSON has it."""
        return [[leaf.name, list(leaf.shape), leaf.dtype.name] for leaf in self.leaves]

    def require_same(self, described: Sequence[Any], where: str) -> None:
        """Refuse what the other side described, if it is not this; the first difference is named."""
        words = lambda leaf: f"{leaf[2]} of shape {tuple(leaf[1])}" if leaf else "no such array"
        mine, theirs = ({leaf[0]: list(leaf) for leaf in leaves} for leaves in (self.describe(), described))
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise Mismatch(
                    f"{where}: `{name}` must be {words(mine.get(name))} as here, got {words(theirs.get(name))} there. "
                    "Use the same model, data types and version of personax on both."
                )

    @cached_property
    def _placed(self) -> list[tuple[int, int]]:
        """For each leaf in the order of the bytes: its index and where it begins.

        Wide types first, so that all are aligned; each type in one stretch.
        """
        rank = lambda i: (-self.leaves[i].dtype.itemsize, self.leaves[i].dtype.name, i)
        order = sorted(range(len(self.leaves)), key=rank)
        begins = np.cumsum([0, *(self.leaves[i].num_bytes for i in order)])
        return [(i, int(begin)) for i, begin in zip(order, begins, strict=False)]

    @cached_property
    def _stretches(self) -> list[tuple[np.dtype, int, int]]:
        """For each type in the order of the bytes: how many numbers, and where they begin in a content."""
        found: dict[np.dtype, tuple[int, int]] = {}
        for i, begin in self._placed:
            leaf = self.leaves[i]
            before, first = found.get(leaf.dtype, (0, len(self.header) + begin))
            found[leaf.dtype] = (before + math.prod(leaf.shape), first)
        return [(kind, count, begin) for kind, (count, begin) in found.items()]

    @cached_property
    def _slices(self) -> list[tuple[int, slice, tuple[int, ...]]]:
        """For each leaf: its stretch, its place there, and its shape."""
        kinds = [kind for kind, _, _ in self._stretches]
        slices: list[Any] = [None] * len(self.leaves)
        for i, begin in self._placed:
            leaf = self.leaves[i]
            which = kinds.index(leaf.dtype)
            first = (len(self.header) + begin - self._stretches[which][2]) // leaf.dtype.itemsize
            slices[i] = (which, slice(first, first + math.prod(leaf.shape)), leaf.shape)
        return slices

    @cached_property
    def _views(self) -> list[tuple[tuple[int, ...], np.dtype, int]]:
        """For each leaf: its shape, its type, and where it begins in a content."""
        begins = {i: len(self.header) + begin for i, begin in self._placed}
        return [(leaf.shape, leaf.dtype, begins[i]) for i, leaf in enumerate(self.leaves)]

    @cached_property
    def spans(self) -> dict[str, list[tuple[int, slice]]]:
        """For the delta and each entry of the extra: the places of its numbers in `vectors`, one for each type."""
        found: dict[str, dict[int, slice]] = {}
        for leaf, (which, place, _) in zip(self.leaves, self._slices, strict=True):
            depth = 2 if leaf.name.startswith("extra.") else 1
            of_part = found.setdefault(".".join(leaf.name.split(".")[:depth]), {})
            before = of_part.get(which, place)  # leaves of one type follow each other in the order of the tree
            of_part[which] = slice(before.start, place.stop)
        return {part: list(places.items()) for part, places in found.items()}

    @cached_property
    def whole_numbers(self) -> list[tuple[ArrayLayout, int, slice]]:
        """The leaves of integers, with their places in `vectors`."""
        placed = zip(self.leaves, self._slices, strict=True)
        return [(leaf, which, at) for leaf, (which, at, _) in placed if np.issubdtype(leaf.dtype, np.integer)]

    @cached_property
    def header(self) -> bytes:
        """What every message of this layout begins with."""
        entries = {}
        for i, begin in self._placed:
            leaf = self.leaves[i]
            ends = [begin, begin + leaf.num_bytes]
            entries[leaf.name] = {"dtype": DTYPE_NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": ends}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def num_bytes(self) -> int:
        """The length of every message of this layout."""
        return len(self.header) + sum(leaf.num_bytes for leaf in self.leaves)

    @cached_property
    def _kinds(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        return [(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def encode(self, tree: PyTree) -> bytes:
        """A pytree of this layout as the content of a safetensors file."""
        return b"".join(self.buffers(tree))

    def buffers(self, tree: PyTree) -> Buffers:
        """What `encode` joins, not copied: the arrays must not change before it is sent."""
        arrays = self.leaves_of(tree)
        return [self.header, *(_bytes_of(arrays[i]) for i, _ in self._placed)]

    def leaves_of(self, tree: PyTree) -> list[Any]:
        """The arrays of a pytree, if they are as this layout has them."""
        arrays = jax.tree.leaves(tree)
        if [(array.shape, array.dtype) for array in arrays] != self._kinds:
            for leaf, array in zip(self.leaves, arrays, strict=True):
                if array.shape != leaf.shape or array.dtype != leaf.dtype:
                    raise Mismatch(f"`{leaf.name}` must be {leaf}, got {array.dtype.name} of shape {array.shape}.")
        return arrays

    def buffers_of(self, vectors: Sequence[Any], where: "Layout | None" = None) -> Buffers:
        """The same from the vectors of this layout, or of one that begins with it."""
        numbers = {kind: vector for (kind, _, _), vector in zip((where or self)._stretches, vectors, strict=True)}
        return [self.header, *(_bytes_of(numbers[kind])[: num * kind.itemsize] for kind, num, _ in self._stretches)]

    def begins_with(self, other: "Layout") -> bool:
        """Whether the leaves of another layout are the first of their types here."""
        of_kind = lambda layout, kind: [layout.leaves[i] for i, _ in layout._placed if layout.leaves[i].dtype == kind]
        pairs = [(of_kind(other, kind), of_kind(self, kind)) for kind, _, _ in other._stretches]
        return all(theirs == ours[: len(theirs)] for theirs, ours in pairs)

    @property
    def vector_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and types of `vectors`."""
        return [jax.ShapeDtypeStruct((num,), kind) for kind, num, _ in self._stretches]

    def decode(self, content: Content) -> PyTree:
        """The pytree whose `encode` gave this content; its arrays are views of it."""
        self.require(content)
        arrays = [np.ndarray(shape, kind, content, begin) for shape, kind, begin in self._views]
        return jax.tree.unflatten(self.structure, arrays)

    def vectors(self, content: Content) -> list[np.ndarray]:
        """The numbers of a content: one vector for each type, a view of it."""
        self.require(content)
        return [np.frombuffer(content, *stretch) for stretch in self._stretches]

    def require(self, content: Content) -> None:
        """Refuse what is not a content of this layout."""
        if len(content) != self.num_bytes or content[: len(self.header)] != self.header:
            raise Mismatch(self._difference(content))

    def unflatten(self, vectors: Sequence[Any]) -> PyTree:
        """The pytree of these vectors; inside of `jit`, too, which gets one argument instead of one for each leaf."""
        arrays = [vectors[which][place].reshape(shape) for which, place, shape in self._slices]
        return jax.tree.unflatten(self.structure, arrays)

    def flatten(self, tree: PyTree) -> list[Any]:
        """The vectors of a pytree, inside of `jit`."""
        # Without the barrier XLA computes each number in one loop that asks for its leaf.
        arrays = jax.lax.optimization_barrier(self.leaves_of(tree))
        of_kind: dict[np.dtype, list[Any]] = {kind: [] for kind, _, _ in self._stretches}
        for i, _ in self._placed:
            of_kind[self.leaves[i].dtype].append(arrays[i].reshape(-1))
        return [jnp.concatenate(flat) for flat in of_kind.values()]

    def _difference(self, content: Content) -> str:
        """What is wrong with a content, in words."""
        try:
            found = {name: (tuple(a["shape"]), a["dtype"]) for name, a in safetensors.deserialize(bytes(content))}
        except (safetensors.SafetensorError, ValueError) as error:
            return f"The arrays must come as safetensors of {self.num_bytes} bytes, got {len(content)}: {error}."
        wanted = {leaf.name: (leaf.shape, DTYPE_NAMES[leaf.dtype]) for leaf in self.leaves}
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                described = lambda leaf: f"{leaf[1]} of shape {leaf[0]}" if leaf else "no such array"
                return f"`{name}` must be {described(wanted.get(name))}, got {described(found.get(name))}."
        return "The arrays must be in the agreed order, got the right ones in another."


def _bytes_of(array: Any) -> np.ndarray:
    """The bytes of an array of NumPy or JAX, which is faster read as a buffer than as an array."""
    try:
        return np.frombuffer(array, np.uint8)
    except (TypeError, ValueError, BufferError):  # empty, not in one piece, or of a type that buffers do not have
        return np.asarray(array).reshape(-1).view(np.uint8)


def checksum(content: Content) -> int:
    """XXH3: against accidents. Against people there is TLS."""
    return xxhash.xxh3_64_intdigest(content)


def checksum_of(buffers: Buffers) -> int:
    """The checksum of what these buffers are together."""
    found = xxhash.xxh3_64()
    for buffer in buffers:
        found.update(buffer)
    return found.intdigest()


def pieces(buffers: Buffers, size: int = PIECE) -> Iterator[Buffers]:
    """What these buffers are together, in pieces for messages."""
    piece: Buffers = []
    room = size
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view) > room:
            yield [*piece, view[:room]]
            view, piece, room = view[room:], [], size
        piece.append(view)
        room -= len(view)
    yield piece


def whole(content: Content, num_bytes: int, check: int | None = None) -> Content:
    """A content that has arrived, if it is what was announced; one message, which TLS checks, has no checksum."""
    if len(content) > num_bytes:
        raise TooLong(f"{num_bytes} bytes were announced, got more: {len(content)}. Send what was announced.")
    if len(content) < num_bytes:
        raise Broken(f"{num_bytes} bytes were announced, got {len(content)}: the stream was cut. Send it again.")
    if check is not None and checksum(content) != check:
        raise Broken(f"The checksum of {num_bytes} bytes does not fit: they were changed. Send them again.")
    return content


def room_for(num_bytes: int) -> memoryview:
    """Memory that XLA reads without a copy."""
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room.data[begin : begin + num_bytes]


class Collector:
    """Puts pieces together, and never takes more than was announced."""

    def __init__(self, num_bytes: int, check: int) -> None:
        self.num_bytes, self.check, self.have = num_bytes, check, 0
        self.room = room_for(num_bytes)

    def add(self, piece: bytes | memoryview) -> None:
        """The next piece."""
        end = self.have + len(piece)
        if end > self.num_bytes:
            raise TooLong(f"{self.num_bytes} bytes were announced, got more: {end}. Send what was announced.")
        self.room[self.have : end] = piece
        self.have = end

    @property
    def complete(self) -> bool:
        """Whether all that was announced is there."""
        return self.have == self.num_bytes

    def content(self) -> Content:
        """All of it, checked."""
        return whole(self.room[: self.have], self.num_bytes, self.check)
