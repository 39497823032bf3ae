"""A day of a federation in minutes: 200,000 uploads, with the clock of the book running ahead."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from personax.experiment.config import Terms
from personax.live import journal
from personax.live.journal import read_lines
from personax.live.saved import versions
from tests.live.parts import NAMES, recipe, serving

pytestmark = [pytest.mark.xdist_group("live"), pytest.mark.slow, pytest.mark.attack]
NUM_UPLOADS, DAY = 200_000, 86_400.0


def memory():
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def disk(folder):
    """Bytes of a run folder, apart from the journal and the audit log, which grow."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() and path.suffix not in (".jsonl", ".gz") else 0
        except FileNotFoundError:
            continue  # a checkpoint that has just been replaced
    return found


def test_a_day_of_uploads_takes_no_more_memory_and_disk_at_its_end_than_after_an_hour(tmp_path, note, monkeypatch):
    monkeypatch.setattr(journal, "ARCHIVED_BYTES", 4 << 20)
    given, uploads = recipe(num_rounds=10**8, server={"kind": "asynchronous", "lr": 1e-6}), [0]
    clock = lambda: uploads[0] * DAY / NUM_UPLOADS
    terms = Terms(num_clients=3, rate=1e6, checkpoint=1.0, num_saved=4)
    lock, seen, errors = threading.Lock(), [], []
    with serving(tmp_path, given, terms, clock=clock) as running:
        rng = np.random.default_rng(0)
        shape = [leaf.shape for leaf in given.up.vector_shapes]

        def upload_until_the_end(name):
            try:
                connection = running.connect(name)
                connection.register(given.digest)
                newest, update = connection.fetch(), 0
                while uploads[0] < NUM_UPLOADS:
                    vectors = [0.01 * rng.standard_normal(one).astype(np.float32) for one in shape]
                    vectors = [v.astype(k.dtype) for v, k in zip(vectors, given.up.vector_shapes, strict=True)]
                    newest = connection.send(f"{name}-{update}", update, newest.version, given.up.buffers_of(vectors))
                    assert newest.outcome == "applied", newest.words
                    update += 1
                    with lock:
                        uploads[0] += 1
                        if uploads[0] % (NUM_UPLOADS // 24) == 0:
                            seen.append((memory(), disk(tmp_path), (tmp_path / "journal.jsonl").stat().st_size))
                connection.close()
            except Exception as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=upload_until_the_end, args=(name,)) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and running.book.ledger.num_events >= NUM_UPLOADS
        assert 1 < len(versions(tmp_path / "saved")) <= 4
    memories, disks, journals = (np.array(column) for column in zip(*seen, strict=True))
    mebibytes = [int(memories[i]) >> 20 for i in (1, -1)]
    note(f"{NUM_UPLOADS:,} uploads: memory {mebibytes[0]} MiB after 2 of 24 hours, {mebibytes[1]} MiB at the end;")
    note(f"states and checkpoints {disks[6] >> 10} KiB after 7 hours, {disks[-1] >> 10} KiB at the end;")
    archived = sum(path.stat().st_size for path in (tmp_path / "archive").iterdir())
    lines = read_lines(tmp_path)
    note(f"the journal grows by {archived / lines[-1]['number']:.0f} bytes per upload, compressed, beside the newest")
    note(f"{journals.max() >> 20} MiB or less.")
    assert memories[-1] < memories[1] + (16 << 20)
    assert disks[-1] < 1.5 * disks[6]
    assert sum(line["what"] == "upload" for line in lines) >= NUM_UPLOADS
    assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
