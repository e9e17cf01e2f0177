"""What the publishing schedulers write, against the schedulers' own state, at every step."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import Batch, EngineLoop, make_scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from workloads import random_workload

from deployments import publishing_scheduler
from deployments.publishing_scheduler import (
    EXTRA_ARGS_KEY,
    PublishingAsyncScheduler,
    PublishingScheduler,
    SnapshotTarget,
    identity,
)
from sfs_ext import SnapshotReader


class Witness:
    """Reads every snapshot and compares it with the scheduler that has just published it."""

    def __init__(self, workload: dict[str, Any], path: str) -> None:
        self.scheduler = make_scheduler(
            workload["config"],
            (PublishingScheduler, PublishingAsyncScheduler),
            additional_config=SnapshotTarget(path),
        )
        self.reader = SnapshotReader(path)
        self.loop = EngineLoop(workload, self.scheduler, self.compare)
        self.computed: dict[str, int] = {}
        """Before the newest batch."""
        self.shapes: list[tuple[int, int, int]] = []
        self.snapshots = 0
        self.preempted = self.stale = 0
        """Rows seen of requests that were preempted, and of those with tokens under way."""

    def compare(self, newest: Batch) -> None:
        snapshot = self.reader.read()
        assert snapshot is not None
        self.snapshots += 1
        residents, header = snapshot.residents, snapshot.header
        self.preempted += int(np.sum(residents["status"] == 2))
        self.stale += int(np.sum(residents["stale_tokens"] > 0))
        running, waiting = self.scheduler.running, in_queue_order(self.scheduler)
        requests = running + waiting
        assert residents["id"].tolist() == [identity(request)[0] for request in requests]
        assert (header["running"], header["waiting"]) == (len(running), len(waiting))
        pool = self.scheduler.kv_cache_manager.block_pool
        assert header["free_blocks"] == pool.get_num_free_blocks()

        in_flight = [*self.loop.in_flight, newest]
        assert header["in_flight_batches"] == len(in_flight)
        started = header["in_flight"]["started_s"][: len(in_flight)]
        assert np.isnan(started).tolist() == [i > 0 for i in range(len(in_flight))]
        for request, resident in zip(requests, residents, strict=True):
            assert facts(resident) == self.expected(request, in_flight)

        if newest.output.num_scheduled_tokens:
            self.shapes.append(self.shape(newest))
            published = header["in_flight"][len(in_flight) - 1]
            names = ("tokens", "decode_context_tokens", "prefill_attention")
            assert tuple(int(published[name]) for name in names) == self.shapes[-1]

    def expected(self, request: Request, in_flight: list[Batch]) -> dict[str, Any]:
        coordinator = self.scheduler.kv_cache_manager.coordinator
        blocks = coordinator.single_type_managers[0].req_to_blocks
        waits = {RequestStatus.RUNNING: 0, RequestStatus.WAITING: 1, RequestStatus.PREEMPTED: 2}
        name = request.request_id
        nothing = [0] * (2 - len(in_flight))
        return {
            "arrival_s": request.arrival_time,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "computed_tokens": request.num_computed_tokens,
            "placeholders": request.num_output_placeholders,
            "max_tokens": request.max_tokens,
            "predicted_output_tokens": identity(request)[1],
            "priority": request.priority,
            "blocks": len(blocks.get(name, ())),
            "stale_tokens": request.num_stale_output_tokens,
            "in_flight_tokens": [b.output.num_scheduled_tokens.get(name, 0) for b in in_flight]
            + nothing,
            "in_flight_emits": [int(name in b.emitters) for b in in_flight] + nothing,
            "status": waits.get(request.status, 1),
        }

    def shape(self, batch: Batch) -> tuple[int, int, int]:
        """Eq. 9's sums, one request at a time."""
        tokens = context_of_decodes = attention = 0
        for name, n in batch.output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            context = request.num_computed_tokens - n
            tokens += n
            if n == 1 and context >= request.num_prompt_tokens:
                context_of_decodes += context
            else:
                attention += sum(context + i for i in range(1, n + 1))
        return tokens, context_of_decodes, attention


def in_queue_order(scheduler: Scheduler) -> list[Request]:
    return list(scheduler.kv_holding_waiting) + list(scheduler.waiting)


def facts(resident: np.void) -> dict[str, Any]:
    return {
        name: resident[name].tolist()
        for name in resident.dtype.names
        if name != "id" and not name.startswith("pad")
    }


def crowd(asynchronous: bool, policy: str = "fcfs") -> dict[str, Any]:
    """Requests that outgrow the KV cache together, in a queue longer than what runs."""
    config = random_workload(1)["config"] | {
        "max_num_batched_tokens": 32,
        "max_num_seqs": 5,
        "max_num_active_seqs": 0,
        "block_size": 4,
        "num_blocks": 32,
        "max_model_len": 64,
        "policy": policy,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "async_scheduling": asynchronous,
        "long_prefill_token_threshold": 8,
        "watermark": 0.0,
        "scheduler_reserve_full_isl": True,
        "time_model": None,
    }
    requests = [
        {"id": str(i), "arrival": i // 4, "priority": i % 3, "prompt_len": 11 + i}
        | {"output_len": 30, "max_tokens": 30}
        for i in range(12)
    ]
    return {"config": config, "requests": requests}


both = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "snapshot")


@pytest.mark.parametrize("seed", range(102, 116))
def test_every_snapshot_is_the_schedulers_state(seed: int, path: str) -> None:
    workload = random_workload(seed)
    for i, request in enumerate(workload["requests"]):
        if i % 2:
            ours = {"request_key": 2**64 - 1 - i, "predicted_output_tokens": i + 0.5}
            request["extra_args"] = {EXTRA_ARGS_KEY: ours}
    witness = Witness(workload, path)
    witness.loop.run()
    publisher = witness.scheduler.publisher
    assert publisher.failures == 0
    assert witness.snapshots == len(witness.loop.trace)

    idle = witness.reader.read()
    assert len(idle.residents) == 0
    assert idle.header["in_flight_batches"] == 0
    check_steps(witness)
    witness.scheduler.shutdown()
    assert not Path(path).exists()


def check_steps(witness: Witness) -> None:
    """One record for each batch that held tokens, in order, back to back while work remained."""
    steps = witness.reader.read_steps(0)
    assert steps["sequence"].tolist() == list(range(1, len(witness.shapes) + 1))
    tokens = steps["prefill_tokens"] + steps["decode_requests"]
    shapes = zip(tokens, steps["decode_context_tokens"], steps["prefill_attention"], strict=True)
    assert [tuple(map(int, shape)) for shape in shapes] == witness.shapes
    assert np.all(steps["started_s"] < steps["done_s"])
    assert np.all(steps["started_s"][1:] >= steps["done_s"][:-1])
    back_to_back = steps["started_s"][1:] == steps["done_s"][:-1]
    assert back_to_back.mean() > 0.5


@both
def test_an_aborted_request_leaves_the_snapshot(asynchronous: bool, path: str) -> None:
    workload = random_workload(1)
    workload["config"]["async_scheduling"] = asynchronous
    witness = Witness(workload, path)
    loop, scheduler = witness.loop, witness.scheduler
    for request in workload["requests"][:3]:
        scheduler.add_request(loop.request(request))
    loop.step()
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    while loop.busy:
        loop.step()
    assert len(witness.reader.read().residents) == 0
    assert scheduler.publisher.failures == 0
    scheduler.shutdown()


@both
def test_aborts_between_steps_are_told(asynchronous: bool, path: str) -> None:
    witness = Witness(crowd(asynchronous), path)
    loop, scheduler = witness.loop, witness.scheduler
    aborts = []
    while loop.arrivals or loop.busy:
        loop.advance()
        if len(loop.trace) % 5 == 0:
            leaving = (*scheduler.running[-1:], *list(scheduler.waiting)[1:2])
            aborts += [loop.abort(request.request_id) for request in leaving]
    assert {abort.state for abort in aborts} >= {"waiting", "decoding"}
    assert any(abort.batches_with_it for abort in aborts) == asynchronous
    assert len(witness.reader.read().residents) == 0
    assert scheduler.publisher.failures == 0


@both
def test_an_id_can_come_again(asynchronous: bool, path: str) -> None:
    workload = crowd(asynchronous)
    for i, request in enumerate(workload["requests"]):
        ours = {"request_key": i, "predicted_output_tokens": 1.0}
        request["extra_args"] = {EXTRA_ARGS_KEY: ours}
    witness = Witness(workload, path)
    loop, scheduler = witness.loop, witness.scheduler
    first, second = (loop.request(request) for request in workload["requests"][:2])
    scheduler.add_request(first)
    scheduler.add_request(second)
    for _ in range(4):
        loop.step()
    scheduler.finish_requests([first.request_id], RequestStatus.FINISHED_ABORTED)
    while any(first.request_id in batch.output.num_scheduled_tokens for batch in loop.in_flight):
        loop.step()
    renamed = workload["requests"][5] | {"id": first.request_id}
    scheduler.add_request(loop.request(renamed))
    loop.step()
    assert witness.reader.read().residents["id"].tolist() == [1, 5]
    loop.arrivals.clear()
    loop.run()
    assert scheduler.publisher.failures == 0


@both
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preempted_requests_are_told(asynchronous: bool, policy: str, path: str) -> None:
    witness = Witness(crowd(asynchronous, policy), path)
    witness.loop.run()
    assert witness.scheduler.publisher.failures == 0
    assert witness.preempted > 0
    assert (witness.stale > 0) == asynchronous


@both
def test_a_session_that_is_continued_is_read_anew(asynchronous: bool, path: str) -> None:
    witness = Witness(crowd(asynchronous), path)
    loop, scheduler = witness.loop, witness.scheduler
    for turn, request in enumerate(loop.arrivals[:2]):
        part = loop.request(request | {"id": "0", "max_tokens": 3 + turn})
        part.resumable = True
        scheduler.add_request(part)
        while loop.busy:
            loop.step()
        assert scheduler.requests["0"].status == RequestStatus.WAITING_FOR_STREAMING_REQ
    residents = witness.reader.read().residents
    assert residents["max_tokens"].tolist() == [4]
    assert scheduler.publisher.failures == 0


def test_a_finished_request_is_let_go(path: str) -> None:
    witness = Witness(crowd(asynchronous=True), path)
    requests = weakref.WeakSet()
    add_request = witness.scheduler.add_request

    def watched(request: Request) -> None:
        requests.add(request)
        add_request(request)

    witness.scheduler.add_request = watched
    witness.loop.run()
    gc.collect()
    assert witness.snapshots > 0
    assert not requests


@pytest.mark.parametrize(
    ("field", "attribute", "message"),
    [
        ("stale_tokens", "num_gone", "'Request' object has no attribute 'num_gone'"),
        ("computed_tokens", "request_id", "a request's request_id cannot be read"),
        ("output_token_ids", "num_prompt_tokens", "it is a int, not a list"),
        ("request_id", "status", "it is a RequestStatus, not a str"),
    ],
)
def test_it_says_what_of_vllm_is_missing(
    field: str,
    attribute: str,
    message: str,
    path: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(publishing_scheduler.REQUEST_ATTRIBUTES, field, attribute)
    workload = crowd(asynchronous=True)
    witness = Witness(workload, path)
    witness.loop.on_schedule = lambda batch: None
    result = witness.loop.run()
    assert set(result["token_times"]) == {request["id"] for request in workload["requests"]}
    assert caplog.text.count("could not be published") == 1
    assert message in caplog.text


@both
def test_steps_that_could_not_be_read_leave_no_trace(asynchronous: bool, path: str) -> None:
    workload = crowd(asynchronous)
    workload["config"]["enable_prefix_caching"] = False  # without a KV journal, which would end
    workload["requests"][3]["extra_args"] = {EXTRA_ARGS_KEY: {}}
    witness = Witness(workload, path)
    loop, scheduler = witness.loop, witness.scheduler
    loop.on_schedule = lambda batch: None
    loop.run(12)
    failures = scheduler.publisher.failures
    assert failures > 0
    loop.abort("3")
    while any("3" in batch.output.num_scheduled_tokens for batch in loop.in_flight):
        loop.advance()
    loop.advance()

    loop.on_schedule = witness.compare
    loop.run()
    assert witness.snapshots > 0
    assert witness.preempted > 0
    assert scheduler.publisher.failures < failures + 4


def test_a_failing_publisher_does_not_stop_the_engine(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    workload = random_workload(2)
    witness = Witness(workload, path)
    witness.loop.on_schedule = lambda batch: None
    witness.scheduler.publisher._writer.close()
    result = witness.loop.run()
    assert set(result["token_times"]) == {request["id"] for request in workload["requests"]}
    assert witness.scheduler.publisher.failures > len(result["trace"])
    assert caplog.text.count("could not be published") == 1


def test_without_a_target_it_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match="needs a SnapshotTarget"):
        make_scheduler(
            random_workload(1)["config"], (PublishingScheduler, PublishingAsyncScheduler)
        )
