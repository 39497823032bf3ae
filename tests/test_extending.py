"""User code is treated like the package's own code: the module of docs/extending.md, end to end."""

import importlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import personax as px
from personax.cli import app
from personax.experiment.config import Terms, imports_of, load
from personax.experiment.folders import Folder
from personax.experiment.records import read_results
from personax.live import server
from personax.live.client import take_part
from personax.live.limits import Limits, Refused
from tests import closed_forms
from tests.live.parts import serving

pytestmark = pytest.mark.xdist_group("extending")
PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
PATHS = {f"my_extension:{name}" for name in ("blobs", "halves", "small", "ditto", "Ditto", "Cutoff")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the page's module and configuration, in which the tests take place."""
    root = tmp_path_factory.mktemp("outside")
    (root / "my_extension.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    (root / "mine.toml").write_text(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(root)
        yield root
    sys.modules.pop("my_extension", None)


def personax(*words):
    ended = CliRunner().invoke(app, [str(word) for word in words])
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.fixture(scope="module")
def compared(place):
    return personax("compare", "mine.toml", "--out", "run")


def models_of(folder):
    return {path.name: load_file(path) for path in Folder(folder).models.iterdir()}


def test_ditto_takes_the_steps_of_its_equation(place):
    """On quadratics, with full batches: v follows its equation, and w is FedAvg's."""
    ditto = importlib.import_module("my_extension").ditto
    (fed, problems), lr, strength, key = closed_forms.federation(), 0.1, 0.5, jax.random.key(0)
    local = {"lr": lr, "num_epochs": 1, "batch_size": 9, "sampling": "shuffled"}
    run = lambda algorithm, num: px.simulate(
        algorithm, closed_forms.TASK, fed, px.rounds(4, num, key=key), key=key, params={"w": np.ones(3)}
    )
    ours, fedavg = run(ditto(strength=strength, **local), 2), [run(px.fedavg(**local), num) for num in (1, 2)]
    np.testing.assert_allclose(ours.params["w"], fedavg[1].params["w"], rtol=1e-12)
    for i, problem in enumerate(problems):
        v = np.ones(3)
        for w in (np.ones(3), np.asarray(fedavg[0].params["w"])):
            v = v - lr * (problem.gradient(v) + strength * (v - w))
        np.testing.assert_allclose(ours.personal["w"][i], v, rtol=1e-10)


def test_compare_prints_what_it_imports_and_scores_the_personal_model(compared):
    said = " ".join(compared.output.split())
    assert "This configuration imports and runs my_extension:" in said and all(path in said for path in PATHS)
    record = read_results(Path("run"))
    by_name = {algorithm.name: algorithm for algorithm in record.algorithms}
    for name in ("Ditto", "Ditto, asynchronous"):
        assert by_name[name].scores[0].scoring["model"] == "personal"
        assert by_name[name].definition["objective"] == {
            "kind": "import",
            "path": "my_extension:Ditto",
            "strength": 0.5,
        }
        assert by_name[name].scores[0].newcomers is not None
    assert by_name["Ditto"].recipe == "my_extension:ditto"


def test_reports_citations_and_lists_do_not_import(compared, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_extension")
    assert "report.html" in personax("report", "run").output
    cited = personax("cite", "run").output
    assert cited.count("@inproceedings{li2021,") == 1 and "toghani2023" in cited
    personax("list")
    assert "my_extension" not in sys.modules


def test_a_killed_run_is_resumed_to_the_same_bits(compared):
    words = [
        sys.executable,
        "-c",
        "import conftest; from personax.cli import app; app()",
        "compare",
        "mine.toml",
        "--out",
        "killed",
    ]
    root = str(Path(__file__).parents[1])
    environment = {"PYTHONPATH": root, "PATH": "", "HOME": str(Path.cwd()), "JAX_ENABLE_X64": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    parts, until = Path("killed/parts"), time.monotonic() + 120
    while not (parts.exists() and list(parts.glob("*.json"))):
        assert process.poll() is None and time.monotonic() < until, process.stdout.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not Path("killed/results.json").exists()
    assert "This configuration imports" in personax("resume", "killed").output
    whole, resumed = models_of(Path("run")), models_of(Path("killed"))
    assert whole.keys() == resumed.keys()
    for name, arrays in whole.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(resumed[name][key], array)


def test_a_newcomer_gets_a_personal_model(compared):
    rng = np.random.default_rng(1)
    np.savez("new.npz", x=rng.normal(size=(20, 2)).astype(np.float32), y=np.arange(20) % 3)
    told = personax("personalize", "run", "--data", "new.npz", "--algorithm", "Ditto", "--out", "new.safetensors")
    assert "Ditto: the objective's personal model" in told.output
    own, shared = load_file("new.safetensors"), load_file(Folder(Path("run")).model("Ditto"))
    assert own and any(np.any(array != shared[f"params.{name}"]) for name, array in own.items())


def test_a_live_client_runs_imports_only_if_its_owner_allows_them(place, tmp_path):
    config = load(Path("mine.toml"), ["schedule.num_rounds=1", "schedule.cohort_size=2"])
    recipe = server.choose(config, "Ditto, asynchronous")
    fed = server.make_federation(config)
    data = px.Federation.from_clients([fed.client(0)], [fed.client_test(0)])
    with serving(tmp_path / "server", recipe, Terms(num_clients=1, outlier_factor=0.0, rate=1e5)) as running:
        with pytest.raises(Refused, match=r"The server's recipe imports my_extension:.*allow_imports"):
            take_part(running.connect("bert"), data, tmp_path / "bert")
        allowed = Limits(allow_imports=True)
        take_part(running.connect("anna"), data, tmp_path / "anna", limits=allowed)
        assert running.book.ledger.num_events == 2


def test_an_objective_that_leaves_answers_out_is_rejected_by_name():
    class Short:
        federated = True

    with pytest.raises(ValueError, match=r"The objective Short lacks .*`default_scoring`.* Implement each"):
        px.Algorithm(Short(), px.Local(0.1, num_steps=1), px.synchronous())


def test_everything_a_configuration_imports_is_found(place):
    assert set(imports_of(load(place / "mine.toml"))) == PATHS
