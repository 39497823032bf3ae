"""One run on several hosts: their devices share each cohort, and the process of the first host writes the run folder.

All processes run the same command and compute the same states and results. The processes of other hosts write their
files to a temporary folder, so that no other code depends on the process it runs in.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from personax.experiment.runs import Work, provenances_of

AUTO = "auto"  # JAX finds the other processes through the scheduler, such as Slurm


class Host(NamedTuple):
    """One process of a run. A run of a single process without `devices` uses the default one."""

    devices: Sequence[Any] | None = None
    is_first: bool = True

    @contextlib.contextmanager
    def folder(self, root: Path) -> Iterator[Path]:
        """Provide the run folder, or in the processes of other hosts a temporary copy of its current state."""
        if self.devices is None:
            yield root
            return
        with tempfile.TemporaryDirectory() as place:
            multihost_utils.sync_global_devices("before the run folder is read")
            own = root if self.is_first else Path(place) / "run"
            if not self.is_first and root.exists():
                shutil.copytree(root, own, ignore=shutil.ignore_patterns("locks", "jobs"))
            multihost_utils.sync_global_devices("the run folder is read")
            yield own
            multihost_utils.sync_global_devices("the run has ended")

    def require_same(self, work: Work) -> None:
        """Raise an error in all processes if their settings or data differ."""
        if self.devices is None:
            return
        stated = json.dumps([one.table for one in provenances_of(work).values()], sort_keys=True, default=str)
        digest = np.frombuffer(hashlib.sha256(stated.encode()).digest(), np.uint8)
        of_all = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1, len(digest))
        different = np.flatnonzero((of_all != of_all[0]).any(axis=1)).tolist()
        if different:
            raise ValueError(
                f"Settings or data of processes {different} differ from those of process 0. Start all processes with "
                "the same command and data."
            )


ALONE = Host()


def join_hosts(hosts: str | None) -> Host:
    """Connect this process with the other processes of a run, before anything is computed.

    `hosts` is "auto" under a scheduler, or "HOST:PORT,I/N": the address at which the first process listens, the number
    of this process (the first is 0), and the number of processes.
    """
    if hosts is None:
        return ALONE
    given = {} if hosts == AUTO else parse_hosts(hosts)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # whose sums do not depend on the number of hosts
    try:
        jax.distributed.initialize(**given)
    except (RuntimeError, ValueError) as error:
        hint = "Without a scheduler, use --hosts HOST:PORT,I/N." if hosts == AUTO else "Start all processes."
        raise ValueError(f"The processes of this run could not connect: {error} {hint}") from None
    return Host(jax.devices(), jax.process_index() == 0)


def parse_hosts(hosts: str) -> dict[str, Any]:
    """Return the arguments of `jax.distributed.initialize` for "HOST:PORT,I/N".

    >>> parse_hosts("10.0.0.1:1234,0/4")
    {'coordinator_address': '10.0.0.1:1234', 'num_processes': 4, 'process_id': 0}
    """
    address, _, process = hosts.partition(",")
    number, _, of = process.partition("/")
    if not (address.rpartition(":")[2].isdigit() and number.isdigit() and of.isdigit() and int(number) < int(of)):
        raise ValueError(f"`--hosts` must be {AUTO} or HOST:PORT,I/N, such as 10.0.0.1:1234,0/4 (got {hosts}).")
    return {"coordinator_address": address, "num_processes": int(of), "process_id": int(number)}
