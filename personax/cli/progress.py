"""Progress bars of a run, one per algorithm, with its rounds, remaining time and latest score."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column

NARROW = 100  # a terminal with fewer columns shows no bar beside the numbers


class Bars:
    """A `Watch` that draws progress bars on a terminal. Otherwise it prints a line when an algorithm ends.

    `names` are the algorithms of the run, in order.
    """

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self.console, self.names = console, list(names)
        # Names are printed without markup, and truncated on a narrow terminal.
        plain = lambda field, **column: TextColumn(
            f"{{task.{field}}}", markup=False, table_column=Column(no_wrap=True, **column)
        )
        self.progress = Progress(
            SpinnerColumn(),
            plain("fields[place]"),
            plain("description", overflow="ellipsis", ratio=1),
            *([] if console.width < NARROW else [BarColumn(16)]),
            plain("fields[rounds]", justify="right"),
            plain("fields[left]", justify="right"),
            plain("fields[latest]", overflow="ellipsis", max_width=30),
            console=console,
            disable=not console.is_terminal,
            expand=console.width < NARROW,
        )
        self.tasks: dict[str, TaskID] = {}
        self.begun: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def begin(self, name: str, num_rounds: int, done: int) -> None:
        self.tasks[name] = self.progress.add_task(
            name,
            total=num_rounds,
            completed=done,
            place=f"{self.names.index(name) + 1}/{len(self.names)}",
            rounds=f"round {done}/{num_rounds}",
            left="compiling",
            latest="" if not done else f"resumed at {done}",
        )

    def advance(self, name: str, done: int, latest: str) -> None:
        now, task = time.monotonic(), self.progress.tasks[self.tasks[name]]
        total = int(task.total or done)
        # The first chunk includes compilation, so the speed is measured from its end.
        since, first = self.begun.setdefault(name, (now, done)) if done else (now, done)
        left = duration((now - since) / (done - first) * (total - done)) + " left" if done > first else "compiling"
        self.progress.update(task.id, completed=done, rounds=f"round {done}/{total}", left=left, latest=latest)

    def end(self, name: str, seconds: dict[str, float]) -> None:
        spent = ", ".join(f"{what} {took:.1f} s" for what, took in seconds.items())
        self.progress.update(self.tasks[name], left=f"took {duration(sum(seconds.values()))}")
        if not self.console.is_terminal:
            self.console.print(f"{name}: {spent}", highlight=False)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)


def duration(seconds: float) -> str:
    """Format a time.

    >>> duration(0.4), duration(75), duration(7500)
    ('0 s', '1:15 min', '2:05 h')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"
