"""Progress bars of a run, one for each algorithm: its speed, the time left and the latest numbers."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class Bars:
    """A `Watch` that draws progress bars on a terminal. Elsewhere it prints a line when an algorithm ends."""

    def __init__(self, console: Console) -> None:
        self.console = console
        plain = lambda field: TextColumn(f"{{task.{field}}}", markup=False)  # print names as they are
        columns = (BarColumn(24), MofNCompleteColumn(), plain("fields[speed]"), TimeRemainingColumn())
        self.progress = Progress(
            SpinnerColumn(),
            plain("description"),
            *columns,
            plain("fields[latest]"),
            console=console,
            disable=not console.is_terminal,
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
            name, total=num_rounds, completed=done, speed="compiling", latest="" if not done else f"resumed at {done}"
        )

    def advance(self, name: str, done: int, latest: str) -> None:
        now = time.monotonic()
        # The first chunk includes compilation, so the speed is measured from its end.
        since, first = self.begun.setdefault(name, (now, done)) if done else (now, done)
        speed = f"{(done - first) / (now - since):.1f} rounds/s" if done > first else "compiling"
        self.progress.update(self.tasks[name], completed=done, speed=speed, latest=latest)

    def end(self, name: str, seconds: dict[str, float]) -> None:
        spent = ", ".join(f"{what} {took:.1f} s" for what, took in seconds.items())
        self.progress.update(self.tasks[name], speed=spent)
        if not self.console.is_terminal:
            self.console.print(f"{name}: {spent}", highlight=False)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)
