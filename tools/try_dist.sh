#!/usr/bin/env bash
# Install each distribution (wheel, source) in an empty environment outside the repository, and run the demo with it. With
# the wheel, also run the tasks of the documentation that need no extra, as a new user types them.
# Usage: tools/try_dist.sh FILE...
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
unset PYTHONPATH
pip() { "$place/env/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
"${PYTHON:-python3}" -m venv "$place/env"
pip install --require-hashes --no-deps --requirement "$root/locks/base.txt"
for file in "$@"; do
    pip install --no-deps --no-index --no-build-isolation "$(realpath "$file")"
    pip check  # the lock has every dependency
    cd "$place"
    env/bin/python -c "import personax; assert personax.__file__.startswith('$place'), personax.__file__"
    env/bin/personax compare --out "runs/${file##*.}"
    test -s "runs/${file##*.}/report.html"
    if [[ $file == *.whl ]]; then
        for task in csv algorithm number; do
            mkdir "$place/$task" && cd "$place/$task"
            "$place/env/bin/python" "$root/docs/extensions/tasks.py" "$task" > task.sh
            PATH="$place/env/bin:$PATH" bash task.sh > task.log 2>&1 || { cat task.log; exit 1; }
            echo "The task $task works."
        done
    fi
    cd "$root"
    pip uninstall --yes personax
    echo "$file works in an empty environment."
done
