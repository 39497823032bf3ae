"""A Slurm cluster on this machine: munge, a controller and one node daemon, each with its files in one folder.

`python -m tests.cluster.slurm COMMAND` runs a command with such a cluster.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cluster.studies import wait_for

COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue")
CONFIG = """
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
MinJobAge=60
KillWait=5
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def can_run():
    """True if the daemons are installed and this user may start them."""
    paths = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return os.geteuid() == 0 and all(shutil.which(command, path=paths) for command in COMMANDS)


class Slurm:
    """The daemons; `environment` is what commands need to find them."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.chmod(0o755)
        for name in ("munge", "state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o711)
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, ports=free_ports(2)))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        munge = self.folder / "munge"
        files = [f"--{what}-file={munge / what}" for what in ("key", "pid", "log", "seed")]
        self.daemons = {"munged": self._start("munged", "--foreground", "--force", f"--socket={munge}/socket", *files)}
        wait_for(lambda: (munge / "socket").exists())
        self.begin_controller()
        self.begin_node()

    def _start(self, *words):
        path = os.environ["PATH"] + ":/usr/sbin:/sbin"
        environment = {**os.environ, **self.environment, "PATH": path}
        with open(self.folder / f"{words[0]}.out", "a") as log:
            return subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)

    def ask(self, *words):
        environment = {**os.environ, **self.environment}
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout

    def begin_controller(self):
        """Start the controller, with the jobs that an earlier one has saved."""
        self.daemons["slurmctld"] = self._start("slurmctld", "-D")
        wait_for(lambda: "UP" in self.ask("scontrol", "ping"))

    def kill_controller(self):
        self.daemons["slurmctld"].kill()
        self.daemons["slurmctld"].wait()

    def begin_node(self):
        """Start the node daemon, and wait until the controller sees it."""
        self.daemons["slurmd"] = self._start("slurmd", "-D", "-N", "localhost")
        ready = ("idle", "mixed", "alloc")
        wait_for(lambda: self.ask("sinfo", "--noheader", "--format=%t").strip() in ready)

    def kill_node(self):
        """Kill the node daemon and all steps of jobs on it, as a power cut does."""
        listed = self.ask("scontrol", "-N", "localhost", "listpids").splitlines()[1:]
        tasks = [int(line.split()[0]) for line in listed if line.split()[0] != "-1"]
        parents = {_parent(pid) for pid in tasks}
        self.daemons["slurmd"].kill()
        self.daemons["slurmd"].wait()
        for pid in {*tasks, *(pid for pid in parents if _is_step(pid))}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self):
        self.ask("scancel", "--me")
        for daemon in reversed(self.daemons.values()):
            daemon.kill()
            daemon.wait()


def _parent(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _is_step(pid):
    """True for the daemon of a job's step."""
    with contextlib.suppress(OSError):
        return "slurmstepd" in Path(f"/proc/{pid}/comm").read_text()
    return False


def free_ports(num):
    probes = [socket.socket() for _ in range(num)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        cluster = Slurm(temporary)
        try:
            status = subprocess.run(sys.argv[1:], env={**os.environ, **cluster.environment}).returncode
        finally:
            cluster.close()
    sys.exit(status)
