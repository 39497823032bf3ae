"""Check that the tests detect deliberate faults: a table of changes to the package, and the test that each must fail.

    python benchmarks/faults.py [--only TEXT ...]

Run it in an environment in which `make test` runs, from any directory. For each fault it copies the package and its
tests to a temporary folder, replaces the old text, which must be in the file exactly once, and runs the test there.
Before that, all these tests must pass without a fault. A fault is *caught* if its test fails and *survived* if it
passes; if the test could not be run, pytest's exit status is shown. The exit status is 1 unless all are caught.
`--only` runs the faults whose description contains one of the texts. On one idle core it takes about 3 minutes.

To check a new test, add a row with the fault that it should detect.
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
ADMISSION, GATE, SERVER = (f"tests/live/test_{name}.py::" for name in ("admission", "gate", "hostile_server"))
THEOREMS = "tests/theory/test_theorems.py::"
SETTINGS = "tests/reproduce/test_settings.py::"
FAULTS = [
    Fault(
        "live: the largest norm of the others for their median",
        "personax/live/admission.py",
        "else median(known)",
        "else max(known)",
        "tests/live/test_book.py::test_the_bound_on_norms_is_a_multiple_of_the_median_of_the_others",
    ),
    Fault(
        "live: no bound on an extra",
        "personax/live/admission.py",
        'found = {"": norm, **extras}\n    loud',
        'found = {"": norm}\n    loud',
        f"{ADMISSION}test_an_extra_far_beyond_the_model_is_refused_from_the_first_upload_on",
    ),
    Fault(
        "live: no bound by the model's own scale",
        "personax/live/admission.py",
        "if not terms.model_factor:",
        "if terms.model_factor:",
        f"{ADMISSION}test_the_first_upload_cannot_destroy_the_model",
    ),
    Fault(
        "live: no budget for loud uploads",
        "personax/live/admission.py",
        "terms.loud_budget - seat.excess + QUIET",
        "terms.loud_budget + QUIET",
        f"{ADMISSION}test_uploads_just_below_the_bound_spend_a_budget",
    ),
    Fault(
        "live: no cap on the number of samples",
        "personax/live/admission.py",
        "return min(claimed, largest_weight({**counts, name: claimed}.values(), terms.max_share))",
        "return claimed",
        f"{ADMISSION}test_a_lie_about_the_number_of_samples_does_not_control_a_round",
    ),
    Fault(
        "live: no operator's numbers of samples",
        "personax/live/admission.py",
        "if name in terms.samples:",
        "if not terms.max_share:",
        f"{ADMISSION}test_the_operator_declares_the_numbers_of_samples",
    ),
    Fault(
        "live: no daily limit on reports",
        "personax/live/gate.py",
        "return self.written[name][1] < self.terms.bytes_per_day",
        "return True",
        f"{GATE}test_reports_fill_no_disk",
    ),
    Fault(
        "live: messages of any size of update count",
        "personax/live/uploads.py",
        "if first.update >= min(seat.next_update + _MOST_SKIPPED, _MOST_UPDATES):",
        "if first.update < 0:",
        f"{GATE}test_a_huge_count_of_updates_does_not_lock_a_client_out",
    ),
    Fault(
        "live: malformed messages before the rate limit",
        "personax/live/serving.py",
        'who = gate.admit(context, ROLES.get(method.name, ("client",)))\n            given',
        "who = gate.identify(context)\n            given",
        f"{GATE}test_malformed_messages_do_not_bypass_the_rate_limit",
    ),
    Fault(
        "live: control characters in the log",
        "personax/live/log.py",
        "logger.addFilter(_on_one_line)",
        "",
        f"{GATE}test_control_characters_never_reach_the_log_or_a_terminal",
    ),
    Fault(
        "live: any number of connections for a certificate",
        "personax/live/connections.py",
        "list(peers)[self.most_each :]",
        "[]",
        f"{GATE}test_one_certificate_cannot_take_all_connections",
    ),
    Fault(
        "live: a model for a client that was revoked while it waited",
        "personax/live/service.py",
        "            self.gate.require_valid(who)  # the certificate may have been revoked meanwhile\n",
        "",
        f"{GATE}test_a_revoked_client_with_an_open_request_gets_no_model",
    ),
    Fault(
        "live: deadlines by the wall clock",
        "personax/live/book.py",
        "return self.resumed_at + self.clock() - self.started",
        "return self.wall() - self.ledger.began",
        f"{GATE}test_deadlines_follow_a_monotonic_clock",
    ),
    Fault(
        "live: links are followed",
        "personax/live/files.py",
        'getattr(os, "O_NOFOLLOW", 0)',
        "0",
        f"{GATE}test_links_are_not_followed",
    ),
    Fault(
        "live: checkpoints that others can read",
        "personax/live/book.py",
        "checkpoint.save(self.checkpoints, number, state, about, private=True)",
        "checkpoint.save(self.checkpoints, number, state, about)",
        f"{GATE}test_states_are_for_their_owner_alone",
    ),
    Fault(
        "live: the work of scores does not count",
        "personax/live/acceptance.py",
        "return 2 * total + visit",
        "return visit",
        f"{SERVER}test_the_total_work_is_bounded",
    ),
    Fault(
        "live: batches of one sample",
        "personax/live/acceptance.py",
        "if min(sizes) < limits.min_batch:",
        "if min(sizes) < 0:",
        f"{SERVER}test_a_recipe_with_one_sample_or_one_step_is_refused_with_the_reason",
    ),
    Fault(
        "live: visits of one step",
        "personax/live/acceptance.py",
        "if num_steps < limits.min_steps:",
        "if num_steps < 0:",
        f"{SERVER}test_a_recipe_with_one_sample_or_one_step_is_refused_with_the_reason",
    ),
    Fault(
        "live: unexpected errors of a recipe",
        "personax/live/acceptance.py",
        "except Exception as error:  # the text is untrusted",
        "except (KeyError, ValueError) as error:  # the text is untrusted",
        f"{SERVER}test_recipes_and_layouts_of_other_types_are_refused_with_a_message",
    ),
    Fault(
        "live: compilation without an end",
        "personax/live/limits.py",
        "thread.join(seconds)",
        "thread.join()",
        f"{SERVER}test_compilation_ends_in_time",
    ),
    Fault(
        "live: a version names a model without its rollbacks",
        "personax/live/service.py",
        "has_it = (ask.have, ask.rollbacks) == (self.book.version, self.book.ledger.rollbacks)",
        "has_it = ask.have == self.book.version",
        "tests/live/test_operations.py::test_clients_take_the_model_of_a_rollback_whatever_its_version",
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
        "288 * level * (num_local_steps + 7)",
        "288 * level * (num_local_steps + 6)",
        f"{THEOREMS}test_from_how_many_updates_theorems_1_to_3_hold",
    ),
    Fault(
        "Meta in shared products: the adaptation batch for the curvature batch",
        "personax/objectives/meta.py",
        '(here.batches("curvature"),)',
        '(here.batches("adapt"),)',
        f"{NETWORK}[exact, one step]",
    ),
    Fault(
        "Meta in shared products: every Hessian at the last model of the path",
        "personax/objectives/meta.py",
        "here.hvp(self.hvp, w, moved(d), batch)",
        "here.hvp(self.hvp, adapted, moved(d), batch)",
        f"{NETWORK}[Hessian-free, two steps]",
    ),
    Fault(
        "Meta in shared products: the outer gradient before the last adaptation step",
        "personax/objectives/meta.py",
        "here.gradient(adapted, outer)",
        "here.gradient(here.start(), outer)",
        f"{NETWORK}[first-order, two steps]",
    ),
    Fault(
        "reproduce Fallah: the HF column runs first-order",
        "personax/reproduce/fallah.py",
        "HF: meta(finite_difference(1e-3)),",
        "HF: meta(first_order),",
        f"{SETTINGS}test_trainings_are_those_of_the_paper[fallah-table1]",
    ),
    Fault(
        "reproduce Fallah: evaluation with a different step",
        "personax/reproduce/fallah.py",
        "contestants, readings = contestants_of(num_steps, adapt_lr), readings_of(adapt_lr)",
        "contestants, readings = contestants_of(num_steps, adapt_lr), readings_of(2 * adapt_lr)",
        f"{SETTINGS}test_models_are_scored_as_in_the_paper[fallah-table1]",
    ),
    Fault(
        "reproduce Fallah: a = 64 for 68",
        "personax/reproduce/fallah.py",
        '"cifar10": _divided(datasets.cifar10, 68),',
        '"cifar10": _divided(datasets.cifar10, 64),',
        f"{SETTINGS}test_splits_are_those_of_the_paper[fallah-table1-cifar10]",
    ),
    Fault(
        "reproduce gMeta: one adaptation step for three",
        "personax/reproduce/gmeta.py",
        "GMETA: meta(difference, NUM_ADAPT_STEPS),",
        "GMETA: meta(difference, 1),",
        f"{SETTINGS}test_trainings_are_those_of_the_paper[gmeta-figure1]",
    ),
    Fault(
        "reproduce Fallah: a mistyped number of the paper",
        "personax/reproduce/fallah.py",
        "(75.96, 0.02)",
        "(79.56, 0.02)",
        f"{SETTINGS}test_the_papers_numbers_are_quoted_as_printed[fallah-table1]",
    ),
    Fault(
        "reproduce PersA-FL: SCAFFOLD with Option II for I",
        "personax/reproduce/persafl.py",
        "option=1, **local)",
        "option=2, **local)",
        f"{SETTINGS}test_trainings_are_those_of_the_paper[persafl-figure2]",
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
