"""vLLM's schedulers with a record of what they are told and what they decide, in order.

``additional_config["record"]`` is the file: one JSON list a line, ``[event, …]``:

- ``["config", {…}]``, once, as in a workload of ``sfs_ext.replay_workload``;
- ``["add", id, prompt_tokens, max_tokens, priority]``;
- ``["abort", [id, …]]``, in the order in which they are freed;
- ``["schedule", [[id, tokens], …], [preempted, …], free_blocks, has_requests]``;
- ``["update", [[id, tokens, vllm.v1.engine.FinishReason or null], …], free_blocks]``;
- ``["shutdown"]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from deployments.publishing_scheduler import scheduler_config

CONFIG_NAMES = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_num_active_seqs",
    "block_size",
    "num_blocks",
    "max_model_len",
    "policy",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "async_scheduling",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "watermark",
    "scheduler_reserve_full_isl",
)


class RecordingScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = self.vllm_config.additional_config["record"]
        self.record = open(path, "w", buffering=1)  # noqa: SIM115
        config = scheduler_config(self)
        self.write("config", {name: getattr(config, name) for name in CONFIG_NAMES})

    def write(self, *event: Any) -> None:
        self.record.write(json.dumps(event) + "\n")

    @property
    def free_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.write(
            "add",
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            request.priority,
        )

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        if finished:
            self.write("abort", [request.request_id for request in finished])
        return finished

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        batch = list(output.num_scheduled_tokens.items())
        preempted = sorted(output.preempted_req_ids or ())
        self.write("schedule", batch, preempted, self.free_blocks, self.has_requests())
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        results = [
            [output.request_id, len(output.new_token_ids), output.finish_reason]
            for client_outputs in outputs.values()
            for output in client_outputs.outputs
        ]
        self.write("update", results, self.free_blocks)
        return outputs

    def shutdown(self) -> None:
        super().shutdown()
        self.write("shutdown")
        self.record.close()


class RecordingAsyncScheduler(RecordingScheduler, AsyncScheduler):
    """The same for engines that schedule a batch while the one before it runs."""
