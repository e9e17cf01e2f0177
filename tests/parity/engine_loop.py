"""vLLM's real scheduler in a stand-in for its engine loop: no model, no weights, virtual time.

Workloads and traces have the format of ``sfs_ext.replay_workload``.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # read when vLLM is imported

import torch
from transformers import Qwen3Config
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

EOS = 7
MAX_PASSES = 50_000
SPAN = 1_000_000
"""Token ids of one owner: more than any sequence is long."""


def save_model_config(folder: Path, vocab_size: int = 4096) -> None:
    """A small Qwen3: what vLLM has to know of a model, without weights or tokenizer."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=40960,
    ).save_pretrained(folder)


@functools.cache
def model_config(max_model_len: int) -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        save_model_config(Path(folder))
        return ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=max_model_len
        )


def make_scheduler(
    config: dict[str, Any],
    classes: tuple[type[Scheduler], type[AsyncScheduler]] = (Scheduler, AsyncScheduler),
    **vllm_config: Any,
) -> Scheduler:
    """``classes``: for synchronous and for asynchronous scheduling."""
    settings = VllmConfig(
        model_config=model_config(config["max_model_len"]),
        scheduler_config=SchedulerConfig(
            is_encoder_decoder=False,
            max_num_active_seqs=config["max_num_active_seqs"] or None,
            **{
                name: config[name]
                for name in (
                    "max_num_seqs",
                    "max_num_batched_tokens",
                    "max_model_len",
                    "policy",
                    "enable_chunked_prefill",
                    "long_prefill_token_threshold",
                    "long_prefill_token_threshold_adaptive",
                    "watermark",
                    "scheduler_reserve_full_isl",
                    "async_scheduling",
                )
            },
        ),
        cache_config=CacheConfig(
            block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"]
        ),
        device_config=DeviceConfig("cpu"),
    )
    # Set once the configuration stands: the CPU platform turns asynchrony off.
    settings.scheduler_config.async_scheduling = config["async_scheduling"]
    settings.cache_config.num_gpu_blocks = config["num_blocks"]
    for name, value in vllm_config.items():
        setattr(settings, name, value)
    attention = FullAttentionSpec(
        block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    return classes[config["async_scheduling"]](
        vllm_config=settings,
        kv_cache_config=KVCacheConfig(
            num_blocks=config["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(settings),
        block_size=config["block_size"],
        hash_block_size=config["block_size"],
    )


@dataclass(slots=True)
class Batch:
    output: SchedulerOutput
    emitters: list[str]
    """Requests whose prefill this batch completes or that decode in it."""
    record: list[Any]
    end_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    """What the engine found when it heard that a request's client had gone."""

    request_id: str
    state: str
    """waiting, prefilling, decoding, preempted; ended: nothing was left to abort."""
    batches: int
    """In flight, the one just awaited among them."""
    batches_with_it: int


@dataclass
class EngineLoop:
    """vLLM's engine core with its scheduler, on one workload: ``EngineCoreProc.run_busy_loop``.

    Everything follows from the workload, so that a second loop comes to the same state at the same
    pass: to see what one request more would meet there, stop another loop at that pass
    (``run(passes)``), ``submit`` the request and run on.
    """

    workload: dict[str, Any]
    scheduler: Scheduler
    on_schedule: Callable[[Batch], None] = lambda batch: None
    trace: list[list[Any]] = field(default_factory=list)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    aborts: list[Abort] = field(default_factory=list)
    in_flight: deque[Batch] = field(default_factory=deque)
    engine_pass: int = 0
    """Passes begun; where the clock counts passes, those that an idle engine skipped as well."""
    now_s: float = 0.0
    device_free_s: float = 0.0

    def __post_init__(self) -> None:
        config = self.workload["config"]
        self.depth = 2 if config["async_scheduling"] else 1
        self.time_model = config["time_model"]
        self.idle_sleep_s = config["idle_sleep"]
        self.hasher = None
        if config["enable_prefix_caching"]:
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(config["block_size"], sha256)
        self.requests: dict[str, dict[str, Any]] = {}
        self.owner: dict[str, int] = {}
        self.arrivals: list[dict[str, Any]] = []
        self.departures: list[dict[str, Any]] = []
        for request in self.workload["requests"]:
            self.submit(request)

    def submit(self, request: dict[str, Any]) -> None:
        """One request more; where its arrival has gone by, the next pass takes it."""
        self.requests[request["id"]] = request
        self.owner[request["id"]] = 1000 + len(self.owner)
        insort(self.arrivals, request, key=itemgetter("arrival"))
        if request.get("abort") is not None:
            insort(self.departures, request, key=itemgetter("abort", "arrival"))

    def run(self, passes: int | None = None) -> dict[str, Any]:
        """To the end, or for at most ``passes``: the workload, its trace and token times."""
        for _ in range(MAX_PASSES) if passes is None else range(passes):
            if not self.arrivals and not self.busy:
                break
            self.advance()
        else:
            if passes is None:
                raise RuntimeError(f"no end after {MAX_PASSES} passes; the last: {self.trace[-1]}")
        return self.workload | {"trace": self.trace, "token_times": self.token_times}

    @property
    def clock(self) -> float:
        """What arrivals and aborts are due by."""
        return self.now_s if self.time_model else self.engine_pass

    @property
    def busy(self) -> bool:
        return bool(self.in_flight) or self.scheduler.has_requests()

    def advance(self) -> None:
        """One pass: takes what has come, then steps."""
        if not self.busy:
            self.sleep_until(self.arrivals[0]["arrival"])
        while self.arrivals and self.arrivals[0]["arrival"] <= self.clock:
            self.scheduler.add_request(self.request(self.arrivals.pop(0)))
        self.take_aborts(self.clock)
        executed = self.step()
        if self.time_model and not executed and self.scheduler.has_requests():
            self.now_s += self.idle_sleep_s
        self.engine_pass += 1

    def sleep_until(self, arrival: float) -> None:
        if self.time_model:
            self.now_s = max(self.now_s, arrival)
        else:
            self.engine_pass = max(self.engine_pass, math.ceil(arrival))

    def take_aborts(self, now: float) -> None:
        """Those due by ``now``; the engine does not know requests it has not taken in yet."""
        due = [r for r in self.departures if r["abort"] <= now and r not in self.arrivals]
        for request in due:
            self.departures.remove(request)
            self.aborts.append(self.abort(request["id"]))

    def abort(self, request_id: str) -> Abort:
        request = self.scheduler.requests.get(request_id)
        held = sum(request_id in batch.output.num_scheduled_tokens for batch in self.in_flight)
        found = Abort(request_id, state_of(request), len(self.in_flight), held)
        # One a call: of several, vLLM frees the blocks in the order of a set of strings, any order.
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        return found

    def step(self) -> bool:
        """``EngineCore.step`` and ``step_with_batch_queue``; whether any token was scheduled."""
        executed = False
        if self.scheduler.has_requests():
            batch = self.schedule()
            self.in_flight.append(batch)
            executed = batch.output.total_num_scheduled_tokens > 0
            room = len(self.in_flight) < self.depth
            if room and (executed or self.scheduler.has_requests()):
                return executed
        self.now_s = max(self.now_s, self.in_flight[0].end_s)
        self.take_aborts(self.now_s if self.time_model else self.engine_pass + 0.5)
        self.update(self.in_flight.popleft())
        return executed

    def schedule(self) -> Batch:
        output = self.scheduler.schedule()
        free_blocks = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        tokens = output.num_scheduled_tokens
        emitters = [
            request_id
            for request_id in tokens
            if not self.scheduler.requests[request_id].is_prefill_chunk
        ]
        preempted = sorted(output.preempted_req_ids or ())
        batch = [list(scheduled) for scheduled in tokens.items()]
        record = [batch, preempted, [], free_blocks, free_blocks, self.now_s]
        self.trace.append(record)
        end_s = self.now_s
        if self.time_model and tokens:
            fixed_s, per_token_s = self.time_model
            end_s = max(self.now_s, self.device_free_s)
            end_s += fixed_s + per_token_s * output.total_num_scheduled_tokens
            self.device_free_s = end_s
        scheduled = Batch(output, emitters, record, end_s)
        self.on_schedule(scheduled)
        return scheduled

    def update(self, batch: Batch) -> None:
        outputs = self.scheduler.update_from_output(batch.output, self.sampled(batch))
        for output in outputs[0].outputs if 0 in outputs else ():
            self.token_times.setdefault(output.request_id, []).append(self.now_s)
            if output.finish_reason is not None:
                batch.record[2].append(output.request_id)
        batch.record[4] = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def sampled(self, batch: Batch) -> ModelRunnerOutput:
        ids = list(batch.output.num_scheduled_tokens)
        if not ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        emitters = set(batch.emitters)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[
                [self.next_token(request_id)] if request_id in emitters else []
                for request_id in ids
            ],
        )

    def next_token(self, request_id: str) -> int:
        request = self.requests[request_id]
        live = self.scheduler.requests.get(request_id)
        outputs = live.num_output_tokens if live else 0
        if outputs + 1 == request["output_len"] < request["max_tokens"]:
            return EOS
        return self.token(request_id, request["prompt_len"] + outputs)

    def token(self, request_id: str, position: int) -> int:
        """What stands at ``position`` of a request's prompt and output."""
        request = self.requests[request_id]
        if position < request.get("parent_len", 0):
            return self.token(request["parent"], position)
        if position < request.get("prefix_len", 0):
            return EOS + 1 + SPAN * request["prefix_group"] + position
        return SPAN * self.owner[request_id] + position

    def request(self, request: dict[str, Any]) -> Request:
        return Request(
            request_id=request["id"],
            prompt_token_ids=[self.token(request["id"], i) for i in range(request["prompt_len"])],
            sampling_params=SamplingParams(
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                stop_token_ids=[EOS],
                detokenize=False,
                extra_args=request.get("extra_args"),
            ),
            pooling_params=None,
            arrival_time=float(request["arrival"]),
            priority=request["priority"],
            block_hasher=self.hasher,
        )


def state_of(request: Request | None) -> str:
    if request is None:
        return "ended"
    if request.status == RequestStatus.RUNNING:
        unfinished = request.is_prefill_chunk or request.num_output_tokens == 0
        return "prefilling" if unfinished else "decoding"
    return "preempted" if request.status == RequestStatus.PREEMPTED else "waiting"
