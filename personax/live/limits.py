"""The limits that a client's owner sets for what a server may ask for: the settings of a TOML file."""

import threading
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import pydantic
import pydantic.dataclasses

from personax.experiment.config import Count, Flag, Positive
from personax.values import OBJECTIVES, check_names

Found = TypeVar("Found")


class Refused(ValueError):
    """A recipe that the client's owner does not allow."""


class TooSlow(Refused):
    """A recipe whose programs take longer to compile than the client's owner allows. A thread still works on one."""


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class Limits:
    """What a client's owner allows a server to ask for: the settings of a TOML file."""

    objectives: tuple[str, ...] | None = None  # by default all that personax has, and what `allow_imports` lets in
    max_steps: Count = 10_000  # gradients of one visit, of all scores and of the final adaptation together
    min_steps: Count = 2  # of a visit: a single step uploads a gradient
    max_batch: Count = 4096  # samples in one batch
    min_batch: Count = 8  # samples in one batch, and of the client: fewer may be recovered from an upload
    max_scores: Count = 20  # each is a program of its own
    max_layers: Count = 100  # of the network
    max_params: Count = 100_000_000  # of the network
    max_compile_seconds: Positive = 600.0  # for each program, its first run included
    max_bytes: Count = 256 << 20  # of one model, as it is sent
    max_updates: Count | None = None  # after which the client leaves
    patience: Positive = 3600.0  # seconds without the server before giving up
    allow_imports: Flag = False  # code of installed packages, by name: recipes, objectives, models, optimizers, ...
    share_moments: Flag = False  # the mean and spread of each column, from which a server fits a common scaling

    def __post_init__(self) -> None:
        check_names("objectives", (n for n in self.objectives or () if ":" not in n), OBJECTIVES.kinds, "objective")


def within(seconds: float, do: Callable[[], Found]) -> Found:
    """Return the result of `do`, or raise `TooSlow`: a compiler cannot be interrupted, so it runs in a thread."""
    results: list[Found] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:  # for the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TooSlow(
            f"A program of the server's recipe was not compiled after {seconds:g} s, which is all that this client "
            "allows (limit `max_compile_seconds`)."
        )
    return results[0]


def read_limits(path: Path) -> Limits:
    """The limits of a TOML file; a setting that it does not have is the default."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}. Repair that place.") from None
    check_names(str(path), table, (field.name for field in fields(Limits)), "limit")
    try:
        return Limits(**table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"`{part}` is wrong: " for part in first["loc"][:1])
        raise ValueError(f"{path}: {where}{first['msg']}, got {first['input']!r:.80}.") from None
