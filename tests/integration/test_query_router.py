"""The router's shell without Serve: lost replicas, views of the fleet, what a request leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from in_process import Handle, LocalHub
from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from app.config import PoolSettings
from app.records import DecisionRecord, read_records
from app.types import Estimator, Forecast
from deployments.hub import FleetVersion, FleetView, Hub
from deployments.messages import (
    Accepted,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FirstToken,
    InstanceReport,
    Payload,
)
from deployments.metrics import RouterMetrics
from deployments.openai_protocol import ApiError
from deployments.request_router import PickedReplicaRouter
from deployments.router import QueryRouter
from deployments.snapshots import SnapshotFeed, SnapshotRelay
from deployments.timing import given
from sfs_ext import BatchTime, SnapshotWriter, batch_dtype, resident_dtype

HERE, ELSEWHERE = "this-node", "another-node"
SMALL = {"model": "small", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
ANOTHER_LAYOUT = b"another layout".ljust(4096, b"\0")
LARGE = {**SMALL, "model": "large"}


@pytest.fixture
def settings(tmp_path: Path) -> PoolSettings:
    data = yaml.safe_load((Path(__file__).parent / "pool.yaml").read_text())
    data["router"]["records_dir"] = str(tmp_path / "records")
    return PoolSettings.model_validate(data)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(RouterMetrics, "ended", lambda _, model, outcome: seen.append(outcome))
    return seen


class Instance:
    """What of a replica the router sees: its report, and an idle engine's snapshot."""

    def __init__(
        self, settings: PoolSettings, model: str, folder: Path, node_id: str = HERE
    ) -> None:
        [found] = (m for m in settings.models if m.name == model)
        scheduler = found.engine.scheduler_config(found.context_tokens)
        number = len(list(folder.iterdir()))
        self.path = folder / f"{model}-{number}"
        self.writer = SnapshotWriter(str(self.path), scheduler)
        self.publish()
        self.relay = SnapshotRelay(str(self.path), "127.0.0.1")
        self.report = InstanceReport(
            instance_id=self.path.name,
            model=model,
            replica_id=f"replica-{number}",
            node_id=node_id,
            snapshot_path=str(self.path),
            snapshot_endpoint=self.relay.endpoint,
            scheduler=scheduler,
            timing=given(scheduler, found.engine.batch_time.batch_time()),
        )

    def publish(self) -> None:
        none, idle = np.zeros(0, batch_dtype), np.zeros(0, resident_dtype)
        self.writer.publish(time.time(), 19_000, none, idle)

    def close(self) -> None:
        self.relay.stop()
        self.writer.close()


Start = Callable[..., Instance]


@pytest.fixture
def instance(settings: PoolSettings, tmp_path: Path) -> Iterator[Start]:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    started: list[Instance] = []

    def start(model: str, node_id: str = HERE) -> Instance:
        started.append(Instance(settings, model, folder, node_id))
        return started[-1]

    yield start
    for one in started:
        one.close()


class Engines:
    """Answers with one token, or raises what ``failures`` has for the next call."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.called: list[str] = []

    async def generate(
        self, request: EngineRequest, replica_id: str
    ) -> AsyncGenerator[list[EngineEvent], None]:
        self.called.append(replica_id)
        if self.failures:
            raise self.failures.pop(0)
        now_s = time.time()
        yield [Accepted(now_s), FirstToken(now_s), Payload(b"one")]
        yield [Payload(b"two"), Finished(len(request.prompt_token_ids), 2, "stop")]


class WatchedHub(LocalHub):
    def __init__(self) -> None:
        super().__init__()
        self.removed: asyncio.Queue[str] = asyncio.Queue()

    async def remove(self, instance_id: str) -> None:
        await super().remove(instance_id)
        self.removed.put_nowait(instance_id)


async def until(condition: Callable[[], bool]) -> None:
    """The hub's view is on its way in this very loop."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def routing(
    settings: PoolSettings, instances: list[Instance], engines: Any, hub: Hub | None = None
) -> AsyncIterator[tuple[QueryRouter, Any]]:
    hub = WatchedHub() if hub is None else hub
    for one in instances:
        await hub.report(one.report, None)
    handles = {model.name: Handle(engines) for model in settings.models}
    router = QueryRouter(settings, Handle(hub), handles, HERE)
    try:
        async with asyncio.timeout(20):
            served = {one.report.model for one in instances}
            await until(lambda: not served & set(router.missing_models))
            yield router, hub
    finally:
        router.stop()
        hub._upkeep.cancel()


async def ask(router: QueryRouter, body: dict[str, Any]) -> tuple[Forecast, bytes]:
    answer = await router.answer("chat", body, time.time(), None)
    return answer.decision.choice, b"".join([payload async for payload in answer.payloads])


def records_of(settings: PoolSettings) -> list[DecisionRecord]:
    assert settings.router.records_dir is not None
    return read_records(settings.router.records_dir)


class TestLostReplicas:
    def test_another_answers_and_one_record_is_left(
        self, settings: PoolSettings, instance: Start, outcomes: list[str]
    ) -> None:
        async def scenario() -> tuple[str, Forecast, list[str]]:
            instances = [instance("small"), instance("small")]
            names = {one.report.replica_id: one.report.instance_id for one in instances}
            engines = Engines(RayActorError())
            async with routing(settings, instances, engines) as (router, hub):
                choice, data = await ask(router, SMALL)
                assert data == b"onetwo"
                removed = await hub.removed.get()
                assert hub.removed.empty()
            return removed, choice, [names[replica] for replica in engines.called]

        removed, choice, tried = asyncio.run(scenario())
        assert tried == [removed, choice.instance_id]
        assert removed != choice.instance_id
        [record] = records_of(settings)
        assert record.finish_reason == "stop"
        assert record.decision.choice.instance_id == choice.instance_id
        assert outcomes == ["stop"]

    def test_the_second_attempt_does_not_wait_for_the_hub(
        self, settings: PoolSettings, instance: Start
    ) -> None:
        class SlowHub(LocalHub):
            async def remove(self, instance_id: str) -> None:
                await asyncio.Event().wait()

        async def scenario() -> None:
            instances = [instance("small"), instance("small")]
            engines = Engines(RayActorError())
            async with routing(settings, instances, engines, SlowHub()) as (router, _):
                async with asyncio.timeout(5):
                    assert (await ask(router, SMALL))[1] == b"onetwo"

        asyncio.run(scenario())

    def test_a_dead_hub_changes_nothing(self, settings: PoolSettings, instance: Start) -> None:
        class DeadHub(LocalHub):
            async def remove(self, instance_id: str) -> None:
                raise RayActorError()

        async def scenario() -> list[dict[str, Any]]:
            unhandled: list[dict[str, Any]] = []
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: unhandled.append(context))
            instances = [instance("small"), instance("small")]
            engines = Engines(RayActorError())
            async with routing(settings, instances, engines, DeadHub()) as (router, _):
                assert (await ask(router, SMALL))[1] == b"onetwo"
                await asyncio.gather(*router._removals)
            return unhandled

        assert asyncio.run(scenario()) == []

    @pytest.mark.parametrize(("body", "attempts"), [(SMALL, 2), (LARGE, 1)])
    def test_a_request_that_none_answers_leaves_one_record(
        self,
        settings: PoolSettings,
        instance: Start,
        outcomes: list[str],
        body: dict[str, Any],
        attempts: int,
    ) -> None:
        """Two deaths are enough, though a third replica stands; or no other is left."""

        async def scenario() -> str:
            instances = [instance(model) for model in ("small", "small", "small", "large")]
            names = {one.report.replica_id: one.report.instance_id for one in instances}
            engines = Engines(*[RayActorError()] * 9)
            async with routing(settings, instances, engines) as (router, hub):
                with pytest.raises(ApiError) as refused:
                    await ask(router, body)
                assert refused.value.status == 503
                removed = [await hub.removed.get() for _ in range(attempts)]
            assert removed == [names[replica] for replica in engines.called]
            assert len(set(removed)) == attempts
            return removed[-1]

        last = asyncio.run(scenario())
        [record] = records_of(settings)
        assert record.finish_reason == "error"
        assert record.ttft_s is None
        assert record.decision.choice.instance_id == last
        assert outcomes == ["error"]

    def test_one_that_cannot_be_reached_yet_is_passed_over_and_kept(
        self, settings: PoolSettings, instance: Start, outcomes: list[str]
    ) -> None:
        async def scenario() -> None:
            instances = [instance("small") for _ in range(3)]
            engines = Engines(*[ReplicaUnavailableError("new")] * 5)
            async with routing(settings, instances, engines) as (router, hub):
                with pytest.raises(ApiError) as refused:
                    await ask(router, SMALL)
                assert refused.value.status == 503
                assert len(set(engines.called)) == 3
                assert (await ask(router, SMALL))[1] == b"onetwo"
                assert hub.removed.empty()
                assert len((await hub.fleet(None)).instances) == 3

        asyncio.run(scenario())
        assert [record.finish_reason for record in records_of(settings)] == ["error", "stop"]
        assert outcomes == ["error", "stop"]

    def test_what_an_engine_refuses_is_not_tried_elsewhere(
        self, settings: PoolSettings, instance: Start, outcomes: list[str]
    ) -> None:
        class Refusing(Engines):
            async def generate(
                self, request: EngineRequest, replica_id: str
            ) -> AsyncGenerator[list[EngineEvent], None]:
                self.called.append(replica_id)
                error = {"message": "no", "type": "t", "param": "n", "code": None}
                yield [Failed(400, error)]

        async def scenario() -> None:
            engines = Refusing()
            instances = [instance("small"), instance("small")]
            async with routing(settings, instances, engines) as (router, _):
                with pytest.raises(ApiError, match="no"):
                    await ask(router, SMALL)
            assert len(engines.called) == 1

        asyncio.run(scenario())
        [record] = records_of(settings)
        assert record.finish_reason == "error"
        assert outcomes == ["error"]

    def test_a_caller_that_leaves(
        self, settings: PoolSettings, instance: Start, outcomes: list[str]
    ) -> None:
        async def scenario() -> None:
            async with routing(settings, [instance("small")], Engines()) as (router, _):
                body = {**SMALL, "stream": True}
                answer = await router.answer("chat", body, time.time(), None)
                assert await anext(answer.payloads) == b"one"
                await answer.payloads.aclose()

        asyncio.run(scenario())
        [record] = records_of(settings)
        assert record.finish_reason == "disconnected"
        assert outcomes == ["disconnected"]


class TestRequestRouter:
    def choose(self, wanted: str, **options: Any) -> Any:
        class Router(PickedReplicaRouter):
            def __init__(self) -> None:
                """Serve's own is not needed to choose."""

            @property
            def curr_replicas(self) -> Any:
                return {"r": SimpleNamespace(replica_id=SimpleNamespace(unique_id="there"))}

        pending: Any = SimpleNamespace(kwargs={"replica_id": wanted})
        return asyncio.run(Router()._choose_replica_for_request(pending, **options))

    def test_the_picked_one_is_taken(self) -> None:
        assert self.choose("there").replica_id.unique_id == "there"

    def test_unknown_is_not_dead(self) -> None:
        with pytest.raises(ReplicaUnavailableError, match="elsewhere"):
            self.choose("elsewhere")

    def test_known_and_out_of_reach_is(self) -> None:
        with pytest.raises(RayActorError, match="there") as raised:
            self.choose("there", is_retry=True)
        # Serve catches the subclasses, and would try again without end.
        assert type(raised.value) is RayActorError


def view(*instances: Instance) -> FleetView:
    return FleetView(FleetVersion("life", 1), tuple(one.report for one in instances))


class TestFleetViews:
    def test_a_snapshot_file_of_another_layout_leaves_one_instance_out_until_it_changes(
        self, settings: PoolSettings, instance: Start
    ) -> None:
        async def scenario() -> None:
            good, odd = instance("small"), instance("large")
            # Beside it: the writer's own file is mapped into this process.
            whole = odd.path.rename(odd.path.with_suffix(".whole"))
            odd.path.write_bytes(ANOTHER_LAYOUT)
            async with routing(settings, [good], Engines()) as (router, hub):
                await hub.report(odd.report, None)
                await hub.report(replace(good.report, replica_id="moved"), None)
                name = good.report.instance_id
                await until(lambda: router._instances[name].replica_id == "moved")
                assert router.missing_models == ["large"]
                router.check_health()
                whole.replace(odd.path)
                await hub.remove(good.report.instance_id)
                await until(lambda: router.missing_models == ["small"])

        asyncio.run(scenario())

    def test_a_known_instance_whose_file_turns_odd_is_forgotten_whole(
        self, settings: PoolSettings, instance: Start
    ) -> None:
        async def scenario() -> None:
            one = instance("small")
            async with routing(settings, [one], Engines()) as (router, _):
                odd = one.path.with_suffix(".odd")
                odd.write_bytes(ANOTHER_LAYOUT)
                one.report = replace(one.report, snapshot_path=str(odd))
                router._apply(view(one))
                assert router.missing_models == ["small", "large"]
                with pytest.raises(ApiError) as refused:
                    await router.explain("chat", SMALL, time.time(), None)
                assert refused.value.status == 503

        asyncio.run(scenario())

    def test_health_tells_that_the_fleet_is_no_longer_followed(
        self, settings: PoolSettings, instance: Start
    ) -> None:
        class OddHub(LocalHub):
            async def fleet(self, after: FleetVersion | None) -> FleetView:
                if after is None:
                    return await super().fleet(after)
                raise TypeError("a message of another version")

        async def scenario() -> None:
            async with routing(settings, [instance("small")], Engines(), OddHub()) as (router, _):
                await asyncio.wait(router._following)
                with pytest.raises(RuntimeError, match="another version"):
                    router.check_health()

        asyncio.run(scenario())

    def test_an_instance_on_another_node_is_forecast_from_what_it_sends(
        self, settings: PoolSettings, instance: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario() -> None:
            far = instance("small", ELSEWHERE)
            loop = asyncio.get_running_loop()
            received: asyncio.Queue[str] = asyncio.Queue()

            def deliver(router: QueryRouter, instance_id: str, snapshot: bytes) -> None:
                whole(router, instance_id, snapshot)
                loop.call_soon_threadsafe(received.put_nowait, instance_id)

            def subscribe(feed: SnapshotFeed, instance_id: str, endpoint: str) -> None:
                subscribed.append(endpoint)
                really(feed, instance_id, endpoint)

            subscribed: list[str] = []
            whole, really = QueryRouter._deliver, SnapshotFeed.subscribe
            monkeypatch.setattr(QueryRouter, "_deliver", deliver)
            monkeypatch.setattr(SnapshotFeed, "subscribe", subscribe)
            async with routing(settings, [far], Engines()) as (router, _):
                assert await received.get() == far.report.instance_id
                [before] = (await router.explain("chat", SMALL, time.time(), None)).candidates
                assert before.estimator is Estimator.SFS
                assert 0 <= before.snapshot_age_s < 5

                # Batch times fitted anew: the forecast follows, the subscription stays.
                slower = given(far.report.scheduler, BatchTime(0.5, 1e-5, 1e-7, 1e-9))
                far.report = replace(far.report, timing=slower)
                router._apply(view(far))
                [after] = (await router.explain("chat", SMALL, time.time(), None)).candidates
                assert after.estimator is Estimator.SFS
                assert after.ttft_s > before.ttft_s + 0.4
                assert subscribed == [far.relay.endpoint]

                # Another address: a relay that started anew.
                moved = SnapshotRelay(str(far.path), "127.0.0.1")
                try:
                    far.report = replace(far.report, snapshot_endpoint=moved.endpoint)
                    router._apply(view(far))
                    far.publish()
                    assert await received.get() == far.report.instance_id
                finally:
                    moved.stop()
                assert subscribed == [far.relay.endpoint, moved.endpoint]

                router._apply(view())
                assert router.missing_models == ["small", "large"]

        asyncio.run(scenario())


def test_metrics_are_named_as_prometheus_has_it() -> None:
    metrics = RouterMetrics()
    names = {metric.info["name"] for metric in vars(metrics).values()}
    assert names == {
        "foretoken_time_to_first_token_seconds",
        "foretoken_predicted_time_to_first_token_seconds",
        "foretoken_decision_seconds",
        "foretoken_requests_total",
        "foretoken_output_length_bias_ratio",
        "foretoken_output_length_coverage_ratio",
        "foretoken_predictor_trained_timestamp_seconds",
    }
