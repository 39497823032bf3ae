"""Names that come from a file or over the wire, checked before a path is made of them or a terminal shows them."""

import re

from pydantic_core import PydanticCustomError

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_DOTTED = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MOST = 80  # characters


def require_run_name(name: object) -> str:
    """The name of a run if it can be the name of a folder: up to 80 ASCII letters, digits, `-` and `_`.

    >>> require_run_name("tiny-5f0c")
    'tiny-5f0c'
    """
    return _required("run", name, _PLAIN)


def require_client_name(name: object) -> str:
    """The name of a client, which may have single dots inside, too."""
    return _required("client", name, _DOTTED)


def require_title(name: str) -> str:
    """A name that people read, such as that of an algorithm in a configuration: without control characters.

    It may have path separators, because files are called by its `folders.slug`.
    """
    if not name.isprintable() or not name.strip(" ."):
        raise PydanticCustomError("name", "A name must have letters or digits, and no control characters")
    return name


def require_title_on_the_wire(name: str) -> str:
    """A title that a server sends, or another machine's file has: also without path separators and `..`."""
    if ".." in name or "/" in name or "\\" in name or len(name) > _MOST:
        raise ValueError(f"A name that is sent must have neither / nor \\ nor .., got {name!r:.100}. Rename it.")
    return require_title(name)


def printable(text: object) -> str:
    r"""The text of someone else for a log or a terminal, with its control characters escaped.

    >>> printable("anna" + chr(27) + "[2J")
    'anna\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _required(what: str, name: object, form: re.Pattern[str]) -> str:
    if not isinstance(name, str) or len(name) > _MOST or not form.fullmatch(name):
        rule = f"up to {_MOST} letters, digits, - and _"
        raise ValueError(f"The name of a {what} must have {rule}, got {name!r:.100}. Choose another.")
    return name
