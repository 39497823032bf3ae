#!/usr/bin/env bash
# Install each distribution (wheel, source) in an empty environment outside the repository, and run the demo with it.
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
    cd "$root"
    pip uninstall --yes personax
    echo "$file works in an empty environment."
done
