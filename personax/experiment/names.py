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
    """A name that people read, such as that of an algorithm: without control characters and path separators."""
    if not name.isprintable() or name.strip() in ("", ".", "..") or "/" in name or "\\" in name:
        raise PydanticCustomError("name", "A name must have neither control characters nor / or \\")
    return name


def _required(what: str, name: object, form: re.Pattern[str]) -> str:
    if not isinstance(name, str) or len(name) > _MOST or not form.fullmatch(name):
        rule = f"up to {_MOST} letters, digits, - and _"
        raise ValueError(f"The name of a {what} must have {rule}, got {name!r:.100}. Choose another.")
    return name
