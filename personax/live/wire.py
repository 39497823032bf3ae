"""The calls of a live federation and their messages.

| call | takes | gives |
|---|---|---|
| `Register` | `Hello` | `Welcome` |
| `Fetch` | `Ask` | `DownloadHeader`s |
| `Exchange` | `UploadHeader`s | `DownloadHeader`s |
| `Report` | `Numbers` | `Thanks` |
| `Status` | `Question` | `Status` |
| `Exclude` | `Exclusion` | `Thanks` |

A message is a JSON object without the fields that have their default value. It is validated when it is read; unknown
fields are ignored. Each `DownloadHeader` and `UploadHeader` is followed by a piece of safetensors
bytes: the length of the JSON (4 bytes, little endian), the JSON padded with spaces, and the piece. A model or an upload
consists of one or more such messages; the first has all fields and the first piece, the others only have pieces.
`num_bytes` is the total length of all pieces, and `checksum` is their XXH3 (64 bits), which a single message does not
need.

`Exchange` stays open: a client sends an upload whenever it has one, and gets the answer before sending the next.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import pydantic

from personax.live.messages import ALIGNMENT

PROTOCOL = 4
SERVICE = "personax.live.Federation"
_LENGTH = struct.Struct("<I")
_MOST_HEADER = 1 << 16  # bytes of JSON before a piece
_ANY_FLOAT: pydantic.ConfigDict = {"ser_json_inf_nan": "constants"}  # writes NaN and Infinity, which JSON lacks
Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class ClientMoments:
    """The number of a client's samples, and the sum and the sum of squared deviations of each column."""

    count: Count = 0
    total: list[Finite] = field(default_factory=list)
    squares: list[Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hello:
    """The registration of a client. Its certificate identifies it.

    `schema` is the digest of the schema that its data conform to, and is empty if the client does not know it yet.
    `num_samples` is sent only to a server that weights by samples.
    """

    protocol: Count = 0
    personax: str = ""
    schema: str = ""
    newcomer: bool = False
    features: ClientMoments | None = None
    targets: ClientMoments | None = None
    num_samples: Annotated[float, pydantic.Field(ge=0, lt=1 << 31)] = 0.0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The run, the client's number in it, and the recipe, which has names and numbers but no code.

    A client is not registered if its data conform to another schema than the recipe's.
    """

    protocol: Count = 0
    registered: bool = False
    run: str = ""
    recipe: str = ""
    layout: str = ""
    id: Count = 0
    next_update: Count = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the newest model, for which `wait_seconds` may pass. `have` is the client's version (-1: none)."""

    run: str = ""
    have: Annotated[int, pydantic.Field(ge=-1, lt=1 << 63)] = 0
    wait_seconds: Finite = 0.0
    rollbacks: Count = 0


@dataclass(frozen=True, slots=True)
class DownloadHeader:
    """The newest model, or the fact that it is `unchanged`; after an upload also its outcome.

    `rollbacks` counts the run's returns to a saved state: only with it does a version identify a model.
    """

    outcome: str = ""
    words: str = ""
    version: Count = 0
    rollbacks: Count = 0
    unchanged: bool = False
    train: bool = False
    finished: bool = False
    retry_seconds: Finite = 0.0
    num_bytes: Count = 0
    checksum: Annotated[int, pydantic.Field(ge=0, lt=1 << 64)] = 0


@dataclass(frozen=True, slots=True)
class UploadHeader:
    """The update of a visit: only the arrays in the upload layout, and no personal state."""

    run: str = ""
    id: str = ""
    update: Count = 0
    version: Count = 0
    rollbacks: Count = 0
    num_samples: float = 0.0
    want_model: bool = False
    num_bytes: Count = 0
    checksum: Annotated[int, pydantic.Field(ge=0, lt=1 << 64)] = 0
    __pydantic_config__: ClassVar = _ANY_FLOAT


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that a client reports, by score and metric."""

    run: str = ""
    version: Count = 0
    update: Count = 0
    num_samples: Count = 0
    num_train_samples: Count = 0
    last: bool = False
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    __pydantic_config__: ClassVar = _ANY_FLOAT


@dataclass(frozen=True, slots=True)
class Thanks:
    """The answer to a report, which is `dropped` if the client has reached its daily limit."""

    finished: bool = False
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """A request for the state of the run."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the run as JSON, with all clients for an operator and only itself for a client."""

    json: str = ""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """An operator's request to exclude a client's uploads, or to admit them again."""

    client: str = ""
    excluded: bool = True


class MessagePart(NamedTuple):
    """A message and its piece of data, which may be a list of buffers."""

    about: Any
    data: Any = b""


class Method(NamedTuple):
    """A remote call: its name, and the types of its requests and answers.

    A server decodes a request with `coders[1]` itself, once it has identified the sender.
    """

    name: str
    takes: type
    gives: type
    many_in: bool = False
    many_out: bool = False

    @property
    def path(self) -> str:
        """The path of the call in gRPC."""
        return f"/{SERVICE}/{self.name}"

    @property
    def coders(self) -> tuple[Callable[..., Any], ...]:
        """The functions that write and read the request, then those that write and read the answer."""
        return *_coder(self.takes, self.many_in), *_coder(self.gives, self.many_out)


METHODS = {
    method.name: method
    for method in (
        Method("Register", Hello, Welcome),
        Method("Fetch", Ask, DownloadHeader, many_out=True),
        Method("Exchange", UploadHeader, DownloadHeader, many_in=True, many_out=True),
        Method("Report", Numbers, Thanks),
        Method("Status", Question, Status),
        Method("Exclude", Exclusion, Thanks),
    )
}
_ADAPTERS = {kind: pydantic.TypeAdapter(kind) for method in METHODS.values() for kind in (method.takes, method.gives)}


def write(message: Any) -> bytes:
    """Write a message as JSON."""
    return _ADAPTERS[type(message)].dump_json(message, exclude_defaults=True)


def read(kind: type, content: bytes) -> Any:
    """Read a message; raise a ValueError if it is not of this kind."""
    return _ADAPTERS[kind].validate_json(content)


def pack(part: MessagePart) -> bytes:
    """Write a message with its piece of data, copying the data once."""
    header = write(part.about)
    header += b" " * (-(_LENGTH.size + len(header)) % ALIGNMENT)  # aligned arrays are faster to read
    buffers = part.data if isinstance(part.data, list) else [part.data]
    return b"".join([_LENGTH.pack(len(header)), header, *buffers])


def unpack(kind: type, content: bytes) -> MessagePart:
    """Read a message and its piece of data as a view of the content."""
    if len(content) < _LENGTH.size:
        raise ValueError(f"A message must have at least {_LENGTH.size} bytes, got {len(content)}.")
    end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    if end > min(len(content), _MOST_HEADER):
        raise ValueError(f"The header of a message of {len(content)} bytes is too long: it ends at {end}.")
    return MessagePart(read(kind, content[_LENGTH.size : end]), memoryview(content)[end:])


def _coder(kind: type, has_data: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (pack, partial(unpack, kind)) if has_data else (write, partial(read, kind))
