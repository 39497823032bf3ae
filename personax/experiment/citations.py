"""BibTeX entries of the papers and data sets."""

from collections.abc import Iterable
from pathlib import Path

ENTRIES = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").strip().split("\n\n")
BIBTEX = {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in ENTRIES}


def cite(keys: Iterable[str]) -> str:
    """The BibTeX entries of some keys, each once, in the order given. What is an entry already stays as it is.

    >>> print(cite(["xie2019", "deng2020", "xie2019"]).count("@"))
    2
    """
    wanted = list(dict.fromkeys(keys))
    for key in wanted:
        if key not in BIBTEX and not key.lstrip().startswith("@"):
            raise ValueError(f"A key must be one of {', '.join(sorted(BIBTEX))}, got {key!r}.")
    return "\n\n".join(BIBTEX.get(key, key.strip()) for key in wanted)
