"""The nouns of routing. Times in seconds, costs in micro-dollars, lengths in tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sfs_ext import BatchTime, SchedulerConfig

AUTO = "auto"
"""The model name that asks to be routed."""

TokenIds = NDArray[np.int32]

FinishReason = Literal["stop", "length"]
FINISH_REASONS: Mapping[int, FinishReason] = {1: "stop", 2: "length"}
"""Of emulated engines' events."""


class Estimator(StrEnum):
    """Where a forecast's time comes from."""

    SFS = "sfs"
    THROUGHPUT = "throughput"
    LPS = "lps"
    PRIOR = "prior"


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """What predictors see of a prompt: raw, no model's projection is in it."""

    buckets: NDArray[np.int32]
    """Sum of the signs of the tokens whose hash falls into each."""
    description: NDArray[np.float64]
    """Counts and indicators, the token count first."""

    @property
    def hashed(self) -> NDArray[np.float64]:
        """The signed hash over the token count."""
        share: NDArray[np.float64] = self.buckets / max(1.0, self.description[0])
        return share


@dataclass(frozen=True, slots=True)
class Query:
    """One request as the router sees it: tokenised, its limits known, its answer unknown."""

    decision_id: str
    request_key: int
    """Names the query in snapshots; unsigned 64 bit."""
    model: str
    """A model of the pool, or ``auto``."""
    prompts: Mapping[str, TokenIds]
    """Prompt token ids by tokenizer name, one entry for each tokenizer of the candidates."""
    text: str
    """The prompt as text, for predictors that read it."""
    arrived_s: float
    """Unix time at the ingress."""
    max_tokens: int | None
    """The caller's limit on output tokens; None means up to the model's context."""
    priority: int
    """vLLM's own: the lower is served first, where the engine schedules by priority."""
    ttft_slo_s: float
    """Target for the time to the first token; inf means none."""
    cost_weight: float
    """Lambda of eq. 2, utility per micro-dollar."""
    latency_weight: float
    """Delta of eq. 5, utility per second."""
    policy: str
    features: PromptFeatures | None = None
    """What predictors see of the prompt; None: whoever needs them makes them."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the pool's settings say of one model."""

    name: str
    tokenizer: str
    context_tokens: int
    price_in_usd_per_mtok: float
    price_out_usd_per_mtok: float

    def cost_microusd(self, prompt_tokens: int, output_tokens: float) -> float:
        """Tokens times USD per million tokens is micro-dollars (spec of eq. 2)."""
        return (
            prompt_tokens * self.price_in_usd_per_mtok + output_tokens * self.price_out_usd_per_mtok
        )


@dataclass(frozen=True, slots=True)
class LpsParameters:
    """Eq. 10: service capacity mu, queries per second, and queries served in parallel, k."""

    capacity_qps: float
    parallel_queries: float


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One deployed model with its hardware and its engine: a candidate."""

    instance_id: str
    model: ModelSpec
    scheduler: SchedulerConfig
    batch_time: BatchTime
    prefill_tokens_per_s: float
    """theta_pre of eq. 6."""
    decode_step_s: float
    """Mean time of a decode-only batch, eq. 6."""
    prior_ttft_s: float
    """Stands in where neither a snapshot nor LPS parameters are to be had."""
    lps: LpsParameters | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of one model's answer to one query, before dispatch."""

    quality: float
    """In [0, 1]."""
    output_tokens: float
    """Their mean."""
    source: str
    """Which predictor spoke: ``prior`` until one is trained."""
    output_tokens_low: float = math.nan
    output_tokens_high: float = math.nan
    """One answer in ten is shorter, and one in ten longer; nan where that is not known."""
    length_correction: float = 1.0
    """What these lengths have been multiplied by, after requests that have finished."""


@dataclass(slots=True)
class Forecast:
    """One candidate's promise for one query.

    Not frozen: that would triple what making one costs, and a decision makes one per candidate.
    """

    instance_id: str
    model: str
    estimator: Estimator
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, in the instance's prefix cache as far as that is known."""
    max_tokens: int
    """Of the answer: what was asked for, in the room that the instance has behind the prompt."""
    ttft_s: float
    """Router arrival to first token; inf where the instance can never serve the query."""
    waiting_s: float
    prefill_s: float
    """Prefill and first decode: ttft_s = waiting_s + prefill_s (eq. 1)."""
    throughput_ttft_s: float
    """Eq. 6 beside the estimator in use, kept for comparison; nan without a snapshot."""
    quality: float
    predicted_output_tokens: float
    """Their mean, as far as ``max_tokens`` allows, like the two that follow."""
    output_tokens_low: float
    output_tokens_high: float
    length_correction: float
    prediction_source: str
    cost_microusd: float
    utility: float
    """Eq. 2."""
    feasible: bool
    """ttft_s within the query's target."""
    snapshot_age_s: float
    """nan without a snapshot."""
    running: int
    waiting: int

    @property
    def limits_answer(self) -> bool:
        """Whether ``max_tokens`` may cut the answer: then its length says little of what was
        predicted."""
        return not self.output_tokens_high < self.max_tokens


@dataclass(slots=True)
class Decision:
    """The candidates forecast and the one chosen."""

    decision_id: str
    policy: str
    ttft_slo_s: float
    cost_weight: float
    latency_weight: float
    candidates: tuple[Forecast, ...]
    chosen: int
    """Index into candidates."""
    reason: str
    """One sentence."""
    decision_s: float
    """Wall time the decision took."""
    pruned: int = 0
    """Candidates besides that were not forecast: replicas that do not look as soon as those
    forecast, and models whose utility could not have been chosen however soon."""

    @property
    def choice(self) -> Forecast:
        return self.candidates[self.chosen]
