"""Snapshots between nodes: a real writer, the relay beside it, the feed that routers have."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deployments.snapshots import SnapshotFeed, SnapshotRelay
from sfs_ext import (
    BatchTime,
    Fleet,
    SchedulerConfig,
    Snapshot,
    SnapshotWriter,
    batch_dtype,
    query_dtype,
    resident_dtype,
)

CONFIG = SchedulerConfig(
    max_num_batched_tokens=2048, max_num_seqs=64, block_size=16, num_blocks=1000, max_model_len=2048
)


class Replica:
    """What of an engine's replica the snapshots see."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._writer = SnapshotWriter(self.path, CONFIG)
        self.relay = SnapshotRelay(self.path, "127.0.0.1")

    def publish(self, *request_ids: int, status: int = 1) -> None:
        residents = np.zeros(len(request_ids), resident_dtype)
        residents["id"] = request_ids
        residents["prompt_tokens"] = 100
        residents["max_tokens"] = 50
        residents["status"] = status
        in_flight = np.zeros(0, batch_dtype)
        self._writer.publish(time.time(), 900, in_flight, residents)

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
