"""The stand-in for vLLM's engine core can be stopped anywhere, and repeated."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import EngineLoop, make_scheduler, state_of
from workloads import random_workload


def start(workload: dict[str, Any]) -> EngineLoop:
    return EngineLoop(workload, make_scheduler(workload["config"]))


def state(loop: EngineLoop) -> list[tuple[str, str, int, int]]:
    return [
        (name, state_of(request), request.num_computed_tokens, request.num_output_tokens)
        for name, request in loop.scheduler.requests.items()
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_second_loop_stops_in_the_same_state(seed: int) -> None:
    workload = random_workload(seed)
    passes = len(start(workload).run()["trace"]) // 2
    first, second = start(workload), start(workload)
    assert first.run(passes) == second.run(passes)
    assert state(first) == state(second)
    assert state(first) or first.arrivals, "stopped where nothing is left"


@pytest.mark.parametrize("seed", range(8))
def test_a_request_submitted_on_the_way_is_as_good_as_known_from_the_start(seed: int) -> None:
    workload = random_workload(seed)
    loop = start(workload)
    loop.run(len(start(workload).run()["trace"]) // 2)
    late = workload["requests"][0] | {"id": "late", "arrival": loop.clock, "abort": None}
    loop.submit(late)
    known = start(workload | {"requests": [*workload["requests"], late]})
    stopped, whole = loop.run(), known.run()
    assert stopped["trace"] == whole["trace"]
    assert stopped["token_times"] == whole["token_times"]
    assert len(whole["token_times"]["late"]) > 0
