"""What vLLM would do with a workload, step by step: JSON in, JSON out.

A workload is ``{"config": {...}, "requests": [...]}``. The configuration takes the names of
:class:`SchedulerConfig`, and ``time_model`` (``[a, b]``: a batch lasts a + b·tokens seconds, or
null: the clock counts passes of the engine loop) and ``idle_sleep`` (seconds). A request is
``{"id", "arrival", "prompt_len", "output_len", "max_tokens", "priority"}``; an ``output_len`` below
``max_tokens`` ends by EOS. ``prefix_group`` and ``prefix_len`` share the first tokens within a
group, ``parent`` and ``parent_len`` with an earlier request's prompt and output.

``abort`` is when the request's client goes away. The engine hears of it where a pass begins, after
the arrivals, or where the batch that the pass waits for is done, before its results are taken. On a
clock of passes, pass k begins at k and takes results at k + 0.5.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

from sfs_ext._core import BatchTime, SchedulerConfig, replay

_CONFIG_DEFAULTS: dict[str, Any] = {
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 128,
    "block_size": 16,
    "num_blocks": 10000,
    "max_model_len": 8192,
    "enable_prefix_caching": False,
}
_CLOCK_KEYS = {"time_model", "idle_sleep"}


def replay_workload(workload: dict[str, Any], max_steps: int = 200_000) -> dict[str, Any]:
    """Replays one workload.

    Returns the workload with ``trace``, a list of ``[batch, preempted, finished, free_blocks,
    free_blocks_after_results, time_s]`` for each step, and ``token_times`` in seconds by request
    id. Raises ValueError for a workload that makes no sense, RuntimeError for one that is
    unfinished after ``max_steps``.
    """
    settings = _CONFIG_DEFAULTS | workload["config"]
    limits = {k: v for k, v in settings.items() if k not in _CLOCK_KEYS and v is not None}
    unknown = sorted(key for key in limits if not hasattr(SchedulerConfig, key))
    if unknown:
        raise ValueError(f"workload config: unknown {', '.join(unknown)}")
    config = SchedulerConfig(**limits)
    requests = workload["requests"]
    ids = [str(request["id"]) for request in requests]
    if len(set(ids)) != len(ids):
        raise ValueError("workload: request ids must be unique")
    _check_parents(requests, ids)
    _check_times(requests, ids)
    time_model = settings.get("time_model")
    steps, token_times = replay(
        config,
        _core_requests(requests, ids, config),
        batch_time=BatchTime(time_model[0], time_model[1], 0.0, 0.0) if time_model else None,
        idle_sleep_s=float(settings.get("idle_sleep") or 0.0),
        max_steps=max_steps,
    )
    trace = [
        [
            [[ids[index], tokens] for index, tokens in step["batch"]],
            sorted(ids[index] for index in step["preempted"]),
            [ids[index] for index in step["finished"]],
            step["free_blocks"],
            step["free_blocks_after"],
            step["time_s"],
        ]
        for step in steps
    ]
    times = {ids[index]: times for index, times in enumerate(token_times) if times}
    return workload | {"trace": trace, "token_times": times}


def _check_parents(requests: list[dict[str, Any]], ids: list[str]) -> None:
    earlier: set[str] = set()
    for request_id, request in zip(ids, requests, strict=True):
        parent = request.get("parent")
        if parent is not None and str(parent) not in earlier:
            raise ValueError(f"request {request_id}: its parent {parent} is not an earlier one")
        earlier.add(request_id)


def _check_times(requests: list[dict[str, Any]], ids: list[str]) -> None:
    for request_id, request in zip(ids, requests, strict=True):
        arrival, abort = float(request["arrival"]), _abort(request)
        if not math.isfinite(arrival):
            raise ValueError(f"request {request_id}: its arrival {arrival} is not finite")
        if not abort >= arrival:
            raise ValueError(f"request {request_id}: abort {abort} comes before arrival {arrival}")


def _abort(request: dict[str, Any]) -> float:
    abort = request.get("abort")
    return math.inf if abort is None else float(abort)


def _core_requests(
    requests: list[dict[str, Any]], ids: list[str], config: SchedulerConfig
) -> list[dict[str, Any]]:
    rank = {request_id: position for position, request_id in enumerate(sorted(ids))}
    by_id = dict(zip(ids, requests, strict=True))
    return [
        {
            "arrival_s": float(request["arrival"]),
            "rank": rank[request_id],
            "prompt_tokens": request["prompt_len"],
            "output_tokens": request["output_len"],
            "max_tokens": request.get("max_tokens", request["output_len"]),
            "priority": request.get("priority", 0),
            "abort_s": _abort(request),
            "block_keys": _block_keys(request_id, by_id, config)
            if config.enable_prefix_caching
            else [],
        }
        for request_id, request in by_id.items()
    ]


def _block_keys(
    request_id: str, by_id: dict[str, dict[str, Any]], config: SchedulerConfig
) -> list[int]:
    request = by_id[request_id]
    longest = min(
        request["prompt_len"] + request.get("max_tokens", request["output_len"]),
        config.max_model_len,
    )
    return [
        _content_key(request_id, block, by_id, config.block_size)
        for block in range(longest // config.block_size)
    ]


def _content_key(
    request_id: str, block: int, by_id: dict[str, dict[str, Any]], block_size: int
) -> int:
    """Names the content of a block and of all before it: the request's own, or a shared one."""
    request = by_id[request_id]
    end = (block + 1) * block_size
    parent = request.get("parent")
    if parent is not None and end <= request.get("parent_len", 0):
        return _content_key(str(parent), block, by_id, block_size)
    group = request.get("prefix_group")
    owner = f"request {request_id}"
    if group is not None and end <= request.get("prefix_len", 0):
        owner = f"group {group}"
    digest = blake2b(f"{owner} block {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
