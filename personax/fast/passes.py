"""The rewriting passes applied to a task's programs before training and scoring."""

import functools
from typing import Literal

from personax.fast.rewrite import rewritten
from personax.typing import Task

Passes = Literal["all", "none"]


@functools.cache
def optimized(task: Task, passes: Passes = "all") -> Task:
    """Rewrite a task's loss, metrics and statistics; with "none", return it unchanged, for debugging.

    Equal arguments return the same object, because `jit` identifies functions by identity.
    """
    if passes == "none":
        return task
    statistics = None if task.statistics is None else rewritten(task.statistics)
    return task._replace(loss=rewritten(task.loss), metrics=rewritten(task.metrics), statistics=statistics)
