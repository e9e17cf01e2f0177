"""A writer process at full speed beside its reader: whole snapshots only, even after its death."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sfs_ext import KvMirror, SnapshotReader

NUM_BLOCKS = 1000
EVENTS_PER_REQUEST = 6

# Every field of snapshot n says n, so that a mixture of two shows; so do the six events before it,
# by which request n computes content n in the block least recently used.
WRITER = """
import sys
import numpy as np
from sfs_ext import (
    KvEventKind, SchedulerConfig, SnapshotWriter, batch_dtype, kv_event_dtype, resident_dtype,
)

config = SchedulerConfig(
    max_num_batched_tokens=2048, max_num_seqs=256, block_size=16, num_blocks=1000,
    max_model_len=1 << 20,
)
writer = SnapshotWriter(sys.argv[1], config, max_residents=256, kv_journaled=True)
events = np.zeros(6, kv_event_dtype)
events["kind"] = [KvEventKind[k] for k in "WANT KEY TAKE HASH RELEASE FORGET".split()]
in_flight = np.zeros(0, batch_dtype)
residents = np.zeros(256, resident_dtype)
residents["prompt_tokens"] = residents["max_tokens"] = 1
print("ready", flush=True)
n = 0
while True:
    n += 1
    some = residents[: 1 + n % 200]
    some["id"] = n
    some["arrival_s"] = n
    events["value"] = n
    events["block"][2:4] = 1 + (n - 1) % 999
    writer.append(events)
    writer.publish(float(n), n % 1000, in_flight, some)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "snapshot")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def read_whole(reader: SnapshotReader, mirror: KvMirror | None = None) -> int:
    """The number of the snapshot read, each of whose parts has to agree on it.

    0 if it could not be read, or could not be followed by the mirror."""
    snapshot = reader.read()
    if snapshot is None:
        return 0
    n = int(snapshot.header["sequence"])
    assert snapshot.header["kv_position"] == EVENTS_PER_REQUEST * n
    if mirror is not None:
        if not reader.read_journal(mirror, EVENTS_PER_REQUEST * n):
            return 0
        assert mirror.position == EVENTS_PER_REQUEST * n
        newest = np.arange(n, max(n - NUM_BLOCKS + 1, 0), -1, dtype=np.uint64)
        assert mirror.cached_free_blocks == len(newest)
        assert mirror.cached_tokens(newest, 16) == 16 * len(newest)
    assert snapshot.header["published_s"] == n
    assert snapshot.header["free_blocks"] == n % 1000
    assert len(snapshot.residents) == 1 + n % 200
    assert np.all(snapshot.residents["id"] == n)
    assert np.all(snapshot.residents["arrival_s"] == n)
    return n


def test_no_snapshot_is_torn(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    reader = SnapshotReader(str(tmp_path / "snapshot"))
    assert reader.writer_pid == writer.pid
    numbers = []
    deadline_s = time.monotonic() + 3
    while time.monotonic() < deadline_s:
        numbers.append(read_whole(reader))
    seen = [n for n in numbers if n]
    assert seen == sorted(seen)
    assert len(set(seen)) > 100


def test_no_journal_is_torn(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    reader = SnapshotReader(str(tmp_path / "snapshot"))
    follower = KvMirror(NUM_BLOCKS)
    followed = joined = 0
    while reader.kv_position < 200_000:  # six times what the ring holds
        followed += read_whole(reader, follower) > 0
        joined += read_whole(reader, KvMirror(NUM_BLOCKS)) > 0
    assert followed > 100
    assert joined > 100


def test_what_a_killed_writer_left_is_whole(writer: subprocess.Popen[str], tmp_path: Path) -> None:
    reader = SnapshotReader(str(tmp_path / "snapshot"))
    while reader.sequence < 1000:
        read_whole(reader)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    # It may have died within a slot: not the newest complete one, which is announced after it.
    assert read_whole(reader) == reader.sequence
    assert read_whole(reader, KvMirror(NUM_BLOCKS)) == reader.sequence
