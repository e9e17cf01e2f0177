"""One decision: which instance answers a query."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from app.config import PoolSettings
from app.estimators import Observation, estimate, throughput
from app.identity import request_key
from app.policies import POLICIES, Choice, Options, feasible
from app.prediction import Predictor
from app.replicas import Instance, Replicas, by_model
from app.shortlist import Indices, Loads, shortlist
from app.types import (
    AUTO,
    Decision,
    Estimator,
    Forecast,
    InstanceSpec,
    Prediction,
    Query,
)
from sfs_ext import Fleet, ForecastStatus, query_dtype

FORECAST_ALL = 64
"""Candidates up to which a decision forecasts each of them."""
SIGMA_STEP = 0.1
"""Of a sigma: less may be chance."""


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
        self,
        settings: PoolSettings,
        predictor: Predictor,
        clock: Callable[[], float] = time.time,
        forecast_all: int = FORECAST_ALL,
    ) -> None:
        self.fleet = Fleet()
        self._predictor = predictor
        self._clock = clock
        self.forecast_all = forecast_all
        self._limits = settings.router
        self._preferred = Estimator(settings.router.estimator)
        self._models = {model.name: model for model in settings.models}
        self._length_sigmas = {m.name: m.prior.output_sigma for m in settings.models}
        self._instances: dict[str, Instance] = {}
        self._replicas: Mapping[str, Sequence[Replicas]] | None = None
        """None: to be grouped anew."""
        self._delays_s = np.zeros((0, 2))
        """By handle: each instance's running means of dispatch and return delay, once more."""
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
            offers = self._offers(query, exclude)
            candidates = sum(len(offer.replicas.instances) for offer in offers)
            if candidates <= self.forecast_all:
                forecasts, choice = self._weigh_all(query, offers, now_s)
                pruned = 0
            else:
                forecasts, choice = self._weigh_likeliest(query, offers, now_s)
                pruned = candidates - len(forecasts)
            chosen = forecasts[choice.index]
            if not dry_run:
                self._book(query, chosen, now_s)
        left_out = f"; {pruned} more were not worth a forecast" if pruned else ""
        return Decision(
            decision_id=query.decision_id,
            policy=query.policy,
            ttft_slo_s=query.ttft_slo_s,
            cost_weight=query.cost_weight,
            latency_weight=query.latency_weight,
            candidates=tuple(forecasts),
            chosen=choice.index,
            reason=f"{chosen.instance_id}: {choice.reason}{left_out}.",
            decision_s=time.perf_counter() - began_s,
            pruned=pruned,
        )

    def _offers(self, query: Query, exclude: frozenset[str]) -> list[_Offer]:
        """Of the models asked for, as far as they have room for the prompt and the answer."""
        if query.model != AUTO and query.model not in self._models:
            there_are = ", ".join((AUTO, *self._models))
            raise NoCandidate(404, f"no model {query.model!r}; there are {there_are}", "model")
        if self._replicas is None:
            self._replicas = by_model(self._instances.values())
        asked = self._replicas.get(query.model, ())
        roomy = [r for r in asked if r.room_tokens(query) >= (query.max_tokens or 1)]
        if asked and not roomy:
            raise _too_long(query, max(asked, key=lambda r: r.room_tokens(query)))
        if exclude:
            roomy = [left for r in roomy if (left := r.without(exclude)).instances]
        if not roomy:
            raise NoCandidate(503, f"no instance of {query.model} can be reached")
        predictions = self._predictor.predict(query, [r.model for r in roomy])
        return [_Offer(query, r, p) for r, p in zip(roomy, predictions, strict=True)]

    def _weigh_all(
        self, query: Query, offers: Sequence[_Offer], now_s: float
    ) -> tuple[list[Forecast], Choice]:
        """Every candidate's forecast, and the policy's choice."""
        candidates = [
            (offer, instance) for offer in offers for instance in offer.replicas.instances
        ]
        forecasts = self._forecasts(query, candidates, now_s)
        if not forecasts:
            raise _all_silent(query)
        return forecasts, self._choose(query, forecasts)

    def _weigh_likeliest(
        self, query: Query, offers: Sequence[_Offer], now_s: float
    ) -> tuple[list[Forecast], Choice]:
        """From few forecasts, nearly always the same choice (``tests/bench/test_route.py`` measures
        how often): one model after the other by utility, until no further one could be chosen, and
        of each those replicas that might answer soonest by their loads."""
        forecasts: list[Forecast] = []
        choice = None
        for offer in sorted(offers, key=lambda offer: offer.utility, reverse=True):
            if choice is not None and offer.utility < choice.least_utility:
                break
            forecasts += self._likeliest(query, offer, now_s)
            if forecasts:
                choice = self._choose(query, forecasts)
        if choice is None:
            raise _all_silent(query)
        return forecasts, choice

    def _likeliest(self, query: Query, offer: _Offer, now_s: float) -> list[Forecast]:
        """Forecasts of those replicas of a model that the policy might choose."""
        loads, limits = self._loads(query, offer, now_s), self._limits
        instances = offer.replicas.instances
        forecasts: list[Forecast] = []

        def forecast_batch(batch: Indices) -> float:
            more = [(offer, instances[i]) for i in batch.tolist()]
            forecasts.extend(self._forecasts(query, more, now_s))
            return min((forecast.ttft_s for forecast in forecasts), default=math.inf)

        shortlist(query.policy, loads, limits.stale_after_s, limits.silent_after_s, forecast_batch)
        return forecasts

    def _loads(self, query: Query, offer: _Offer, now_s: float) -> Loads:
        replicas = offer.replicas
        dispatch_s, return_s = self._delays_s[replicas.handles].T
        asked = np.empty(len(replicas.handles), query_dtype)
        asked["instance"] = replicas.handles
        asked["prompt_tokens"] = offer.prompt_tokens
        asked["predicted_output_tokens"] = offer.output_tokens
        asked["max_tokens"] = offer.max_tokens
        asked["priority"] = query.priority
        asked["arrival_s"] = now_s + dispatch_s
        asked["prompt"] = offer.prompt
        loads = self.fleet.loads(now_s, asked, list(query.prompts.values()))
        delays_s = _since(query, now_s) + dispatch_s + return_s
        return Loads(
            ttft_s=delays_s + loads["ttft_s"],
            least_ttft_s=delays_s + loads["least_ttft_s"],
            residents=loads["running"] + loads["waiting"],
            age_s=loads["age_s"],
            position=replicas.positions,
            last_position=self._last_positions.get(query.model, -1),
        )

    def _forecasts(
        self, query: Query, candidates: Sequence[tuple[_Offer, Instance]], now_s: float
    ) -> list[Forecast]:
        """In order, without those that have fallen silent."""
        asked = np.array(
            [
                (
                    instance.handle,
                    offer.prompt_tokens,
                    offer.output_tokens,
                    offer.max_tokens,
                    query.priority,
                    now_s + instance.dispatch_delay.value,
                    offer.prompt,
                )
                for offer, instance in candidates
            ],
            query_dtype,
        )
        rows = self.fleet.forecast(now_s, asked, list(query.prompts.values()))
        views = map(_View._make, rows.tolist())
        return [
            self._forecast(query, offer, instance, view, now_s)
            for (offer, instance), view in zip(candidates, views, strict=True)
            # nan without a snapshot: neither silent nor fresh.
            if not view.age_s > self._limits.silent_after_s
        ]

    def _forecast(
        self, query: Query, offer: _Offer, instance: Instance, view: _View, now_s: float
    ) -> Forecast:
        seen = Observation(
            spec=instance.spec,
            prompt_tokens=offer.prompt_tokens,
            arrival_qps=instance.arrivals.per_s(now_s),
            servable=view.status != _NEVER,
            fresh=view.age_s <= self._limits.stale_after_s,
            simulated=view.status == _OK,
            simulated_waiting_s=view.waiting_s,
            simulated_prefill_s=view.prefill_s,
            queued_prefill_tokens=view.queued_prefill_tokens,
        )
        expected = estimate(self._preferred, seen)
        compared = throughput(seen)
        # The engine counts from the query's arrival there, its caller from arrival at the ingress.
        before_s = _since(query, now_s) + instance.dispatch_delay.value
        after_s = instance.return_delay.value
        waiting_s, prefill_s = before_s + expected.waiting_s, expected.prefill_s + after_s
        return Forecast(
            instance_id=instance.spec.instance_id,
            model=offer.replicas.model.name,
            estimator=expected.estimator,
            prompt_tokens=offer.prompt_tokens,
            cached_tokens=view.cached_tokens,
            max_tokens=offer.max_tokens,
            ttft_s=waiting_s + prefill_s,
            waiting_s=waiting_s,
            prefill_s=prefill_s,
            throughput_ttft_s=before_s + compared.ttft_s + after_s if compared else math.nan,
            quality=offer.prediction.quality,
            predicted_output_tokens=offer.output_tokens,
            output_tokens_low=min(offer.prediction.output_tokens_low, offer.max_tokens),
            output_tokens_high=min(offer.prediction.output_tokens_high, offer.max_tokens),
            length_correction=offer.prediction.length_correction,
            prediction_source=offer.prediction.source,
            cost_microusd=offer.cost_microusd,
            utility=offer.utility,
            feasible=feasible(waiting_s + prefill_s, query.ttft_slo_s),
            snapshot_age_s=view.age_s,
            running=view.running,
            waiting=view.waiting,
        )

    def _choose(self, query: Query, forecasts: Sequence[Forecast]) -> Choice:
        return POLICIES[query.policy](
            Options(
                utility=[f.utility for f in forecasts],
                ttft_s=[f.ttft_s for f in forecasts],
                residents=[f.running + f.waiting for f in forecasts],
                position=[self._instances[f.instance_id].position for f in forecasts],
                ttft_slo_s=query.ttft_slo_s,
                latency_weight=query.latency_weight,
                last_position=self._last_positions.get(query.model, -1),
            )
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
            chosen.max_tokens,
            query.priority,
            query.prompts[instance.spec.model.tokenizer],
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
                sigma = self._length_sigmas[spec.model.name]
                handle = self.fleet.add(spec.scheduler, spec.batch_time, sigma)
                known = Instance(spec, handle, next(self._positions))
                self._delays_s = np.vstack((self._delays_s, (0.0, 0.0)))
                self._replicas = None
            elif known.spec.batch_time != spec.batch_time:
                self.fleet.calibrate(known.handle, spec.batch_time)
            if known.spec.model != spec.model:
                self._replicas = None
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
                self._replicas = None

    def update_snapshot(self, instance_id: str, data: bytes) -> bool:
        """False for a snapshot no newer than the one held, or of an instance that has gone."""
        with self._lock:
            instance = self._instances.get(instance_id)
            return instance is not None and self.fleet.update(instance.handle, data)

    def update_journal(self, instance_id: str, message: bytes) -> bool:
        """False where a message before it is missing: one that begins anew is wanted."""
        with self._lock:
            instance = self._instances.get(instance_id)
            return instance is None or self.fleet.update_journal(instance.handle, message)

    def observe_dispatch(self, instance_id: str, dispatch_s: float, return_s: float) -> None:
        """Delays from router to engine and from engine to ingress; later forecasts add them."""
        with self._lock:
            instance = self._instances.get(instance_id)
            if instance is not None:
                # Clocks of two nodes may disagree by more than a short delay.
                instance.dispatch_delay.add(max(0.0, dispatch_s))
                instance.return_delay.add(max(0.0, return_s))
                delays_s = instance.dispatch_delay.value, instance.return_delay.value
                self._delays_s[instance.handle] = delays_s

    def observe_length_sigma(self, model: str, sigma: float) -> None:
        """How far answers of a model of the pool stray from their predicted lengths: the standard
        deviation of the log of their ratio. Until it is observed, the prior's. Forecasts take it up
        with each instance's next snapshot. ValueError unless it is finite and not negative."""
        if not 0.0 <= sigma < math.inf:
            raise ValueError(f"{model}: a length sigma of {sigma}; it must be finite and >= 0")
        with self._lock:
            known = self._length_sigmas[model]
            if abs(sigma - known) <= SIGMA_STEP * known:
                return
            for instance in self._instances.values():
                if instance.spec.model.name == model:
                    self.fleet.set_length_sigma(instance.handle, sigma)
            self._length_sigmas[model] = sigma


class _Offer:
    """What a model's replicas would answer one query, whichever of them does."""

    __slots__ = (
        *("cost_microusd", "max_tokens", "output_tokens", "prediction", "prompt"),
        *("prompt_tokens", "replicas", "utility"),
    )

    def __init__(self, query: Query, replicas: Replicas, prediction: Prediction) -> None:
        room_tokens = replicas.room_tokens(query)
        self.replicas = replicas
        self.prediction = prediction
        self.prompt = list(query.prompts).index(replicas.model.tokenizer)
        self.prompt_tokens = replicas.context_tokens - room_tokens
        asked_tokens = room_tokens if query.max_tokens is None else query.max_tokens
        self.max_tokens = min(asked_tokens, room_tokens)
        self.output_tokens = min(prediction.output_tokens, self.max_tokens)
        self.cost_microusd = replicas.model.cost_microusd(self.prompt_tokens, self.output_tokens)
        self.utility = prediction.quality - query.cost_weight * self.cost_microusd


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
    cached_tokens: int


_OK, _NEVER = int(ForecastStatus.OK), int(ForecastStatus.NEVER)


def _since(query: Query, now_s: float) -> float:
    """Seconds since the ingress had the query."""
    return max(0.0, now_s - query.arrived_s)


def _all_silent(query: Query) -> NoCandidate:
    return NoCandidate(503, f"every instance of {query.model} has fallen silent")


def _too_long(query: Query, roomiest: Replicas) -> NoCandidate:
    limit, room_tokens = roomiest.context_tokens, roomiest.room_tokens(query)
    prompt_tokens = limit - room_tokens
    if room_tokens < 1:
        message = (
            f"the prompt has {prompt_tokens} tokens; the longest that {query.model} takes with an "
            f"answer of at least one is {limit - 1} (a context of {limit})"
        )
        return NoCandidate(400, message, "messages")
    return NoCandidate(
        400,
        f"max_tokens is {query.max_tokens}; beside a prompt of {prompt_tokens} tokens "
        f"{query.model} has room for at most {room_tokens} (a context of {limit})",
        "max_tokens",
    )
