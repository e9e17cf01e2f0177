"""Random workloads that press on every rule of the scheduler."""

from __future__ import annotations

from random import Random
from typing import Any


def random_workload(seed: int) -> dict[str, Any]:
    random = Random(seed)
    config = random_config(random)
    count = random.randint(8, 40)
    requests: list[dict[str, Any]] = []
    arrival = 0.0
    for i in range(count):
        if random.random() < 0.5:  # else in the same burst as the one before
            arrival += random.expovariate(1 / 20)
        requests.append(random_request(random, str(i), arrival, config, requests))
    if config["time_model"]:
        for request in requests:
            request["arrival"] *= config["time_model"][0]
    else:
        for request in requests:
            request["arrival"] = int(request["arrival"])
    return {"seed": seed, "config": config, "requests": requests}


def random_config(random: Random) -> dict[str, Any]:
    max_model_len = random.choice((96, 256, 700))
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
        "max_num_seqs": random.choice((2, 5, 16)),
        "block_size": block_size,
        "num_blocks": int(tightest * random.choice((1, 1.3, 2, 8))),
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
        "time_model": random.choice((None, [5e-3, 1e-5], [2e-3, 4e-4])),
        "idle_sleep": 1e-3,
    }


def random_request(
    random: Random,
    request_id: str,
    arrival: float,
    config: dict[str, Any],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    max_model_len = config["max_model_len"]
    prompt_tokens = random.randint(1, max_model_len * 2 // 3)
    output_tokens = random.randint(1, max_model_len // 3)
    request: dict[str, Any] = {
        "id": request_id,
        "arrival": arrival,
        "priority": random.randint(0, 3),
    }
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
