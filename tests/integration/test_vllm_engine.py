"""One real vLLM engine of a tiny model, through ``VllmEngine``."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from tiny_qwen3 import make_tiny_qwen3, make_tokenizer

from app.calibration import fit_batch_time
from app.config import VllmEngineSettings
from app.identity import new_decision_id, request_key
from deployments.messages import (
    Accepted,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FirstToken,
    Payload,
)
from deployments.vllm_engine import VllmEngine
from deployments.warm_up import warm_up
from sfs_ext import SnapshotReader

MODEL = "tiny"
CONTEXT_TOKENS = 1024
MESSAGES = [{"role": "user", "content": "Name a colour."}]
CHAT_IDS = make_tokenizer().apply_chat_template(
    MESSAGES, add_generation_prompt=True, return_dict=False
)
TEXT_IDS = make_tokenizer()("Once upon a time").input_ids

pytestmark = pytest.mark.timeout(600)  # an engine starts within the first test

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One event loop for the module: the engine's client lives in it."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("vllm")
    settings = VllmEngineSettings(
        kind="vllm",
        model=str(make_tiny_qwen3(folder / "model")),
        num_gpus=0,
        args={
            "dtype": "float32",
            "max_model_len": CONTEXT_TOKENS,
            "max_num_seqs": 16,
            "enforce_eager": True,
            "disable_log_stats": True,
        },
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    )
    engine = run(VllmEngine.start(MODEL, settings, str(folder / "snapshot")))
    yield engine
    run(engine.stop())
    assert not (folder / "snapshot").exists()


def chat(max_tokens: int = 12, **body: Any) -> EngineRequest:
    return request("chat", CHAT_IDS, max_tokens, **{"messages": MESSAGES} | body)


def completion(max_tokens: int = 12, **body: Any) -> EngineRequest:
    return request("completions", TEXT_IDS, max_tokens, prompt="Once upon a time", **body)


def request(endpoint: Any, ids: list[int], max_tokens: int, **body: Any) -> EngineRequest:
    decision_id = new_decision_id()
    return EngineRequest(
        decision_id=decision_id,
        request_key=request_key(decision_id),
        endpoint=endpoint,
        body={"model": MODEL, "temperature": 0, "ignore_eos": True} | body,
        prompt_token_ids=np.array(ids, np.int32),
        max_tokens=max_tokens,
        predicted_output_tokens=7.5,
        priority=0,
    )


async def events_of(engine: VllmEngine, request: EngineRequest) -> list[EngineEvent]:
    return [event async for event in engine.generate(request)]


def sse_chunks(events: list[EngineEvent]) -> list[dict[str, Any]]:
    text = b"".join(event.data for event in events if isinstance(event, Payload)).decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def check_order(events: list[EngineEvent]) -> Finished:
    accepted, first, *payloads, finished = events
    assert isinstance(accepted, Accepted) and isinstance(first, FirstToken)
    assert all(isinstance(payload, Payload) for payload in payloads)
    assert isinstance(finished, Finished)
    assert accepted.at_s <= first.at_s <= time.time()
    return finished


def test_chat_streams(run: Run, engine: VllmEngine) -> None:
    usage = {"include_usage": True}
    events = run(events_of(engine, chat(stream=True, stream_options=usage, return_token_ids=True)))
    assert check_order(events) == Finished(len(CHAT_IDS), 12, "length")
    opening, *tokens, last = sse_chunks(events)
    assert opening["prompt_token_ids"] == CHAT_IDS
    assert opening["model"] == MODEL
    # vLLM sends tokens together where its reader lags behind.
    assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in tokens) == 12
    assert tokens[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 12


def test_chat_whole_says_what_the_stream_says(run: Run, engine: VllmEngine) -> None:
    streamed = sse_chunks(run(events_of(engine, chat(stream=True))))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed)
    events = run(events_of(engine, chat(return_token_ids=True)))
    assert check_order(events) == Finished(len(CHAT_IDS), 12, "length")
    body = json.loads(events[2].data)
    assert body["choices"][0]["message"]["content"] == text
    assert body["prompt_token_ids"] == CHAT_IDS
    assert body["usage"] == body["usage"] | {
        "prompt_tokens": len(CHAT_IDS),
        "completion_tokens": 12,
    }


@pytest.mark.parametrize("make", [chat, completion])
def test_the_prompt_is_the_routers_ids_and_not_made_again(
    run: Run, engine: VllmEngine, make: Callable[..., EngineRequest]
) -> None:
    ids = list(range(65, 85))
    asked = dataclasses.replace(
        make(return_token_ids=True), prompt_token_ids=np.array(ids, np.int32)
    )
    events = run(events_of(engine, asked))
    assert check_order(events).prompt_tokens == len(ids)
    body = json.loads(events[2].data)
    assert (body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]) == ids


def test_completions_streamed_and_whole(run: Run, engine: VllmEngine) -> None:
    events = run(events_of(engine, completion(stream=True)))
    assert check_order(events) == Finished(len(TEXT_IDS), 12, "length")
    text = "".join(chunk["choices"][0]["text"] for chunk in sse_chunks(events))
    events = run(events_of(engine, completion(echo=True)))
    assert check_order(events) == Finished(len(TEXT_IDS), 12, "length")
    assert json.loads(events[2].data)["choices"][0]["text"] == "Once upon a time" + text


def test_the_first_token_is_told_long_before_a_whole_answer(run: Run, engine: VllmEngine) -> None:
    async def times() -> tuple[float, float]:
        first_s = 0.0
        async for event in engine.generate(chat(max_tokens=200)):
            if isinstance(event, FirstToken):
                first_s = time.time()
                assert first_s - event.at_s < 0.5
        return first_s, time.time()

    first_s, end_s = run(times())
    assert end_s - first_s > 0.05


def test_several_choices_and_log_probabilities_pass_through(run: Run, engine: VllmEngine) -> None:
    many = chat(n=3, temperature=1.0, seed=1, logprobs=True, top_logprobs=2)
    events = run(events_of(engine, many))
    assert check_order(events) == Finished(len(CHAT_IDS), 36, "length")
    choices = json.loads(events[2].data)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert [len(t["top_logprobs"]) for t in choice["logprobs"]["content"]] == [2] * 12


def test_a_stop_string_ends_the_answer(run: Run, engine: VllmEngine) -> None:
    whole = json.loads(run(events_of(engine, completion()))[2].data)["choices"][0]["text"]
    events = run(events_of(engine, completion(stop=[whole[4:8]])))
    finished = check_order(events)
    assert finished.finish_reason == "stop"
    assert finished.output_tokens < 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"logprobs": True, "top_logprobs": 4000}, "logprobs"),
        ({"messages": [{"role": "user"}, 3]}, "messages"),
    ],
)
def test_what_vllm_refuses_fails_in_its_words(
    run: Run, engine: VllmEngine, body: dict[str, Any], said: str, stream: bool
) -> None:
    events = run(events_of(engine, chat(stream=stream, **body)))
    (failed,) = events
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert said in failed.error["message"]
    assert failed.error.keys() == {"message", "type", "param", "code"}


def test_a_prompt_beyond_the_context_is_refused(run: Run, engine: VllmEngine) -> None:
    too_long = dataclasses.replace(
        completion(), prompt_token_ids=np.full(CONTEXT_TOKENS + 1, 65, np.int32)
    )
    (failed,) = run(events_of(engine, too_long))
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert str(CONTEXT_TOKENS) in failed.error["message"]


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> float:
    """Seconds until ``condition`` held."""
    start_s = time.monotonic()
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # nothing announces it
    return time.monotonic() - start_s


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_answer_frees_the_engine(run: Run, engine: VllmEngine, stream: bool) -> None:
    reader = SnapshotReader(engine.snapshot_path)

    async def scenario() -> float:
        async with aclosing(engine.generate(chat(max_tokens=900, stream=stream))) as events:
            async for event in events:
                if isinstance(event, FirstToken):
                    break
            await until(lambda: len(reader.read().residents) == 1)
        return await until(lambda: len(reader.read().residents) == 0)

    assert run(scenario()) < 1.0


def test_the_snapshot_names_the_request_and_follows_it(run: Run, engine: VllmEngine) -> None:
    reader = SnapshotReader(engine.snapshot_path)
    assert reader.config == engine.scheduler
    assert engine.scheduler.max_model_len == CONTEXT_TOKENS
    assert not engine.scheduler.async_scheduling  # never on a CPU
    asked = chat(max_tokens=100, stream=True)
    asked_s = time.time()

    async def watch() -> list[np.void]:
        seen: list[np.void] = []
        async for event in engine.generate(asked):
            if isinstance(event, Payload):
                seen.extend(reader.read().residents)
        return seen

    seen = run(watch())
    assert len(seen) > 50
    for resident in seen:
        assert resident["id"] == asked.request_key
        assert resident["predicted_output_tokens"] == 7.5
        assert resident["prompt_tokens"] == len(CHAT_IDS)
        assert resident["max_tokens"] == 100
        assert abs(resident["arrival_s"] - asked_s) < 5
    outputs = [int(resident["output_tokens"]) for resident in seen]
    assert outputs == sorted(outputs)
    assert outputs[-1] - outputs[0] > 50


def test_steps_add_up_to_the_request(run: Run, engine: VllmEngine) -> None:
    reader = SnapshotReader(engine.snapshot_path)
    before = int(reader.read_steps(0)["sequence"][-1])
    start_s = time.time()
    ids = np.random.default_rng(5).integers(300, 3000, 77, dtype=np.int32)
    run(events_of(engine, dataclasses.replace(completion(), prompt_token_ids=ids)))
    steps = reader.read_steps(before)
    assert steps["prefill_tokens"].tolist() == [77] + [0] * 11
    assert steps["decode_requests"].tolist() == [0] + [1] * 11
    assert steps["decode_context_tokens"].tolist() == [0, *range(77, 88)]
    assert steps["prefill_attention"].tolist() == [77 * 78 // 2] + [0] * 11
    assert start_s < steps["scheduled_s"][0] <= steps["started_s"][0] < steps["done_s"][0]
    assert steps["started_s"][1:].tolist() == steps["done_s"][:-1].tolist()


def test_an_idle_engine_vouches_for_its_state(run: Run, engine: VllmEngine) -> None:
    reader = SnapshotReader(engine.snapshot_path)
    seen = reader.sequence
    run(until(lambda: reader.sequence >= seen + 2))
    assert time.time() - reader.read().header["published_s"] < 1.0


def test_a_warm_up_is_enough_to_fit_the_batch_time(run: Run, engine: VllmEngine) -> None:
    reader = SnapshotReader(engine.snapshot_path)
    before = int(reader.read_steps(0)["sequence"][-1])
    run(warm_up(engine, MODEL, time_limit_s=20.0))
    fit = fit_batch_time(reader.read_steps(before))
    assert fit.samples > 100
    assert 0 < fit.decode_step_s < 1
    assert fit.prefill_tokens_per_s > 100


def test_concurrent_requests_are_kept_apart(run: Run, engine: VllmEngine) -> None:
    async def scenario() -> list[list[EngineEvent]]:
        requests = [chat(max_tokens=3 + i, stream=i % 2 == 0) for i in range(20)]
        return await asyncio.gather(*(events_of(engine, request) for request in requests))

    for i, events in enumerate(run(scenario())):
        assert check_order(events) == Finished(len(CHAT_IDS), 3 + i, "length")


def test_health(run: Run, engine: VllmEngine) -> None:
    run(engine.check_health())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_model_length": 10}, "vLLM knows no argument engine.args.max_model_length"),
        ({"tensor_parallel_size": 2}, "engine.args.tensor_parallel_size follows from"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config must be left out",
        ),
    ],
)
def test_arguments_that_cannot_be(
    run: Run, tmp_path: Path, args: dict[str, Any], said: str
) -> None:
    settings = VllmEngineSettings(
        kind="vllm", model=str(make_tiny_qwen3(tmp_path / "model")), num_gpus=0, args=args
    )
    with pytest.raises(ValueError, match=said):
        run(VllmEngine.start(MODEL, settings, str(tmp_path / "snapshot")))
