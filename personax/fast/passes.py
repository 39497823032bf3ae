"""The passes that a task's programs go through before they are trained or scored."""

import functools
from typing import Literal

from personax.fast.rewrite import rewritten
from personax.typing import Task

Passes = Literal["all", "none"]


@functools.cache
def optimized(task: Task, passes: Passes = "all") -> Task:
    """The same task, rewritten: loss, metrics and statistics; with "none" it is left as it is, for debugging.

    Equal arguments give the same task, because `jit` recognizes a function by identity.
    """
    if passes == "none":
        return task
    statistics = None if task.statistics is None else rewritten(task.statistics)
    return task._replace(loss=rewritten(task.loss), metrics=rewritten(task.metrics), statistics=statistics)
