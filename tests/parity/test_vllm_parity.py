"""``sfs_ext.replay_workload`` against the scheduler it replays, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import EngineLoop, make_scheduler
from workloads import random_workload

from sfs_ext import replay_workload

SEEDS = range(60)
STEP = ("batch", "preempted", "finished", "free_blocks", "free_blocks_after")


def run_vllm(workload: dict[str, Any]) -> dict[str, Any]:
    return EngineLoop(workload, make_scheduler(workload["config"])).run()


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_schedules_as_vllm_does(seed: int) -> None:
    workload = random_workload(seed)
    real, replayed = run_vllm(workload), replay_workload(workload)
    for i, (theirs, ours) in enumerate(zip(real["trace"], replayed["trace"], strict=False)):
        assert dict(zip(STEP, ours, strict=False)) == dict(zip(STEP, theirs, strict=False)), (
            f"seed {seed}, step {i}: ours, then vLLM's; {workload['config']}"
        )
        assert ours[-1] == pytest.approx(theirs[-1], abs=1e-9), f"seed {seed}, step {i}: time"
    assert len(replayed["trace"]) == len(real["trace"])
    assert replayed["token_times"].keys() == real["token_times"].keys()
    for request_id, times in real["token_times"].items():
        assert replayed["token_times"][request_id] == pytest.approx(times, abs=1e-9)


def test_the_workloads_press_on_every_rule() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        workload = random_workload(seed)
        config, requests = workload["config"], workload["requests"]
        trace = replay_workload(workload)["trace"]
        seen["preemption"] += any(step[1] for step in trace)
        seen["asynchronous"] += config["async_scheduling"]
        seen["synchronous"] += not config["async_scheduling"]
        seen["priority"] += config["policy"] == "priority"
        seen["first come, first served"] += config["policy"] == "fcfs"
        seen["whole prefills"] += not config["enable_chunked_prefill"]
        seen["prefix cache"] += config["enable_prefix_caching"]
        seen["multi-turn"] += any("parent" in request for request in requests)
        seen["threshold"] += config["long_prefill_token_threshold"] > 0
        seen["watermark"] += config["watermark"] > 0
        seen["no full-sequence check"] += not config["scheduler_reserve_full_isl"]
        seen["EOS"] += any(r["output_len"] < r["max_tokens"] for r in requests)
        seen["context limit"] += any(
            r["prompt_len"] + r["output_len"] > config["max_model_len"] for r in requests
        )
    assert min(seen.values()) >= 5, seen
