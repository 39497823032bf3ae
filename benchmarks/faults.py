"""Whether the tests notice deliberate faults: a table of changes to the package, and the test that each must fail.

    python benchmarks/faults.py [--only TEXT ...]

Run it in an environment in which `make test` runs, from any directory. For each fault it copies the package and its
tests to a temporary folder, replaces the old text, which must be in the file exactly once, and runs the test there.
Before that, all these tests must pass without a fault. A fault is *caught* if its test fails and *survived* if it
passes; where the test could not be run, pytest's exit status is shown. The exit status is 1 unless all are caught.
`--only` runs the faults whose description contains one of the texts. On one idle core it takes about 3 minutes.

To check a new test, add a row with the fault that it is to notice.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("personax", "tests", "conftest.py", "pyproject.toml")


class Fault(NamedTuple):
    """A change to one file, and the test that must fail with it."""

    what: str
    file: str
    old: str
    new: str
    test: str


REFERENCE = "tests/test_reference.py::"
NETWORK = f"{REFERENCE}test_meta_gradients_of_a_network_in_shared_products_agree_with_the_twin"
OBJECTIVES = "tests/objectives/test_objectives.py::"
SYNTHETIC = "tests/data/test_datasets.py::"
THEOREMS = "tests/theory/test_theorems.py::"
FAULTS = [
    Fault(
        "live: the largest norm of the others for their median",
        "personax/live/admission.py",
        "else median(known)",
        "else max(known)",
        "tests/live/test_book.py::test_the_bound_on_norms_is_a_multiple_of_the_median_of_the_others",
    ),
    Fault(
        "SCAFFOLD option II: K times the first step size for the sum of all",
        "personax/client/local.py",
        "visit = visit._replace(lr=lr_sum)",
        "visit = visit._replace(lr=visit.clock.num_steps * step_size_at(local.lr, visit.clock))",
        f"{REFERENCE}test_seeds_together_agree_with_the_twin[SCAFFOLD, Option II, decaying]",
    ),
    Fault(
        "APFL: the mixing weight clipped to [0, 2]",
        "personax/objectives/mixture.py",
        "* slope, 0, 1)",
        "* slope, 0, 2)",
        f"{OBJECTIVES}test_the_mixing_weight_stays_in_its_interval",
    ),
    Fault(
        "APFL: the mixing weight not clipped at 0",
        "personax/objectives/mixture.py",
        "* slope, 0, 1)",
        "* slope, -1, 1)",
        f"{OBJECTIVES}test_the_mixing_weight_stays_in_its_interval",
    ),
    Fault(
        "Moreau.personalize: one batch for all",
        "personax/objectives/moreau.py",
        "merged = Batch(flat(batches.x), flat(batches.y), batches.weight.reshape(-1), batches.key[0])",
        "merged = jax.tree.map(lambda leaf: leaf[0], batches)",
        f"{OBJECTIVES}test_the_moreau_personal_model_uses_all_its_batches",
    ),
    Fault(
        "Mixture.personalize: no projection",
        "personax/objectives/mixture.py",
        "return Mixed(self.project(objective.descent_step(own.model, slope, lr)), own.mix), None",
        "return Mixed(objective.descent_step(own.model, slope, lr), own.mix), None",
        f"{OBJECTIVES}test_the_personal_model_of_a_mixture_stays_in_the_ball",
    ),
    Fault(
        "synthetic: gamma as a standard deviation",
        "personax/data/datasets/synthetic.py",
        "rng.normal(0, np.sqrt(model_spread))",
        "rng.normal(0, model_spread)",
        f"{SYNTHETIC}test_spreads_are_variances_of_the_clients_means",
    ),
    Fault(
        "synthetic: beta as a standard deviation",
        "personax/data/datasets/synthetic.py",
        "rng.normal(0, np.sqrt(input_spread))",
        "rng.normal(0, input_spread)",
        f"{SYNTHETIC}test_the_input_spread_of_a_federation_is_a_variance",
    ),
    Fault(
        "PersA-FL Theorem 1: Q + 6 for Q + 7 in its condition",
        "personax/theory/persafl.py",
        "return 160 * smoothness * (num_local_steps + 7)",
        "return 160 * smoothness * (num_local_steps + 6)",
        f"{THEOREMS}test_from_how_many_updates_theorems_1_to_3_hold",
    ),
    Fault(
        "PersA-FL Theorem 3: Q + 6 for Q + 7 in its condition",
        "personax/theory/persafl.py",
        "288 * level * (steps + 7)",
        "288 * level * (steps + 6)",
        f"{THEOREMS}test_from_how_many_updates_theorems_1_to_3_hold",
    ),
    Fault(
        "Meta in shared products: the adaptation batch for the curvature batch",
        "personax/objectives/meta.py",
        'direction, ("curvature", index))',
        'direction, ("adapt", index))',
        f"{NETWORK}[exact, one step]",
    ),
    Fault(
        "Meta in shared products: every Hessian at the last model of the path",
        "personax/objectives/meta.py",
        "span.curvature(self.hvp, path[index]",
        "span.curvature(self.hvp, path[-1]",
        f"{NETWORK}[Hessian-free, two steps]",
    ),
    Fault(
        "Meta in shared products: the outer gradient before the last adaptation step",
        "personax/objectives/meta.py",
        'span.gradient(path.pop(), ("outer", 0))',
        'span.gradient(path[-2], ("outer", 0))',
        f"{NETWORK}[first-order, two steps]",
    ),
]


def copy(folder: Path) -> None:
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)


def apply(fault: Fault, folder: Path) -> None:
    path = folder / fault.file
    text = path.read_text()
    if (count := text.count(fault.old)) != 1:
        raise SystemExit(f"{fault.file} must contain {fault.old!r} exactly once, got {count}. Update the row.")
    path.write_text(text.replace(fault.old, fault.new))


def run(folder: Path, tests: list[str]) -> int:
    """Pytest's exit status: 0 if all tests passed, 1 if one failed, others if it could not run them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL).returncode


def verdict(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        apply(fault, Path(name))
        status = run(Path(name), [fault.test])
    return {0: "survived", 1: "caught"}.get(status, f"not run (exit status {status})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    texts = parser.parse_args().only
    faults = [fault for fault in FAULTS if any(text in fault.what for text in texts)]
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name))
        if status := run(Path(name), sorted({fault.test for fault in faults})):
            raise SystemExit(f"The tests must pass without a fault, got exit status {status} of pytest.")
    print("| fault | test | verdict |\n|---|---|---|")
    verdicts = []
    for fault in faults:
        verdicts.append(verdict(fault))
        print(f"| {fault.what} | `{fault.test.partition('::')[2]}` | {verdicts[-1]} |", flush=True)
    return int(any(found != "caught" for found in verdicts))


if __name__ == "__main__":
    sys.exit(main())
