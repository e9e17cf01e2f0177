"""Two real vLLM engines behind the router, under Ray Serve, asked by the ``openai`` client."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import openai
import pytest
import yaml
from served_pool import ROOT, Server, running, serve_pool, until

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from tiny_qwen3 import make_tiny_qwen3

SMOLLM2 = ROOT / "build/models/smollm2-135m"
if not SMOLLM2.exists():
    pytest.skip("no SmolLM2: run python -m deployments.smollm2", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)  # the pool starts within the first test

ARGS = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "max_num_seqs": 32}
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SMOLLM2_BATCH_TIME = {"b0_s": 0.05, "b1_s": 3e-3, "b2_s": 1e-6, "b3_s": 1e-6}
"""About right: its own warm-up would take most of a minute."""
START_S = 400.0
"""Two engines load and the tiny one warms up, perhaps on two busy cores."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm-pool")
    tiny = make_tiny_qwen3(folder / "tiny")
    pool = {
        "router": {"records_dir": str(folder / "records"), "stale_after_s": 2.0},
        "tokenizers": {
            "tiny": {"kind": "huggingface", "path": str(tiny)},
            "smollm2": {"kind": "huggingface", "path": str(SMOLLM2)},
        },
        "models": [
            model("tiny", str(tiny), quality=0.4, price=0.01, batch_time=None),
            model("smollm2", str(SMOLLM2), quality=0.5, price=0.02, batch_time=SMOLLM2_BATCH_TIME),
        ],
    }
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump(pool))
    with serve_pool(path, folder, START_S) as server:
        yield server


def model(
    name: str, path: str, quality: float, price: float, batch_time: dict[str, float] | None
) -> dict[str, object]:
    engine = {"kind": "vllm", "model": path, "num_gpus": 0, "args": ARGS, "env": ENV}
    return {
        "name": name,
        "tokenizer": name,
        "context_tokens": 1024,
        "price_in_usd_per_mtok": price,
        "price_out_usd_per_mtok": 2 * price,
        "prior": {"quality": quality, "output_tokens": 20, "output_sigma": 0.5, "ttft_ms": 500},
        "engine": engine | {"batch_time": batch_time},
    }


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
        yield client


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_real_model_knows_its_geography(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=1, temperature=0
    )
    assert answer.choices[0].text == " Paris"
    assert answer.usage.prompt_tokens == 5


def test_the_real_model_answers_in_a_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=say("What is the capital of France?"),
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert last.usage.completion_tokens <= 12


def test_the_other_engine_answers_too(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=say("Hello"), max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.model == "tiny"
    assert answer.usage.completion_tokens == 5


def test_a_decision_weighs_both_by_their_snapshots(server: Server) -> None:
    body = {"model": "auto", "messages": say("Hello"), "max_tokens": 5}
    decision = httpx.post(f"{server.url}/v1/route", json=body, timeout=60).json()
    candidates = decision["candidates"]
    assert {candidate["model"] for candidate in candidates} == {"tiny", "smollm2"}
    assert {candidate["estimator"] for candidate in candidates} == {"sfs"}


def test_routed_requests_are_all_answered(server: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, i: int) -> tuple[str, int]:
        raw = await client.chat.completions.with_raw_response.create(
            model="auto",
            messages=say(f"Count to {i}."),
            max_tokens=8,
            extra_body={"ignore_eos": True, "routing": {"policy": "round_robin"}},
        )
        return raw.headers["x-foretoken-model"], raw.parse().usage.completion_tokens

    async def ask_all() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=120
        ) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    answers = asyncio.run(ask_all())
    assert [tokens for _, tokens in answers] == [8] * 16
    assert Counter(name for name, _ in answers) == {"tiny": 8, "smollm2": 8}


def test_what_vllm_refuses_comes_back_as_its_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=say("Hi"), temperature=-1)


def test_a_caller_that_leaves_frees_the_engine(client: openai.OpenAI) -> None:
    stream = client.chat.completions.with_streaming_response.create(
        # Of the two the slow one: it must still be at it when its first token has travelled here.
        model="smollm2",
        messages=say("Go on and on"),
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream as response:
        next(response.iter_lines())
        instance_id = response.headers["x-foretoken-instance"]
        assert running(instance_id) == 1
    until(lambda: running(instance_id) == 0, timeout_s=2.0)
