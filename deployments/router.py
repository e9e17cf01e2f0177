"""The Serve shell around ``app.router``: a query in, an answer's bytes out.

Here lives what a decision needs from Serve: the fleet and its snapshots, the call to the chosen
replica, and what is observed of it. The decision itself is ``app.router.Router.route``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from app.chat import PromptError
from app.config import PoolSettings
from app.identity import new_decision_id, request_key
from app.prediction import PriorPredictor
from app.prediction.features import FEATURE_VERSION, prompt_features
from app.prediction.online import OnlinePredictor
from app.prediction.source import PredictorFile
from app.records import DecisionRecord, RecordWriter
from app.router import NoCandidate, Router
from app.tokenizer import Tokenizers
from app.types import AUTO, FINISH_REASONS, Decision, PromptFeatures, Query, TokenIds
from deployments.hub import FleetVersion, FleetView
from deployments.messages import (
    Accepted,
    Endpoint,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FirstToken,
    InstanceReport,
    Payload,
)
from deployments.metrics import RouterMetrics
from deployments.openai_protocol import ApiError, Generation, parse
from deployments.snapshots import SnapshotFeed
from deployments.upkeep import raise_if_ended

logger = logging.getLogger("ray.serve")

LONG_PROMPT_CHARACTERS = 20_000
"""From here on tokenising would hold up the other requests."""
HUB_RETRY_S = 1.0
PREDICTOR_INTERVAL_S = 2.0
"""Between looks at whether the predictor's file has changed."""
DEATHS_PER_REQUEST = 2
"""A request that kills whoever runs it must not run on every replica."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    decision: Decision
    payloads: AsyncGenerator[bytes, None]
    """SSE events when streaming, else the JSON body. ApiError where it breaks off; closing it
    aborts the request. The first payload is already here: what came before it did not fail."""


class _ReplicaLost(Exception):
    """The replica died, or cannot be reached yet, before the first token: another may answer."""

    def __init__(self, decision: Decision, seen: _Observed, cause: Exception) -> None:
        super().__init__(f"{decision.choice.instance_id}: {cause}")
        self.decision = decision
        self.seen = seen
        self.died = isinstance(cause, RayActorError)


class QueryRouter:
    """One per ingress replica; lives on its event loop."""

    def __init__(
        self,
        settings: PoolSettings,
        hub: DeploymentHandle,
        engines: Mapping[str, DeploymentHandle],
        node_id: str,
    ) -> None:
        """``node_id``: Ray's name of the node, on which snapshots are read in shared memory."""
        _log_with_serve()
        self._settings = settings
        self._models = {model.name: model for model in settings.models}
        self._hub = hub
        self._engines = engines
        self._tokenizers = Tokenizers(settings.tokenizers)
        for name in settings.tokenizers:
            # Loaded now rather than on somebody's first query.
            self._tokenizers[name]
        self._predictor = OnlinePredictor(PriorPredictor(settings))
        self._router = Router(settings, self._predictor)
        self._instances: dict[str, InstanceReport] = {}
        self._node_id = node_id
        self._feed = SnapshotFeed(self._deliver, self._deliver_journal)
        self._metrics = RouterMetrics()
        folder = settings.router.records_dir
        self._records = None if folder is None else RecordWriter(folder)
        self._following = [
            asyncio.create_task(self._follow_fleet(), name="following the fleet"),
        ]
        if settings.router.predictor is not None:
            self._metrics.predictor(0.0)
            file = PredictorFile(settings, settings.router.predictor)
            following = asyncio.create_task(
                self._follow_predictor(file), name="following the predictor"
            )
            self._following.append(following)
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def missing_models(self) -> list[str]:
        """Models of the pool that no instance serves now."""
        served = {report.model for report in self._instances.values()}
        return [name for name in self._models if name not in served]

    async def explain(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        arrived_s: float,
        slo_ms: float | None,
    ) -> Decision:
        """The decision that ``answer`` would make; nothing is run or booked."""
        generation = parse(endpoint, body)
        query = await self._query(generation, arrived_s, slo_ms)
        return self._decide(query, generation, dry_run=True)

    async def answer(
        self,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        arrived_s: float,
        slo_ms: float | None,
    ) -> Answer:
        """Routes and runs. ApiError while nothing has been answered."""
        generation = parse(endpoint, body)
        query = await self._query(generation, arrived_s, slo_ms)
        lost: list[_ReplicaLost] = []
        while True:
            decision = self._decide_after(lost, query, generation)
            payloads = self._run(query, endpoint, generation, body, decision)
            try:
                first = await anext(payloads)
            except _ReplicaLost as loss:
                if loss.died:
                    self._remove_in_background(decision.choice.instance_id)
                lost.append(loss)
                continue
            return Answer(decision, _with_first(first, payloads))

    def check_health(self) -> None:
        """Raises what keeps the router from following the fleet."""
        raise_if_ended(*self._following)

    def stop(self) -> None:
        for task in (*self._following, *self._removals):
            task.cancel()
        self._feed.stop()
        if self._records is not None:
            self._records.close()

    def _decide_after(
        self, lost: Sequence[_ReplicaLost], query: Query, generation: Generation
    ) -> Decision:
        """Among those not yet lost to this request; with none left, it ends with the last loss."""
        try:
            if sum(loss.died for loss in lost) == DEATHS_PER_REQUEST:
                died = "; ".join(str(loss) for loss in lost if loss.died)
                raise ApiError(503, f"replicas died: {died}", type="server_error")
            exclude = frozenset(loss.decision.choice.instance_id for loss in lost)
            return self._decide(query, generation, exclude)
        except ApiError:
            if lost:
                self._settle(query, lost[-1].decision, lost[-1].seen)
            raise

    def _decide(
        self,
        query: Query,
        generation: Generation,
        exclude: frozenset[str] = frozenset(),
        dry_run: bool = False,
    ) -> Decision:
        try:
            decision = self._router.route(query, exclude, dry_run)
        except NoCandidate as error:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            param = generation.field_of(error.param)
            raise ApiError(error.status, error.message, param, kind) from error
        if not dry_run:
            self._metrics.decided(decision)
        return decision

    async def _query(self, generation: Generation, arrived_s: float, slo_ms: float | None) -> Query:
        tokenizers = dict.fromkeys(
            model.tokenizer
            for model in self._settings.models
            if generation.model in (AUTO, model.name)
        )
        try:
            text = generation.text
            prompts = {name: await self._encode(generation, name, len(text)) for name in tokenizers}
        except PromptError as error:
            param = str(error).split(" ", 1)[0]
            raise ApiError(400, str(error), param) from error
        features = await self._features(generation, text, prompts) if self._sees_prompts else None
        defaults, wanted = self._settings.router, generation.routing
        slo_ms = _first(wanted.ttft_slo_ms, slo_ms, defaults.ttft_slo_ms, math.inf)
        decision_id = new_decision_id()
        return Query(
            decision_id=decision_id,
            request_key=request_key(decision_id),
            model=generation.model,
            prompts=prompts,
            text=text,
            arrived_s=arrived_s,
            max_tokens=generation.output_limit,
            priority=generation.priority,
            ttft_slo_s=slo_ms / 1e3,
            cost_weight=_first(wanted.lambda_per_microusd, defaults.lambda_per_microusd),
            latency_weight=_first(wanted.delta_per_s, defaults.delta_per_s),
            policy=_first(wanted.policy, defaults.policy),
            features=features,
        )

    @property
    def _sees_prompts(self) -> bool:
        """Whether anybody wants to know what prompts look like."""
        return self._settings.router.predictor is not None or self._records is not None

    async def _features(
        self, generation: Generation, text: str, prompts: Mapping[str, TokenIds]
    ) -> PromptFeatures | None:
        """None for a prompt that the candidates take, and the tokenizer of features does not."""
        name = self._settings.feature_tokenizer
        try:
            ids = (
                prompts[name]
                if name in prompts
                else await self._encode(generation, name, len(text))
            )
        except PromptError:
            return None
        if len(text) < LONG_PROMPT_CHARACTERS:
            return prompt_features(ids, text)
        return await asyncio.to_thread(prompt_features, ids, text)

    async def _encode(self, generation: Generation, tokenizer: str, characters: int) -> TokenIds:
        if characters < LONG_PROMPT_CHARACTERS:
            return generation.encode(self._tokenizers[tokenizer])
        return await asyncio.to_thread(generation.encode, self._tokenizers[tokenizer])

    async def _run(
        self,
        query: Query,
        endpoint: Endpoint,
        generation: Generation,
        body: Mapping[str, Any],
        decision: Decision,
    ) -> AsyncGenerator[bytes, None]:
        """The chosen replica's payloads. However it ends, the booking is released, and the request
        settled unless the replica was lost: then it is not over yet."""
        choice = decision.choice
        # It may be replaced before the answer ends.
        promised_by = self._predictor.version
        seen = _Observed(query.arrived_s, sent_s=time.time(), streams=bool(generation.stream))
        engine = self._engines[choice.model]
        replica_id = self._instances[choice.instance_id].replica_id
        lost = False
        try:
            # By value: a token through Ray's object store costs three times the CPU time.
            call = engine.options(stream=True, _by_reference=False).generate.remote(
                self._request(query, endpoint, body, decision), replica_id=replica_id
            )
            async for batch in call:
                for event in batch:
                    if seen.first_token_arrives_with(event):
                        self._router.observe_dispatch(
                            choice.instance_id, seen.dispatch_s, seen.return_s
                        )
                        self._metrics.first_token(decision, seen.ttft_s)
                    match event:
                        case Payload(data):
                            yield data
                        case Finished(_, output_tokens, finish_reason):
                            seen.output_tokens, seen.ending = (
                                output_tokens,
                                finish_reason,
                            )
                            if finish_reason in FINISH_REASONS.values():
                                self._predictor.finished(choice, output_tokens, promised_by)
                                self._pass_on_residuals(choice.model)
                        case Failed(status, error):
                            raise ApiError.of(status, error)
        except (GeneratorExit, asyncio.CancelledError):
            call.cancel()
            raise
        except ApiError:
            seen.ending = "error"
            raise
        except Exception as error:
            seen.ending = "error"
            if isinstance(error, ReplicaUnavailableError | RayActorError) and seen.first_s is None:
                lost = True
                raise _ReplicaLost(decision, seen, error) from error
            logger.exception("%s broke off on %s", decision.decision_id, choice.instance_id)
            message = f"{choice.instance_id} failed: {error}"
            raise ApiError(500, message, type="server_error") from error
        finally:
            self._router.release(decision)
            if not lost:
                self._settle(query, decision, seen)

    def _pass_on_residuals(self, model: str) -> None:
        """To the forecasts, which ask how far lengths stray, and to whoever watches."""
        prior = self._models[model].prior.output_sigma
        self._router.observe_length_sigma(model, self._predictor.length_sigma(model, prior))
        self._metrics.length_drift(model, self._predictor.drift_of(model))

    def _settle(self, query: Query, decision: Decision, seen: _Observed) -> None:
        """Once a request, with the decision that it ended with."""
        self._metrics.ended(decision.choice.model, seen.ending)
        if self._records is not None:
            self._records.add(seen.record(query, decision))

    def _remove_in_background(self, instance_id: str) -> None:
        # The next attempt must not wait for the hub, which may be slow or dead itself.
        task = asyncio.create_task(self._remove(instance_id))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _remove(self, instance_id: str) -> None:
        with contextlib.suppress(RayError, RayServeException):
            await self._hub.remove.remote(instance_id)

    def _request(
        self,
        query: Query,
        endpoint: Endpoint,
        body: Mapping[str, Any],
        decision: Decision,
    ) -> EngineRequest:
        choice = decision.choice
        model = self._models[choice.model]
        engine_body = {name: value for name, value in body.items() if name != "routing"}
        return EngineRequest(
            decision_id=query.decision_id,
            request_key=query.request_key,
            endpoint=endpoint,
            body={**engine_body, "model": choice.model},
            prompt_token_ids=query.prompts[model.tokenizer],
            max_tokens=choice.max_tokens,
            predicted_output_tokens=choice.predicted_output_tokens,
            priority=query.priority,
        )

    async def _follow_predictor(self, file: PredictorFile) -> None:
        while True:
            loaded = await asyncio.to_thread(file.newer)
            if loaded is not None:
                self._predictor.replace(loaded.predictor)
                self._metrics.predictor(loaded.trained_s)
                for model in self._models:
                    self._pass_on_residuals(model)
            await asyncio.sleep(PREDICTOR_INTERVAL_S)

    async def _follow_fleet(self) -> None:
        version: FleetVersion | None = None
        while True:
            try:
                view: FleetView = await self._hub.fleet.remote(version)
            except (RayError, RayServeException) as error:
                # Serve restarts the hub; meanwhile the fleet is as it was.
                logger.warning("the hub does not answer: %s", error)
                await asyncio.sleep(HUB_RETRY_S)
                continue
            self._apply(view)
            version = view.version

    def _apply(self, view: FleetView) -> None:
        # While an application is replaced, the hub may still know models of the old one.
        fleet = {r.instance_id: r for r in view.instances if r.model in self._models}
        for instance_id in self._instances.keys() - fleet.keys():
            self._forget(instance_id)
        for instance_id, report in fleet.items():
            known = self._instances.get(instance_id)
            if known == report:
                continue
            spec = self._models[report.model].instance_spec(
                instance_id,
                report.scheduler,
                report.timing.batch_time,
                report.timing.prefill_tokens_per_s,
                report.timing.decode_step_s,
            )
            here = report.node_id == self._node_id
            try:
                self._router.add_instance(spec, report.snapshot_path if here else None)
            except (OSError, ValueError) as error:
                # Its engine has just ended, or lays its snapshots out in another version's way; if
                # that changes, a later view brings it back.
                logger.warning("%s is left out: %s", instance_id, error)
                self._forget(instance_id)
                continue
            self._instances[instance_id] = report
            endpoint = None if known is None else known.snapshot_endpoint
            if not here and report.snapshot_endpoint != endpoint:
                self._feed.subscribe(instance_id, report.snapshot_endpoint)

    def _forget(self, instance_id: str) -> None:
        self._feed.unsubscribe(instance_id)
        self._router.remove_instance(instance_id)
        self._instances.pop(instance_id, None)

    def _deliver(self, instance_id: str, snapshot: bytes) -> None:
        try:
            self._router.update_snapshot(instance_id, snapshot)
        except ValueError as error:
            # Of another version of the layout: the instance goes stale, and forecasts say so.
            logger.warning("snapshot of %s dropped: %s", instance_id, error)

    def _deliver_journal(self, instance_id: str, message: bytes) -> bool:
        try:
            return self._router.update_journal(instance_id, message)
        except ValueError as error:
            logger.warning("KV journal of %s dropped: %s", instance_id, error)
            return False


@dataclass(slots=True)
class _Observed:
    """What the ingress sees of one request; Unix times."""

    arrived_s: float
    sent_s: float
    streams: bool
    accepted_s: float | None = None
    engine_first_s: float | None = None
    first_s: float | None = None
    output_tokens: int = 0
    ending: str = "disconnected"
    """The engine's finish reason, or ``error``; as it stands until one is known."""

    def first_token_arrives_with(self, event: EngineEvent) -> bool:
        """A stream's first bytes; of a whole answer, the engine's word that it has begun."""
        match event:
            case Accepted(at_s):
                self.accepted_s = at_s
            case FirstToken(at_s):
                self.engine_first_s = at_s
        awaited = Payload if self.streams else FirstToken
        known = self.accepted_s is not None and self.engine_first_s is not None
        if self.first_s is not None or not known or not isinstance(event, awaited):
            return False
        self.first_s = time.time()
        return True

    @property
    def ttft_s(self) -> float | None:
        return _since(self.arrived_s, self.first_s)

    @property
    def dispatch_s(self) -> float | None:
        return _since(self.sent_s, self.accepted_s)

    @property
    def return_s(self) -> float | None:
        return _since(self.engine_first_s, self.first_s)

    def record(self, query: Query, decision: Decision) -> DecisionRecord:
        seen = query.features
        return DecisionRecord(
            decision=decision,
            requested_model=query.model,
            arrived_s=query.arrived_s,
            finished_s=time.time(),
            max_tokens=query.max_tokens,
            priority=query.priority,
            ttft_s=self.ttft_s,
            engine_ttft_s=_since(self.accepted_s, self.engine_first_s),
            dispatch_s=self.dispatch_s,
            output_tokens=self.output_tokens,
            finish_reason=self.ending,
            prompt_hash=[] if seen is None else seen.buckets.tolist(),
            prompt_description=[] if seen is None else seen.description.tolist(),
            feature_version=0 if seen is None else FEATURE_VERSION,
        )


def _log_with_serve() -> None:
    """Serve sets up its own logger alone; what ``app`` has to say is for the same readers."""
    app_logger = logging.getLogger("app")
    app_logger.handlers = list(logger.handlers)
    app_logger.setLevel(logger.getEffectiveLevel())


def _since(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


def _first(*values: T | None) -> T:
    """The first that is given."""
    return next(value for value in values if value is not None)


async def _with_first(
    first: bytes, rest: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for payload in rest:
            yield payload
