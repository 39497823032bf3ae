"""The inputs and outputs of a book: uploads, their outcomes, and models."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from personax.live.messages import Buffers, Content, checksum_of


class Arrived(NamedTuple):
    """A complete upload as received."""

    id: str
    update: int  # the client's own count of its updates
    version: int  # version of the model that the visit started from
    num_samples: float
    content: Content
    rollbacks: int = 0  # rollbacks of the run before that model


class Settled(NamedTuple):
    """The outcome of an upload (applied, duplicate, late or refused), and the reason."""

    outcome: str
    words: str = ""


@dataclass(frozen=True)
class Published:
    """A model as clients download it."""

    version: int
    buffers: Buffers  # its safetensors bytes
    num_bytes: int
    num_events: int  # number of applied updates that led to it

    @cached_property
    def check(self) -> int:
        """The checksum, needed by clients that download the model in pieces."""
        return checksum_of(self.buffers)

    @property
    def content(self) -> bytes:
        """The model in one piece."""
        return b"".join(self.buffers)
