"""Traces in the format of ``sfs_ext.replay_workload``, compared."""

from __future__ import annotations

from math import isclose
from typing import Any

STEP = ("batch", "preempted", "finished", "free_blocks", "free_blocks_after", "time_s")


def first_difference(ours: dict[str, Any], vllms: dict[str, Any]) -> str | None:
    """Of ``trace`` and ``token_times``, in words; None: there is none."""
    for i, (our, their) in enumerate(zip(ours["trace"], vllms["trace"], strict=False)):
        for name, a, b in zip(STEP, our, their, strict=True):
            if not (same_time(a, b) if name == "time_s" else a == b):
                return f"step {i}: {name} is {a}, vLLM's is {b}"
    if len(ours["trace"]) != len(vllms["trace"]):
        return f"{len(ours['trace'])} steps, vLLM takes {len(vllms['trace'])}"
    for request_id in ours["token_times"].keys() | vllms["token_times"].keys():
        a, b = (side["token_times"].get(request_id, []) for side in (ours, vllms))
        if len(a) != len(b) or not all(map(same_time, a, b)):
            return f"tokens of request {request_id} come at {a}, vLLM's at {b}"
    return None


def same_time(a_s: float, b_s: float) -> bool:
    return isclose(a_s, b_s, abs_tol=1e-9)
