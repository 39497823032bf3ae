"""The examples of the README and the docs run, from top to bottom."""

import re
from pathlib import Path

import pytest

import personax as px

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "docs" / "notebooks"


SHORTER = {  # runs that need not be long to show that the code works
    "README": {"num_rounds=50": "num_rounds=5", "num_events=400": "num_events=120"},
    "first-python": {"num_rounds=60": "num_rounds=6"},
}


def run_blocks(path):
    """Run a page's Python blocks in order, and return their variables.

    A block whose first line is a comment with a file name is saved under that name in the current folder.
    """
    text = path.read_text()
    for number, smaller in SHORTER.get(path.stem, {}).items():
        assert number in text
        text = text.replace(number, smaller)
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names = {}
    for block in blocks:
        if named := re.match(r"# (\w+\.py)\n", block):
            Path(named[1]).write_text(block)
        else:
            exec(compile(block, str(path), "exec"), names)
    assert blocks
    return names


def test_the_code_of_the_readme_runs(capsys):
    names = run_blocks(ROOT / "README.md")
    assert "Meta(adapt_lr=0.01" in capsys.readouterr().out
    assert names["scores"].metrics["accuracy"].shape == (5, 20)
    assert names["result"].history == sorted(names["result"].history)


PAGES = {  # each page whose code runs, and a part of what it prints
    "data": "3 clients, 1",
    "evaluation": "over local",
    "theory": "label distance",
    "scale": "personal",
    "devices": "stopped",
    "logging": "FedAvg FedAvg 2 [",
    "sharing": "dense_0.kernel",
    "asynchrony": "in virtual time",
    "newcomers": "20:",
    "first-python": "over local",
    "adapters": "lora.dense_0.kernel.a",
    "networks": "Mine",
    "reference/api/types": "1.0",
    "reference/api/values": "fedavg",
}


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_blocks(ROOT / "docs" / f"{page}.md")
    assert PAGES[page] in capsys.readouterr().out


def test_the_algorithm_of_a_page_is_fedavg_with_power_zero(tmp_path, monkeypatch):
    module, check = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "own-algorithm.md").read_text(), flags=re.DOTALL
    )
    (tmp_path / "fair.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    exec(compile(check, "own-algorithm.md", "exec"), {})  # compares the two


def test_the_algorithm_of_a_notebook_is_complete():
    text = (NOTEBOOKS / "own-algorithm.md").read_text()
    cell = re.findall(r"```\{code-cell\} ipython3\n(.*?)```", text, flags=re.DOTALL)[0]
    names = {}
    exec(compile(cell.replace("import matplotlib.pyplot as plt\n", ""), "own-algorithm.md", "exec"), names)
    px.Algorithm(names["Trusting"](1.0), px.Local(0.1, num_steps=1), px.synchronous())  # checks the contract
