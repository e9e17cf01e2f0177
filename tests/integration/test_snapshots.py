"""Snapshots and KV journals between nodes: a real writer, the relay beside it, a router's feed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from deployments import snapshots
from deployments.snapshots import SnapshotFeed, SnapshotRelay
from sfs_ext import (
    BatchTime,
    Fleet,
    KvEventKind,
    KvJournalMessage,
    KvMirror,
    SchedulerConfig,
    Snapshot,
    SnapshotReader,
    SnapshotWriter,
    batch_dtype,
    kv_event_dtype,
    query_dtype,
    resident_dtype,
)

CONFIG = SchedulerConfig(
    max_num_batched_tokens=2048, max_num_seqs=64, block_size=16, num_blocks=1000, max_model_len=2048
)


def requests_computed(first: int, last: int) -> NDArray[np.void]:
    """Request n, of n from first to last, fills the block least recently used with content n."""
    n = np.arange(first, last + 1, dtype=np.uint64)[:, None]
    kinds = "WANT", "KEY", "TAKE", "HASH", "RELEASE", "FORGET"
    events = np.zeros((len(n), len(kinds)), kv_event_dtype)
    events["value"] = n
    events["kind"] = [KvEventKind[kind] for kind in kinds]
    events["block"][:, 2:4] = 1 + (n - 1) % (CONFIG.num_blocks - 1)
    return events.reshape(-1)


class Replica:
    """What of an engine's replica the snapshots see."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._writer = SnapshotWriter(self.path, CONFIG, kv_journaled=True)
        self.relay = SnapshotRelay(self.path, "127.0.0.1")
        self.computed = 0

    def publish(self, *request_ids: int, status: int = 1) -> None:
        residents = np.zeros(len(request_ids), resident_dtype)
        residents["id"] = request_ids
        residents["prompt_tokens"] = 100
        residents["max_tokens"] = 50
        residents["status"] = status
        in_flight = np.zeros(0, batch_dtype)
        self._writer.publish(time.time(), 900, in_flight, residents)

    def compute(self, requests: int) -> None:
        """As many requests of one block each come, compute it and end; then a snapshot says so."""
        first = self.computed + 1
        self.computed += requests
        self._writer.append(requests_computed(first, self.computed))
        self.publish()

    def close(self) -> None:
        self.relay.stop()
        self._writer.close()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    replicas = [Replica(tmp_path / f"snapshot-{i}") for i in range(2)]
    yield replicas
    for replica in replicas:
        replica.close()


@pytest.fixture
def received() -> queue.Queue[tuple[str, list[int]]]:
    return queue.Queue()


@pytest.fixture
def feed(received: queue.Queue[tuple[str, list[int]]]) -> Iterator[SnapshotFeed]:
    def deliver(instance_id: str, data: bytes) -> None:
        received.put((instance_id, Snapshot.from_bytes(data).residents["id"].tolist()))

    feed = SnapshotFeed(deliver)
    yield feed
    feed.stop()


def test_a_new_subscriber_gets_what_is_current(
    replicas: list[Replica], feed: SnapshotFeed, received: queue.Queue[tuple[str, list[int]]]
) -> None:
    replicas[0].publish(1, 2)
    feed.subscribe("a", replicas[0].relay.endpoint)
    assert received.get(timeout=5) == ("a", [1, 2])


def test_each_replica_is_heard_though_all_are_conflated(
    replicas: list[Replica], feed: SnapshotFeed, received: queue.Queue[tuple[str, list[int]]]
) -> None:
    for name, replica in zip("ab", replicas, strict=True):
        replica.publish()
        feed.subscribe(name, replica.relay.endpoint)
    assert sorted(received.get(timeout=5) for _ in replicas) == [("a", []), ("b", [])]
    replicas[0].publish(1)
    assert received.get(timeout=5) == ("a", [1])
    replicas[1].publish(2)
    assert received.get(timeout=5) == ("b", [2])


def test_the_newest_arrives_last_of_a_burst(
    replicas: list[Replica], feed: SnapshotFeed, received: queue.Queue[tuple[str, list[int]]]
) -> None:
    replicas[0].publish()
    feed.subscribe("a", replicas[0].relay.endpoint)
    received.get(timeout=5)
    for request_id in range(1, 501):
        replicas[0].publish(request_id)
    seen = []
    while seen[-1:] != [("a", [500])]:
        seen.append(received.get(timeout=5))
    assert len(seen) < 500


def test_unsubscribing_ends_it(
    replicas: list[Replica], feed: SnapshotFeed, received: queue.Queue[tuple[str, list[int]]]
) -> None:
    for name, replica in zip("ab", replicas, strict=True):
        replica.publish()
        feed.subscribe(name, replica.relay.endpoint)
    for _ in replicas:
        received.get(timeout=5)
    feed.unsubscribe("a")
    replicas[0].publish(1)
    replicas[1].publish(2)
    assert received.get(timeout=5) == ("b", [2])
    assert received.empty()


def test_both_ways_give_the_same_forecast(replicas: list[Replica], tmp_path: Path) -> None:
    """Shared memory on the node, ZMQ from elsewhere: one fleet, one answer."""
    fleet = Fleet()
    batch_time = BatchTime(5e-3, 2e-6, 4e-8, 3e-10)
    here, there = fleet.add(CONFIG, batch_time), fleet.add(CONFIG, batch_time)
    replicas[0].publish(1, 2, 3)
    fleet.attach(here, replicas[0].path)
    updated: queue.Queue[bool] = queue.Queue()
    feed = SnapshotFeed(lambda _, data: updated.put(fleet.update(there, data)))
    try:
        feed.subscribe("there", replicas[0].relay.endpoint)
        assert updated.get(timeout=5)
    finally:
        feed.stop()
    now_s = time.time()
    queries = np.zeros(2, query_dtype)
    queries["instance"] = here, there
    queries["prompt_tokens"] = 500
    queries["predicted_output_tokens"] = 50
    queries["max_tokens"] = 100
    queries["arrival_s"] = now_s
    near, far = fleet.forecast(now_s, queries)
    assert near["ttft_s"] == far["ttft_s"] > 0
    assert near["waiting"] == far["waiting"] == 3


def test_a_snapshot_that_contradicts_itself_is_none_and_the_next_is_sent(
    replicas: list[Replica],
    feed: SnapshotFeed,
    received: queue.Queue[tuple[str, list[int]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = replicas[0]
    replica.publish(1)
    feed.subscribe("a", replica.relay.endpoint)
    assert received.get(timeout=5) == ("a", [1])
    replica.publish(2, status=7)
    assert replica.relay.newest() is None
    assert replica.relay.newest() is None
    assert len([r for r in caplog.records if "snapshot refused" in r.message]) == 1
    replica.publish(3)
    assert received.get(timeout=5) == ("a", [3])


class Journals:
    """What a feed delivers of journals, and the mirrors that follow them."""

    def __init__(self) -> None:
        self.mirrors: dict[str, KvMirror] = {}
        self.messages: queue.Queue[tuple[str, KvJournalMessage, bool]] = queue.Queue()
        self.checkpoints: list[str] = []
        """Who got them, in order."""

    def deliver(self, instance_id: str, data: bytes) -> bool:
        mirror = self.mirrors.setdefault(instance_id, KvMirror(CONFIG.num_blocks))
        follows = mirror.advance(data)
        message = KvJournalMessage.from_bytes(data)
        if message.from_position == 0:
            self.checkpoints.append(instance_id)
        self.messages.put((instance_id, message, follows))
        return follows

    def await_computed(self, instance_id: str, requests: int) -> None:
        """Until that mirror holds the content of so many requests, which then is checked."""
        while instance_id not in self.mirrors or self.mirrors[instance_id].position < 6 * requests:
            self.messages.get(timeout=5)
        mirror = self.mirrors[instance_id]
        assert mirror.position == 6 * requests
        assert mirror.requests == 0
        kept = min(requests, CONFIG.num_blocks - 1)
        assert mirror.cached_free_blocks == kept
        for n in (requests, requests - kept + 1):
            assert mirror.cached_tokens(np.array([n], np.uint64), 16) == 16
        assert mirror.cached_tokens(np.array([requests - kept], np.uint64), 16) == 0


@pytest.fixture
def journals() -> Journals:
    return Journals()


@pytest.fixture
def journal_feed(
    received: queue.Queue[tuple[str, list[int]]], journals: Journals
) -> Iterator[SnapshotFeed]:
    def deliver(instance_id: str, data: bytes) -> None:
        received.put((instance_id, Snapshot.from_bytes(data).residents["id"].tolist()))

    feed = SnapshotFeed(deliver, journals.deliver)
    yield feed
    feed.stop()


def test_a_journal_begins_with_a_checkpoint_and_goes_on_in_increments(
    replicas: list[Replica], journal_feed: SnapshotFeed, journals: Journals
) -> None:
    for name, replica in zip("ab", replicas, strict=True):
        replica.compute(10)
        journal_feed.subscribe(name, replica.relay.endpoint)
    first = [journals.messages.get(timeout=5) for _ in replicas]
    assert sorted((name, m.from_position, m.to_position) for name, m, _ in first) == [
        ("a", 0, 60),
        ("b", 0, 60),
    ]
    replicas[0].compute(3)
    name, increment, follows = journals.messages.get(timeout=5)
    assert (name, increment.from_position, increment.to_position, follows) == ("a", 60, 78, True)
    assert np.array_equal(increment.events, requests_computed(11, 13))
    for _ in range(300):
        replicas[0].compute(40)
    journals.await_computed("a", 12013)
    journals.await_computed("b", 10)


def test_each_increment_ends_where_a_snapshot_does(
    replicas: list[Replica], journals: Journals
) -> None:
    positions: queue.Queue[int] = queue.Queue()

    def deliver(_: str, data: bytes) -> None:
        positions.put(int(Snapshot.from_bytes(data).header["kv_position"]))

    feed = SnapshotFeed(deliver, journals.deliver)
    try:
        replicas[0].compute(1)
        feed.subscribe("a", replicas[0].relay.endpoint)
        journals.await_computed("a", 1)
        for _ in range(200):
            replicas[0].compute(7)
        ends = {6, 0}
        while max(ends) < 6 * 1401:
            ends.add(journals.messages.get(timeout=5)[1].to_position)
        seen = 0
        while seen < 6 * 1401:
            seen = positions.get(timeout=5)
            assert seen in ends
    finally:
        feed.stop()


def test_a_checkpoint_goes_to_who_asked_for_it(
    replicas: list[Replica], journal_feed: SnapshotFeed, journals: Journals
) -> None:
    replicas[0].compute(10)
    journal_feed.subscribe("first", replicas[0].relay.endpoint)
    journals.await_computed("first", 10)
    journal_feed.subscribe("second", replicas[0].relay.endpoint)
    journals.await_computed("second", 10)
    replicas[0].compute(1)
    for name in ("first", "second"):
        journals.await_computed(name, 11)
    assert journals.checkpoints == ["first", "second"]


def test_a_gap_is_closed_by_a_checkpoint(
    replicas: list[Replica],
    journal_feed: SnapshotFeed,
    journals: Journals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "ASK_INTERVAL_S", 0.0)
    replicas[0].compute(10)
    journal_feed.subscribe("a", replicas[0].relay.endpoint)
    journals.await_computed("a", 10)
    journals.mirrors["a"] = KvMirror(CONFIG.num_blocks)  # as if all before had been lost
    replicas[0].compute(1)
    _, increment, follows = journals.messages.get(timeout=5)
    assert (increment.from_position, follows) == (60, False)
    _, checkpoint, follows = journals.messages.get(timeout=5)
    assert (checkpoint.from_position, checkpoint.to_position, follows) == (0, 66, True)
    journals.await_computed("a", 11)
    replicas[0].compute(1)
    journals.await_computed("a", 12)


def test_a_lost_checkpoint_is_asked_for_again(
    replicas: list[Replica],
    journal_feed: SnapshotFeed,
    journals: Journals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = threading.Event()
    send = zmq.Socket.send_multipart

    def lose_first(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
        if lost.is_set():
            send(socket, frames)
        lost.set()

    monkeypatch.setattr(snapshots, "ASK_INTERVAL_S", 0.0)
    monkeypatch.setattr(zmq.Socket, "send_multipart", lose_first)
    replicas[0].compute(10)
    journal_feed.subscribe("a", replicas[0].relay.endpoint)
    assert lost.wait(timeout=5)
    replicas[0].compute(1)
    _, increment, follows = journals.messages.get(timeout=5)
    assert (increment.from_position, follows) == (60, False)
    _, checkpoint, follows = journals.messages.get(timeout=5)
    assert (checkpoint.from_position, checkpoint.to_position, follows) == (0, 66, True)
    journals.await_computed("a", 11)


def test_a_relay_overtaken_by_its_engine_begins_anew(
    replicas: list[Replica], journal_feed: SnapshotFeed, journals: Journals
) -> None:
    replicas[0].compute(10)
    journal_feed.subscribe("a", replicas[0].relay.endpoint)
    journals.await_computed("a", 10)
    replicas[0].compute(50000)  # some times as much as the ring holds
    name, message, follows = journals.messages.get(timeout=5)
    assert (name, message.from_position, follows) == ("a", 0, True)
    assert len(message.events) < 6 * 50000
    journals.await_computed("a", 50010)


def test_without_a_journal_snapshots_come_all_the_same(
    tmp_path: Path,
    journal_feed: SnapshotFeed,
    journals: Journals,
    received: queue.Queue[tuple[str, list[int]]],
) -> None:
    writer = SnapshotWriter(str(tmp_path / "plain"), CONFIG)
    relay = SnapshotRelay(str(tmp_path / "plain"), "127.0.0.1")
    try:
        assert not SnapshotReader(str(tmp_path / "plain")).kv_journaled
        for expected in range(2):
            writer.publish(time.time(), 900, np.zeros(0, batch_dtype), np.zeros(0, resident_dtype))
            if expected == 0:
                journal_feed.subscribe("a", relay.endpoint)
            assert received.get(timeout=5) == ("a", [])
        assert journals.messages.empty()
    finally:
        relay.stop()
        writer.close()
