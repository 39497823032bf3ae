"""The choices made where a paper is silent, in words: the texts of `choices.toml`."""

import tomllib
from pathlib import Path

TEXTS = tomllib.loads(Path(__file__).with_name("choices.toml").read_text(encoding="utf-8"))


def choices(paper: str, *keys: str, **values: object) -> tuple[str, ...]:
    """The texts of some keys of a paper, in the order given, with values in place of their braces.

    >>> choices("fallah", "tuned", rates=(0.1, 0.3))
    ("Not as in the paper: the others' training step, there 0.001, is one of (0.1, 0.3).",)
    """
    found = (TEXTS[paper][key] for key in keys)
    return tuple(text.format(**values) for one in found for text in ([one] if isinstance(one, str) else one))
