"""An executor without a model, for the whole of vLLM above it: batches take time and yield noise.

``additional_config["batch_time_s"]`` is ``[a, b]``: a batch lasts a + b·tokens seconds.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput


class FakeExecutor(Executor):
    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        # The CPU platform turns asynchrony off; the engine core looks only after this.
        self.scheduler_config.async_scheduling = True
        self.fixed_s, self.per_token_s = self.vllm_config.additional_config["batch_time_s"]
        self.device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self.random = Random(0)
        self.prompt_tokens: dict[str, int] = {}
        self.scheduled = SchedulerOutput.make_empty()

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self.prompt_tokens.pop(request_id, None)
        self.scheduled = scheduler_output
        done: Future[ModelRunnerOutput | None] = Future()
        empty = scheduler_output.total_num_scheduled_tokens == 0
        done.set_result(EMPTY_MODEL_RUNNER_OUTPUT if empty else None)
        return done if non_block else done.result()

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        tokens = self.scheduled.total_num_scheduled_tokens
        done = self.device.submit(self.run_batch, tokens, self.sampled(self.scheduled))
        return done if non_block else done.result()

    def run_batch(self, tokens: int, output: ModelRunnerOutput) -> ModelRunnerOutput:
        time.sleep(self.fixed_s + self.per_token_s * tokens)
        return output

    def sampled(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """A random token for each request whose known tokens the batch completes."""
        tokens = scheduled.num_scheduled_tokens
        left = {}
        for new in scheduled.scheduled_new_reqs:
            self.prompt_tokens[new.req_id] = new.prompt_len
            left[new.req_id] = new.prompt_len - new.num_computed_tokens
        old = scheduled.scheduled_cached_reqs
        for request_id, computed, outputs in zip(
            old.req_ids, old.num_computed_tokens, old.num_output_tokens, strict=True
        ):
            left[request_id] = self.prompt_tokens[request_id] + outputs - computed
        vocabulary = range(self.model_config.get_vocab_size())
        return ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={request_id: i for i, request_id in enumerate(tokens)},
            sampled_token_ids=[
                [self.random.choice(vocabulary)] if n >= left[request_id] else []
                for request_id, n in tokens.items()
            ],
        )

    def collective_rpc(
        self,
        method: str | Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """What the engine core asks its workers at start-up; there is one."""
        attention = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=1,
            head_size=1,
            dtype=self.model_config.dtype,
        )
        return {
            "get_kv_cache_spec": [{"layer": attention}],
            "determine_available_memory": [1 << 30],
            "get_supported_kv_cache_layouts": [["LBNHC"]],
            "get_supported_tasks": [("generate",)],
        }.get(method, [])

    def check_health(self) -> None:
        """A thread of this process does not fail on its own."""

    def shutdown(self) -> None:
        self.device.shutdown()
