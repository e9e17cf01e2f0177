"""A router whose predictor is a file: taken up as it changes, corrected by what has finished, and
trained again from the router's own records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from in_process import Handle, LocalHub
from typer.testing import CliRunner

from app.cli import app
from app.config import PoolSettings
from app.prediction import artifact as artifacts
from app.prediction.artifact import Artifact
from app.prediction.cli import cards
from app.prediction.examples import Example, chat_features
from app.prediction.prior import prior
from app.prediction.residuals import Drift
from app.prediction.source import PredictorFile
from app.prediction.training import train
from app.records import read_records
from app.tokenizer import QwenTokenizer
from app.types import Decision, Forecast
from deployments.messages import (
    Accepted,
    EngineEvent,
    EngineRequest,
    Finished,
    FirstToken,
    InstanceReport,
    Payload,
)
from deployments.metrics import RouterMetrics
from deployments.router import QueryRouter
from deployments.timing import given
from sfs_ext import SnapshotWriter, batch_dtype, resident_dtype

HERE = "this-node"
LEARNT_TOKENS = 30
LONG = "international " * 1500
"""Tokenised, and looked at, on another thread."""
AUTO = {"model": "auto", "messages": [{"role": "user", "content": "Explain briefly why."}]}
SMALL = {**AUTO, "model": "small"}


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    data = yaml.safe_load((Path(__file__).parent / "pool.yaml").read_text())
    data["router"]["records_dir"] = str(tmp_path / "records")
    data["router"]["predictor"] = str(tmp_path / "predictor.json")
    # Engines publish once; a loaded machine may take its time.
    data["router"]["silent_after_s"] = 1000.0
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def settings(pool_file: Path, monkeypatch: pytest.MonkeyPatch) -> PoolSettings:
    monkeypatch.setattr("deployments.router.PREDICTOR_INTERVAL_S", 0.005)
    return PoolSettings.model_validate(yaml.safe_load(pool_file.read_text()))


@pytest.fixture(autouse=True)
def _few_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.prediction.fitting.INNER_FOLDS", 2)
    monkeypatch.setattr("app.prediction.fitting.QUALITY_TREES", 4)
    monkeypatch.setattr("app.prediction.fitting.LENGTH_TREES", 4)


@pytest.fixture(scope="module")
def tokenizer() -> QwenTokenizer:
    return QwenTokenizer()


def trained(
    settings: PoolSettings, tokenizer: QwenTokenizer, prompts: int, tokens: int = LEARNT_TOKENS
) -> Artifact:
    """Of as many prompts, all answered by small alone and at one length."""
    examples = [
        Example(
            prompt_id=str(i),
            model="small",
            prompt=chat_features([{"role": "user", "content": f"Question {i}"}], tokenizer),
            task="",
            output_tokens=tokens,
            quality=0.95,
        )
        for i in range(prompts)
    ]
    return train(examples, cards(settings), settings.tokenizers[settings.feature_tokenizer])


def predictor_path(settings: PoolSettings) -> Path:
    assert settings.router.predictor is not None
    return Path(settings.router.predictor)


class Engines:
    """Answers with one payload; when ``ending`` is set, it was of ``output_tokens``."""

    def __init__(self, output_tokens: int = 2, finish_reason: str = "stop") -> None:
        self.output_tokens, self.finish_reason = output_tokens, finish_reason
        self.ending = asyncio.Event()
        self.ending.set()

    async def generate(
        self, request: EngineRequest, replica_id: str
    ) -> AsyncGenerator[list[EngineEvent], None]:
        now_s = time.time()
        yield [Accepted(now_s), FirstToken(now_s), Payload(b"one")]
        await self.ending.wait()
        prompt_tokens = len(request.prompt_token_ids)
        yield [Finished(prompt_tokens, self.output_tokens, self.finish_reason)]


@pytest.fixture
def reports(settings: PoolSettings, tmp_path: Path) -> Iterator[list[InstanceReport]]:
    """An idle replica of each model."""
    found = []
    with contextlib.ExitStack() as stack:
        for model in settings.models:
            path = tmp_path / f"{model.name}-0"
            scheduler = model.engine.scheduler_config(model.context_tokens)
            writer = SnapshotWriter(str(path), scheduler)
            stack.callback(writer.close)
            none, idle = np.zeros(0, batch_dtype), np.zeros(0, resident_dtype)
            writer.publish(time.time(), 19_000, none, idle)
            report = InstanceReport(
                instance_id=path.name,
                model=model.name,
                replica_id=f"replica-{model.name}",
                node_id=HERE,
                snapshot_path=str(path),
                snapshot_endpoint="",
                scheduler=scheduler,
                timing=given(scheduler, model.engine.batch_time.batch_time()),
            )
            found.append(report)
        yield found


@contextlib.asynccontextmanager
async def routing(
    settings: PoolSettings, reports: list[InstanceReport], engines: Engines
) -> AsyncIterator[QueryRouter]:
    hub = LocalHub()
    for report in reports:
        await hub.report(report, None)
    handles: dict[str, Any] = {model.name: Handle(engines) for model in settings.models}
    router = QueryRouter(settings, Handle(hub), handles, HERE)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(30):
            while router.missing_models:  # noqa: ASYNC110
                await asyncio.sleep(0)
            yield router
    finally:
        router.stop()
        hub._upkeep.cancel()


class Taken:
    """When a predictor's training was; each awaited as it is taken up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue: asyncio.Queue[float] = asyncio.Queue()

        def predictor(_: RouterMetrics, trained_s: float) -> None:
            if trained_s > 0:  # 0: priors speak
                self._queue.put_nowait(trained_s)

        monkeypatch.setattr(RouterMetrics, "predictor", predictor)

    async def next(self) -> float:
        return await self._queue.get()

    @property
    def none(self) -> bool:
        return self._queue.empty()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(monkeypatch)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Waits until the file has been looked at from beginning to end since."""
    begun = ended = 0
    whole = PredictorFile.newer

    def newer(file: PredictorFile) -> Any:
        nonlocal begun, ended
        begun += 1
        try:
            return whole(file)
        finally:
            ended += 1

    monkeypatch.setattr(PredictorFile, "newer", newer)

    async def looked() -> None:
        awaited = begun + 1
        while ended < awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    return looked


async def explain(router: QueryRouter, body: dict[str, Any] = AUTO) -> Decision:
    return await router.explain("chat", body, time.time(), None)


async def ask(router: QueryRouter, body: dict[str, Any] = SMALL) -> Decision:
    answer = await router.answer("chat", body, time.time(), None)
    assert b"".join([payload async for payload in answer.payloads]) == b"one"
    return answer.decision


def forecasts(decision: Decision) -> tuple[Forecast, Forecast]:
    """Of small and of large."""
    by_model = {forecast.model: forecast for forecast in decision.candidates}
    return by_model["small"], by_model["large"]


def sources(decision: Decision) -> dict[str, str]:
    return {forecast.model: forecast.prediction_source for forecast in decision.candidates}


def test_a_file_that_appears_is_replaced_and_is_damaged(
    settings: PoolSettings,
    reports: list[InstanceReport],
    tokenizer: QwenTokenizer,
    taken: Taken,
    looks: Callable[[], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = predictor_path(settings)
    few = trained(settings, tokenizer, prompts=4)
    many = trained(settings, tokenizer, prompts=12)

    async def scenario() -> None:
        async with routing(settings, reports, Engines()) as router:
            await looks()
            decision = await explain(router)
            assert sources(decision) == {"small": "prior", "large": "prior"}
            for forecast, model in zip(forecasts(decision), settings.models, strict=True):
                expected = prior(model.prior)
                assert forecast.quality == expected.quality
                assert forecast.predicted_output_tokens == expected.output_tokens
                assert forecast.output_tokens_low == expected.output_tokens_low
                assert forecast.output_tokens_high == expected.output_tokens_high

            artifacts.save(few, path)
            assert await taken.next() == few.trained_s
            decision = await explain(router)
            assert sources(decision) == {"small": "shrunk", "large": "prior"}
            small, _ = forecasts(decision)
            # Four examples beside a prior that weighs ten.
            assert small.quality == pytest.approx(0.45 + 4 / 14 * (0.95 - 0.45), abs=1e-6)
            assert small.predicted_output_tokens == pytest.approx(60 + 4 / 14 * (30 - 60), abs=0.01)

            artifacts.save(many, path)
            assert await taken.next() == many.trained_s
            trained_decision = await explain(router)
            assert sources(trained_decision) == {"small": "trained", "large": "prior"}

            for damage in (
                path.read_bytes()[:-1],
                path.read_bytes().replace(b'"prompts": 12', b'"prompts": 13'),
                b"",
            ):
                # At once, or it might be looked at half written, and be told twice.
                (beside := path.with_suffix(".new")).write_bytes(damage)
                beside.replace(path)
                await looks()
                again = await explain(router)
                assert sources(again) == {"small": "trained", "large": "prior"}
                assert forecasts(again)[0].quality == forecasts(trained_decision)[0].quality
            path.unlink()
            await looks()
            assert sources(await explain(router))["small"] == "trained"
            assert taken.none
            router.check_health()

            artifacts.save(few, path)
            assert await taken.next() == few.trained_s
            assert sources(await explain(router))["small"] == "shrunk"

    asyncio.run(scenario())
    refused = [record for record in caplog.records if "stays as it was" in record.message]
    assert all(str(path) in record.message for record in refused)
    # Serve's loggers, once set up, let a record be captured twice.
    assert len({record.created for record in refused}) == 3


def test_finished_requests_correct_lengths_of_their_model(
    settings: PoolSettings,
    reports: list[InstanceReport],
    tokenizer: QwenTokenizer,
    taken: Taken,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drifts: list[tuple[str, Drift]] = []
    monkeypatch.setattr(
        RouterMetrics, "length_drift", lambda _, model, drift: drifts.append((model, drift))
    )
    artifacts.save(trained(settings, tokenizer, prompts=12), predictor_path(settings))

    async def scenario() -> None:
        engines = Engines(output_tokens=90)
        async with routing(settings, reports, engines) as router:
            await taken.next()
            first = (await ask(router)).choice
            assert first.length_correction == 1.0
            predicted = first.predicted_output_tokens

            second = (await ask(router)).choice
            factor = (90 + 20 * predicted) / (21 * predicted)
            assert second.length_correction == pytest.approx(factor)
            assert second.predicted_output_tokens == pytest.approx(factor * predicted)
            assert second.output_tokens_low == pytest.approx(factor * first.output_tokens_low)
            assert second.output_tokens_high == pytest.approx(factor * first.output_tokens_high)
            assert second.quality == first.quality

            for reason in ("abort", "error"):
                engines.finish_reason = reason
                await ask(router)
            small, large = forecasts(await explain(router))
            assert small.length_correction == pytest.approx(
                (180 + 20 * predicted) / (22 * predicted)
            )
            assert large.length_correction == 1.0

            # A limit says nothing against the prediction that it cuts.
            engines.finish_reason, engines.output_tokens = "length", 5
            await ask(router, {**SMALL, "max_tokens": 5})
            again, _ = forecasts(await explain(router))
            assert again.length_correction == small.length_correction
        # Of a predictor that has just come, there is nothing to tell.
        assert [model for model, _ in drifts] == ["small", "large", *["small"] * 3]
        assert math.isnan(drifts[0][1].bias) and math.isnan(drifts[0][1].coverage)
        assert drifts[2][1].bias == pytest.approx(90 / predicted - 1)

    asyncio.run(scenario())


def test_what_the_predictor_before_promised_does_not_correct_this_one(
    settings: PoolSettings,
    reports: list[InstanceReport],
    tokenizer: QwenTokenizer,
    taken: Taken,
) -> None:
    async def scenario() -> None:
        engines = Engines(output_tokens=900)
        async with routing(settings, reports, engines) as router:
            engines.ending.clear()
            answer = await router.answer("chat", {**SMALL, "stream": True}, time.time(), None)
            artifacts.save(trained(settings, tokenizer, prompts=4), predictor_path(settings))
            await taken.next()
            engines.ending.set()
            assert [payload async for payload in answer.payloads] == [b"one"]
            assert forecasts(await explain(router))[0].length_correction == 1.0
            await ask(router)
            assert forecasts(await explain(router))[0].length_correction > 1.0

    asyncio.run(scenario())


def test_records_keep_what_predictors_learn_from(
    settings: PoolSettings,
    reports: list[InstanceReport],
    tokenizer: QwenTokenizer,
    taken: Taken,
    pool_file: Path,
) -> None:
    path = predictor_path(settings)
    texts = [f"Explain number {i} in 3 sentences." for i in range(11)] + [LONG]

    async def serve() -> None:
        async with routing(settings, reports, Engines(output_tokens=LEARNT_TOKENS)) as router:
            for text in texts:
                body = {"model": "large", "messages": [{"role": "user", "content": text}]}
                await ask(router, body if len(text) < 2000 else {**body, "max_tokens": None})

    asyncio.run(serve())
    records = read_records(str(settings.router.records_dir))
    assert len(records) == len(texts)
    for record, text in zip(records, texts, strict=True):
        expected = chat_features([{"role": "user", "content": text}], tokenizer)
        assert record.prompt_hash == expected.buckets.tolist()
        assert record.prompt_description == expected.description.tolist()
        assert record.decision.choice.prediction_source == "prior"

    command = ["train", "--from-log", str(settings.router.records_dir)]
    result = CliRunner().invoke(app, [*command, "--pool", str(pool_file), "-o", str(path)])
    assert result.exit_code == 0, result.output
    predictor = json.loads(path.read_text())["predictor"]
    assert predictor["prompts"] == len(texts)

    async def serve_again() -> None:
        async with routing(settings, reports, Engines()) as router:
            await taken.next()
            decision = await explain(router)
            # Lengths are learnt, quality is not.
            assert sources(decision) == {"small": "prior", "large": "trained"}
            _, large = forecasts(decision)
            assert large.quality == 0.75
            assert large.predicted_output_tokens == pytest.approx(
                80 + 12 / 22 * (30 - 80), abs=0.01
            )

    asyncio.run(serve_again())


def test_without_predictor_and_records_nobody_looks_at_prompts(
    settings: PoolSettings, reports: list[InstanceReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("features were made")

    monkeypatch.setattr("deployments.router.prompt_features", never)
    quiet = settings.router.model_copy(update={"records_dir": None, "predictor": None})

    async def scenario() -> None:
        blind = settings.model_copy(update={"router": quiet})
        async with routing(blind, reports, Engines()) as router:
            assert (await ask(router)).choice.prediction_source == "prior"

    asyncio.run(scenario())
