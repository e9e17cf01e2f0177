"""vLLM's scheduler with its state published after every step. Runs in vLLM's engine process.

vLLM promises nothing of its scheduler's interface: what is read of it is read in this file alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from deployments.kv_journal import KvJournal
from sfs_ext import HEARTBEAT_S, SchedulerConfig, SnapshotWriter, StateWriter

logger = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "foretoken"
"""Names ours among ``SamplingParams.extra_args``."""

HANG_S = 60.0
"""A batch older than this is taken for a hung engine: its state is no longer vouched for."""

REQUEST_ATTRIBUTES = {
    "request_id": "request_id",
    "arrival_s": "arrival_time",
    "prompt_tokens": "num_prompt_tokens",
    "output_token_ids": "_output_token_ids",
    "computed_tokens": "num_computed_tokens",
    "placeholders": "num_output_placeholders",
    "max_tokens": "max_tokens",
    "priority": "priority",
    "stale_tokens": "num_stale_output_tokens",
    "status": "status",
    "prefills": "is_prefill_chunk",
    "resumable": "resumable",
    "record": "_foretoken_record",
}
"""What ``StateWriter`` reads of a vLLM request, and ``record``, which it adds."""


@dataclass(frozen=True, slots=True)
class SnapshotTarget:
    """``VllmConfig.additional_config``: where the engine process publishes."""

    path: str

    def compute_hash(self) -> str:
        # vLLM keys its compilation cache by this; each start has a path of its own, and one graph.
        return EXTRA_ARGS_KEY


class StatePublisher:
    """Writes the resident requests, and each step's record, to shared memory."""

    def __init__(self, scheduler: Scheduler, path: str, clock: Callable[[], float]) -> None:
        self.failures = 0
        self._scheduler = scheduler
        pool = scheduler.kv_cache_manager.block_pool
        self._free_blocks = pool.free_block_queue
        manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        config = scheduler_config(scheduler)
        self._journal: KvJournal | None = None
        if sees_every_block(scheduler):
            self._journal = KvJournal(manager, pool, lambda request: identity(request)[0])
        self._writer = SnapshotWriter(path, config, kv_journaled=self._journal is not None)
        self._state = StateWriter(
            self._writer,
            request_attributes=REQUEST_ATTRIBUTES,
            queues=(scheduler.kv_holding_waiting, scheduler.waiting),
            heap="_heap" if scheduler.policy is SchedulingPolicy.PRIORITY else None,
            blocks=manager.req_to_blocks,
            preempted=RequestStatus.PREEMPTED,
            identity=identity,
            clock=clock,
            observer=None if self._journal is None else self._journal.observer,
        )
        self._closed = threading.Event()
        self.guarded(self._publish_idle)
        threading.Thread(target=self._restamp, name="snapshot-restamp", daemon=True).start()

    def guarded(self, action: Callable[..., None], *args: Any) -> None:
        """Runs ``action``; a failure costs the router its view, and must not cost the engine."""
        try:
            action(*args)
        except Exception:
            self._state.forget()
            self.failures += 1
            if self.failures == 1:
                logger.exception("The scheduler's state could not be published; said once")

    def arrived(self, request: Request) -> None:
        if self._journal is None or self._scheduler.requests.get(request.request_id) is not request:
            return  # more input of a session that is there
        self._journal.ended([request.request_id])  # another of that id may have just ended
        self._journal.arrived(request)

    def scheduled(self, output: SchedulerOutput, scheduled_s: float) -> None:
        scheduler = self._scheduler
        if self._journal is not None and output.finished_req_ids:
            alive = scheduler.requests  # an id can have come again
            self._journal.ended(name for name in output.finished_req_ids if name not in alive)
        self._state.scheduled(
            output,
            output.num_scheduled_tokens,
            scheduler.running,
            scheduled_s,
            len(output.preempted_req_ids or ()),
            self._free_blocks.num_free_blocks,
        )

    def done(self, output: SchedulerOutput, done_s: float) -> None:
        if self._state.done(output, done_s, self._scheduler.running):
            # vLLM schedules no more: not even the empty batch that follows a finished request.
            self._publish_idle()

    def close(self) -> None:
        self._closed.set()
        self._state.close()

    def _publish_idle(self) -> None:
        self._state.publish_idle(self._free_blocks.num_free_blocks)

    def _restamp(self) -> None:
        """Until closed: a state that no step has changed is still the state."""
        while not self._closed.wait(HEARTBEAT_S):
            self.guarded(self._state.restamp, HANG_S)


def identity(request: Request) -> tuple[int, float]:
    """The router's key for a request and its predicted output tokens, 0 where it predicted none."""
    params = request.sampling_params
    ours = (params.extra_args or {}).get(EXTRA_ARGS_KEY) if params is not None else None
    if ours is None:
        digest = blake2b(request.request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little"), 0.0
    return ours["request_key"], ours["predicted_output_tokens"]


def sees_every_block(scheduler: Scheduler) -> bool:
    """Whether ``KvJournal`` can follow: there are other caches, and other ways to change one."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        scheduler.cache_config.enable_prefix_caching
        and scheduler.connector is None
        and scheduler.block_size == scheduler.kv_cache_manager.block_pool.hash_block_size
        and [type(manager) for manager in managers] == [FullAttentionManager]
    )


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

    clock: Callable[[], float] = staticmethod(time.time)
    """Unix time in seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        target = self.vllm_config.additional_config
        if not isinstance(target, SnapshotTarget):
            raise TypeError(
                f"{type(self).__name__} needs a SnapshotTarget as VllmConfig.additional_config, "
                f"not {target!r}"
            )
        self.publisher = StatePublisher(self, target.path, self.clock)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.publisher.guarded(self.publisher.arrived, request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        scheduled_s = self.clock()
        output = super().schedule(throttle_prefills)
        self.publisher.guarded(self.publisher.scheduled, output, scheduled_s)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        done_s = self.clock()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.publisher.guarded(self.publisher.done, scheduler_output, done_s)
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self.publisher.close()


class PublishingAsyncScheduler(PublishingScheduler, AsyncScheduler):
    """The same for engines that schedule a batch while the one before it runs."""
