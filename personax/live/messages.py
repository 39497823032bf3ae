"""Arrays as safetensors bytes, in two layouts known to both sides in advance: one for downloads, one for uploads.

A layout fixes the names, shapes and types of a pytree's leaves, and hence every byte of the safetensors header. A
message with another header is refused before its data is read.
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

from personax.experiment.tensors import DTYPE_NAMES, leaves_by_name
from personax.sharing import dotted
from personax.typing import PyTree

ALIGNMENT = 64  # bytes: XLA copies arrays that are not aligned to it
FRAME = 1 << 20  # size of an HTTP/2 frame in bytes; gRPC's default of 16 KB is slower
PIECE = 16 << 20  # bytes of data in one message; longer data is sent in several messages
Content = bytes | memoryview
Buffers = list[Any]  # consecutive bytes, memoryviews or arrays of bytes


class Mismatch(ValueError):
    """A difference between the agreed layout or run and what the other side has or sent."""


class Broken(ValueError):
    """Data that was damaged in transit: too short, too long, or with another checksum."""


class TooLong(Broken):
    """More data than announced, which no transmission error explains."""


@dataclass(frozen=True)
class ArrayLayout:
    """One array of a layout."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """The length in bytes."""
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
                raise ValueError(f"`{name}` must have a real type that safetensors supports, got {kind}. Convert it.")
            leaves.append(ArrayLayout(name, tuple(leaf.shape), kind))
        return cls(tuple(leaves), jax.tree.structure(tree))

    def describe(self) -> list[list[Any]]:
        """The layout as a value for JSON."""
        return [[leaf.name, list(leaf.shape), leaf.dtype.name] for leaf in self.leaves]

    def require_same(self, described: Sequence[Any], where: str) -> None:
        """Raise a `Mismatch` that names the first difference from a described layout."""
        words = lambda leaf: f"{leaf[2]} of shape {tuple(leaf[1])}" if leaf else "no such array"
        mine, theirs = ({leaf[0]: list(leaf) for leaf in leaves} for leaves in (self.describe(), described))
        for name in [*mine, *theirs]:
            if mine.get(name) != theirs.get(name):
                raise Mismatch(
                    f"{where}: `{name}` must be {words(mine.get(name))} as on this side, got "
                    f"{words(theirs.get(name))} on the other. Use the same model, data types and version of personax "
                    "on both."
                )

    @cached_property
    def _placed(self) -> list[tuple[int, int]]:
        """The index and the beginning of each leaf, in the order of the bytes.

        Wide types come first, so that all are aligned, and each type is contiguous.
        """
        rank = lambda i: (-self.leaves[i].dtype.itemsize, self.leaves[i].dtype.name, i)
        order = sorted(range(len(self.leaves)), key=rank)
        begins = np.cumsum([0, *(self.leaves[i].num_bytes for i in order)])
        return [(i, int(begin)) for i, begin in zip(order, begins, strict=False)]

    @cached_property
    def _stretches(self) -> list[tuple[np.dtype, int, int]]:
        """Each type in the order of the bytes, with its count of numbers and their beginning in a content."""
        found: dict[np.dtype, tuple[int, int]] = {}
        for i, begin in self._placed:
            leaf = self.leaves[i]
            before, first = found.get(leaf.dtype, (0, len(self.header) + begin))
            found[leaf.dtype] = (before + math.prod(leaf.shape), first)
        return [(kind, count, begin) for kind, (count, begin) in found.items()]

    @cached_property
    def _slices(self) -> list[tuple[int, slice, tuple[int, ...]]]:
        """For each leaf, the index of its type, its place in that vector, and its shape."""
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
        """For each leaf, its shape, its type, and its beginning in a content."""
        begins = {i: len(self.header) + begin for i, begin in self._placed}
        return [(leaf.shape, leaf.dtype, begins[i]) for i, leaf in enumerate(self.leaves)]

    @cached_property
    def spans(self) -> dict[str, list[tuple[int, slice]]]:
        """For the delta and each entry of the extra, the places of its numbers in `vectors`, one per type."""
        found: dict[str, dict[int, slice]] = {}
        for leaf, (which, place, _) in zip(self.leaves, self._slices, strict=True):
            depth = 2 if leaf.name.startswith("extra.") else 1
            of_part = found.setdefault(".".join(leaf.name.split(".")[:depth]), {})
            before = of_part.get(which, place)  # leaves of one type follow each other in the order of the tree
            of_part[which] = slice(before.start, place.stop)
        return {part: list(places.items()) for part, places in found.items()}

    @cached_property
    def whole_numbers(self) -> list[tuple[ArrayLayout, int, slice]]:
        """The integer leaves, with their places in `vectors`."""
        placed = zip(self.leaves, self._slices, strict=True)
        return [(leaf, which, at) for leaf, (which, at, _) in placed if np.issubdtype(leaf.dtype, np.integer)]

    @cached_property
    def header(self) -> bytes:
        """The safetensors header, with which every message of this layout begins."""
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
        """The parts that `encode` joins, without copies: the arrays must not change until they are sent."""
        arrays = self.leaves_of(tree)
        return [self.header, *(_bytes_of(arrays[i]) for i, _ in self._placed)]

    def leaves_of(self, tree: PyTree) -> list[Any]:
        """The arrays of a pytree; raise if they do not match this layout."""
        arrays = jax.tree.leaves(tree)
        if [(array.shape, array.dtype) for array in arrays] != self._kinds:
            for leaf, array in zip(self.leaves, arrays, strict=True):
                if array.shape != leaf.shape or array.dtype != leaf.dtype:
                    raise Mismatch(f"`{leaf.name}` must be {leaf}, got {array.dtype.name} of shape {array.shape}.")
        return arrays

    def buffers_of(self, vectors: Sequence[Any], where: "Layout | None" = None) -> Buffers:
        """Like `buffers`, from the vectors of this layout or of a layout that begins with it."""
        numbers = {kind: vector for (kind, _, _), vector in zip((where or self)._stretches, vectors, strict=True)}
        return [self.header, *(_bytes_of(numbers[kind])[: num * kind.itemsize] for kind, num, _ in self._stretches)]

    def begins_with(self, other: "Layout") -> bool:
        """True if the leaves of the other layout are the first leaves of their types here."""
        of_kind = lambda layout, kind: [layout.leaves[i] for i, _ in layout._placed if layout.leaves[i].dtype == kind]
        pairs = [(of_kind(other, kind), of_kind(self, kind)) for kind, _, _ in other._stretches]
        return all(theirs == ours[: len(theirs)] for theirs, ours in pairs)

    @property
    def vector_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes and types of `vectors`."""
        return [jax.ShapeDtypeStruct((num,), kind) for kind, num, _ in self._stretches]

    def decode(self, content: Content) -> PyTree:
        """The inverse of `encode`; the arrays are views of the content."""
        self.require(content)
        arrays = [np.ndarray(shape, kind, content, begin) for shape, kind, begin in self._views]
        return jax.tree.unflatten(self.structure, arrays)

    def vectors(self, content: Content) -> list[np.ndarray]:
        """The numbers of a content as one vector per type, each a view of the content."""
        self.require(content)
        return [np.frombuffer(content, *stretch) for stretch in self._stretches]

    def require(self, content: Content) -> None:
        """Raise a `Mismatch` unless the content has this layout."""
        if len(content) != self.num_bytes or content[: len(self.header)] != self.header:
            raise Mismatch(self._difference(content))

    def unflatten(self, vectors: Sequence[Any]) -> PyTree:
        """The pytree of these vectors. Inside `jit`, this means one argument per type rather than one per leaf."""
        arrays = [vectors[which][place].reshape(shape) for which, place, shape in self._slices]
        return jax.tree.unflatten(self.structure, arrays)

    def flatten(self, tree: PyTree) -> list[Any]:
        """The vectors of a pytree, inside `jit`."""
        # Without the barrier, XLA computes all numbers in one loop that selects the leaf for each of them.
        arrays = jax.lax.optimization_barrier(self.leaves_of(tree))
        of_kind: dict[np.dtype, list[Any]] = {kind: [] for kind, _, _ in self._stretches}
        for i, _ in self._placed:
            of_kind[self.leaves[i].dtype].append(arrays[i].reshape(-1))
        return [jnp.concatenate(flat) for flat in of_kind.values()]

    def _difference(self, content: Content) -> str:
        """Describe the first difference between a content and this layout."""
        try:
            found = {name: (tuple(a["shape"]), a["dtype"]) for name, a in safetensors.deserialize(bytes(content))}
        except (safetensors.SafetensorError, ValueError) as error:
            return f"The arrays must be safetensors of {self.num_bytes} bytes, got {len(content)}: {error}."
        wanted = {leaf.name: (leaf.shape, DTYPE_NAMES[leaf.dtype]) for leaf in self.leaves}
        for name in [*wanted, *found]:
            if wanted.get(name) != found.get(name):
                described = lambda leaf: f"{leaf[1]} of shape {leaf[0]}" if leaf else "no such array"
                return f"`{name}` must be {described(wanted.get(name))}, got {described(found.get(name))}."
        return "The arrays must be in the agreed order, got another order."


def _bytes_of(array: Any) -> np.ndarray:
    """The bytes of a NumPy or JAX array. Reading them as a buffer is faster than as an array."""
    try:
        return np.frombuffer(array, np.uint8)
    except (TypeError, ValueError, BufferError):  # empty, not contiguous, or of a type that buffers lack
        return np.asarray(array).reshape(-1).view(np.uint8)


def checksum(content: Content) -> int:
    """The XXH3 checksum, which detects accidental damage. TLS protects against deliberate changes."""
    return xxhash.xxh3_64_intdigest(content)


def checksum_of(buffers: Buffers) -> int:
    """The checksum of the concatenated buffers."""
    found = xxhash.xxh3_64()
    for buffer in buffers:
        found.update(buffer)
    return found.intdigest()


def pieces(buffers: Buffers, size: int = PIECE) -> Iterator[Buffers]:
    """Split the concatenated buffers into pieces for messages, without copies."""
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
    """Return a received content if it is as announced. A single message has no checksum, because TLS verifies it."""
    if len(content) > num_bytes:
        raise TooLong(f"{num_bytes} bytes were announced, got {len(content)}. Send only as many as announced.")
    if len(content) < num_bytes:
        raise Broken(f"{num_bytes} bytes were announced, got {len(content)}: the stream was cut. Send it again.")
    if check is not None and checksum(content) != check:
        raise Broken(f"The checksum of {num_bytes} bytes does not match: they were changed. Send them again.")
    return content


def room_for(num_bytes: int) -> memoryview:
    """Aligned memory that XLA reads without a copy."""
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room.data[begin : begin + num_bytes]


class Collector:
    """A buffer that joins pieces, and never accepts more than was announced."""

    def __init__(self, num_bytes: int, check: int) -> None:
        self.num_bytes, self.check, self.have = num_bytes, check, 0
        self.room = room_for(num_bytes)

    def add(self, piece: bytes | memoryview) -> None:
        """Add the next piece."""
        end = self.have + len(piece)
        if end > self.num_bytes:
            raise TooLong(f"{self.num_bytes} bytes were announced, got {end}. Send only as many as announced.")
        self.room[self.have : end] = piece
        self.have = end

    @property
    def complete(self) -> bool:
        """True once all announced bytes have arrived."""
        return self.have == self.num_bytes

    def content(self) -> Content:
        """The whole content, checked."""
        return whole(self.room[: self.have], self.num_bytes, self.check)
