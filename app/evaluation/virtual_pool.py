"""A pool in virtual time: its engines, its router and its clients, run as fast as can be computed.

The router is the one that serves; the engines are the truth it is held against. They know every
answer's length and when each request will be done, and never look at what the router predicts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.config import EmulatedEngineSettings, ModelSettings, PoolSettings
from app.estimators import throughput_rates
from app.evaluation.accuracy import ALL_MODELS, Accuracy, measure, pairs
from app.evaluation.arrivals import Arrival
from app.prediction import Predictor
from app.records import DecisionRecord
from app.router import Router
from app.types import FINISH_REASONS, Decision, Estimator, Query
from sfs_ext import SchedulerConfig, VirtualEngine

FollowUp = Callable[[DecisionRecord], Iterable[Arrival]]
"""What a client does after a request has ended."""

OnDispatch = Callable[[Arrival, Decision, VirtualEngine], None]
"""Sees the chosen engine right after it got a request, before anything else happens."""


def model_named(settings: PoolSettings, name: str) -> ModelSettings:
    """ValueError for a model that the pool does not have."""
    for model in settings.models:
        if model.name == name:
            return model
    there_are = ", ".join(model.name for model in settings.models)
    raise ValueError(f"no model {name!r} in the pool; there are {there_are}")


def emulated(model: ModelSettings) -> EmulatedEngineSettings:
    """ValueError for an engine that needs hardware."""
    if not isinstance(model.engine, EmulatedEngineSettings):
        raise ValueError(
            f"model {model.name}: its engine is {model.engine.kind!r}; only emulated ones run in "
            "virtual time"
        )
    return model.engine


def scheduler_config(model: ModelSettings, prefix_caching: bool) -> SchedulerConfig:
    return emulated(model).scheduler.config(model.context_tokens, prefix_caching)


def sfs_accuracy(records: Iterable[DecisionRecord]) -> Accuracy:
    """Of the forecasts that were simulated, over all models."""
    compared = [pair for pair in pairs(records) if pair.estimator == Estimator.SFS]
    return measure(ALL_MODELS, Estimator.SFS, compared)


class VirtualPool:
    """Events happen in the order of (time, sequence), arrivals before the engines' own: who comes
    when a batch ends is still in time for the next one."""

    def __init__(
        self,
        settings: PoolSettings,
        predictor: Predictor,
        *,
        prefix_caching: bool = True,
        journaled: bool = True,
        on_dispatch: OnDispatch | None = None,
    ) -> None:
        """``journaled``: the router gets the engines' KV journals beside their snapshots.

        Raises ValueError for a pool whose engines are not all emulated.
        """
        self.now_s = 0.0
        self.router = Router(settings, predictor, clock=lambda: self.now_s)
        self._instances: dict[str, _Instance] = {}
        self._journaled = journaled and prefix_caching
        self._on_dispatch = on_dispatch
        self._arrivals: list[tuple[float, int, Arrival]] = []
        self._sequence = itertools.count()
        self._open: dict[int, _Open] = {}
        for model in settings.models:
            for number in range(model.replicas):
                self._start(model, f"{model.name}-{number}", prefix_caching)

    @property
    def engines(self) -> Mapping[str, VirtualEngine]:
        return {name: instance.engine for name, instance in self._instances.items()}

    def run(
        self, arrivals: Iterable[Arrival], follow_up: FollowUp | None = None
    ) -> list[DecisionRecord]:
        """To the last request's end; records in the order in which requests ended.

        Raises NoCandidate for a query that no instance can take.
        """
        records = []
        self._expect(arrivals)
        while True:
            instance = min(self._instances.values(), key=lambda i: i.engine.next_event_s)
            at_s = instance.engine.next_event_s
            if self._arrivals and self._arrivals[0][0] <= at_s:
                self.now_s, _, arrival = heapq.heappop(self._arrivals)
                self._dispatch(arrival)
            elif at_s < math.inf:
                self.now_s = at_s
                for record in self._step(instance.engine):
                    records.append(record)
                    if follow_up is not None:
                        self._expect(follow_up(record))
            else:
                return records

    def _start(self, model: ModelSettings, instance_id: str, prefix_caching: bool) -> None:
        scheduler = scheduler_config(model, prefix_caching)
        batch_time = emulated(model).batch_time.batch_time()
        rates = throughput_rates(scheduler, batch_time)
        self.router.add_instance(model.instance_spec(instance_id, scheduler, batch_time, *rates))
        self._instances[instance_id] = _Instance(
            model=model, engine=VirtualEngine(scheduler, batch_time)
        )

    def _expect(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            entry = (arrival.query.arrived_s, next(self._sequence), arrival)
            heapq.heappush(self._arrivals, entry)

    def _dispatch(self, arrival: Arrival) -> None:
        for instance_id, instance in self._instances.items():
            self._deliver_state(instance_id, instance)
        query = arrival.query
        decision = self.router.route(query)
        choice = decision.choice
        instance = self._instances[choice.instance_id]
        answer = arrival.answers[choice.model]
        instance.engine.submit(
            request_id=query.request_key,
            arrival_s=self.now_s,
            prompt_token_ids=query.prompts[instance.model.tokenizer],
            output_tokens=len(answer),
            max_tokens=choice.max_tokens,
            predicted_output_tokens=choice.predicted_output_tokens,
            priority=query.priority,
            answer_token_ids=answer,
        )
        self._open[query.request_key] = _Open(query, decision)
        if self._on_dispatch is not None:
            self._on_dispatch(arrival, decision, instance.engine)

    def _deliver_state(self, instance_id: str, instance: _Instance) -> None:
        """As if there were no way between them."""
        instance.engine.run_until(self.now_s)
        snapshot = instance.engine.snapshot()
        sequence, position = (int(snapshot.header[name]) for name in ("sequence", "kv_position"))
        if sequence == instance.delivered_sequence:
            return
        # The journal first: a snapshot is worked up when it comes, with what is known by then.
        if self._journaled and position > instance.delivered_position:
            message = instance.engine.journal_message(instance.delivered_position)
            if not self.router.update_journal(instance_id, message):
                raise RuntimeError(f"{instance_id}: a gap in its KV journal before {position}")
            instance.delivered_position = position
        self.router.update_snapshot(instance_id, snapshot.to_bytes())
        instance.delivered_sequence = sequence

    def _step(self, engine: VirtualEngine) -> Iterable[DecisionRecord]:
        events = engine.step()
        if len(events) == 0:
            return
        of_note = events[(events["tokens"] == 1) | (events["finish"] != 0)]
        for key, tokens, finish, at_s in of_note.tolist():
            request = self._open[key]
            if tokens == 1:
                request.first_s = at_s
            if finish:
                del self._open[key]
                self.router.release(request.decision)
                yield request.record(tokens, FINISH_REASONS[finish], at_s)


@dataclass(slots=True)
class _Instance:
    model: ModelSettings
    engine: VirtualEngine
    delivered_sequence: int = 0
    """Of the snapshot that the router has."""
    delivered_position: int = 0
    """Of the KV journal that the router has."""


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    query: Query
    decision: Decision
    first_s: float = math.nan

    def record(self, output_tokens: int, finish_reason: str, finished_s: float) -> DecisionRecord:
        ttft_s = self.first_s - self.query.arrived_s
        return DecisionRecord(
            decision=self.decision,
            requested_model=self.query.model,
            arrived_s=self.query.arrived_s,
            finished_s=finished_s,
            max_tokens=self.query.max_tokens,
            priority=self.query.priority,
            ttft_s=ttft_s,
            engine_ttft_s=ttft_s,
            dispatch_s=0.0,
            output_tokens=output_tokens,
            finish_reason=finish_reason,
        )
