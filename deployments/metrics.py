"""What operators watch, as Ray Serve metrics: Prometheus shows them as ``ray_foretoken_…``."""

from __future__ import annotations

from ray.serve.metrics import Counter, Histogram

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
