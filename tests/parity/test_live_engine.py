"""Live engines, their processes and queues included, against a replay of what they were told."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: the extra 'cpu' or 'gpu'")

from engine_loop import save_model_config
from live_record import read_record
from traces import first_difference
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from sfs_ext import replay_workload

CLIENTS = 40
AT_ONCE = 14
"""A client comes when the one this many before it gets its first token."""
BLOCK_SIZE = 32
CONTEXT_TOKENS = 512
VOCABULARY = 1000
STOP_TOKENS = list(range(10))
"""The tokens are noise, so that one in a hundred ends an answer."""

ENGINES: dict[str, dict[str, Any]] = {
    "asynchronous": {
        "distributed_executor_backend": "fake_executor.FakeExecutor",
        "scheduler_cls": "recording_scheduler.RecordingAsyncScheduler",
        "additional_config": {"batch_time_s": [4e-3, 1e-5]},
    },
    "synchronous": {
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "scheduler_cls": "recording_scheduler.RecordingScheduler",
        "scheduling_policy": "priority",
    },
}


class Crowd:
    """Clients that come and go by what they and others are told, never by the clock."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.random = Random(0)
        self.prompts: dict[str, dict[str, Any]] = {}
        self.answered = [asyncio.Event() for _ in range(CLIENTS)]
        """A client's first token came, or its request ended without."""
        self.prefixes = [self.tokens(3 * BLOCK_SIZE + 5) for _ in range(3)]
        self.priorities = self.random.sample(range(1000), 2 * CLIENTS)

    def tokens(self, n: int) -> list[int]:
        return self.random.choices(range(VOCABULARY), k=n)

    async def come_and_go(self) -> None:
        await asyncio.gather(*map(self.client, range(CLIENTS)))

    async def client(self, i: int) -> None:
        if i >= AT_ONCE:
            await self.answered[i - AT_ONCE].wait()
        prompt, max_tokens = self.tokens(self.random.randint(8, 150)), self.random.randint(1, 120)
        shared: dict[str, Any] = {}
        if i % 3:
            prefix = self.prefixes[i % 3]
            prompt = prefix + prompt
            shared = {"prefix_group": i % 3, "prefix_len": len(prefix)}
        self.prompts[str(i)] = shared
        try:
            match i % 5:
                case 2:  # comes back with what was said and more
                    said = prompt + await self.read(i, str(i), prompt, max_tokens)
                    again = f"{i} again"
                    self.prompts[again] = {"parent": str(i), "parent_len": len(said)}
                    await self.read(i, again, said + self.tokens(20), max_tokens)
                case 3:  # goes in the middle of its answer
                    patience = self.random.randint(1, 30)
                    await self.read(i, str(i), prompt, max_tokens, patience)
                case 4:  # goes when the client before it gets its first token
                    prompts, params, priority = self.request(prompt, max_tokens)
                    await self.engine.add_request(str(i), prompts, params, priority=priority)
                    await self.answered[i - 1].wait()
                    await self.engine.abort(str(i))
                case _:
                    await self.read(i, str(i), prompt, max_tokens)
        finally:
            self.answered[i].set()

    async def read(
        self, i: int, name: str, prompt: list[int], max_tokens: int, patience: int | None = None
    ) -> list[int]:
        """The answer; after ``patience`` tokens the client closes the stream."""
        prompts, params, priority = self.request(prompt, max_tokens)
        answer: list[int] = []
        outputs = self.engine.generate(prompts, params, name, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                self.answered[i].set()
                answer += output.outputs[0].token_ids
                if patience is not None and len(answer) >= patience:
                    break
        return answer

    def request(
        self, prompt: list[int], max_tokens: int
    ) -> tuple[TokensPrompt, SamplingParams, int]:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0,
            stop_token_ids=STOP_TOKENS,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # No two priorities are equal: arrival times, which the record has not, decide nothing.
        return TokensPrompt(prompt_token_ids=prompt), params, self.priorities.pop()


async def serve_a_crowd(args: AsyncEngineArgs) -> Crowd:
    engine = AsyncLLM.from_engine_args(args)
    try:
        crowd = Crowd(engine)
        await crowd.come_and_go()
        return crowd
    finally:
        engine.shutdown(timeout=30)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_live_engine_is_replayed_step_by_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    save_model_config(tmp_path / "model", vocab_size=VOCABULARY)
    record = tmp_path / "record"
    own = dict(ENGINES[kind])
    args = AsyncEngineArgs(
        model=str(tmp_path / "model"),
        skip_tokenizer_init=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=12,
        max_num_batched_tokens=192,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=36,
        disable_log_stats=True,
        additional_config=own.pop("additional_config", {}) | {"record": str(record)},
        **own,
    )
    crowd = asyncio.run(serve_a_crowd(args))
    live = read_record(record, crowd.prompts)
    assert live["config"]["async_scheduling"] == (kind == "asynchronous")
    assert first_difference(replay_workload(live), live) is None
    check_pressure(live)


def check_pressure(live: dict[str, Any]) -> None:
    requests = live["requests"]
    assert len(requests) >= CLIENTS
    assert sum("abort" in request for request in requests) >= 5
    assert sum(request["output_len"] < request["max_tokens"] for request in requests) >= 3
    assert sum(len(step[1]) for step in live["trace"]) >= 5, "preemptions"
