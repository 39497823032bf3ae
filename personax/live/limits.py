"""Limits that a client's owner sets on a server's requests, read from a TOML file."""

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
    """A recipe or visit that the limits of the client's owner do not allow."""


class TooSlow(Refused):
    """A recipe that takes longer to compile than the client's owner allows. A thread is still compiling it."""


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class Limits:
    """Limits that a client's owner sets on a server's requests: the settings of a TOML file."""

    objectives: tuple[str, ...] | None = None  # default: all of personax, and those that `allow_imports` permits
    max_steps: Count = 10_000  # gradients of one visit, including all scores and the final adaptation
    min_steps: Count = 2  # local steps of a visit: the upload of a single step is a gradient
    max_batch: Count = 4096  # samples in one batch
    min_batch: Count = 8  # samples in one batch and in total: fewer may be recovered from an upload
    max_scores: Count = 20  # each score compiles its own program
    max_layers: Count = 100  # layers of the network
    max_params: Count = 100_000_000  # parameters of the network
    max_compile_seconds: Positive = 600.0  # for each program, including its first run
    max_bytes: Count = 256 << 20  # size of a model as sent
    max_updates: Count | None = None  # number of updates after which the client leaves
    patience: Positive = 3600.0  # seconds without an answer before the client gives up
    allow_imports: Flag = False  # code of installed packages, by name: recipes, objectives, models, optimizers, ...
    base: str | None = None  # the file with the base of the server's model, which `[model] base` names there
    share_moments: Flag = False  # the mean and spread of each column, from which a server fits a common scaling

    def __post_init__(self) -> None:
        check_names("objectives", (n for n in self.objectives or () if ":" not in n), OBJECTIVES.kinds, "objective")


def within(seconds: float, do: Callable[[], Found]) -> Found:
    """Return the result of `do`, or raise `TooSlow`. It runs in a thread, because a compiler cannot be interrupted."""
    results: list[Found] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(do())
        except BaseException as error:  # raised again in the waiting thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TooSlow(
            f"The server's recipe did not compile within {seconds:g} s. Raise the limit `max_compile_seconds` if you "
            "want to allow more time."
        )
    return results[0]


def read_limits(path: Path) -> Limits:
    """Read limits from a TOML file; missing settings have their defaults."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}. Fix the syntax there.") from None
    check_names(str(path), table, (field.name for field in fields(Limits)), "limit")
    try:
        return Limits(**table)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"invalid `{part}`: " for part in first["loc"][:1])
        raise ValueError(f"{path}: {where}{first['msg']}, got {first['input']!r:.80}.") from None
