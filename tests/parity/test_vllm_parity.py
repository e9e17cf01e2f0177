"""``sfs_ext.replay_workload`` against the scheduler it replays, step by step."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import EngineLoop, make_scheduler
from traces import first_difference
from workloads import random_workload

from sfs_ext import replay_workload

ENOUGH_WORKLOADS = 300
STATES = ("waiting", "prefilling", "decoding", "preempted")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload through both schedulers."""

    difference: str | None
    """The first, with what repeats it; None: there is none."""
    features: Counter[str]


@functools.cache
def compare(seed: int) -> Comparison:
    workload = random_workload(seed)
    loop = EngineLoop(workload, make_scheduler(workload["config"]))
    real, replayed = loop.run(), replay_workload(workload)
    difference = first_difference(replayed, real)
    if difference is not None:
        difference = (
            f"FORETOKEN_PARITY_SEED={seed} FORETOKEN_PARITY_WORKLOADS=1: {difference}\n"
            f"{workload['config']}"
        )
    return Comparison(difference, features_of(loop))


def features_of(loop: EngineLoop) -> Counter[str]:
    """What the workload pressed on: 1 for each rule, and for each kind of abort how many."""
    config, requests = loop.workload["config"], loop.workload["requests"]
    timing = "asynchronous" if config["async_scheduling"] else "synchronous"
    features = Counter(
        {
            timing: 1,
            f"policy {config['policy']}": 1,
            "preemption": any(step[1] for step in loop.trace),
            "whole prefills": not config["enable_chunked_prefill"],
            "prefix cache": config["enable_prefix_caching"],
            "multi-turn": any("parent" in request for request in requests),
            "threshold": config["long_prefill_token_threshold"] > 0,
            "adaptive threshold": config["long_prefill_token_threshold"] > 0
            and config["long_prefill_token_threshold_adaptive"],
            "active limit": config["max_num_active_seqs"] > 0,
            "watermark": config["watermark"] > 0,
            "no full-sequence check": not config["scheduler_reserve_full_isl"],
            "EOS": any(request["output_len"] < request["max_tokens"] for request in requests),
            "context limit": any(
                len(loop.token_times.get(request["id"], ())) + request["prompt_len"]
                == config["max_model_len"]
                for request in requests
            ),
        }
    )
    for abort in loop.aborts:
        features[f"{timing}: {abort.state} request aborted"] += 1
        if abort.state != "ended":
            features[f"{timing}: aborted with {abort.batches} batches in flight"] += 1
    return features


EXPECTED = {
    "preemption",
    "policy fcfs",
    "policy priority",
    "whole prefills",
    "prefix cache",
    "multi-turn",
    "threshold",
    "adaptive threshold",
    "active limit",
    "watermark",
    "no full-sequence check",
    "EOS",
    "context limit",
    *(
        f"{timing}{suffix}"
        for timing, depth in (("synchronous", 1), ("asynchronous", 2))
        for suffix in (
            "",
            *(f": {state} request aborted" for state in (*STATES, "ended")),
            *(f": aborted with {n} batches in flight" for n in range(depth + 1)),
        )
    ),
}


def test_replay_schedules_as_vllm_does(case_seeds: range) -> None:
    differences = [found for seed in case_seeds if (found := compare(seed).difference)]
    assert not differences, "\n".join(differences)


def test_the_workloads_press_on_every_rule(seeds: range) -> None:
    if len(seeds) < ENOUGH_WORKLOADS:
        pytest.skip(f"{len(seeds)} workloads cannot be asked for every rule: {ENOUGH_WORKLOADS}")
    seen = sum((compare(seed).features for seed in seeds), Counter[str]())
    missed = {feature: seen[feature] for feature in EXPECTED if seen[feature] < 3}
    assert not missed, f"FORETOKEN_PARITY_SEED={seeds[0]}: {missed} of {seen}"
