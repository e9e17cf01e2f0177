"""Drives an engine through varied batches, so that its batch times can be fitted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np

from app.identity import new_decision_id, request_key
from deployments.messages import Engine, EngineRequest, Failed

PROMPT_TOKENS = (16, 64, 192, 512, 1024, 2048)
CONCURRENCIES = (1, 4, 8)
OUTPUT_TOKENS = 16
# Every tokenizer has these ids as ordinary tokens.
LOWEST_ID, HIGHEST_ID = 300, 3000


class WarmUpFailed(RuntimeError):
    """The engine refused or failed a request of the warm-up."""


async def warm_up(engine: Engine, model: str, time_limit_s: float = 40.0) -> None:
    """Rounds of growing prompts, each at several concurrencies, as far as the time goes.

    The engine's step records, beside its snapshot, hold what came of it.
    """
    deadline_s = time.monotonic() + time_limit_s
    random = np.random.default_rng(0)
    for prompt_tokens, concurrency in _rounds(engine.scheduler.max_model_len):
        requests = [_request(model, prompt_tokens, random) for _ in range(concurrency)]
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                async with asyncio.TaskGroup() as group:
                    for request in requests:
                        group.create_task(_run(engine, request))
        except TimeoutError:
            return


def _rounds(max_model_len: int) -> Iterator[tuple[int, int]]:
    for prompt_tokens in PROMPT_TOKENS:
        if prompt_tokens + OUTPUT_TOKENS <= max_model_len:
            for concurrency in CONCURRENCIES:
                yield prompt_tokens, concurrency


def _request(model: str, prompt_tokens: int, random: np.random.Generator) -> EngineRequest:
    # Random, so that no prompt finds another's prefix in the cache.
    prompt = random.integers(LOWEST_ID, HIGHEST_ID, prompt_tokens, dtype=np.int32)
    decision_id = new_decision_id()
    return EngineRequest(
        decision_id=decision_id,
        request_key=request_key(decision_id),
        endpoint="completions",
        body={
            "model": model,
            "prompt": prompt.tolist(),
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        },
        prompt_token_ids=prompt,
        max_tokens=OUTPUT_TOKENS,
        predicted_output_tokens=OUTPUT_TOKENS,
        priority=0,
    )


async def _run(engine: Engine, request: EngineRequest) -> None:
    async for event in engine.generate(request):
        if isinstance(event, Failed):
            raise WarmUpFailed(f"status {event.status}: {event.error['message']}")
