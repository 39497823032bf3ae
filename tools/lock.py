"""Write locks/*.txt: every dependency of the environments that `make` creates, with its version and hashes.

    python3 tools/lock.py [NAME ...]

The versions are those of the constraints files, which this script reads and does not change; `pip` resolves what is
needed, with its own configuration. A lock lists the hashes of the files for CPython 3.11 to 3.14 on Linux (x86-64,
aarch64), macOS and Windows (x86-64), so that `pip install --require-hashes` rejects any other file. It uses functions
of pip that are not public, because pip has no command that lists the hashes of a release.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from pip._internal.commands.install import InstallCommand
from pip._internal.index.collector import parse_links
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
BUILD = "setuptools"  # builds the project itself, without pip's isolation, which downloads unhashed files
LOCKS = {  # the extras to lock, the constraints, and the locks that are installed before
    "base": ("", "constraints.txt", ()),
    "test": ("test", "constraints.txt", ("base",)),
    "lint": ("lint", "constraints.txt", ("base",)),
    "dist": ("dist", "constraints.txt", ("base",)),
    "flower": ("test-flower", "constraints-flower.txt", ()),
    "cluster": ("test-cluster", "constraints-cluster.txt", ()),
    "docs": ("docs", "constraints-docs.txt", ()),
    "loggers": ("test-loggers", "constraints-loggers.txt", ()),
}
PYTHONS = {"py3", "py2.py3", *(f"cp3{minor}" for minor in range(11, 15))}
OTHER_PLATFORMS = re.compile(r"musllinux|win32|win_arm64|i686|armv7l|ppc64|s390x|riscv64|ios|android|wasm|pyodide")


def resolved(extra, constraints):
    """The versions that pip would install for the project with an extra."""
    wanted = f".[{extra}]" if extra else "."
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    given = (["--constraint", constraints] if (ROOT / constraints).exists() else []) + [wanted, BUILD]
    ended = subprocess.run([*command, *given], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    about = (one["metadata"] for one in json.loads(ended.stdout)["install"])
    return {canonicalize_name(one["name"]): one["version"] for one in about if one["name"] != "personax"}


class Index:
    """The hashes of all files of a package, from every place where pip looks."""

    def __init__(self, command):
        options, _ = command.parse_args([])
        self.collector = command._build_package_finder(options, command.get_default_session(options))._link_collector

    def hashes(self, name, version):
        """The hashes of the files of one version that an environment may install; of the source only without wheels."""
        files = self._files(name)
        wheels = {digest for file, digest in files.items() if file.endswith(".whl") and is_wanted(file, version)}
        sources = {digest for file, digest in files.items() if file.endswith(f"-{version}.tar.gz")}
        if not wheels | sources:
            raise LookupError(f"No file of {name} {version} found. Does the index of pip have it?")
        return sorted(wheels or sources)

    def _files(self, name):
        found = {}

        def candidates(link):
            page = self.collector.fetch_response(link)
            found.update({one.filename: one.hash for one in (parse_links(page) if page else ()) if one.hash})
            return []

        places = self.collector.collect_sources(name, candidates_from_page=candidates)
        for place in filter(None, (*places.find_links, *places.index_urls)):
            list(place.page_candidates())
        return found


def is_wanted(wheel, version):
    """True for the wheel of a version that one of our Pythons and platforms installs."""
    _, found, *_, pythons, abis, platforms = wheel.removesuffix(".whl").split("-")
    stable = abis == "abi3" and pythons.startswith("cp3")
    ours = stable or (set(pythons.split(".")) & PYTHONS and not abis.endswith("t"))
    return found == version and ours and not OTHER_PLATFORMS.search(platforms)


def main():
    """Write the locks that the command line names, or all of them."""
    command = InstallCommand("install", "")
    with command.main_context():
        write(Index(command), sys.argv[1:])


def write(index, chosen):
    """Write the chosen locks, or all of them."""
    versions = {}
    for name, (extra, constraints, before) in LOCKS.items():
        if chosen and name not in chosen and not any(name in LOCKS[other][2] for other in chosen):
            continue
        known = {one for other in before for one in versions[other]}
        versions[name] = resolved(extra, constraints)
        lines = [f"# Written by tools/lock.py from the versions in {constraints}: names, versions, hashes."]
        for package, version in sorted(versions[name].items()):
            if package not in known:
                hashes = [f"    --hash=sha256:{digest}" for digest in index.hashes(package, version)]
                lines.append(" \\\n".join([f"{package}=={version}", *hashes]))
        (ROOT / "locks" / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"locks/{name}.txt: {len(versions[name])} packages")


if __name__ == "__main__":
    main()
