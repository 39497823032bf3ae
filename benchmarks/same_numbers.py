"""Check that two versions of personax compute the same numbers, to the last bit, for refactorings.

    python benchmarks/same_numbers.py OLD NEW [--out table.md] [--only demo recipes live]

OLD and NEW are paths of checkouts, or revisions of the repository in the current directory. Each is run in a process of
its own with the same interpreter, on the CPU. What it computes is hashed: sha256 over names, types, shapes and bytes of
all arrays. The cases:

    demo      `personax compare`: its models, `clients.parquet`, and the numbers of `results.json`
    recipes   every recipe under every server, and scores of its models
    live      a server and its clients as processes: the models that they leave

The table has a row for each case. The exit status is 1 if any of them differs or failed. Times, dates, machines and
versions in `results.json` may differ, and so may its words, and the new version may write more numbers. With 2 idle
cores it takes about 8 minutes.

In live runs the order of uploads is left to chance. With two clients and a synchronous server the served model does not
depend on it, because the sum of two updates does not. A client's own model may, because whoever uploads last leaves
before it has the last shared model. So these are hashed only in runs of one client, and an asynchronous server has one.

What runs on both versions uses names that both have. Names that have moved are looked up by `moved`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load_file
from scipy.special import stdtrit

import personax as px

COMPILES_FASTER = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"  # as the command line has it
GROUPS = ("demo", "recipes", "live")
RENAMED = {"protocol": "scoring", "mix": "personal_number"}  # fields of records, from the old name to the new
UNTIMELY = ("seconds", "started", "machine", "personax", "schema_version")  # keys of results.json that may differ
NEW = ("num_seeds", "num_lost", "schema")  # fields that records lacked before schema version 3
NUM_CLIENTS, NUM_ROUNDS, COHORT, NUM_EVENTS = 6, 3, 4, 12
STEPS = {"num_steps": 2, "batch_size": 8}
EPOCHS = {"num_epochs": 1, "batch_size": 8, "sampling": "shuffled"}
PATIENCE = 240.0  # seconds for a live run
MOST_LISTED = 30  # differing numbers of results.json
LIVE_CONFIG = """
name = "same"
seeds = [3]
[data]
kind = "file"
path = "on the clients"
[model]
kind = "mlp"
widths = [16]
[schedule]
num_rounds = 4
cohort_size = "all"
[local]
lr = 0.1
num_steps = 3
batch_size = 8
[live]
num_clients = {num_clients}
outlier_factor = 0
[live.sample]
shape = [8, 8]
type = "uint8"
num_outputs = 10
[algorithms.Served]
{algorithm}
"""
LIVE = {  # the number of clients, and the algorithm
    "scaffold, synchronous, 2 clients": (2, 'recipe = "scaffold"'),
    "apfl, synchronous, 2 clients": (2, 'recipe = "apfl"\nmix = 0.5'),
    "persafl with Moreau, asynchronous, 1 client": (
        1,
        'recipe = "persafl"\nobjective = { kind = "Moreau", strength = 1.0, prox_lr = 0.1, num_prox_steps = 3 }\n'
        'server = { kind = "asynchronous", lr = 0.5 }',
    ),
}

# The result of a case: its "hash" or an "error", and "numbers" by path if they are compared individually.
Found = dict[str, Any]


# Hashes


def hash_of(tree: Any) -> str:
    """The sha256 of a pytree: of the names, types, shapes and bytes of its leaves, in the order of their names."""
    leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    total = hashlib.sha256()
    for name, leaf in sorted(leaves, key=lambda pair: pair[0]):
        array = np.asarray(leaf)
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def columns_of(path: Path) -> dict[str, np.ndarray]:
    """The columns of numbers of a Parquet file; a missing number is NaN."""
    table = pq.read_table(path)
    columns = {RENAMED.get(name, name): table.column(name).to_numpy() for name in table.column_names}
    return {name: column for name, column in columns.items() if column.dtype.kind in "biuf"}


def numbers_of(value: Any, path: str = "$") -> Iterator[tuple[str, str]]:
    """All numbers of a JSON value by their path, written so that different bits read differently."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key not in (*UNTIMELY, *NEW):
                yield from numbers_of(part, f"{path}.{RENAMED.get(key, key)}")
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from numbers_of(part, f"{path}[{i}]")
    elif value is None or isinstance(value, bool | int | float):
        yield path, repr(value)


def with_intervals(record: dict[str, Any]) -> dict[str, Any]:
    """`results.json` with each interval as one value, as records have them since schema version 3."""
    if record["schema_version"] >= 3:
        return record
    table = []
    for row in record["table"]:
        gone = [key for key in row if key in ("low", "high") or key.startswith("over_")]
        kept = {key: item for key, item in row.items() if key not in gone}
        over = {name: _interval(row, name, f"{name}_") for name in ("over_local", "over_global")}
        table.append({**kept, **over, "mean": _interval(row, "mean", "")})
    for algorithm in record["algorithms"]:
        for score in algorithm["scores"]:
            rounds = {tuple(one["events"]): one["round"] for one in score["evaluations"]}
            at = lambda seed, events, rounds=rounds: next(num for found, num in rounds.items() if found[seed] == events)
            for metric, best in score["best"].items():
                when = [at(seed, events) for seed, events in enumerate(best["events"])]
                score["best"][metric] = {"mean": t_interval(best["mean"]), "rounds": when}
    return {**record, "table": table}


def _interval(row: dict[str, Any], name: str, ends: str) -> dict[str, Any] | None:
    found = {"mean": row[name], "low": row[f"{ends}low"], "high": row[f"{ends}high"]}
    return None if row[name] is None else found


def t_interval(of_seeds: list[float]) -> dict[str, float | None]:
    """The mean of seeds and the ends of its 95 % t-interval."""
    seeds, num = np.asarray(of_seeds), len(of_seeds)
    half = None if num == 1 else float(stdtrit(num - 1, 0.975) * seeds.std(ddof=1) / np.sqrt(num))
    mean = float(seeds.mean())
    ends = (None, None) if half is None else (mean - half, mean + half)
    return {"mean": mean, "low": ends[0], "high": ends[1]}


# Cases of the command line


class CommandLine(NamedTuple):
    """The command line of a checkout, which runs in a folder."""

    checkout: Path
    folder: Path

    def words(self, *words: Any) -> list[str]:
        """Run a command of personax with the checkout's own entry point."""
        about = tomllib.loads((self.checkout / "pyproject.toml").read_text(encoding="utf-8"))
        module, _, name = about["project"]["scripts"]["personax"].partition(":")
        return [sys.executable, "-c", f"from {module} import {name}; {name}()", *map(str, words)]

    def run(self, *words: Any) -> None:
        """Run a command to its end."""
        done = subprocess.run(self.words(*words), cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"personax {words[0]} ended with {done.returncode}: {said}")

    def begin(self, name: str, *words: Any) -> subprocess.Popen[bytes]:
        """Start a command; what it says goes to a file."""
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(self.words(*words), cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)


def demo_cases(checkout: Path, folder: Path) -> dict[str, Found]:
    """`personax compare` with its defaults."""
    folder.mkdir()
    CommandLine(checkout, folder).run("compare", "--out", "run")
    run = folder / "run"
    models = sorted(run.glob("models/*.safetensors"))
    found: dict[str, Found] = {f"demo: models/{path.name}": {"hash": hash_of(load_file(path))} for path in models}
    found["demo: clients.parquet"] = {"hash": hash_of(columns_of(run / "clients.parquet"))}
    numbers = dict(numbers_of(with_intervals(json.loads((run / "results.json").read_text(encoding="utf-8")))))
    text = json.dumps(numbers, sort_keys=True)
    found["demo: results.json"] = {"hash": hashlib.sha256(text.encode()).hexdigest(), "numbers": numbers}
    return found


def live_case(checkout: Path, folder: Path, num_clients: int, algorithm: str) -> str:
    """A live run to its end; the hash of the served model and, of a client that is alone, of its own."""
    folder.mkdir()
    shell, federation = CommandLine(checkout, folder), digits()
    (folder / "config.toml").write_text(LIVE_CONFIG.format(num_clients=num_clients, algorithm=algorithm))
    names = ["anna", "bert", "cleo"][:num_clients]
    shell.run("certify", "create", "certificates", "--host", "127.0.0.1", *(f"--client={name}" for name in names))
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    identity = lambda who: ("--identity", f"certificates/{who}")
    serving = ("serve", "config.toml", "--listen", address, *identity("server"), "--out", "run", "--no-view")
    processes = {"server": shell.begin("server", *serving)}
    try:
        for i, name in enumerate(names):
            (x, y), (test_x, test_y) = federation.client(i), federation.client_test(i)
            np.savez(folder / f"{name}.npz", x=x, y=y, test_x=test_x, test_y=test_y)
            given = ("--data", f"{name}.npz", *identity(f"clients/{name}"), "--folder", f"{name}-state")
            processes[name] = shell.begin(name, "join", address, *given)
        wait_for(processes, folder)
    finally:
        end(processes)
    models = {f"server/{path.name}": load_file(path) for path in folder.glob("run/models/*.safetensors")}
    if not models:
        raise RuntimeError("The server left no model.")
    if num_clients == 1:
        models[names[0]] = load_file(*folder.glob(f"{names[0]}-state/**/personal.safetensors"))
    return hash_of(models)


def wait_for(processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for the end of processes; an error has the output of the one that failed."""
    until = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes.values()):
        failed = [name for name, process in processes.items() if process.poll() not in (None, 0)]
        if failed or time.monotonic() > until:
            break
        time.sleep(0.1)
    for name, process in processes.items():
        if process.poll() not in (None, 0):
            said = (folder / f"{name}.log").read_text(errors="replace")
            raise RuntimeError(f"{name} ended with {process.returncode}: {said[-2000:]}")
    if any(process.poll() is None for process in processes.values()):
        raise RuntimeError(f"The live run did not end in {PATIENCE:g} seconds.")


def end(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    """End what is still running."""
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes.values():
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Cases of the library


def moved(place: str, name: str) -> Any:
    """A public name where it is now, or else at the top level, where it was."""
    holder = getattr(px, place, px)
    return getattr(holder, name) if hasattr(holder, name) else getattr(px, name)


def scoring(**options: Any) -> Any:
    """Return the scoring class, formerly called a protocol."""
    return (px.Scoring if hasattr(px, "Scoring") else px.Protocol)(**options)


def digits() -> Any:
    """A few hundred of the digits, on clients of different sizes, and one newcomer."""
    pool, key = px.datasets.digits(), jax.random.key(5)
    divided = px.partition.dirichlet_by_class(
        labels=pool.y[:500], num_clients=NUM_CLIENTS + 1, concentration=1.0, least=10, key=key
    )
    train, test = divided.split(share=0.3, key=key)
    return px.Federation.from_partition(pool.x[:500], pool.y[:500], train, test).hold_out([NUM_CLIENTS])


class Case(NamedTuple):
    """A run: an algorithm on a model along a schedule, and the models that are scored at its end."""

    algorithm: Callable[[], Any]
    schedule: Callable[[], Any]
    scored: tuple[str, ...] = ()
    model: Callable[[], Any] = lambda: px.mlp(widths=(16,), num_outputs=10)


def run_case(case: Case, federation: Any) -> dict[str, Any]:
    """The arrays that a run leaves, and its scores."""
    key, algorithm, task = jax.random.key(7), case.algorithm(), px.classification(case.model())
    result = px.simulate(algorithm, task, federation, case.schedule(), key=key)
    found = {"": {"params": result.params, "personal": result.personal, "shared": result.shared}}
    score = lambda what: px.evaluate(algorithm, task, federation, result, what, key=key).metrics
    adapting = {"num_steps": 2, "lr": 0.05, "batch_size": 8}
    for model in case.scored:
        found[f", scored: {model}"] = score(scoring(model=model, score_on="both", **adapting))
    if "adapted" in case.scored:
        found[", scored: newcomer"] = score(scoring(model="adapted", clients="held_out", **adapting))
    return found


def in_rounds(**options: Any) -> Any:
    """Synchronous rounds of a part of the clients."""
    return px.rounds(
        num_clients=NUM_CLIENTS, num_rounds=NUM_ROUNDS, cohort_size=COHORT, key=jax.random.key(11), **options
    )


def as_they_come() -> Any:
    """Asynchronous arrivals with PersA-FL's delays, as many as there are updates in the rounds."""
    key = jax.random.key(11)
    delays = moved("delays", "persafl_delays")(num_clients=NUM_CLIENTS, key=key)
    return px.arrivals(num_clients=NUM_CLIENTS, num_events=NUM_EVENTS, delays=delays, key=key)


def exponentially() -> Any:
    """Asynchronous arrivals with delays of other kinds."""
    exponential, kinds = moved("delays", "Exponential"), moved("delays", "Delays")
    delays = kinds(download=exponential(mean=1.0), compute=exponential(mean=2.0), upload=exponential(mean=3.0))
    return px.arrivals(num_clients=NUM_CLIENTS, num_events=NUM_EVENTS, delays=delays, key=jax.random.key(12))


def servers() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Each kind of server and the schedule that it goes with."""
    polynomial = lambda: moved("discounts", "Polynomial")(power=0.5)
    return {
        "synchronous": (lambda: px.synchronous(lr=0.9), in_rounds),
        "buffered": (lambda: px.buffered(buffer_size=2, lr=0.8, discount=polynomial()), as_they_come),
        "asynchronous": (lambda: px.asynchronous(lr=0.5, max_staleness=8), as_they_come),
    }


def averaging() -> dict[str, Callable[..., Any]]:
    """Recipes with one model for all, or none, as functions of a server."""
    return {
        "fedavg": partial(px.fedavg, lr=0.1, **STEPS),
        "fedprox": partial(px.fedprox, strength=0.5, lr=0.1, **STEPS),
        "scaffold, option 1": partial(px.scaffold, lr=0.1, option=1, **STEPS),
        "scaffold, option 2": partial(px.scaffold, lr=0.1, option=2, **STEPS),
        "aruba": partial(px.aruba, **STEPS),
        "local_only": partial(px.local_only, lr=0.1, **STEPS),
        "fedasync": partial(px.fedasync, lr=0.1, **STEPS),
    }


def personalizing() -> dict[str, Callable[..., Any]]:
    """Recipes with a model for each, as functions of a server."""
    meta, hvp = {"adapt_lr": 0.05, "lr": 0.1}, partial(moved, "curvature")
    moreau = px.Moreau(strength=1.0, prox_lr=0.1, num_prox_steps=5)
    mixing = {
        f"apfl, mix updated: {when}": partial(px.apfl, lr=0.1, mix=0.5, update_mix=when, **STEPS)
        for when in ("never", "round", "step")
    }
    return {
        "per_fedavg, exact": partial(px.per_fedavg, **meta, hvp=hvp("exact"), **STEPS),
        "per_fedavg, first order": partial(px.per_fedavg, **meta, hvp=hvp("first_order"), **STEPS),
        "per_fedavg, Hessian-free": partial(px.per_fedavg, **meta, hvp=hvp("relative_difference")(0.01), **STEPS),
        "per_fedavg, 3 steps": partial(px.per_fedavg, **meta, num_adapt_steps=3, **STEPS),
        "pfedme": partial(px.pfedme, strength=1.0, lr=0.1, prox_lr=0.1, num_prox_steps=5, **STEPS),
        **mixing,
        "persafl with Meta": partial(px.persafl, objective=px.Meta(adapt_lr=0.05), lr=0.1, **STEPS),
        "persafl with Moreau": partial(px.persafl, objective=moreau, lr=0.1, **STEPS),
    }


def variants() -> dict[str, Callable[..., Any]]:
    """Some of the recipes with other local steps, as functions of a server."""
    adam = moved("optimizers", "optimizer")("adam")
    decay = lambda rate: moved("step_sizes", "Decay")(initial=0.1, rate=rate)
    radius = moved("curvature", "finite_difference")(0.01)
    return {
        "fedavg, epochs": partial(px.fedavg, lr=0.1, **EPOCHS),
        "fedavg, adam": partial(px.fedavg, lr=0.01, optimizer=adam, **STEPS),
        "fedavg, decay, clipped": partial(px.fedavg, lr=decay(0.1), clip_norm=0.5, **STEPS),
        "scaffold, option 2, epochs, decay": partial(px.scaffold, lr=decay(0.05), option=2, **EPOCHS),
        "per_fedavg, fixed radius": partial(px.per_fedavg, adapt_lr=0.05, lr=0.1, hvp=radius, **STEPS),
        "per_fedavg, epochs, adam": partial(px.per_fedavg, adapt_lr=0.05, lr=0.01, optimizer=adam, **EPOCHS),
        "apfl, epochs, adam": partial(px.apfl, lr=0.01, mix=0.3, radius=9.0, optimizer=adam, **EPOCHS),
    }


def single_cases() -> dict[str, Case]:
    """Recipes with their own server, and runs on other models and schedules."""
    cnn = lambda: px.cnn(channels=(4,), widths=(16,), num_outputs=10, kernel_size=3)
    wide = lambda: px.mlp(widths=(1 << 14,), num_outputs=10)  # large enough for steps of another kind
    fedavg, both = partial(px.fedavg, lr=0.1, **STEPS), ("global", "adapted")
    aggregated = partial(in_rounds, num_aggregated=2)
    moreau = px.Moreau(strength=1.0, prox_lr=0.1, num_prox_steps=3)
    return {
        "fedasync_mixing": Case(partial(px.fedasync_mixing, lr=0.1, strength=0.1, **STEPS), as_they_come, both),
        "fedbuff": Case(partial(px.fedbuff, lr=0.1, buffer_size=3, server_lr=0.8, **STEPS), as_they_come, both),
        "fedbuff, other delays": Case(partial(px.fedbuff, lr=0.1, buffer_size=3, **EPOCHS), exponentially),
        "pfedme, 2 aggregated": Case(partial(px.pfedme, strength=1.0, lr=0.1, prox_lr=0.1, **STEPS), aggregated),
        "fedavg, CNN": Case(fedavg, in_rounds, both, cnn),
        "persafl with Moreau, CNN": Case(partial(px.persafl, objective=moreau, lr=0.1, **STEPS), as_they_come, (), cnn),
        "fedavg, wide layer": Case(fedavg, in_rounds, (), wide),
    }


def scored_models(name: str) -> tuple[str, ...]:
    """Return the models of a recipe that are scored."""
    keeps = name.startswith(("local_only", "pfedme", "apfl")) or name == "persafl with Moreau"
    return ("global", "adapted", *(["personal"] if keeps else []), "recomputed")


def recipe_cases() -> dict[str, Case]:
    """All runs by their names: variants without buffers; models are scored under synchronous servers."""
    found, rare = {}, variants()
    for name, recipe in (averaging() | personalizing() | rare).items():
        for kind, (server, schedule) in servers().items():
            if name in rare and kind == "buffered":
                continue
            scored = scored_models(name) if kind == "synchronous" else ()
            found[f"{name}, {kind}"] = Case(lambda r=recipe, s=server: r(server=s()), schedule, scored)
    return found | single_cases()


# The worker


def attempt(found: dict[str, Found], name: str, compute: Callable[[], dict[str, Found]]) -> None:
    """Add what is computed; what fails is a case that says why."""
    begin = time.perf_counter()
    try:
        found.update(compute())
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
    print(f"{time.perf_counter() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)


def work(checkout: Path, out: Path, groups: list[str]) -> None:
    """Compute all cases with the package of this checkout, and write what was found as JSON."""
    if Path(px.__file__).resolve().parents[1] != checkout.resolve():
        raise SystemExit(f"This should run the package in {checkout}, got {px.__file__}.")
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as place:
        if "demo" in groups:
            attempt(found, "demo", lambda: demo_cases(checkout, Path(place) / "demo"))
        if "recipes" in groups:
            federation = digits()
            for name, case in recipe_cases().items():
                hashes = lambda name=name, case=case: {
                    f"{name}{what}": {"hash": hash_of(tree)} for what, tree in run_case(case, federation).items()
                }
                attempt(found, name, hashes)
        if "live" in groups:
            for i, (name, given) in enumerate(LIVE.items()):
                folder = Path(place) / f"live{i}"
                served = lambda name=name, folder=folder, given=given: {
                    f"live: {name}": {"hash": live_case(checkout, folder, *given)}
                }
                attempt(found, f"live: {name}", served)
    out.write_text(json.dumps(found), encoding="utf-8")


# Both versions


@contextlib.contextmanager
def checked_out(given: str) -> Iterator[Path]:
    """A checkout unchanged, or a revision in a temporary work tree."""
    if (Path(given) / "personax").is_dir():
        yield Path(given).resolve()
        return
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / re.sub(r"\W+", "-", given)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), given], check=True)
        try:
            yield tree.resolve()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)


def found_in(checkout: Path, groups: list[str]) -> dict[str, Found]:
    """Compute in a process with the package of a checkout, without sharing compiled programs."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "found.json"
        env = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        env |= {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}  # and not what lies beside this file
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {COMPILES_FASTER}".strip()
        env |= {"JAX_PLATFORMS": "cpu", "PERSONAX_COMPILED": str(Path(place) / "compiled")}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(checkout), str(out), *groups]
        subprocess.run(command, check=True, env=env, cwd=place)
        return json.loads(out.read_text(encoding="utf-8"))


def differing_numbers(old: Found, new: Found) -> list[str]:
    """The numbers of the old version that differ in the new one, by their paths, old and new."""
    before, after = old.get("numbers", {}), new.get("numbers", {})
    paths = [path for path in before if before[path] != after.get(path)]
    lines = [f"`{path}`: {before[path]} | {after.get(path, 'missing')}" for path in paths]
    more = [f"and {len(lines) - MOST_LISTED} more"] if len(lines) > MOST_LISTED else []
    return lines[:MOST_LISTED] + more


def verdict(old: Found, new: Found) -> str:
    """Say whether two versions of a case are equal. A record may have numbers that the old version did not write."""
    if "hash" not in old or "hash" not in new:
        return "**no**"
    added = len(new.get("numbers", {}).keys() - old.get("numbers", {}).keys())
    if added and not differing_numbers(old, new):
        return f"yes, and {added} new numbers"
    return "yes" if old["hash"] == new["hash"] else "**no**"


def compared(old: dict[str, Found], new: dict[str, Found]) -> tuple[str, bool]:
    """A Markdown table of all cases, what there is to say about them, and whether all are equal."""
    lines, notes, num_equal = ["| case | old | new | equal |", "|---|---|---|---|"], [], 0
    cases = list({**old, **new})
    for name in cases:
        pair = [found.get(name, {"error": "no such case"}) for found in (old, new)]
        hashes = [one.get("hash", "failed")[:12] for one in pair]
        equal = verdict(*pair)
        num_equal += equal.startswith("yes")
        lines.append(f"| {name} | {hashes[0]} | {hashes[1]} | {equal} |")
        for version, one in zip(("old", "new"), pair, strict=True):
            if "error" in one:
                notes.append(f"- {name}, {version}: {one['error']}")
        notes += [f"- {name}: {line}" for line in differing_numbers(*pair)]
    told = f"{len(cases)} cases: {num_equal} equal, {len(cases) - num_equal} not equal."
    parts = ["\n".join(lines), "\n".join(notes), told]
    return "\n\n".join(part for part in parts if part), num_equal == len(cases) > 0


def main() -> None:
    """Compare two versions, or be the worker of one."""
    if sys.argv[1:2] == ["--worker"]:
        work(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a checkout, or a revision of the repository in the current directory")
    parser.add_argument("new", help="another")
    parser.add_argument("--out", type=Path, help="a file for the table, too")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="by default all cases")
    options = parser.parse_args()
    with checked_out(options.old) as old, checked_out(options.new) as new:
        table, same = compared(*(found_in(checkout, options.only) for checkout in (old, new)))
    print(table)
    if options.out:
        options.out.write_text(f"{table}\n", encoding="utf-8")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
