"""A study of 24 jobs with each launcher against the plain loop: overhead beyond startup and compilation.

`python benchmarks/launchers.py` runs `personax compare` in one process, then with `--launcher local`, and with `ray`
and `slurm` where there are clusters (`--address`, SLURM_CONF), each with a compilation cache of its own. It prints the
wall time; startup, compilation, and training with evaluation ("work"), summed over jobs and divided by the jobs at a
time; and the overhead: the wall time without startup and compilation against the plain loop's work.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_JOBS = 24
CONFIG = """
name = "launchers"
seeds = 3
[partition]
kind = "classes_per_client"
num_clients = 66
num_classes_each = 4
[schedule]
num_rounds = {rounds}
cohort_size = 10
[evaluation]
every = {every}
adaptation_steps = []
[local]
num_steps = 5
batch_size = 10
"""
ENTRY = """
[algorithms."FedAvg {number}"]
recipe = "fedavg"
lr = {lr}
"""


def import_seconds() -> float:
    """Measure the time that a job's process needs to import everything."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import personax.cluster.jobs"], check=True)
    return time.perf_counter() - began


def measure(place: Path, name: str, words: list[str], at_a_time: int) -> dict[str, float]:
    """Run the study once, and return the seconds by activity."""
    environment = {**os.environ, "PERSONAX_COMPILED": str(place / f"compiled-{name}")}
    personax = str(Path(sys.executable).with_name("personax"))
    command = [personax, "compare", str(place / "study.toml"), "--out", str(place / name), *words]
    began = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    algorithms = json.loads((place / name / "results.json").read_text())["algorithms"]
    spent = {what: sum(one["seconds"][what] for one in algorithms) for what in ("compile", "train", "evaluate")}
    useful = spent["train"] + spent["evaluate"]
    if not words:
        return {
            "wall": wall,
            "startup": wall - spent["compile"] - useful,
            "compile": spent["compile"],
            "useful": useful,
        }
    records = [json.loads(path.read_text()) for path in (place / name / "jobs").glob("*.json")]
    inside = sum(record["updated"] - record["began"] for record in records if "began" in record)
    startup = len(algorithms) * import_seconds() + inside - useful - spent["compile"]
    parts = {"startup": startup, "compile": spent["compile"], "useful": useful}
    return {"wall": wall, **{what: seconds / at_a_time for what, seconds in parts.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--parallel", type=int, default=2, help="jobs at a time")
    parser.add_argument("--address", help="of a Ray cluster with room for that many jobs")
    options = parser.parse_args()
    launchers = {"plain": [], "local": ["--launcher", "local"]}
    if options.address:
        launchers["ray"] = ["--launcher", "ray", "--address", options.address]
    if shutil.which("sbatch") and os.environ.get("SLURM_CONF"):
        launchers["slurm"] = ["--launcher", "slurm"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        entries = [ENTRY.format(number=number, lr=0.01 * (number + 1)) for number in range(NUM_JOBS - 1)]
        text = CONFIG.format(rounds=options.rounds, every=options.rounds // 10)  # and local training: 24 jobs
        (place / "study.toml").write_text(text + "".join(entries))
        print(f"{'launcher':10}" + "".join(f"{title:>14}" for title in ("wall s", "startup s", "compile s", "work s")))
        plain = 0.0
        for name, words in launchers.items():
            given = [*words, "--parallel", str(options.parallel)] if words else []
            found = measure(place, name, given, options.parallel)
            plain = plain or found["useful"]
            rest = found["wall"] - found["startup"] - found["compile"]
            numbers = (found["wall"], found["startup"], found["compile"], found["useful"])
            overhead = "" if name == "plain" else f"   overhead {100 * (rest / plain - 1):+.1f} %"
            print(f"{name:10}" + "".join(f"{number:14.1f}" for number in numbers) + overhead, flush=True)


if __name__ == "__main__":
    main()
