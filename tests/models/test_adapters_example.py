"""The example with adapters over a pretrained transformer, reduced."""

import runpy
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "adapters.py"


@pytest.mark.slow
def test_the_example_compares_all_contestants_under_one_protocol(capsys):
    example = runpy.run_path(str(EXAMPLE))
    comparison = example["compare"](example["SMALL"])
    scored = {row.score: row.mean.mean for row in comparison.rows()}
    assert list(scored) == ["Local", "Shared", "Personal (FedSA-LoRA)", "Mixed (FedDPA)"]
    assert capsys.readouterr().out.count("step size") == len(scored)
    guess = 1 / example["NUM_WORDS"]
    assert all(accuracy > 2 * guess for accuracy in scored.values())


def test_authors_share_a_grammar_and_differ_in_style():
    example = runpy.run_path(str(EXAMPLE))
    rng = np.random.default_rng(0)
    common = example["grammar"](rng)
    one, other = example["style"](common, rng), example["style"](common, rng)
    for table in (common, one, other):
        np.testing.assert_allclose(table.sum(axis=1), 1)
    distance = lambda a, b: np.abs(a - b).sum(axis=1).mean() / 2
    assert distance(one, other) > 0.2
    words, following = example["sentences"](one, 400, rng)
    np.testing.assert_array_equal(words[:, 1:], following[:, :-1])
    assert (one[words, following] > 0).all()
    counts = np.zeros_like(one)
    np.add.at(counts, (words, following), 1)
    frequent = counts.sum(axis=1) > 100
    found = (counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))[frequent]
    assert distance(found, one[frequent]) < 0.15 < distance(found, other[frequent])
