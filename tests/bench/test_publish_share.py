"""What publishing adds to the scheduling steps of vLLM's own scheduler while requests decode."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from statistics import median

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
PAIRS = 6
"""Of engines: where each lies in memory makes a step several percent slower or faster."""
LARGEST_SHARE = 0.08
"""The aim is 0.05; runs differ by two percent of a step."""


class Decoding:
    """An engine without a model: ``running`` requests, each a token in every step."""

    def __init__(self, running: int, asynchronous: bool, path: str | None = None) -> None:
        """``path``: where it publishes, if it does."""
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
            *(((PublishingScheduler, PublishingAsyncScheduler),) if path else ()),
            **({"additional_config": SnapshotTarget(path)} if path else {}),
        )
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

    def step(self) -> float:
        """Seconds that the scheduler took."""
        begun_s = time.perf_counter()
        self._in_flight.append(self.scheduler.schedule())
        took_s = time.perf_counter() - begun_s
        if len(self._in_flight) < self._depth:
            return took_s
        output = self._in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        sampled = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[1] for _ in ids],
        )
        begun_s = time.perf_counter()
        self.scheduler.update_from_output(output, sampled)
        return took_s + time.perf_counter() - begun_s


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("running", "rounds"), [(16, 60), (64, 20), (256, 8)])
def test_publish_share(
    benchmark: BenchmarkFixture, tmp_path: Path, running: int, rounds: int, asynchronous: bool
) -> None:
    shares: list[float] = []

    def compare(pair: int) -> None:
        path = str(tmp_path / str(pair))
        paths = (None, path) if pair % 2 else (path, None)
        engines = {made: Decoding(running, asynchronous, made) for made in paths}
        plain, publishing = engines[None], engines[path]
        for _ in range(WARM_UP_STEPS):
            plain.step()
            publishing.step()
        ratios = []
        for _ in range(rounds):
            seconds = {plain: 0.0, publishing: 0.0}
            # Step by step in turn, so that both meet the same of what else the machine does.
            for step in range(BLOCK_SIZE):
                for engine in (plain, publishing) if step % 2 else (publishing, plain):
                    seconds[engine] += engine.step()
            ratios.append(seconds[publishing] / seconds[plain])
        shares.append(median(ratios) - 1.0)

        reader = SnapshotReader(path)
        snapshot = reader.read()
        assert snapshot is not None
        assert snapshot.residents["id"].tolist() == list(range(1, running + 1))
        assert reader.kv_position > running
        assert publishing.scheduler.publisher.failures == 0
        for engine in engines.values():
            engine.scheduler.shutdown()

    pairs = iter(range(PAIRS))
    benchmark.pedantic(lambda: compare(next(pairs)), rounds=1 if benchmark.disabled else PAIRS)

    share = median(shares)
    name = f"publish_share_{running}" + ("" if asynchronous else "_sync")
    benchmark.extra_info[name] = share
    if not benchmark.disabled:
        assert share < LARGEST_SHARE
