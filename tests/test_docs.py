"""What the README shows runs, from top to bottom."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_code_of_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert len(blocks) >= 4 and "Meta(adapt_lr=0.01" in capsys.readouterr().out
    assert names["scores"].metrics["accuracy"].shape == (5, 20)
    assert names["result"].history == sorted(names["result"].history)
