"""Our side in a separate process, so that its memory and compilation time can be measured.

    python -m personax.bench.worker '{"setting": {...}, "checks": ["steps.npz"]}'

It uses the same protocol as the peers (benchmarks/peer.py): one line of JSON when it is ready, then one for each number
of seconds on its input. The reference rounds that the peers repeat are written first.
`python -m personax.bench.worker machine` prints the machine's peaks.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import TypeAdapter

from personax.bench.check import EPOCH, write_work
from personax.bench.floor import floor_of
from personax.bench.machine import device_peak, host_peak, measure_machine, num_cores
from personax.bench.ours import make_run, make_schedule
from personax.bench.record import MachineRecord
from personax.bench.setting import SETTING, BenchSetting
from personax.fast.backends import peak_sizes
from personax.fast.speed import Peaks
from personax.simulation.waves import wave_bounds


def prepare(setting: BenchSetting) -> tuple[Any, dict[str, Any]]:
    """Return a compiled function that runs the setting once, and facts about it."""
    run = make_run(setting)
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    waves = np.diff(wave_bounds(make_schedule(setting))) if setting.asynchronous else None
    facts = {
        **floor_of(setting)._asdict(),
        "compile_seconds": max(seconds[0] - seconds[1], 0.0),
        "mean_wave": None if waves is None else float(waves.mean()),
    }
    return run, facts


def run_for(run: Any, num_rounds: int, seconds: float) -> dict[str, Any]:
    """Repeat complete runs until the time is over."""
    num_runs, begin = 0, time.perf_counter()
    while (took := time.perf_counter() - begin) < seconds:
        run()
        num_runs += 1
    return {"rounds": num_runs * num_rounds, "seconds": took}


def main() -> None:
    """Prepare, report readiness, and run on request until the input ends."""
    if sys.argv[1] == "machine":
        print(TypeAdapter(MachineRecord).dump_json(measure_machine()).decode(), flush=True)
        return
    asked = json.loads(sys.argv[1])
    setting = SETTING.validate_python(asked["setting"])
    if setting.divided:
        jax.config.update("jax_num_cpu_devices", num_cores())
    for path in map(Path, asked["checks"]):
        write_work(setting, path, epoch=path.name == EPOCH)
    run, facts = prepare(setting)
    print(json.dumps(facts), flush=True)
    peaks, memory = None, {}
    for line in sys.stdin:
        found = run_for(run, setting.num_rounds, float(line))
        if peaks is None:  # after the memory is read, because the measurement needs memory itself
            memory = {"host_peak_bytes": host_peak(), "device_peak_bytes": device_peak()}
            peaks = Peaks(*peak_sizes())
        print(json.dumps({**found, **memory, **peaks.measure()}), flush=True)


if __name__ == "__main__":
    main()
