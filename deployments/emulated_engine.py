"""The scheduler in real time behind the Engine protocol: no GPU, no weights, placeholder text.

Batches, queues, KV cache and token times are the scheduler's; only the words mean nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import numpy as np

import sfs_ext
from app.config import EmulatedEngineSettings
from app.types import FINISH_REASONS
from deployments.messages import (
    Accepted,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FirstToken,
    Payload,
)
from deployments.openai_protocol import DONE, AnswerFrame, ApiError

_WORDS = (
    "the",
    "river",
    "bends",
    "where",
    "old",
    "stones",
    "keep",
    "a",
    "slow",
    "green",
    "light",
)

# Each would change what an answer looks like or means, which placeholder text cannot follow.
_SINGLE = ("n", "best_of")
_ABSENT = (
    *("stop", "stop_token_ids", "use_beam_search"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "logit_bias"),
    *("tools", "tool_choice", "functions", "function_call", "audio", "modalities"),
    *(
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
    ),
)
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class Progress(NamedTuple):
    """One event of the engine's thread, as ``sfs_ext.event_dtype`` has it after the id."""

    tokens: int
    finish: int
    at_s: float


class EmulatedEngine:
    """One dispatcher reads the engine's events and hands each to its request's queue."""

    def __init__(
        self, settings: EmulatedEngineSettings, context_tokens: int, snapshot_path: str
    ) -> None:
        self.scheduler = settings.scheduler_config(context_tokens)
        self.batch_time = settings.batch_time.batch_time()
        self.snapshot_path = snapshot_path
        self._lengths = settings.output_tokens
        self._random = np.random.default_rng()
        self._queues: dict[int, asyncio.Queue[Progress | RuntimeError]] = {}
        self._engine = sfs_ext.EmulatedEngine(self.scheduler, self.batch_time, snapshot_path)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._engine.fileno(), self._dispatch)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        try:
            _refuse_unsupported(request.body)
            output_tokens = self._draw_output_tokens(request)
        except ApiError as refusal:
            yield Failed(refusal.status, refusal.error)
            return
        key = request.request_key
        queue: asyncio.Queue[Progress | RuntimeError] = asyncio.Queue()
        self._queues[key] = queue
        try:
            self._engine.submit(
                key,
                request.prompt_token_ids,
                output_tokens,
                request.max_tokens,
                request.predicted_output_tokens,
                request.priority,
                time.time(),
            )
            yield Accepted(time.time())
            async for event in _answer(request, queue):
                yield event
        finally:
            # Does nothing for a request that has finished.
            self._engine.abort(key)
            del self._queues[key]

    async def check_health(self) -> None:
        if (error := self._engine.error()) is not None:
            failure = RuntimeError(f"the emulated engine's thread ended: {error}")
            for queue in self._queues.values():
                queue.put_nowait(failure)
            raise failure

    async def stop(self) -> None:
        self._loop.remove_reader(self._engine.fileno())
        self._engine.stop()

    def _dispatch(self) -> None:
        for request_id, *progress in self._engine.poll().tolist():
            if (queue := self._queues.get(request_id)) is not None:
                queue.put_nowait(Progress(*progress))

    def _draw_output_tokens(self, request: EngineRequest) -> int:
        """The true length, of which the router knows nothing."""
        min_tokens = _min_tokens(request)
        if request.body.get("ignore_eos"):
            return request.max_tokens
        sigma = self._lengths.sigma
        drawn = self._random.lognormal(math.log(self._lengths.mean) - sigma**2 / 2, sigma)
        return max(1, min_tokens, round(drawn))


async def _answer(
    request: EngineRequest, queue: asyncio.Queue[Progress | RuntimeError]
) -> AsyncGenerator[EngineEvent, None]:
    body = request.body
    prefix = "chatcmpl" if request.endpoint == "chat" else "cmpl"
    frame = AnswerFrame(
        request.endpoint,
        f"{prefix}-{request.decision_id}",
        body["model"],
        int(time.time()),
    )
    stream = bool(body.get("stream"))
    words = itertools.cycle(_WORDS)
    text: list[str] = []
    finish = 0
    while not finish:
        progress = await queue.get()
        if isinstance(progress, RuntimeError):
            raise progress
        if not text and progress.tokens:
            yield FirstToken(progress.at_s)
        fresh = [f"{next(words)} " for _ in range(progress.tokens - len(text))]
        finish = progress.finish
        if stream and fresh:
            opening = b"" if text else frame.opening()
            yield Payload(opening + b"".join(map(frame.token, fresh)))
        text += fresh
    if finish not in FINISH_REASONS:
        raise RuntimeError(f"{request.decision_id} was aborted by the engine")
    reason = FINISH_REASONS[finish]
    prompt_tokens = len(request.prompt_token_ids)
    if stream:
        last = frame.closing(reason)
        if (body.get("stream_options") or {}).get("include_usage"):
            last += frame.usage(prompt_tokens, len(text))
        yield Payload(last + DONE)
    else:
        yield Payload(frame.whole("".join(text), reason, prompt_tokens, len(text)))
    yield Finished(prompt_tokens, len(text), reason)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for param in _SINGLE:
        if body.get(param) not in (None, 1):
            raise _unsupported(param, "only 1")
    for param in _ABSENT:
        value = body.get(param)
        if value and value not in _HARMLESS.get(param, ()):
            raise _unsupported(param, "nothing there")


def _min_tokens(request: EngineRequest) -> int:
    min_tokens = request.body.get("min_tokens")
    if min_tokens is None:
        return 0
    if type(min_tokens) is not int or not 0 <= min_tokens <= request.max_tokens:
        raise ApiError(
            400,
            f"min_tokens must be a whole number from 0 to max_tokens, here {request.max_tokens}: "
            f"{min_tokens!r}",
            "min_tokens",
        )
    return min_tokens


def _unsupported(param: str, supported: str) -> ApiError:
    return ApiError(
        400,
        f"{param} is not supported by the emulated engine, which writes placeholder text; "
        f"it takes {supported}",
        param,
        code="unsupported_parameter",
    )
