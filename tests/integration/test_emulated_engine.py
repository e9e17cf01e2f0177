"""The emulated engine takes what placeholder text can follow, and refuses the rest by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_engine import small_engine

from app.identity import new_decision_id, request_key
from deployments.emulated_engine import EmulatedEngine
from deployments.messages import EngineEvent, EngineRequest, Failed, Finished

SETTINGS = small_engine(
    batch_time={"b0_s": 1e-4, "b1_s": 1e-7, "b2_s": 1e-9, "b3_s": 1e-11},
    output_tokens={"mean": 3, "sigma": 0.1},
)


def events_of(tmp_path: Path, *bodies: dict[str, Any], max_tokens: int = 40) -> list[EngineEvent]:
    """The last event of each request."""

    async def last(engine: EmulatedEngine, body: dict[str, Any]) -> EngineEvent:
        decision_id = new_decision_id()
        request = EngineRequest(
            decision_id=decision_id,
            request_key=request_key(decision_id),
            endpoint="completions",
            body={"model": "m", "prompt": "p", **body},
            prompt_token_ids=np.arange(5, dtype=np.int32),
            max_tokens=max_tokens,
            predicted_output_tokens=3.0,
            priority=0,
        )
        *_, event = [event async for event in engine.generate(request)]
        return event

    async def run() -> list[EngineEvent]:
        engine = EmulatedEngine(SETTINGS, 4096, str(tmp_path / "snapshot"))
        try:
            async with asyncio.timeout(20):
                return [await last(engine, body) for body in bodies]
        finally:
            await engine.stop()

    return asyncio.run(run())


def test_min_tokens_are_reached(tmp_path: Path) -> None:
    plain, none, floor, whole = events_of(
        tmp_path, {}, {"min_tokens": None}, {"min_tokens": 25}, {"min_tokens": 40}
    )
    assert isinstance(plain, Finished) and plain.output_tokens < 10
    assert isinstance(none, Finished) and none.output_tokens < 10
    assert floor == Finished(5, 25, "stop")
    assert isinstance(whole, Finished) and whole.output_tokens == 40


@pytest.mark.parametrize("min_tokens", [-1, 41, 2.5, "3", True, [1]])
@pytest.mark.parametrize("others", [{}, {"ignore_eos": True}])
def test_min_tokens_that_cannot_be(tmp_path: Path, min_tokens: Any, others: dict[str, Any]) -> None:
    [failed] = events_of(tmp_path, {"min_tokens": min_tokens, **others})
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert failed.error["param"] == "min_tokens"
    assert "from 0 to max_tokens, here 40" in failed.error["message"]


@pytest.mark.parametrize(
    ("param", "value"),
    [("stop", "."), ("stop", ["a", "b"]), ("stop_token_ids", [7]), ("use_beam_search", True)],
)
def test_what_text_would_be_needed_for_is_refused(tmp_path: Path, param: str, value: Any) -> None:
    [failed] = events_of(tmp_path, {param: value})
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert failed.error["param"] == param
    assert param in failed.error["message"]


def test_no_stop_is_no_matter(tmp_path: Path) -> None:
    events = events_of(tmp_path, {"stop": None}, {"stop": []}, {"stop": ""})
    assert all(isinstance(event, Finished) for event in events)
