"""Tables in HTML for notebooks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

_CELL = 'style="text-align: left; vertical-align: top; padding: 0.15em 0.8em 0.15em 0"'


def html_table(title: str, rows: Iterable[Sequence[str]], heads: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Return a table with a title, and notes below it. All texts are escaped.

    >>> html_table("Two", [("a", "1 < 2")]).count("&lt;")
    1
    """
    cells = lambda row, tag: "".join(f"<{tag} {_CELL}>{escape(text)}</{tag}>" for text in row)
    head = f"<thead><tr>{cells(heads, 'th')}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    below = "".join(f"<div><small>{escape(note)}</small></div>" for note in notes)
    return f"<div><strong>{escape(title)}</strong></div><table>{head}<tbody>{body}</tbody></table>{below}"


def settings(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Flatten the result of `to_dict` to dotted names and texts.

    >>> dict(settings({"kind": "Local", "lr": {"kind": "Decay", "initial": 0.1}}))
    {'lr': 'Decay', 'lr.initial': '0.1'}
    """
    for name, item in table.items():
        if isinstance(item, Mapping):
            yield before + name, str(item.get("path") or item.get("kind", ""))
            yield from settings(item, f"{before}{name}.")
        elif name not in ("kind", "path"):
            yield before + name, str(item)
