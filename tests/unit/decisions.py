"""Forecasts, decisions and records as a router leaves them; a test names what matters to it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from app.records import DecisionRecord
from app.types import Decision, Estimator, Forecast


def forecast(**changed: Any) -> Forecast:
    whole = Forecast(
        instance_id="small-0",
        model="small",
        estimator=Estimator.SFS,
        prompt_tokens=100,
        cached_tokens=0,
        max_tokens=100,
        ttft_s=0.2,
        waiting_s=0.15,
        prefill_s=0.05,
        throughput_ttft_s=0.3,
        quality=0.4,
        predicted_output_tokens=200.0,
        output_tokens_low=50.0,
        output_tokens_high=400.0,
        length_correction=1.0,
        prediction_source="prior",
        cost_microusd=90.0,
        utility=0.355,
        feasible=True,
        snapshot_age_s=0.001,
        running=3,
        waiting=1,
    )
    return replace(whole, **changed)


def decision(number: int, *candidates: Forecast, **changed: Any) -> Decision:
    """The first candidate is chosen."""
    whole = Decision(
        decision_id=f"dec-{number:024x}",
        policy="constrained",
        ttft_slo_s=math.inf,
        cost_weight=5e-4,
        latency_weight=1.0,
        candidates=candidates,
        chosen=0,
        reason="the only one",
        decision_s=1e-4,
    )
    return replace(whole, **changed)


def record(decided: Decision, **changed: Any) -> DecisionRecord:
    whole = DecisionRecord(
        decision=decided,
        requested_model="auto",
        arrived_s=1e9,
        finished_s=1e9 + 2,
        max_tokens=None,
        priority=0,
        ttft_s=0.21,
        engine_ttft_s=0.2,
        dispatch_s=0.005,
        output_tokens=150,
        finish_reason="stop",
    )
    return replace(whole, **changed)
