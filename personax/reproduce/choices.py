"""Descriptions of our choices where a paper is silent, read from `choices.toml`."""

import tomllib
from pathlib import Path

TEXTS = tomllib.loads(Path(__file__).with_name("choices.toml").read_text(encoding="utf-8"))


def choices(paper: str, *keys: str, **values: object) -> tuple[str, ...]:
    """Return the texts under the given keys of a paper, in order, with `values` filled in.

    >>> choices("fallah", "tuned", rates=(0.1, 0.3))
    ('Unlike the paper, which uses 0.001: the training step size of the others is one of (0.1, 0.3).',)
    """
    found = (TEXTS[paper][key] for key in keys)
    return tuple(text.format(**values) for one in found for text in ([one] if isinstance(one, str) else one))
