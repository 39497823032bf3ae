"""The messages of `wire.proto`, which is read here: no generated code, and any release of protobuf will do.

The pieces of a model are packed and unpacked by hand, where protobuf would copy them three times over; what travels is
the same.
"""

import re
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROTOCOL = 2
_MESSAGE = re.compile(r"^message (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^  (repeated )?(\w+) (\w+) = (\d+);$", re.MULTILINE)
_METHOD = re.compile(r"^  rpc (\w+) \((stream )?(\w+)\) returns \((stream )?(\w+)\);$", re.MULTILINE)
_TEXT = Path(__file__).with_name("wire.proto").read_text(encoding="utf-8")
_PACKAGE = "personax.live"
SERVICE = f"{_PACKAGE}.Federation"


class MessagePart(NamedTuple):
    """A message and, apart from it, the piece that its field `data` holds, which may be a list of buffers."""

    about: Any
    data: Any = b""


class Method(NamedTuple):
    """A remote call: its path, and the messages that go in and come out."""

    path: str
    takes: Any
    gives: Any
    many_in: bool
    many_out: bool

    @property
    def coders(self) -> tuple[Any, ...]:
        """How the request is written and read, and the answer written and read."""
        return *_coder(self.takes), *_coder(self.gives)


def _messages() -> dict[str, Any]:
    field_kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="personax/live/wire.proto", package=_PACKAGE, syntax="proto3")
    for name, body in _MESSAGE.findall(_TEXT):
        message = file.message_type.add(name=name)
        for repeated, kind, field, number in _FIELD.findall(body):
            label = field_kind.LABEL_REPEATED if repeated else field_kind.LABEL_OPTIONAL
            made = message.field.add(name=field, number=int(number), label=label)
            scalar = f"TYPE_{kind.upper()}"
            if scalar in field_kind.Type.keys():  # noqa: SIM118  # an enum of protobuf, not a dictionary
                made.type = field_kind.Type.Value(scalar)
            else:
                made.type, made.type_name = field_kind.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{message.name}"))
        for message in file.message_type
    }


_CLASSES = _messages()
Hello, Welcome, Ask, Model, Upload = (_CLASSES[name] for name in ("Hello", "Welcome", "Ask", "Model", "Upload"))
Numbers, Number, Thanks, Question, Standing = (
    _CLASSES[name] for name in ("Numbers", "Number", "Thanks", "Question", "Standing")
)
METHODS = {
    name: Method(f"/{SERVICE}/{name}", _CLASSES[takes], _CLASSES[gives], bool(many_in), bool(many_out))
    for name, many_in, takes, many_out, gives in _METHOD.findall(_TEXT)
}


def _coder(kind: Any) -> tuple[Any, Any]:
    if "data" not in kind.DESCRIPTOR.fields_by_name:
        return kind.SerializeToString, kind.FromString
    return pack, partial(unpack, kind)


def pack(part: MessagePart) -> bytes:
    """The bytes of a message with its piece of data, which comes first: it is found without reading the rest."""
    head = part.about.SerializeToString()
    buffers = part.data if isinstance(part.data, list) else [part.data]
    length = sum(map(len, buffers))
    if not length:
        return head
    return b"".join([_data_tag(type(part.about)), _varint(length), *buffers, head])


def unpack(kind: Any, content: bytes) -> MessagePart:
    """The message whose bytes these are, and its piece of data as a view of them."""
    if content[:1] == _data_tag(kind):
        length, begin = _read_varint(content, 1)
        end = begin + length
        if end <= len(content):
            return MessagePart(kind.FromString(content[end:]), memoryview(content)[begin:end])
    whole = kind.FromString(content)  # says what is wrong with it, if anything is
    piece = whole.data
    whole.ClearField("data")
    return MessagePart(whole, piece)


@cache
def _data_tag(kind: Any) -> bytes:
    return _varint(kind.DESCRIPTOR.fields_by_name["data"].number << 3 | 2)


@lru_cache(1024)
def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """A number of variable length, and where it ends; one that does not end is longer than any message."""
    number = shift = 0
    for byte in content[at : at + 10]:
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    return len(content), at
