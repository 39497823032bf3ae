"""The papers as the pages present them: claims in plain words, explanations of verdicts, and findings."""

import tomllib
from dataclasses import field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.reproduce.experiment import Verdict

_HERE = Path(__file__).parent
_KNOWN = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_KNOWN)
class PaperClaim:
    """A claim in plain words, the claims of experiments that test it, and a sentence on the verdict.

    `tests` has entries "experiment: words of its claim", which `labels` names if there are several. `older` has entries
    of records with outdated settings, which are shown but do not count. `why` was written for the verdict `expected`.
    The overview shows `main` claims and folds the others; its first table has those with a `headline`. `qualifier` is
    shown with the verdict.
    """

    words: str
    tests: list[str]
    expected: Verdict | str
    why: str
    main: bool = False
    labels: list[str] = field(default_factory=list)
    older: list[str] = field(default_factory=list)
    headline: str = ""
    qualifier: str = ""

    def __post_init__(self) -> None:
        if len(self.labels) != (len(self.tests) if len(self.tests) > 1 else 0):
            raise ValueError(
                f"papers.toml: {self.words!r} has {len(self.tests)} tests. Give a label for each if several."
            )


@dataclass(frozen=True, config=_KNOWN)
class Paper:
    """A paper: its idea, a summary of what is reliable, findings to cite, and its claims."""

    title: str
    citation: str
    idea: str
    summary: str
    findings: list[str]
    claims: list[PaperClaim]


PAPERS: dict[str, Paper] = TypeAdapter(dict[str, Paper]).validate_python(
    tomllib.loads((_HERE / "papers.toml").read_text(encoding="utf-8"))
)
FINDINGS: dict[str, list[str]] = tomllib.loads((_HERE / "findings.toml").read_text(encoding="utf-8"))


def paper_of(experiment: str) -> str:
    """Return the paper of an experiment: the first part of its name."""
    return experiment.partition("-")[0]
