"""Poisson load against a live server, and what its clients saw."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np

MAX_REQUESTS = 100_000

PROMPT_WORDS_MEDIAN = 100
PROMPT_WORDS_SIGMA = 0.8
"""Of the logarithm of the prompt's length."""
PROMPT_WORDS_MIN = 4
PROMPT_WORDS_MAX_IN_MEDIANS = 10

_TASKS = ("Summarize", "Explain", "Continue", "List the points of", "Answer briefly from")
_WORDS = (
    "river market stone window letter garden winter engine signal copper lantern harbor ledger "
    "orchard compass timber meadow canyon bridge station village painter captain doctor student "
    "carries follows builds measures forgets repairs counts answers crosses gathers describes "
    "quiet narrow bright hollow early distant careful broken steady ancient northern silver "
    "the a of under beyond between after before without and but while because near"
).split()


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and where."""

    url: str
    rate_qps: float
    requests: int
    seed: int
    model: str = "auto"
    prompt_words: int = PROMPT_WORDS_MEDIAN
    """Median of the prompts' lengths."""
    max_tokens: int | None = None
    request_timeout_s: float = 120.0
    time_limit_s: float = 1800.0
    """For the whole run; requests still unanswered then are counted as failed."""

    def __post_init__(self) -> None:
        if httpx.URL(self.url).scheme not in ("http", "https"):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise ValueError(f"requests must be from 1 to {MAX_REQUESTS}, not {self.requests}")
        if self.prompt_words < 1:
            raise ValueError(f"prompt_words must be at least 1, not {self.prompt_words}")
        for name in ("rate_qps", "request_timeout_s", "time_limit_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, not {value}")


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    """Since the start of the run."""
    prompt: str


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; a time that never came is None."""

    index: int
    scheduled_s: float
    sent_s: float | None = None
    ttft_s: float | None = None
    """From sending to the first token."""
    total_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    model: str | None = None
    instance: str | None = None
    decision_id: str | None = None
    predicted_ttft_s: float | None = None
    failure: str | None = None
    """A kind that can be counted, None for a request that was answered in full."""
    failure_detail: str | None = None


@dataclass(frozen=True, slots=True)
class Results:
    load: Load
    outcomes: Sequence[Outcome]
    elapsed_s: float
    failures: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        kinds = Counter(o.failure for o in self.outcomes if o.failure is not None)
        object.__setattr__(self, "failures", kinds)

    @property
    def ttfts_s(self) -> list[float]:
        """Of the requests answered in full."""
        return [o.ttft_s for o in self.outcomes if o.failure is None and o.ttft_s is not None]

    @property
    def decision_ids(self) -> frozenset[str]:
        return frozenset(o.decision_id for o in self.outcomes if o.decision_id is not None)

    def to_json(self) -> dict[str, Any]:
        return {
            "load": asdict(self.load),
            "elapsed_s": self.elapsed_s,
            "failures": dict(self.failures),
            "requests": [asdict(outcome) for outcome in self.outcomes],
        }


class _Failed(Exception):
    """The server's own refusal: an HTTP status or an error event within the stream."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def arrivals(load: Load) -> list[Arrival]:
    """A Poisson process and prompts of lognormal length in words, both from the seed alone."""
    rng = np.random.default_rng(load.seed)
    at_s = np.cumsum(rng.exponential(1.0 / load.rate_qps, load.requests))
    lengths = rng.lognormal(np.log(load.prompt_words), PROMPT_WORDS_SIGMA, load.requests)
    longest = PROMPT_WORDS_MAX_IN_MEDIANS * load.prompt_words
    words = np.clip(np.rint(lengths), PROMPT_WORDS_MIN, longest).astype(int)
    return [Arrival(float(at), _prompt(rng, int(n))) for at, n in zip(at_s, words, strict=True)]


def _prompt(rng: np.random.Generator, words: int) -> str:
    task = _TASKS[rng.integers(len(_TASKS))]
    body = rng.choice(_WORDS, words)
    return f"{task} this: " + " ".join(body) + "."


async def run(load: Load) -> Results:
    """Sends every request at its time whether or not earlier ones were answered (open loop)."""
    # trust_env=False: a proxy named in the environment would send the load elsewhere.
    async with httpx.AsyncClient(
        base_url=load.url,
        timeout=httpx.Timeout(load.request_timeout_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        trust_env=False,
        follow_redirects=False,
    ) as client:
        planned = arrivals(load)
        outcomes = [Outcome(index=i, scheduled_s=a.at_s) for i, a in enumerate(planned)]
        start_s = time.perf_counter()
        tasks = [
            asyncio.create_task(_request(client, load, arrival, outcome, start_s))
            for arrival, outcome in zip(planned, outcomes, strict=True)
        ]
        _, unfinished = await asyncio.wait(tasks, timeout=load.time_limit_s)
        for task in unfinished:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome, result in zip(outcomes, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                outcome.failure = "run_time_limit"
                outcome.failure_detail = f"unanswered at the limit of {load.time_limit_s:g} s"
            elif isinstance(result, BaseException):
                raise result
        return Results(load, outcomes, time.perf_counter() - start_s)


async def _request(
    client: httpx.AsyncClient, load: Load, arrival: Arrival, outcome: Outcome, start_s: float
) -> None:
    await asyncio.sleep(start_s + arrival.at_s - time.perf_counter())
    sent = time.perf_counter()
    outcome.sent_s = sent - start_s
    try:
        async with asyncio.timeout(load.request_timeout_s):
            await _stream(client, load, arrival.prompt, outcome, sent)
    except TimeoutError:
        outcome.failure = "request_timeout"
        outcome.failure_detail = f"not answered in full within {load.request_timeout_s:g} s"
    except _Failed as error:
        outcome.failure, outcome.failure_detail = error.kind, str(error)
    except httpx.HTTPError as error:
        outcome.failure, outcome.failure_detail = type(error).__name__, str(error)


async def _stream(
    client: httpx.AsyncClient, load: Load, prompt: str, outcome: Outcome, sent: float
) -> None:
    body: dict[str, Any] = {
        "model": load.model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if load.max_tokens is not None:
        body["max_tokens"] = load.max_tokens

    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        _read_headers(answer.headers, outcome)
        if answer.status_code != httpx.codes.OK:
            text = (await answer.aread()).decode(errors="replace")
            raise _Failed(f"http_{answer.status_code}", text)
        done = False
        # Read to the end of the body: a client that leaves at [DONE] counts as disconnected.
        async for event in _events(answer):
            if event == "[DONE]":
                done = True
                outcome.total_s = time.perf_counter() - sent
            else:
                _read_chunk(event, outcome, sent)
    if not done:
        raise _Failed("stream_cut", "the stream ended before [DONE]")
    if outcome.ttft_s is None:
        raise _Failed("no_token", "the stream ended without a token")


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


def _read_headers(headers: httpx.Headers, outcome: Outcome) -> None:
    outcome.model = headers.get("x-foretoken-model")
    outcome.instance = headers.get("x-foretoken-instance")
    outcome.decision_id = headers.get("x-foretoken-decision-id")
    predicted_ms = headers.get("x-foretoken-predicted-ttft-ms")
    if predicted_ms is None:
        return
    try:
        outcome.predicted_ttft_s = float(predicted_ms) / 1e3
    except ValueError as error:
        detail = f"x-foretoken-predicted-ttft-ms is not a number: {predicted_ms!r}"
        raise _Failed("bad_header", detail) from error


def _read_chunk(event: str, outcome: Outcome, sent: float) -> None:
    try:
        chunk = json.loads(event)
        if chunk.get("error"):
            raise _Failed("error_event", json.dumps(chunk["error"]))
        for choice in chunk["choices"]:
            # The role alone comes before any token; an end of sequence as first token has no text.
            text = any(value for key, value in choice["delta"].items() if key != "role")
            finish = choice.get("finish_reason")
            if outcome.ttft_s is None and (text or finish):
                outcome.ttft_s = time.perf_counter() - sent
            outcome.finish_reason = finish or outcome.finish_reason
        if usage := chunk.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise _Failed("bad_event", f"not a chat completion chunk: {event!r}") from error
