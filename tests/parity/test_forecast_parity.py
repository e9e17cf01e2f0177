"""Forecasts from published snapshots, against vLLM's real scheduler run on from there."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import EngineLoop, make_scheduler
from workloads import random_workload

from deployments.publishing_scheduler import (
    EXTRA_ARGS_KEY,
    PublishingAsyncScheduler,
    PublishingScheduler,
    SnapshotTarget,
)
from sfs_ext import BatchTime, Fleet, ForecastStatus, Snapshot, SnapshotReader, query_dtype

FORECASTS = int(os.environ.get("FORETOKEN_PARITY_FORECASTS", "100"))
QUERY = "query"


class VirtualTime:
    """Publishing schedulers whose clock is that of the loop that drives them."""

    def __init__(self) -> None:
        self.loop: EngineLoop | None = None

    def __call__(self) -> float:
        return 0.0 if self.loop is None else self.loop.now_s

    def classes(self) -> tuple[type[PublishingScheduler], type[PublishingAsyncScheduler]]:
        clock = {"clock": staticmethod(self)}
        return (
            type("VirtualScheduler", (PublishingScheduler,), clock),
            type("VirtualAsyncScheduler", (PublishingAsyncScheduler,), clock),
        )


def workload_of(random: Random, seed: int) -> dict[str, Any]:
    """In virtual time; all lengths known, nobody leaves, no answer known in advance."""
    workload = random_workload(seed)
    workload["config"]["time_model"] = random.choice(([5e-3, 1e-5], [2e-3, 4e-4]))
    scale_s = workload["config"]["time_model"][0]
    prompts = {request["id"]: request["prompt_len"] for request in workload["requests"]}
    for i, request in enumerate(workload["requests"]):
        request.pop("abort", None)
        if "parent" in request:
            request["parent_len"] = min(request["parent_len"], prompts[request["parent"]])
        # Equal arrivals under priority would be told apart by vLLM's request ids.
        request["arrival"] = request["arrival"] * scale_s + i * 1e-9
        request["extra_args"] = {
            EXTRA_ARGS_KEY: {
                "request_key": i + 1,
                "predicted_output_tokens": float(request["output_len"]),
            }
        }
    return workload


def query_of(random: Random, workload: dict[str, Any], arrival_s: float) -> dict[str, Any]:
    config, requests = workload["config"], workload["requests"]
    prompt_tokens = random.randint(1, config["max_model_len"] * 2 // 3)
    output_tokens = random.randint(1, config["max_model_len"] // 3)
    query: dict[str, Any] = {
        "id": QUERY,
        "arrival": arrival_s,
        "priority": random.randint(0, 3),
        "output_len": output_tokens,
        "max_tokens": output_tokens,
        "prompt_len": prompt_tokens,
    }
    if random.random() < 0.7:  # begins like another
        alike = random.choice(requests)
        length = random.randint(1, alike["prompt_len"])
        query |= {"parent": alike["id"], "parent_len": length}
        query["prompt_len"] = min(length + random.randint(0, 40), config["max_model_len"] - 1)
    return query


def forecast(
    path: str, scheduler: PublishingScheduler, loop: EngineLoop, query: dict[str, Any]
) -> Any:
    fleet = Fleet()
    fixed_s, per_token_s = loop.time_model
    reader = SnapshotReader(path)
    fleet.add(reader.config, BatchTime(fixed_s, per_token_s, 0.0, 0.0))
    fleet.attach(0, path)
    snapshot = reader.read()
    assert snapshot is not None
    asked = np.zeros(1, query_dtype)
    asked["prompt_tokens"] = query["prompt_len"]
    asked["predicted_output_tokens"] = query["output_len"]
    asked["max_tokens"] = query["max_tokens"]
    asked["priority"] = query["priority"]
    asked["arrival_s"] = query["arrival"]
    prompt = np.array([loop.token(QUERY, i) for i in range(query["prompt_len"])], np.int32)
    [answer] = fleet.forecast(float(snapshot.header["published_s"]), asked, [prompt])
    return answer


def state_of(snapshot: Snapshot) -> set[str]:
    """What the forecast had to go on from."""
    residents, header = snapshot.residents, snapshot.header
    running = residents[residents["status"] == 0]
    kinds = {f"{header['in_flight_batches']} in flight"}
    if np.any(running["computed_tokens"] < running["prompt_tokens"]):
        kinds.add("mid-prefill")
    if np.any(residents["status"] == 2):
        kinds.add("preempted")
    if np.any(residents["status"] == 1):
        kinds.add("waiting")
    return kinds


def test_the_first_token_comes_when_forecast(tmp_path: Path, record_property: Any) -> None:
    seed = int(os.environ.get("FORETOKEN_PARITY_FORECAST_SEED", Random().randrange(2**32)))
    print(f"FORETOKEN_PARITY_FORECAST_SEED={seed}")
    random = Random(seed)
    seen = Counter[str]()
    for number in range(FORECASTS):
        workload = workload_of(random, random.randrange(2**32))
        time = VirtualTime()
        path = str(tmp_path / f"snapshot-{number}")
        scheduler = make_scheduler(
            workload["config"], time.classes(), additional_config=SnapshotTarget(path)
        )
        time.loop = loop = EngineLoop(workload, scheduler)
        loop.run(random.randint(1, 80))
        snapshot = SnapshotReader(path).read()
        assert snapshot is not None
        assert scheduler.publisher.failures == 0
        # Whoever comes after the query may share its batches.
        loop.arrivals.clear()
        arrival_s = float(snapshot.header["published_s"]) + random.uniform(1e-6, 0.05)
        query = query_of(random, workload, arrival_s)
        loop.submit(query)
        answer = forecast(path, scheduler, loop, query)
        loop.run()
        scheduler.shutdown()
        first_s = loop.token_times[QUERY][0] - arrival_s
        where = f"seed {seed}, forecast {number}: {workload['config']}"
        assert answer["status"] == ForecastStatus.OK, where
        assert answer["ttft_s"] == pytest.approx(first_s, rel=1e-9), where
        seen.update(state_of(snapshot))
        seen["prefix hit"] += answer["cached_tokens"] > 0
        for flag in ("async_scheduling", "enable_prefix_caching", "enable_chunked_prefill"):
            seen[f"{flag} {workload['config'][flag]}"] += 1
        seen[workload["config"]["policy"]] += 1
    assert (
        min(
            seen[kind]
            for kind in (
                "0 in flight",
                "1 in flight",
                "2 in flight",
                "mid-prefill",
                "preempted",
                "waiting",
                "prefix hit",
                "fcfs",
                "priority",
                "async_scheduling True",
                "async_scheduling False",
            )
        )
        >= FORECASTS // 50
    ), seen
