"""The mirror that follows vLLM's KV journal, against vLLM's own blocks, after every step."""

from __future__ import annotations

import functools
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import Batch, EngineLoop, make_scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from workloads import random_config, random_requests, random_workload

from deployments.kv_journal import KvJournal
from sfs_ext import KvEventKind, KvMirror, block_keys

SEEDS = [seed for seed in range(200, 300) if random_config(Random(seed))["enable_prefix_caching"]]


@functools.cache
def largest_workload() -> dict[str, Any]:
    def requests(seed: int) -> int:
        random = Random(seed)
        return len(random_requests(random, random_config(random)))

    return random_workload(max(SEEDS, key=requests))


class Witness:
    """Follows one workload's journal and compares where it leads with vLLM's pool."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.scheduler: Scheduler = make_scheduler(workload["config"])
        cache = self.scheduler.kv_cache_manager
        self.pool = cache.block_pool
        self.manager = cache.coordinator.single_type_managers[0]
        self.journal = KvJournal(self.manager, self.pool, lambda request: int(request.request_id))
        self.mirror = KvMirror(workload["config"]["num_blocks"])
        self.loop = EngineLoop(workload, self.scheduler, self.compare)
        self.seen = Counter[str]()
        add_request = self.scheduler.add_request

        def arrive(request: Request) -> None:
            add_request(request)
            self.journal.arrived(request)

        self.scheduler.add_request = arrive  # type: ignore[method-assign]

    def compare(self, newest: Batch) -> None:
        self.journal.ended(newest.output.finished_req_ids)
        for request_id, blocks in self.manager.req_to_blocks.items():
            if blocks:
                self.journal.observer.holds(request_id, blocks)
        events = self.journal.observer.take_events()
        self.seen.update(KvEventKind(kind).name for kind in events["kind"])
        self.mirror.apply(events)
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert self.mirror.free_blocks == len(free)
        cached_free = [block.block_id for block in free if block.block_hash is not None]
        cached, tables = contents(self.mirror)
        assert [block for block in cached if block in set(cached_free)] == cached_free
        assert set(cached) == {b.block_id for b in self.pool.blocks if b.block_hash is not None}
        assert {owner: blocks for owner, blocks in tables.items() if blocks} == {
            int(name): [block.block_id for block in blocks]
            for name, blocks in self.manager.req_to_blocks.items()
            if blocks
        }


def contents(mirror: KvMirror) -> tuple[list[int], dict[int, list[int]]]:
    """Blocks with known content, free ones in the order of eviction; blocks by request."""
    cached: dict[int, None] = {}
    tables: dict[int, list[int]] = {}
    owner = 0
    for event in mirror.compact():
        block = int(event["block"])
        match KvEventKind(event["kind"]):
            case KvEventKind.CACHED:
                cached.pop(block, None)  # the last mention counts
                cached[block] = None
            case KvEventKind.WANT:
                owner = int(event["value"])
                tables.setdefault(owner, [])
            case KvEventKind.TAKE | KvEventKind.TOUCH:
                tables[owner].append(block)
    return list(cached), tables


def test_the_mirror_is_vllms_cache_at_every_step() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        witness = Witness(random_workload(seed))
        try:
            witness.loop.run()
        except AssertionError as difference:
            difference.add_note(f"seed {seed}")
            raise
        assert witness.journal.observer.failure is None
        seen += witness.seen
    assert min(seen[kind.name] for kind in KvEventKind if kind is not KvEventKind.CACHED) > 100


def test_a_reset_cache_holds_nothing() -> None:
    witness = Witness(largest_workload())
    witness.loop.run()
    assert witness.mirror.cached_free_blocks > 0
    assert witness.scheduler.reset_prefix_cache()
    witness.mirror.apply(witness.journal.observer.take_events())
    assert witness.mirror.cached_free_blocks == 0
    assert witness.mirror.free_blocks == witness.pool.get_num_free_blocks()


def test_keys_are_those_of_the_router() -> None:
    workload = largest_workload()
    witness = Witness(workload)
    request = witness.loop.request(max(workload["requests"], key=lambda r: r["prompt_len"]))
    witness.journal.arrived(request)
    events = witness.journal.observer.take_events()
    keys = events["value"][events["kind"] == KvEventKind.KEY]
    expected = block_keys(
        np.array(request.prompt_token_ids, np.int32), workload["config"]["block_size"]
    )
    assert keys.tolist() == expected.tolist()


def test_a_failure_ends_the_journal_and_not_the_engine() -> None:
    workload = largest_workload()
    witness = Witness(workload)
    witness.loop.on_schedule = lambda batch: None
    witness.scheduler.add_request = Scheduler.add_request.__get__(witness.scheduler)
    result = witness.loop.run()
    assert set(result["token_times"]) == {request["id"] for request in workload["requests"]}
    assert witness.journal.observer.failure is not None
    assert "is unknown to the KV journal" in witness.journal.observer.failure
    assert len(witness.journal.observer.take_events()) == 0
