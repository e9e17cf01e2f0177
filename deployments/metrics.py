"""What operators watch, as Ray Serve metrics: Prometheus shows them as ``ray_foretoken_…``."""

from __future__ import annotations

from ray.serve.metrics import Counter, Gauge, Histogram

from app.prediction.residuals import Drift
from app.types import Decision

_TTFT_BOUNDARIES_S = [
    0.01,
    0.025,
    0.05,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
    32.0,
]
_DECISION_BOUNDARIES_S = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2]


class RouterMetrics:
    def __init__(self) -> None:
        self._predicted_ttft_s = Histogram(
            "foretoken_predicted_time_to_first_token_seconds",
            description="Time to first token as forecast for the chosen instance.",
            boundaries=_TTFT_BOUNDARIES_S,
            tag_keys=("model", "estimator"),
        )
        self._observed_ttft_s = Histogram(
            "foretoken_time_to_first_token_seconds",
            description="Time from a request's arrival to its first token, at the ingress.",
            boundaries=_TTFT_BOUNDARIES_S,
            tag_keys=("model", "estimator"),
        )
        self._decision_s = Histogram(
            "foretoken_decision_seconds",
            description="Wall time of one routing decision.",
            boundaries=_DECISION_BOUNDARIES_S,
        )
        self._requests = Counter(
            "foretoken_requests_total",
            description="Requests by model and by how they ended.",
            tag_keys=("model", "outcome"),
        )

        self._length_bias = Gauge(
            "foretoken_output_length_bias_ratio",
            description="How much longer newest answers were than predicted, before correction.",
            tag_keys=("model",),
        )
        self._length_coverage = Gauge(
            "foretoken_output_length_coverage_ratio",
            description="Share of newest answers within the interval predicted for 0.8 of them.",
            tag_keys=("model",),
        )
        self._predictor_trained_s = Gauge(
            "foretoken_predictor_trained_timestamp_seconds",
            description="When the predictor in use was trained; 0 while priors speak.",
        )

    def decided(self, decision: Decision) -> None:
        choice = decision.choice
        tags = {"model": choice.model, "estimator": choice.estimator.value}
        self._predicted_ttft_s.observe(choice.ttft_s, tags)
        self._decision_s.observe(decision.decision_s)

    def first_token(self, decision: Decision, ttft_s: float) -> None:
        choice = decision.choice
        tags = {"model": choice.model, "estimator": choice.estimator.value}
        self._observed_ttft_s.observe(ttft_s, tags)

    def ended(self, model: str, outcome: str) -> None:
        """``outcome``: the engine's finish reason, ``error`` or ``disconnected``."""
        self._requests.inc(1, {"model": model, "outcome": outcome})

    def length_drift(self, model: str, drift: Drift) -> None:
        """nan while there is nothing to tell."""
        self._length_bias.set(drift.bias, {"model": model})
        self._length_coverage.set(drift.coverage, {"model": model})

    def predictor(self, trained_s: float) -> None:
        self._predictor_trained_s.set(trained_s)
