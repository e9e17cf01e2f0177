from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from app.evaluation.live import PROMPT_WORDS_MEDIAN, PROMPT_WORDS_SIGMA, Load, arrivals, run

Serve = Callable[..., AbstractContextManager[Any]]


def load(url: str, **changes: Any) -> Load:
    return Load(**{"url": url, "rate_qps": 200.0, "requests": 5, "seed": 1, **changes})


def test_streams_every_request_and_keeps_what_the_server_said(serve: Serve) -> None:
    with serve() as server:
        results = asyncio.run(run(load(server.url)))

    assert not results.failures
    assert len(results.ttfts_s) == len(server.bodies) == 5
    assert server.streamed_to_the_end == 5, "no client left before the end of its answer"
    assert results.decision_ids == {f"dec-{i:024x}" for i in range(5)}
    for outcome in results.outcomes:
        assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 3)
        assert outcome.finish_reason == "stop"
        assert (outcome.model, outcome.instance) == ("qwen3-0.6b", "qwen3-0.6b-0")
        assert outcome.predicted_ttft_s == pytest.approx(0.0125)
        assert outcome.total_s is not None
        assert outcome.ttft_s is not None
        assert server.prefill_s <= outcome.ttft_s <= outcome.total_s, (
            "the role alone is not a token"
        )


def test_sends_what_was_asked_for(serve: Serve) -> None:
    with serve() as server:
        asyncio.run(run(load(server.url, requests=1, model="qwen3-8b", max_tokens=9)))

    (body,) = server.bodies
    (message,) = body.pop("messages")
    assert message["content"] == arrivals(load(server.url, requests=1))[0].prompt
    assert body == {
        "model": "qwen3-8b",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("behaviour", "kind", "detail"),
    [
        ("refuse", "http_503", "no instance"),
        ("error", "error_event", "engine died"),
        ("cut", "stream_cut", "[DONE]"),
        ("garble", "bad_event", "not a chat completion chunk"),
        ("no token", "no_token", "without a token"),
        ("bad header", "bad_header", "'soon'"),
    ],
)
def test_a_failure_is_kept_and_named(serve: Serve, behaviour: str, kind: str, detail: str) -> None:
    with serve("ok", behaviour, "ok") as server:
        results = asyncio.run(run(load(server.url, requests=3)))

    assert results.failures == {kind: 1}
    assert len(results.ttfts_s) == 2
    (failed,) = [o for o in results.outcomes if o.failure]
    assert failed.failure_detail is not None
    assert detail in failed.failure_detail


def test_a_request_has_a_time_limit(serve: Serve) -> None:
    with serve("hang") as server:
        results = asyncio.run(run(load(server.url, requests=2, request_timeout_s=0.5)))

    assert results.failures == {"request_timeout": 1}


def test_the_run_has_a_time_limit(serve: Serve) -> None:
    with serve("ok", "hang") as server:
        results = asyncio.run(run(load(server.url, requests=2, time_limit_s=0.5)))

    assert results.failures == {"run_time_limit": 1}
    assert results.elapsed_s < 5


def test_a_server_that_is_not_there_fails_each_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        results = asyncio.run(run(load(url, requests=2)))

    assert results.failures == {"ConnectError": 2}


def test_a_proxy_in_the_environment_is_not_used(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with serve() as server:
        assert not asyncio.run(run(load(server.url, requests=1))).failures


def test_results_are_plain_json(serve: Serve) -> None:
    with serve("refuse") as server:
        results = asyncio.run(run(load(server.url, requests=2)))

    read = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert read["failures"] == {"http_503": 1}
    assert [r["index"] for r in read["requests"]] == [0, 1]


def test_arrivals_are_poisson_and_prompts_lognormal() -> None:
    planned = arrivals(load("http://unused", rate_qps=4.0, requests=4000))
    gaps_s = np.diff([0.0, *(a.at_s for a in planned)])
    log_words = np.log([len(a.prompt.split()) for a in planned])

    assert gaps_s.mean() == pytest.approx(1 / 4.0, rel=0.05)
    assert gaps_s.std() == pytest.approx(1 / 4.0, rel=0.05)
    assert np.median(log_words) == pytest.approx(np.log(PROMPT_WORDS_MEDIAN), abs=0.1)
    assert log_words.std() == pytest.approx(PROMPT_WORDS_SIGMA, rel=0.1)


def test_prompts_are_as_long_as_asked_for() -> None:
    many = {"rate_qps": 4.0, "requests": 4000}
    usual = [len(a.prompt.split()) for a in arrivals(load("http://unused", **many))]
    long = [
        len(a.prompt.split()) for a in arrivals(load("http://unused", prompt_words=600, **many))
    ]

    assert np.median(long) == pytest.approx(6 * np.median(usual), rel=0.05)
    # A task of two to four words comes before the body.
    assert 1000 < max(usual) <= 1005
    assert 6000 < max(long) <= 6005


def test_the_seed_alone_decides() -> None:
    assert arrivals(load("http://a")) == arrivals(load("http://b"))
    assert arrivals(load("http://a")) != arrivals(load("http://a", seed=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url must begin with http"),
        ({"requests": 0}, "requests must be from 1"),
        ({"requests": 1_000_000}, "requests must be from 1"),
        ({"prompt_words": 0}, "prompt_words must be at least 1"),
        ({"rate_qps": 0.0}, "rate_qps must be positive"),
        ({"rate_qps": float("inf")}, "rate_qps must be positive"),
    ],
)
def test_an_impossible_load_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**{"url": "http://unused", **changes})
