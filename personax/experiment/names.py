"""Validation of names from files or the network, before they are used in paths or printed."""

import re

from pydantic_core import PydanticCustomError

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
_DOTTED = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_MOST = 80  # characters


def require_run_name(name: object) -> str:
    """Return the name of a run if it is a valid folder name: up to 80 ASCII letters, digits, `-` and `_`.

    >>> require_run_name("tiny-5f0c")
    'tiny-5f0c'
    """
    return _required("run", name, _PLAIN)


def require_client_name(name: object) -> str:
    """Return the name of a client if it is valid; it may also contain single dots inside."""
    return _required("client", name, _DOTTED)


def require_title(name: str) -> str:
    """Return a displayed name, such as an algorithm's, if it has no control characters.

    It may have path separators, because files are named by its `folders.slug`.
    """
    if not name.isprintable() or not name.strip(" ."):
        raise PydanticCustomError("name", "A name must have letters or digits, and no control characters")
    return name


def require_title_on_the_wire(name: str) -> str:
    """Return a title from another machine if it also has no path separators and no `..`."""
    if ".." in name or "/" in name or "\\" in name or len(name) > _MOST:
        raise ValueError(f"A name from another machine must not contain /, \\ or .., got {name!r:.100}. Rename it.")
    return require_title(name)


def printable(text: object) -> str:
    r"""Escape the control characters of untrusted text for a log or a terminal.

    >>> printable("anna" + chr(27) + "[2J")
    'anna\\x1b[2J'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _required(what: str, name: object, form: re.Pattern[str]) -> str:
    if not isinstance(name, str) or len(name) > _MOST or not form.fullmatch(name):
        rule = f"up to {_MOST} letters, digits, - and _"
        raise ValueError(f"The name of a {what} must have {rule}, got {name!r:.100}. Choose another.")
    return name
