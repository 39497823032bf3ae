"""Every command ends through one error wrapper."""

import ast
import inspect

import pytest

from tests.cli.test_runs import COMMANDS
from tests.sources import trees

ENDINGS = {"BadParameter", "ClickException", "Exit", "SystemExit", "UsageError", "exit"}


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if not hasattr(COMMANDS[words], "commands")], ids=" ".join
)
def test_a_command_is_wrapped(words):
    (function,) = ast.parse(inspect.getsource(inspect.unwrap(COMMANDS[words].callback))).body
    last = function.body[-1]
    assert isinstance(last, ast.With) and ast.unparse(last.items[0].context_expr).startswith("plain_errors(")


def test_no_other_module_ends_the_process():
    found = {
        str(path)
        for path, tree in trees()
        for node in ast.walk(tree)
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ENDINGS
            and ast.unparse(node.value) in ("typer", "click", "sys")
        )
        or (isinstance(node, ast.Name) and node.id == "SystemExit")
    }
    assert found == {"cli/__init__.py", "cli/errors.py"}  # the first one after `--version`
