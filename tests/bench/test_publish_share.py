"""What publishing adds to the scheduling steps of vLLM's own scheduler while requests decode."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")
sys.path.append(str(Path(__file__).parents[1] / "parity"))

from engine_loop import make_scheduler
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from deployments.publishing_scheduler import (
    EXTRA_ARGS_KEY,
    PublishingAsyncScheduler,
    PublishingScheduler,
    SnapshotTarget,
)
from sfs_ext import SnapshotReader

BLOCK_SIZE = 16
WARM_UP_STEPS = 32
NOBODY, VLLM, PUBLISHER = range(3)


class Stopwatch:
    """Seconds by whose code runs. What reading it costs is shared by the two on either side."""

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]
        self._whose = NOBODY
        self._since_s = time.perf_counter()

    def turn_to(self, whose: int) -> int:
        """Whose code ran until now."""
        now_s, before = time.perf_counter(), self._whose
        self.seconds[before] += now_s - self._since_s
        self._whose, self._since_s = whose, now_s
        return before

    def charging(self, whose: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def charged(*args: Any, **kwargs: Any) -> Any:
            before = self.turn_to(whose)
            try:
                return call(*args, **kwargs)
            finally:
                self.turn_to(before)

        return charged


class Decoding:
    """An engine without a model: ``running`` requests, each a token in every step."""

    def __init__(self, running: int, asynchronous: bool, path: str) -> None:
        self.scheduler: Scheduler = make_scheduler(
            {
                "max_num_batched_tokens": 8192,
                "max_num_seqs": running,
                "max_num_active_seqs": 0,
                "block_size": BLOCK_SIZE,
                "num_blocks": 500 * running,
                "max_model_len": 32_768,
                "policy": "fcfs",
                "enable_chunked_prefill": True,
                "enable_prefix_caching": True,
                "async_scheduling": asynchronous,
                "long_prefill_token_threshold": 0,
                "long_prefill_token_threshold_adaptive": False,
                "watermark": 0.0,
                "scheduler_reserve_full_isl": True,
            },
            (PublishingScheduler, PublishingAsyncScheduler),
            additional_config=SnapshotTarget(path),
        )
        self.reader = SnapshotReader(path)
        self._depth = 2 if asynchronous else 1
        self._in_flight: deque[SchedulerOutput] = deque()
        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        for i in range(running):
            ours = {"request_key": i + 1, "predicted_output_tokens": 1000.0}
            request = Request(
                request_id=f"chatcmpl-{i:032x}",
                prompt_token_ids=[i] * (100 + i % BLOCK_SIZE),  # blocks fill at different steps
                sampling_params=SamplingParams(
                    max_tokens=30_000, ignore_eos=True, extra_args={EXTRA_ARGS_KEY: ours}
                ),
                pooling_params=None,
                arrival_time=time.time(),
                block_hasher=hasher,
            )
            self.scheduler.add_request(request)

    def step(self, watch: Stopwatch) -> None:
        watch.turn_to(PUBLISHER)
        self._in_flight.append(self.scheduler.schedule())
        watch.turn_to(NOBODY)
        if len(self._in_flight) < self._depth:
            return
        output = self._in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[1] for _ in ids],
        )
        watch.turn_to(PUBLISHER)
        self.scheduler.update_from_output(output, sampled)
        watch.turn_to(NOBODY)


def hooks(scheduler: Scheduler) -> Iterator[tuple[Any, str]]:
    """Methods of vLLM's that the publisher has put its own calls around."""
    cache = scheduler.kv_cache_manager
    for target in (cache.block_pool, *cache.coordinator.single_type_managers):
        names = [name for name in vars(target) if callable(getattr(type(target), name, None))]
        yield from ((target, name) for name in names)


@pytest.mark.parametrize(("running", "rounds"), [(16, 200), (64, 60), (256, 20)])
def test_publish_share(
    benchmark: BenchmarkFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    running: int,
    rounds: int,
) -> None:
    watch = Stopwatch()
    plain = [(Scheduler, "schedule"), (Scheduler, "update_from_output")]
    probe = Decoding(1, False, str(tmp_path / "probe"))
    plain += [(type(target), name) for target, name in hooks(probe.scheduler)]
    probe.scheduler.shutdown()
    for kind, name in plain:
        monkeypatch.setattr(kind, name, watch.charging(VLLM, getattr(kind, name)))

    engines = [Decoding(running, mode, str(tmp_path / f"{mode}")) for mode in (False, True)]
    for engine in engines:
        for target, name in list(hooks(engine.scheduler)):
            setattr(target, name, watch.charging(PUBLISHER, getattr(target, name)))
        for _ in range(WARM_UP_STEPS):
            engine.step(watch)
    shares: list[list[float]] = [[], []]

    def decode_a_block() -> None:
        for engine, of_engine in zip(engines, shares, strict=True):
            watch.seconds = [0.0, 0.0, 0.0]
            for _ in range(BLOCK_SIZE):
                engine.step(watch)
            of_engine.append(watch.seconds[PUBLISHER] / watch.seconds[VLLM])

    benchmark.pedantic(decode_a_block, rounds=rounds)
    for engine in engines:
        snapshot = engine.reader.read()
        assert snapshot is not None
        assert snapshot.residents["id"].tolist() == list(range(1, running + 1))
        assert engine.scheduler.publisher.failures == 0
        engine.scheduler.shutdown()

    share = max(median(of_engine) for of_engine in shares)
    benchmark.extra_info[f"publish_share_{running}"] = share
    if not benchmark.disabled:
        assert share < 0.05
