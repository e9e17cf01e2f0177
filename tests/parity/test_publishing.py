"""What the publishing schedulers write, against the schedulers' own state, at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import Batch, EngineLoop, make_scheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from workloads import random_workload

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

    def compare(self, newest: Batch) -> None:
        snapshot = self.reader.read()
        assert snapshot is not None
        self.snapshots += 1
        residents, header = snapshot.residents, snapshot.header
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
            "status": waits[request.status],
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
    return list(scheduler.waiting)


def facts(resident: np.void) -> dict[str, Any]:
    return {
        name: resident[name].tolist()
        for name in resident.dtype.names
        if name != "id" and not name.startswith("pad")
    }


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


@pytest.mark.parametrize("asynchronous", [False, True])
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
