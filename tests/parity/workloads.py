"""Random workloads that press on every rule of the scheduler."""

from __future__ import annotations

from random import Random
from typing import Any

from engine_loop import Batch, EngineLoop, make_scheduler

SHAPES = ((0.6, 0.2), (0.2, 0.4), (0.05, 0.8), (0.05, 0.8))
"""Longest prompt and output in context lengths; requests of the last outgrow a tight pool."""


def random_workload(seed: int) -> dict[str, Any]:
    random = Random(seed)
    config = random_config(random)
    workload = {"seed": seed, "config": config, "requests": random_requests(random, config)}
    whose = random.random()
    if whose < 0.3:
        abort_at_random(random, workload)
    elif whose < 0.8:
        abort_where_it_matters(random, workload)
    return workload


def random_config(random: Random) -> dict[str, Any]:
    max_model_len = random.choice((64, 200, 500))
    block_size = random.choice((4, 16, 32))
    chunked = random.random() < 0.75
    budget = random.choice((24, 64, 200, 1024))
    policy = random.choice(("fcfs", "fcfs", "priority"))
    watermark = random.choice((0.0, 0.0, 0.01, 0.1))
    longest = -(-max_model_len // block_size)
    # The tightest pool still holds one longest request beside the null block and the watermark.
    tightest = int((longest + 2) / (1 - watermark)) + 1
    return {
        "max_num_batched_tokens": budget if chunked else max(budget, max_model_len),
        "max_num_seqs": random.choice((2, 6, 6, 16)),
        "max_num_active_seqs": random.choice((0, 0, 0, 0, 0, 0, 2)),
        "block_size": block_size,
        "num_blocks": int(tightest * random.choice((1, 1, 1.5, 6))),
        "max_model_len": max_model_len,
        "policy": policy,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": random.random() < 0.6,
        "async_scheduling": random.random() < 0.5,
        "long_prefill_token_threshold": random.choice((0, 0, 8, 40)) if chunked else 0,
        "long_prefill_token_threshold_adaptive": random.random() < 0.3,
        "watermark": watermark,
        # Off, two equals under priority can evict one another for ever, in vLLM too.
        "scheduler_reserve_full_isl": policy == "priority" or random.random() < 0.6,
        "time_model": random.choice((None, None, [5e-3, 1e-5], [2e-3, 4e-4])),
        "idle_sleep": 1e-3,
    }


def random_requests(random: Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    shape, gap = random.choice(SHAPES), random.choice((1, 20))
    requests: list[dict[str, Any]] = []
    arrival = 0.0
    for i in range(random.randint(4, random.choice((8, 30)))):
        if random.random() < 0.5:  # else in the same burst as the one before
            arrival += random.expovariate(1 / gap)
        request = random_request(random, config, shape, requests)
        requests.append({"id": str(i), "arrival": on_clock(arrival, config)} | request)
    return requests


def on_clock(passes: float, config: dict[str, Any]) -> float:
    """As ``arrival`` and ``abort`` count: seconds, or passes, of which halves can be told apart."""
    return passes * config["time_model"][0] if config["time_model"] else int(2 * passes) / 2


def random_request(
    random: Random,
    config: dict[str, Any],
    shape: tuple[float, float],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    max_model_len = config["max_model_len"]
    prompt_tokens, output_tokens = (random.randint(1, int(max_model_len * s)) for s in shape)
    request: dict[str, Any] = {"priority": random.randint(0, 3)}
    kind = random.random()
    if kind < 0.3:
        request["prefix_group"] = random.randrange(3)
        request["prefix_len"] = random.randint(1, prompt_tokens)
    elif kind < 0.5 and earlier:
        parent = random.choice(earlier)
        said = min(parent["prompt_len"] + parent["output_len"], max_model_len - 2)
        prompt_tokens = min(said + random.randint(1, 40), max_model_len - 1)
        request["parent"] = parent["id"]
        request["parent_len"] = min(said, prompt_tokens)
    limit = random.choice((output_tokens, output_tokens, output_tokens + 30, max_model_len))
    return request | {
        "prompt_len": prompt_tokens,
        "output_len": output_tokens,
        "max_tokens": max(limit, output_tokens),
    }


def abort_at_random(random: Random, workload: dict[str, Any]) -> None:
    """Clients that go away at once, at any moment of their answer, or after it."""
    config = workload["config"]
    share = random.choice((0.2, 0.6))
    patience = random.choice((0, 0.03, 0.3, 1)) * config["max_model_len"]
    for request in workload["requests"]:
        if random.random() < share:
            stays = patience * random.expovariate(1)
            request["abort"] = request["arrival"] + on_clock(stays, config)
    if random.random() < 0.5:  # the engine is idle when the first one comes
        workload["requests"][0]["abort"] = workload["requests"][0]["arrival"]


def abort_where_it_matters(random: Random, workload: dict[str, Any]) -> None:
    """Clients that go away about when their prompt is computed, or when they are preempted.

    Aims at what vLLM would do if all stayed; an abort shifts what comes behind it.
    """
    config = workload["config"]
    requests = {request["id"]: request for request in workload["requests"]}
    at_preemption = random.random() < 0.75
    odds = 0.5 if at_preemption else 0.1

    def aim(batch: Batch) -> None:
        scheduled, preempted = batch.record[:2]
        prefilled = [request_id for request_id, tokens in scheduled if tokens > 1]
        for request_id in preempted if at_preemption else prefilled:
            request = requests[request_id]
            if "abort" not in request and random.random() < odds:
                request["abort"] = loop.clock + on_clock(2 * random.random(), config)

    loop = EngineLoop(workload, make_scheduler(config), aim)
    loop.run()
