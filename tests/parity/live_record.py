"""What a recording scheduler wrote (``recording_scheduler``), as a workload and its trace."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.v1.engine import FinishReason

TICK = 1e-5
"""Keeps the order of events between two steps; passes count whole numbers."""


def read_record(path: Path, prompts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """In the format of ``sfs_ext.replay_workload``, on a clock of passes: order is all that counts.

    ``prompts``: what each client's prompt shares with others (``prefix_group`` to ``parent_len``).
    """
    (_, config), *events, end = (json.loads(line) for line in path.read_text().splitlines())
    assert end == ["shutdown"], "the engine was not shut down in good order"
    live = _LiveRun(2 if config["async_scheduling"] else 1, prompts)
    for event, *what in events:
        getattr(live, event)(*what)
    return {
        "config": config | {"time_model": None, "idle_sleep": 0.0},
        "requests": list(live.requests.values()),
        "trace": live.trace,
        "token_times": live.token_times,
    }


@dataclass
class _LiveRun:
    """Follows the events through the passes of vLLM's engine core."""

    depth: int
    prompts: dict[str, dict[str, Any]]
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    trace: list[list[Any]] = field(default_factory=list)
    token_times: dict[str, list[float]] = field(default_factory=dict)
    in_flight: deque[list[Any]] = field(default_factory=deque)
    engine_pass: int = 0
    awaits: bool = False
    """The pass has scheduled and waits for the oldest batch."""
    ticks: int = 0

    def moment(self) -> float:
        """Now: up to the pass's number before it schedules, up to half a pass later behind that."""
        self.ticks += 1
        return self.engine_pass - (0.0 if self.awaits else 0.5) + self.ticks * TICK

    def add(self, core_id: str, prompt_tokens: int, max_tokens: int, priority: int) -> None:
        assert not self.awaits, "vLLM takes arrivals between passes only"
        name = client_id(core_id)
        self.requests[name] = {
            "id": name,
            "arrival": self.moment(),
            "prompt_len": prompt_tokens,
            "output_len": max_tokens,
            "max_tokens": max_tokens,
            "priority": priority,
        } | self.prompts[name]

    def abort(self, core_ids: list[str]) -> None:
        for name in map(client_id, core_ids):
            self.requests[name]["abort"] = self.moment()

    def schedule(
        self, batch: list[Any], preempted: list[str], free_blocks: int, has_requests: bool
    ) -> None:
        named = [[client_id(core_id), tokens] for core_id, tokens in batch]
        step = [named, sorted(map(client_id, preempted)), [], free_blocks, free_blocks, 0.0]
        self.trace.append(step)
        self.in_flight.append(step)
        self.awaits = len(self.in_flight) == self.depth or not (batch or has_requests)
        if not self.awaits:
            self.pass_ends()

    def update(self, results: list[Any], free_blocks: int) -> None:
        step = self.in_flight.popleft()
        for core_id, tokens, finish in results:
            name = client_id(core_id)
            self.token_times.setdefault(name, []).extend([0.0] * tokens)
            if finish is not None:
                step[2].append(name)
            if finish == FinishReason.STOP:
                self.requests[name]["output_len"] = len(self.token_times[name])
        step[4] = free_blocks
        self.pass_ends()

    def pass_ends(self) -> None:
        self.engine_pass += 1
        self.awaits = False
        self.ticks = 0


def client_id(core_id: str) -> str:
    """vLLM tells apart requests of one id by a suffix."""
    return core_id.rsplit("-", 1)[0]
