"""What errors in predicted output lengths do to forecasts of the time to the first token.

One emulated engine in virtual time, first come, first served, without prefix caching. Arrivals are
Poisson at shares of the capacity that the study measures itself; prompts and answers have lognormal
lengths. The router predicts the true length times an error. It takes a prediction either as the
mean of a lognormal whose log has the pool's prior spread, each resident's length one of those that
are longer than what has come out already (the conditional rule), or at its word until it is
outlived (the naive one). A running router follows the conditional rule, and learns from the
requests that finish by how much predictions are too long and how far they stray (the corrected
one). The engine never looks at predictions: all rows of a load forecast the same truth.

From true lengths a forecast is exact for a query behind which nobody comes. What is left of its
error is due to later arrivals: first come, first served makes them wait, but a batch that has room
for them beside the query takes longer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.config import ModelSettings, PoolSettings
from app.evaluation.accuracy import Accuracy
from app.evaluation.arrivals import Arrival, lognormal_tokens, plain_query
from app.evaluation.virtual_pool import (
    VirtualPool,
    emulated,
    model_named,
    scheduler_config,
    sfs_accuracy,
)
from app.prediction import Predictor
from app.prediction.online import OnlinePredictor
from app.records import DecisionRecord
from app.types import Decision, Estimator, ModelSpec, Prediction, Query
from sfs_ext import VirtualEngine

PROMPT_TOKENS_MEAN = 500.0
PROMPT_TOKENS_SIGMA = 0.8
"""Of the logarithm. Answers have the mean and the sigma of the emulated engine's settings."""
LONGEST = 0.25
"""Of the model's context, are a prompt and an answer at most."""
INTERVAL = 2.0
"""Predicted lengths are said to lie within this factor."""


@dataclass(frozen=True, slots=True)
class LengthError:
    """A prediction is the true length times ``bias`` times exp(N(0, sigma))."""

    sigma: float = 0.0
    bias: float = 1.0

    def __str__(self) -> str:
        if self == EXACT:
            return "exact"
        return f"s = {self.sigma:g}" if self.bias == 1.0 else f"x {self.bias:g}"


EXACT = LengthError()
ERRORS = (
    EXACT,
    *(LengthError(sigma=sigma) for sigma in (0.2, 0.4, 0.6, 1.0)),
    *(LengthError(bias=bias) for bias in (0.5, 2.0)),
)


LOADS = (0.5, 0.8, 0.95, 1.1)
"""Shares of capacity. Beyond it the KV cache is full, and queries wait for others to end."""


class Rule(StrEnum):
    CONDITIONAL = "conditional"
    NAIVE = "naive"
    CORRECTED = "corrected"


@dataclass(frozen=True, slots=True)
class LengthErrorStudy:
    model: str = "qwen3-8b"
    loads: tuple[float, ...] = LOADS
    requests: int = 2_500
    """In each cell, after the warm-up."""
    warm_up: int = 500
    """Requests that find the engine emptier than later ones will."""
    seed: int = 1

    def __post_init__(self) -> None:
        if self.requests < 1 or self.warm_up < 0:
            raise ValueError(
                f"requests must be at least 1 and warm_up at least 0, not {self.requests} "
                f"and {self.warm_up}"
            )
        if not self.loads or not all(0 < load < math.inf for load in self.loads):
            raise ValueError(f"loads must be positive shares of capacity, not {self.loads}")


@dataclass(frozen=True, slots=True)
class Cell:
    """One load, one error, one rule."""

    load: float
    rate_qps: float
    error: LengthError
    rule: Rule
    accuracy: Accuracy
    unsound: int
    """Forecasts that were not finite and positive, or met the simulation's bound."""
    alone_error_s: float | None
    """From true lengths: the largest difference to what the same engine would have done had nobody
    come behind the query; None where lengths are not the true ones."""


@dataclass(frozen=True, slots=True)
class Results:
    study: LengthErrorStudy
    capacity_qps: float
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(settings: PoolSettings, study: LengthErrorStudy) -> Results:
    """Raises ValueError for a model that the pool does not have, or does not emulate."""
    model = model_named(settings, study.model)
    workload = _Workload.draw(model, study.warm_up + study.requests, study.seed)
    capacity_qps = workload.capacity_qps()
    cells = []
    for load in study.loads:
        arrivals = workload.arrivals(settings, load * capacity_qps)
        for error in ERRORS:
            predictor = _Told(arrivals, workload.predicted(error))
            for rule in Rule:
                alone = _Alone() if error == EXACT and rule is Rule.NAIVE else None
                records = sorted(
                    _records(settings, model, predictor, rule, arrivals, alone),
                    key=lambda record: record.arrived_s,
                )
                cells.append(
                    Cell(
                        load=load,
                        rate_qps=load * capacity_qps,
                        error=error,
                        rule=rule,
                        accuracy=sfs_accuracy(records[study.warm_up :]),
                        unsound=sum(not _is_sound(record.decision) for record in records),
                        alone_error_s=None if alone is None else alone.largest_error_s,
                    )
                )
    return Results(study, capacity_qps, tuple(cells))


def markdown(results: Results) -> str:
    """A row for each load and error, the rules side by side; then how sound forecasts are."""
    columns = [f"{rule}: MAPE | p50 | p95 | bias" for rule in Rule]
    lines = [
        f"| load | queries/s | mean TTFT, ms | prediction | {' | '.join(columns)} |",
        "|---:|---:|---:|---|" + 4 * len(Rule) * "---:|",
    ]
    for first in range(0, len(results.cells), len(Rule)):
        cells = results.cells[first : first + len(Rule)]
        one = cells[0]
        lines.append(
            f"| {one.load:.0%} | {one.rate_qps:.1f} "
            f"| {one.accuracy.observed_mean_s * 1e3:.1f} | {one.error} "
            f"| {' | '.join(_percentages(cell.accuracy) for cell in cells)} |"
        )
    unsound = sum(cell.unsound for cell in results.cells)
    alone_s = max(c.alone_error_s for c in results.cells if c.alone_error_s is not None)
    lines += [
        "",
        f"capacity: {results.capacity_qps:.1f} queries/s; {len(results.cells)} cells of "
        f"{results.study.requests} forecasts; infinite, not positive or at the bound: {unsound}",
        f"from true lengths, had nobody come later: off by {alone_s:.1e} s at most",
    ]
    return "\n".join(lines)


def _percentages(accuracy: Accuracy) -> str:
    spread = " | ".join(f"{x:.1%}" for x in (accuracy.mape, accuracy.p50, accuracy.p95))
    return f"{spread} | {accuracy.bias:+.1%}"


@dataclass(frozen=True, slots=True)
class _Workload:
    """The same at every load, only faster."""

    model: ModelSettings
    prompt_tokens: NDArray[np.int64]
    answer_tokens: NDArray[np.int64]
    unit_arrivals: NDArray[np.float64]
    """Of a Poisson process with rate 1."""
    noise: NDArray[np.float64]
    """N(0, 1)."""

    @classmethod
    def draw(cls, model: ModelSettings, count: int, seed: int) -> _Workload:
        random = np.random.default_rng(seed)
        answer = emulated(model).output_tokens
        longest = int(LONGEST * model.context_tokens)
        return cls(
            model,
            lognormal_tokens(random, PROMPT_TOKENS_MEAN, PROMPT_TOKENS_SIGMA, count, longest),
            lognormal_tokens(random, answer.mean, answer.sigma, count, longest),
            np.cumsum(random.exponential(1.0, count)),
            random.standard_normal(count),
        )

    def capacity_qps(self) -> float:
        """Of an engine that always has more waiting: the workload comes three times over at once,
        and counts while the middle third of it ends."""
        scheduler = scheduler_config(self.model, prefix_caching=False)
        engine = VirtualEngine(scheduler, emulated(self.model).batch_time.batch_time())
        lengths = zip(self.prompt_tokens.tolist(), self.answer_tokens.tolist(), strict=True)
        for key, (prompt_tokens, answer_tokens) in enumerate(3 * list(lengths)):
            engine.submit(
                request_id=key,
                arrival_s=0.0,
                prompt_token_ids=np.zeros(prompt_tokens, np.int32),
                output_tokens=answer_tokens,
                max_tokens=answer_tokens + 1,
                predicted_output_tokens=0.0,
            )
        events = engine.run_until(math.inf)
        ended_s = events["at_s"][events["finish"] != 0]
        third = len(self.prompt_tokens)
        return third / float(ended_s[2 * third] - ended_s[third])

    def arrivals(self, settings: PoolSettings, rate_qps: float) -> list[Arrival]:
        requests = zip(
            (self.unit_arrivals / rate_qps).tolist(),
            self.prompt_tokens.tolist(),
            self.answer_tokens.tolist(),
            strict=True,
        )
        # Without prefix caching it is of no matter what they say.
        return [
            Arrival(
                plain_query(settings, number, at_s, np.zeros(prompt_tokens, np.int32)),
                {self.model.name: np.zeros(answer_tokens, np.int32)},
            )
            for number, (at_s, prompt_tokens, answer_tokens) in enumerate(requests)
        ]

    def predicted(self, error: LengthError) -> NDArray[np.float64]:
        scale: NDArray[np.float64] = error.bias * np.exp(error.sigma * self.noise)
        return self.answer_tokens * scale


class _Told:
    """Predicts what it was told to."""

    def __init__(self, arrivals: Sequence[Arrival], output_tokens: NDArray[np.float64]) -> None:
        names = [arrival.query.decision_id for arrival in arrivals]
        self._output_tokens: Mapping[str, float] = dict(
            zip(names, output_tokens.tolist(), strict=True)
        )

    def predict(self, query: Query, models: Sequence[ModelSpec]) -> Sequence[Prediction]:
        expected = self._output_tokens[query.decision_id]
        # Without an interval, nobody would know whether a limit left room for the answer.
        said = Prediction(0.5, expected, "study", expected / INTERVAL, expected * INTERVAL)
        return [said for _ in models]


class _Alone:
    """Compares each forecast with a copy of the engine to which nobody comes any more."""

    def __init__(self) -> None:
        self.largest_error_s = 0.0

    def __call__(self, arrival: Arrival, decision: Decision, engine: VirtualEngine) -> None:
        key, arrived_s = arrival.query.request_key, arrival.query.arrived_s
        first_s = next(
            at_s
            for request, tokens, _, at_s in _events(copy.copy(engine))
            if request == key and tokens == 1
        )
        error_s = abs(decision.choice.ttft_s - (first_s - arrived_s))
        self.largest_error_s = max(self.largest_error_s, error_s)


def _events(engine: VirtualEngine) -> Iterator[tuple[int, int, int, float]]:
    while engine.next_event_s < math.inf:
        yield from engine.step().tolist()


def _records(
    settings: PoolSettings,
    model: ModelSettings,
    predictor: Predictor,
    rule: Rule,
    arrivals: Sequence[Arrival],
    alone: _Alone | None,
) -> list[DecisionRecord]:
    length_sigma = 0.0 if rule is Rule.NAIVE else model.prior.output_sigma
    online = OnlinePredictor(predictor)
    pool = VirtualPool(
        _one_instance(settings, model, length_sigma),
        online,
        prefix_caching=False,
        on_dispatch=alone,
    )

    def learn(record: DecisionRecord) -> Sequence[Arrival]:
        if rule is Rule.CORRECTED:
            online.finished(record.decision.choice, record.output_tokens, online.version)
            sigma = online.length_sigma(model.name, length_sigma)
            pool.router.observe_length_sigma(model.name, sigma)
        return ()

    return pool.run(arrivals, learn)


def _one_instance(
    settings: PoolSettings, model: ModelSettings, length_sigma: float
) -> PoolSettings:
    prior = model.prior.model_copy(update={"output_sigma": length_sigma})
    alone = model.model_copy(update={"replicas": 1, "prior": prior})
    return settings.model_copy(update={"models": (alone,)})


def _is_sound(decision: Decision) -> bool:
    choice = decision.choice
    return choice.estimator == Estimator.SFS and 0 < choice.ttft_s < math.inf
