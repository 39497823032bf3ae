"""Run the workloads: our side and its peers alternate, each in its own process."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from personax.bench.peers import PEERS, CannotRun, command_of
from personax.bench.processes import ProcessFailed, Side, worker
from personax.bench.record import BenchRecord, MachineRecord, PeerRecord, RowRecord
from personax.bench.setting import SETTING
from personax.bench.start import measure_start
from personax.bench.workloads import BenchRow, rows
from personax.values import check_names

AGREES = 0.02  # relative to the change of the parameters; different orders of float32 sums stay below this
PATIENCE = 600.0  # seconds to wait for an answer


@dataclass(frozen=True)
class BenchPlan:
    """The plan of a benchmark: `turns` turns in which each side runs for `seconds / turns`, and the peers."""

    seconds: float = 2.0
    turns: int = 3
    peers: tuple[str, ...] = tuple(PEERS)


def run_suite(
    plan: BenchPlan,
    only: Sequence[str] = (),
    note: str = "",
    notify: Callable[[BenchRecord], None] = lambda so_far: None,
) -> BenchRecord:
    """Measure all rows whose name begins with the words of one of `only`; by default all except growth rows.

    `notify` is called with the record so far after each row.
    """
    started, begin, load = datetime.now(UTC), time.perf_counter(), os.getloadavg()[0]
    named = lambda name, words: f"{name}-".startswith(f"{words}-")
    wanted = lambda name: any(named(name, words) for words in only) if only else not named(name, "growth")
    known = ["start", *(row.name for row in rows("cpu"))]
    unknown = [words for words in only if not any(named(name, words) for name in known)]
    check_names("personax bench", unknown, known, "row")
    machine = measure_machine()
    chosen = [row for row in rows(machine.backend) if wanted(row.name)]
    start = measure_start() if wanted("start") and machine.backend == "cpu" else None
    record = BenchRecord(
        version=_version(),
        started=started.isoformat(timespec="seconds"),
        command=shlex.join(["personax", *sys.argv[1:]]),
        seconds=time.perf_counter() - begin,
        load=load,
        note=note,
        machine=machine,
        rows=[],
        start=start,
    )
    for row in chosen:
        found = [*record.rows, measure_row(row, plan, machine)]
        record = replace(record, rows=found, seconds=time.perf_counter() - begin)
        notify(record)
    return record


def _version() -> str:
    try:
        return version("personax")
    except PackageNotFoundError:
        return "a folder"


def measure_machine() -> MachineRecord:
    """Measure the machine and its peaks in a separate process while nothing else runs."""
    done = subprocess.run([*worker(), "machine"], stdout=subprocess.PIPE, text=True, check=True)
    return TypeAdapter(MachineRecord).validate_json(done.stdout.splitlines()[-1])


def measure_row(row: BenchRow, plan: BenchPlan, machine: MachineRecord) -> RowRecord:
    """Measure one row: all sides prepare, then run in turn. A peer that fails is left out with its last output."""
    wanted = [name for name in row.peers if name in plan.peers]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        checks = sorted({str(Path(folder) / PEERS[name].work) for name in wanted})
        setting = SETTING.dump_python(row.setting, mode="json")
        ours = stack.enter_context(Side(worker(), {"setting": setting, "checks": checks}))
        ours.get_ready(PATIENCE)
        asked = {"setting": setting, "device": "cpu" if machine.backend == "cpu" else "cuda"}
        left_out: dict[str, str] = {}
        sides = _start_peers(wanted, asked, Path(folder), machine.backend == "cpu", stack, left_out)
        turns = [_turn(ours, sides, plan.seconds / plan.turns, left_out) for _ in range(plan.turns)]
        peers = [_peer_record(name, sides[name].facts, turns) for name in sides if name not in left_out]
        peers += [PeerRecord(name, note=why) for name, why in left_out.items()]
        return _record(row, machine, ours.facts, turns, peers)


def _start_peers(
    names: Sequence[str],
    asked: dict[str, Any],
    folder: Path,
    one_by_one: bool,
    stack: ExitStack,
    left_out: dict[str, str],
) -> dict[str, Side]:
    """Start the peers, return those that are ready; `one_by_one` keeps them from disturbing each other's autotuning."""
    sides: dict[str, Side] = {}
    groups = [[name] for name in names] if one_by_one else [list(names)]
    for group in groups:
        for name in group:
            try:
                check = str(folder / PEERS[name].work)
                sides[name] = stack.enter_context(Side(command_of(PEERS[name]), {**asked, "check": check}))
            except CannotRun as error:
                left_out[name] = str(error)
        for name in [name for name in group if name in sides]:
            try:
                sides[name].get_ready(PATIENCE)
            except ProcessFailed as error:
                left_out[name] = str(error)
    return sides


def _turn(ours: Side, peers: dict[str, Side], seconds: float, left_out: dict[str, str]) -> dict[str, dict[str, Any]]:
    found = {"ours": ours.run(seconds, PATIENCE)}
    for name in [name for name in peers if name not in left_out]:
        time.sleep(0.2)  # lets the threads of the previous side stop spinning
        try:
            found[name] = peers[name].run(seconds, PATIENCE)
        except ProcessFailed as error:
            left_out[name] = str(error)
    time.sleep(0.2)
    return found


def _seconds_per_round(turn: dict[str, dict[str, Any]], name: str) -> float:
    return turn[name]["seconds"] / turn[name]["rounds"]


def _peer_record(name: str, facts: dict[str, Any], turns: Sequence[dict[str, dict[str, Any]]]) -> PeerRecord:
    note = facts["note"]
    if facts["error"] > AGREES:
        note += f"; not the same work: its parameters differ from ours by {facts['error']:.0%}"
    return PeerRecord(
        name=name,
        version=facts["version"],
        note=note,
        error=facts["error"],
        seconds_per_round=median(_seconds_per_round(turn, name) for turn in turns),
        ratio=median(_seconds_per_round(turn, name) / _seconds_per_round(turn, "ours") for turn in turns),
    )


def _record(
    row: BenchRow,
    machine: MachineRecord,
    facts: dict[str, Any],
    turns: Sequence[dict[str, dict[str, Any]]],
    peers: list[PeerRecord],
) -> RowRecord:
    seconds = median(_seconds_per_round(turn, "ours") for turn in turns)
    ours = [turn["ours"] for turn in turns]
    most_operations = max(machine.operations_per_second, *(one["operations_per_second"] for one in ours))
    most_bytes = max(machine.bytes_per_second, *(one["bytes_per_second"] for one in ours))
    by_operations, by_bytes = facts["operations"] / most_operations, facts["bytes"] / most_bytes
    return RowRecord(
        name=row.name,
        workload=row.workload,
        words=row.words,
        setting=row.setting,
        seconds_per_round=seconds,
        rounds_per_second=1 / seconds,
        local_steps_per_second=row.setting.steps_per_round / seconds,
        operations=facts["operations"],
        bytes=facts["bytes"],
        operations_per_second=most_operations,
        bytes_per_second=most_bytes,
        floor_seconds=max(by_operations, by_bytes),
        share_of_operations=by_operations / seconds,
        share_of_bytes=by_bytes / seconds,
        compile_seconds=facts["compile_seconds"],
        host_peak_bytes=ours[0]["host_peak_bytes"],
        device_peak_bytes=ours[0]["device_peak_bytes"],
        mean_wave=facts["mean_wave"],
        turns=len(turns),
        peers=peers,
    )
