"""BibTeX entries of the papers and data sets."""

from collections.abc import Iterable
from pathlib import Path

from personax.values import require_one_of

ENTRIES = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").strip().split("\n\n")
BIBTEX = {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in ENTRIES}


def cite(keys: Iterable[str]) -> str:
    """Return the BibTeX entries of keys, each once, in the given order. BibTeX entries are returned unchanged.

    >>> print(cite(["xie2019", "deng2020", "xie2019"]).count("@"))
    2
    """
    wanted = list(dict.fromkeys(keys))
    for key in wanted:
        if not key.lstrip().startswith("@"):
            require_one_of("key", key, tuple(sorted(BIBTEX)))
    return "\n\n".join(BIBTEX.get(key, key.strip()) for key in wanted)
