"""Extract the task sections of pages into scripts: what a new user would type, from `<!-- task: NAME -->` on.

A block whose first line is a comment with a file name is saved under that name. Blocks of Bash, and blocks of Python
without a name, are run in order. `python docs/extensions/tasks.py NAME` prints a script.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
TASK = re.compile(r"<!-- task: ([\w-]+) -->\n(.*?)<!-- end of task -->", re.DOTALL)
BLOCK = re.compile(r"^```(bash|python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# ([\w-]+\.(?:py|toml))\n")


def tasks() -> dict[str, str]:
    """Each task of the site as a Bash script, by name."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        for name, text in TASK.findall(page.read_text(encoding="utf-8")):
            found[name] = script(text)
    return found


def script(text: str) -> str:
    """The blocks of a section as one script."""
    lines = ["set -euo pipefail"]
    for language, code in BLOCK.findall(text):
        named = NAMED.match(code)
        if named:
            lines.append(f"cat > {named[1]} <<'END_OF_FILE'\n{code}END_OF_FILE")
        elif language == "python":
            lines.append(f"python - <<'END_OF_FILE'\n{code}END_OF_FILE")
        else:
            lines.append(code.rstrip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(tasks()[sys.argv[1]])
