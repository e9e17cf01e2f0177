"""One decision: which instance answers a query."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.config import PoolSettings
from app.estimators import Observation, estimate, throughput
from app.identity import request_key
from app.policies import POLICIES, Options, feasible
from app.prediction import Predictor
from app.rates import ArrivalRate, RunningMean
from app.types import AUTO, Decision, Estimator, Forecast, InstanceSpec, Prediction, Query
from sfs_ext import Fleet, ForecastStatus, query_dtype

ARRIVAL_HORIZON_S = 10.0
DELAY_WEIGHT = 0.1
"""Of the newest dispatch or return delay in its running mean."""


class NoCandidate(Exception):
    """No instance can take the query. ``status`` is HTTP's, ``param`` the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class Router:
    """Thread-safe. ``clock`` gives Unix time in seconds, as the snapshots do."""

    def __init__(
        self, settings: PoolSettings, predictor: Predictor, clock: Callable[[], float] = time.time
    ) -> None:
        self.fleet = Fleet()
        self._predictor = predictor
        self._clock = clock
        self._limits = settings.router
        self._preferred = Estimator(settings.router.estimator)
        self._models = {model.name: model for model in settings.models}
        self._instances: dict[str, _Instance] = {}
        self._positions = itertools.count()
        self._last_positions: dict[str, int] = {}
        self._lock = threading.RLock()

    def route(
        self, query: Query, exclude: frozenset[str] = frozenset(), dry_run: bool = False
    ) -> Decision:
        """Books the query unless ``dry_run``. Raises NoCandidate."""
        began_s = time.perf_counter()
        with self._lock:
            now_s = self._clock()
            candidates = self._candidates(query, exclude)
            predictions = self._predictions(query, candidates)
            rows = self.fleet.forecast(now_s, _questions(query, candidates, predictions, now_s))
            views = [_View(*row) for row in rows.tolist()]
            forecasts = self._forecasts(query, candidates, predictions, views, now_s)
            choice = POLICIES[query.policy](self._options(query, forecasts))
            chosen = forecasts[choice.index]
            if not dry_run:
                self._book(query, chosen, now_s)
        return Decision(
            decision_id=query.decision_id,
            policy=query.policy,
            ttft_slo_s=query.ttft_slo_s,
            cost_weight=query.cost_weight,
            latency_weight=query.latency_weight,
            candidates=tuple(forecasts),
            chosen=choice.index,
            reason=f"{chosen.instance_id}: {choice.reason}.",
            decision_s=time.perf_counter() - began_s,
        )

    def _candidates(self, query: Query, exclude: frozenset[str]) -> list[_Candidate]:
        """Instances of the model asked for with room for the prompt and the answer."""
        if query.model != AUTO and query.model not in self._models:
            there_are = ", ".join((AUTO, *self._models))
            raise NoCandidate(404, f"no model {query.model!r}; there are {there_are}", "model")
        asked = [
            _Candidate(instance, len(query.prompts[instance.spec.model.tokenizer]))
            for instance in self._instances.values()
            if query.model in (AUTO, instance.spec.model.name)
        ]
        roomy = [c for c in asked if c.room_tokens >= (query.max_tokens or 1)]
        if asked and not roomy:
            raise _too_long(query, max(asked, key=lambda c: c.room_tokens))
        reachable = [c for c in roomy if c.instance.spec.instance_id not in exclude]
        if not reachable:
            raise NoCandidate(503, f"no instance of {query.model} can be reached")
        return reachable

    def _predictions(self, query: Query, candidates: Sequence[_Candidate]) -> list[Prediction]:
        """The predictor's, lengths capped by what the query may have."""
        predictions = self._predictor.predict(query, [c.instance.spec.model for c in candidates])
        return [
            Prediction(p.quality, min(p.output_tokens, c.max_tokens(query)), p.source)
            for c, p in zip(candidates, predictions, strict=True)
        ]

    def _forecasts(
        self,
        query: Query,
        candidates: Sequence[_Candidate],
        predictions: Sequence[Prediction],
        views: Sequence[_View],
        now_s: float,
    ) -> list[Forecast]:
        """In order, without those that have fallen silent."""
        forecasts = []
        for candidate, prediction, view in zip(candidates, predictions, views, strict=True):
            # nan without a snapshot: neither silent nor fresh.
            if not view.age_s > self._limits.silent_after_s:
                fresh = view.age_s <= self._limits.stale_after_s
                forecasts.append(self._forecast(query, candidate, prediction, view, fresh, now_s))
        if not forecasts:
            raise NoCandidate(503, f"every instance of {query.model} has fallen silent")
        return forecasts

    def _forecast(
        self,
        query: Query,
        candidate: _Candidate,
        prediction: Prediction,
        view: _View,
        fresh: bool,
        now_s: float,
    ) -> Forecast:
        instance, model = candidate.instance, candidate.instance.spec.model
        seen = Observation(
            spec=instance.spec,
            prompt_tokens=candidate.prompt_tokens,
            arrival_qps=instance.arrivals.per_s(now_s),
            servable=view.status != _NEVER,
            fresh=fresh,
            simulated=view.status == _OK,
            simulated_waiting_s=view.waiting_s,
            simulated_prefill_s=view.prefill_s,
            queued_prefill_tokens=view.queued_prefill_tokens,
        )
        expected = estimate(self._preferred, seen)
        compared = throughput(seen)
        # The engine counts from the query's arrival there, its caller from arrival at the ingress.
        before_s = max(0.0, now_s - query.arrived_s) + instance.dispatch_delay.value
        after_s = instance.return_delay.value
        waiting_s, prefill_s = before_s + expected.waiting_s, expected.prefill_s + after_s
        cost_microusd = model.cost_microusd(seen.prompt_tokens, prediction.output_tokens)
        return Forecast(
            instance_id=instance.spec.instance_id,
            model=model.name,
            estimator=expected.estimator,
            prompt_tokens=seen.prompt_tokens,
            ttft_s=waiting_s + prefill_s,
            waiting_s=waiting_s,
            prefill_s=prefill_s,
            throughput_ttft_s=before_s + compared.ttft_s + after_s if compared else math.nan,
            quality=prediction.quality,
            predicted_output_tokens=prediction.output_tokens,
            prediction_source=prediction.source,
            cost_microusd=cost_microusd,
            utility=prediction.quality - query.cost_weight * cost_microusd,
            feasible=feasible(waiting_s + prefill_s, query.ttft_slo_s),
            snapshot_age_s=view.age_s,
            running=view.running,
            waiting=view.waiting,
        )

    def _options(self, query: Query, forecasts: Sequence[Forecast]) -> Options:
        return Options(
            utility=[f.utility for f in forecasts],
            ttft_s=[f.ttft_s for f in forecasts],
            residents=[f.running + f.waiting for f in forecasts],
            position=[self._instances[f.instance_id].position for f in forecasts],
            ttft_slo_s=query.ttft_slo_s,
            latency_weight=query.latency_weight,
            last_position=self._last_positions.get(query.model, -1),
        )

    def _book(self, query: Query, chosen: Forecast, now_s: float) -> None:
        """From here on the query counts as resident there, before the engine says so."""
        instance = self._instances[chosen.instance_id]
        self.fleet.book(
            instance.handle,
            query.request_key,
            now_s + instance.dispatch_delay.value,
            chosen.prompt_tokens,
            chosen.predicted_output_tokens,
            _Candidate(instance, chosen.prompt_tokens).max_tokens(query),
            query.priority,
        )
        instance.arrivals.arrived(now_s)
        if query.policy == "round_robin":
            # Each name asked for has a cycle of its own; others' turns would skip members of it.
            self._last_positions[query.model] = instance.position

    def release(self, decision: Decision) -> None:
        """The request has ended or failed: its booking goes. Where a snapshot has shown it, it
        counts until a later one does not."""
        with self._lock:
            instance = self._instances.get(decision.choice.instance_id)
            if instance is not None:
                self.fleet.unbook(instance.handle, request_key(decision.decision_id))

    def add_instance(self, spec: InstanceSpec, snapshot_path: str | None = None) -> None:
        """Idempotent; one already there is recalibrated. ``snapshot_path``: its shared memory,
        where that can be read; if it cannot be, FileNotFoundError, and the instance is there
        without it. ValueError for a model that the pool does not have."""
        if spec.model.name not in self._models:
            raise ValueError(
                f"instance {spec.instance_id}: no model {spec.model.name!r} in the pool"
            )
        with self._lock:
            known = self._instances.get(spec.instance_id)
            if known is not None and known.spec.scheduler != spec.scheduler:
                self.remove_instance(spec.instance_id)
                known = None
            if known is None:
                sigma = self._models[spec.model.name].prior.output_sigma
                handle = self.fleet.add(spec.scheduler, spec.batch_time, sigma)
                known = _Instance(spec, handle, next(self._positions))
            elif known.spec.batch_time != spec.batch_time:
                self.fleet.calibrate(known.handle, spec.batch_time)
            known.spec = spec
            self._instances[spec.instance_id] = known
            if snapshot_path is not None and snapshot_path != known.snapshot_path:
                self.fleet.attach(known.handle, snapshot_path)
                known.snapshot_path = snapshot_path

    def remove_instance(self, instance_id: str) -> None:
        """Does nothing for one that is not there."""
        with self._lock:
            instance = self._instances.pop(instance_id, None)
            if instance is not None:
                self.fleet.remove(instance.handle)

    def update_snapshot(self, instance_id: str, data: bytes) -> bool:
        """False for a snapshot no newer than the one held, or of an instance that has gone."""
        with self._lock:
            instance = self._instances.get(instance_id)
            return instance is not None and self.fleet.update(instance.handle, data)

    def observe_dispatch(self, instance_id: str, dispatch_s: float, return_s: float) -> None:
        """Delays from router to engine and from engine to ingress; later forecasts add them."""
        with self._lock:
            instance = self._instances.get(instance_id)
            if instance is not None:
                # Clocks of two nodes may disagree by more than a short delay.
                instance.dispatch_delay.add(max(0.0, dispatch_s))
                instance.return_delay.add(max(0.0, return_s))


@dataclass(slots=True)
class _Instance:
    """An instance and what the router has observed of it."""

    spec: InstanceSpec
    handle: int
    """In the fleet."""
    position: int
    snapshot_path: str | None = None
    arrivals: ArrivalRate = field(default_factory=lambda: ArrivalRate(ARRIVAL_HORIZON_S))
    dispatch_delay: RunningMean = field(default_factory=lambda: RunningMean(DELAY_WEIGHT))
    return_delay: RunningMean = field(default_factory=lambda: RunningMean(DELAY_WEIGHT))

    @property
    def context_tokens(self) -> int:
        scheduler = self.spec.scheduler
        limits = scheduler.max_model_len, scheduler.kv_capacity_tokens
        return min(self.spec.model.context_tokens, *limits)


class _Candidate:
    """An instance asked about one query."""

    __slots__ = ("instance", "prompt_tokens", "room_tokens")

    def __init__(self, instance: _Instance, prompt_tokens: int) -> None:
        self.instance = instance
        self.prompt_tokens = prompt_tokens
        self.room_tokens = instance.context_tokens - prompt_tokens

    def max_tokens(self, query: Query) -> int:
        room = self.room_tokens
        return room if query.max_tokens is None else min(query.max_tokens, room)


class _View(NamedTuple):
    """What the core sees of an instance: a row of ``Fleet.forecast``, forecast_dtype's fields."""

    instance: int
    status: int
    ttft_s: float
    waiting_s: float
    prefill_s: float
    age_s: float
    batches: int
    running: int
    waiting: int
    booked: int
    queued_prefill_tokens: int


_OK, _NEVER = int(ForecastStatus.OK), int(ForecastStatus.NEVER)


def _questions(
    query: Query, candidates: Sequence[_Candidate], predictions: Sequence[Prediction], now_s: float
) -> NDArray[Any]:
    return np.array(
        [
            (
                candidate.instance.handle,
                candidate.prompt_tokens,
                prediction.output_tokens,
                candidate.max_tokens(query),
                query.priority,
                now_s + candidate.instance.dispatch_delay.value,
            )
            for candidate, prediction in zip(candidates, predictions, strict=True)
        ],
        dtype=query_dtype,
    )


def _too_long(query: Query, roomiest: _Candidate) -> NoCandidate:
    prompt_tokens, limit = roomiest.prompt_tokens, roomiest.instance.context_tokens
    if roomiest.room_tokens < 1:
        message = (
            f"the prompt has {prompt_tokens} tokens; the longest that {query.model} takes with an "
            f"answer of at least one is {limit - 1} (a context of {limit})"
        )
        return NoCandidate(400, message, "messages")
    return NoCandidate(
        400,
        f"max_tokens is {query.max_tokens}; beside a prompt of {prompt_tokens} tokens "
        f"{query.model} has room for at most {roomiest.room_tokens} (a context of {limit})",
        "max_tokens",
    )
