"""The values that go into a book and come out of it: uploads, what became of them, and models."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from personax.live.messages import Buffers, Content, checksum_of


class Arrived(NamedTuple):
    """An upload as it came in, whole."""

    id: str
    update: int  # the client's own count
    version: int  # of the model that it started from
    num_samples: float
    content: Content
    rollbacks: int = 0  # of the run, before that model


class Settled(NamedTuple):
    """What became of an upload: applied, duplicate, late or refused; and why."""

    outcome: str
    words: str = ""


@dataclass(frozen=True)
class Published:
    """A model as clients get it."""

    version: int
    buffers: Buffers  # its safetensors bytes
    num_bytes: int
    num_events: int  # that led to it

    @cached_property
    def check(self) -> int:
        """Its checksum, which those who get it in pieces need."""
        return checksum_of(self.buffers)

    @property
    def content(self) -> bytes:
        """In one piece."""
        return b"".join(self.buffers)
