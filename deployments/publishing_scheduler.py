"""vLLM's scheduler with its state published after every step. Runs in vLLM's engine process.

vLLM promises nothing of its scheduler's interface: what is read of it is read in this file alone.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import PriorityRequestQueue, RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from sfs_ext import (
    HEARTBEAT_S,
    SchedulerConfig,
    SnapshotWriter,
    batch_dtype,
    resident_dtype,
    step_dtype,
)

logger = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "foretoken"
"""Names ours among ``SamplingParams.extra_args``."""

HANG_S = 60.0
"""A batch older than this is taken for a hung engine: its state is no longer vouched for."""

WAITING = 1
RESIDENT_STATUS = {RequestStatus.RUNNING: 0, RequestStatus.PREEMPTED: 2}
"""resident_dtype's status; vLLM has several kinds of waiting."""


@dataclass(frozen=True, slots=True)
class SnapshotTarget:
    """``VllmConfig.additional_config``: where the engine process publishes."""

    path: str

    def compute_hash(self) -> str:
        # vLLM keys its compilation cache by this; each start has a path of its own, and one graph.
        return EXTRA_ARGS_KEY


def _row_format() -> struct.Struct:
    """resident_dtype for ``struct``, which packs a row faster than numpy assigns one."""
    codes = {"u8": "Q", "f8": "d", "i4": "i", "f4": "f", "u1": "B"}
    code, at = "<", 0
    for place in (resident_dtype.fields or {}).values():
        field, offset = place[:2]
        base, shape = field.subdtype or (field, (1,))
        code += "x" * (offset - at) + codes[base.str[1:]] * shape[0]
        at = offset + field.itemsize
    return struct.Struct(code + "x" * (resident_dtype.itemsize - at))


pack_row = _row_format().pack


@dataclass(slots=True)
class _Batch:
    output: SchedulerOutput
    unfinished_prefills: set[str]
    """Requests in it that get no token of it."""
    step: NDArray[Any]
    """The step_dtype record, shape (), completed when the batch is done."""

    def header(self) -> tuple[float, int, int, int]:
        step = self.step
        tokens = int(step["prefill_tokens"]) + int(step["decode_requests"])
        context_tokens, attention = step["decode_context_tokens"], step["prefill_attention"]
        return float(step["started_s"]), tokens, int(context_tokens), int(attention)


class StatePublisher:
    """Writes the resident requests, and each step's record, to shared memory."""

    def __init__(self, scheduler: Scheduler, path: str) -> None:
        self.failures = 0
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._blocks = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        self._identities: dict[str, tuple[int, float]] = {}
        self._waiting: list[Request] = []
        self._waiting_rows: list[bytes] = []
        self._waiting_changes = False
        self._in_flight: deque[_Batch] = deque()
        self._busy_since_s: float | None = None
        self._writer = SnapshotWriter(path, scheduler_config(scheduler))
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._published: tuple[float, int, NDArray[Any], NDArray[Any]] | None = None
        self.guarded(self._publish, [])
        threading.Thread(target=self._restamp, name="snapshot-restamp", daemon=True).start()

    def guarded(self, action: Callable[..., None], *args: Any) -> None:
        """Runs ``action``; a failure costs the router its view, and must not cost the engine."""
        try:
            action(*args)
        except Exception:
            self.failures += 1
            if self.failures == 1:
                logger.exception("The scheduler's state could not be published; said once")

    def arrived(self, request: Request) -> None:
        self._identities[request.request_id] = identity(request)

    def scheduled(self, output: SchedulerOutput, scheduled_s: float) -> None:
        for name in output.finished_req_ids:
            self._identities.pop(name, None)
        if output.num_scheduled_tokens:
            self._in_flight.append(self._batch(output, scheduled_s))
        elif not self._in_flight:
            self._busy_since_s = None
        self._publish(self._scheduler.running)

    def done(self, output: SchedulerOutput, done_s: float) -> None:
        if not self._in_flight or self._in_flight[0].output is not output:
            return  # an empty batch, or one whose scheduling could not be recorded
        step = self._in_flight.popleft().step
        if self._in_flight:
            self._in_flight[0].step["started_s"] = done_s
        running, waiting = self._scheduler.get_request_counts()
        self._busy_since_s = done_s if running + waiting else None
        step["done_s"] = done_s
        self._writer.record_step(step)
        if self._busy_since_s is None and not self._in_flight:
            # vLLM schedules no more: not even the empty batch that follows a finished request.
            self._publish([])

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._writer.close()

    def _batch(self, output: SchedulerOutput, scheduled_s: float) -> _Batch:
        """The batch just scheduled, with eq. 9's terms."""
        requests = self._scheduler.requests
        unfinished_prefills: set[str] = set()
        prefill_tokens = prefill_requests = prefill_attention = decode_context_tokens = 0
        for name, tokens in output.num_scheduled_tokens.items():
            request = requests[name]
            context = request.num_computed_tokens - tokens
            if tokens == 1 and context >= request.num_prompt_tokens:
                decode_context_tokens += context
            else:
                prefill_tokens += tokens
                prefill_requests += 1
                prefill_attention += tokens * context + tokens * (tokens + 1) // 2
            if request.is_prefill_chunk:
                unfinished_prefills.add(name)
        step = np.zeros((), step_dtype)
        step["scheduled_s"] = scheduled_s
        step["started_s"] = self._start_s(scheduled_s)
        step["prefill_tokens"] = prefill_tokens
        step["prefill_requests"] = prefill_requests
        step["decode_requests"] = len(output.num_scheduled_tokens) - prefill_requests
        step["preempted"] = len(output.preempted_req_ids or ())
        step["decode_context_tokens"] = decode_context_tokens
        step["prefill_attention"] = prefill_attention
        step["running"], step["waiting"] = self._scheduler.get_request_counts()
        step["free_blocks"] = self._pool.get_num_free_blocks()
        return _Batch(output, unfinished_prefills, step)

    def _start_s(self, scheduled_s: float) -> float:
        if self._in_flight:
            return np.nan  # starts when the one before it is done
        # The host's work between two steps of a busy engine counts for the later one: a forecast
        # adds up steps back to back, and an engine that schedules synchronously pays for both.
        return scheduled_s if self._busy_since_s is None else self._busy_since_s

    def _publish(self, running: Sequence[Request]) -> None:
        rows = b"".join(self._rows(running) + self._rows_of_waiting())
        in_flight = np.array([batch.header() for batch in self._in_flight], batch_dtype)
        residents = np.frombuffer(rows, resident_dtype)
        with self._lock:
            free_blocks = self._pool.get_num_free_blocks()
            self._published = (time.time(), free_blocks, in_flight, residents)
            self._writer.publish(*self._published)

    def _rows(self, requests: Sequence[Request]) -> list[bytes]:
        """One row of resident_dtype for each."""
        identities, blocks = self._identities, self._blocks
        (oldest, oldest_without), (newest, newest_without) = [
            *((b.output.num_scheduled_tokens, b.unfinished_prefills) for b in self._in_flight),
            ({}, ()),
            ({}, ()),
        ][:2]
        rows = []
        for request in requests:
            name = request.request_id
            key, predicted_output_tokens = identities[name]
            rows.append(
                pack_row(
                    key,
                    request.arrival_time,
                    request.num_prompt_tokens,
                    len(request._output_token_ids),
                    request.num_computed_tokens,
                    request.num_output_placeholders,
                    request.max_tokens,
                    predicted_output_tokens,
                    request.priority,
                    len(blocks.get(name, ())),
                    request.num_stale_output_tokens,
                    oldest.get(name, 0),
                    newest.get(name, 0),
                    name in oldest and name not in oldest_without,
                    name in newest and name not in newest_without,
                    RESIDENT_STATUS.get(request.status, WAITING),
                )
            )
        return rows

    def _rows_of_waiting(self) -> list[bytes]:
        scheduler = self._scheduler
        waiting = in_order(scheduler.kv_holding_waiting) + in_order(scheduler.waiting)
        # A long queue rarely changes from step to step, but for what preempted requests still get.
        if waiting != self._waiting or self._waiting_changes:
            self._waiting = waiting
            self._waiting_rows = self._rows(waiting)
            self._waiting_changes = any(request.num_stale_output_tokens for request in waiting)
        return self._waiting_rows

    def _restamp(self) -> None:
        """Until closed: a state that no step has changed is still the state."""
        while not self._closed.wait(HEARTBEAT_S):
            self.guarded(self._restamp_once)

    def _restamp_once(self) -> None:
        with self._lock:
            if self._published is None or self._closed.is_set():
                return
            published_s, free_blocks, in_flight, residents = self._published
            now_s = time.time()
            hung = len(residents) > 0 and now_s - published_s > HANG_S
            if now_s - published_s >= HEARTBEAT_S and not hung:
                self._writer.publish(now_s, free_blocks, in_flight, residents)


def identity(request: Request) -> tuple[int, float]:
    """The router's key for a request and its predicted output tokens, 0 where it predicted none."""
    params = request.sampling_params
    ours = (params.extra_args or {}).get(EXTRA_ARGS_KEY) if params is not None else None
    if ours is None:
        digest = blake2b(request.request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little"), 0.0
    return ours["request_key"], ours["predicted_output_tokens"]


def in_order(queue: RequestQueue) -> list[Request]:
    if isinstance(queue, PriorityRequestQueue):
        # The queue's own iterator pops a copy of its heap, one comparison in Python at a time.
        return sorted(queue._heap, key=lambda r: (r.priority, r.arrival_time, r.request_id))
    return list(queue)


def scheduler_config(scheduler: Scheduler) -> SchedulerConfig:
    config = scheduler.scheduler_config
    return SchedulerConfig(
        max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
        max_num_seqs=scheduler.max_num_running_reqs,
        max_num_active_seqs=config.max_num_active_seqs or 0,
        block_size=scheduler.block_size,
        num_blocks=scheduler.kv_cache_config.num_blocks,
        max_model_len=scheduler.max_model_len,
        policy=scheduler.policy.value,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=scheduler.cache_config.enable_prefix_caching,
        async_scheduling=isinstance(scheduler, AsyncScheduler),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=config.long_prefill_token_threshold_adaptive,
        watermark=config.watermark,
        scheduler_reserve_full_isl=config.scheduler_reserve_full_isl,
    )


class PublishingScheduler(Scheduler):
    """Schedules as vLLM does and tells what it did; for engines that schedule synchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        target = self.vllm_config.additional_config
        if not isinstance(target, SnapshotTarget):
            raise TypeError(
                f"{type(self).__name__} needs a SnapshotTarget as VllmConfig.additional_config, "
                f"not {target!r}"
            )
        self.publisher = StatePublisher(self, target.path)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.publisher.guarded(self.publisher.arrived, request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        scheduled_s = time.time()
        output = super().schedule(throttle_prefills)
        self.publisher.guarded(self.publisher.scheduled, output, scheduled_s)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        done_s = time.time()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.publisher.guarded(self.publisher.done, scheduler_output, done_s)
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self.publisher.close()


class PublishingAsyncScheduler(PublishingScheduler, AsyncScheduler):
    """The same for engines that schedule a batch while the one before it runs."""
