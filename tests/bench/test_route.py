"""What a whole decision costs: the emulated pool's three instances, a prompt of 500 tokens."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from engines import NOW_S, published
from pytest_benchmark.fixture import BenchmarkFixture

from app.config import EmulatedEngineSettings, load_pool
from app.estimators import throughput_rates
from app.identity import new_decision_id, request_key
from app.prediction import PriorPredictor
from app.router import Router
from app.types import AUTO, Estimator, Query

POOL = Path(__file__).parents[2] / "configs/pools/emulated.yaml"


@pytest.mark.parametrize("running", [0, 32])
def test_route(benchmark: BenchmarkFixture, running: int) -> None:
    settings = load_pool(POOL)
    router = Router(settings, PriorPredictor(settings), clock=lambda: NOW_S + 1e-3)
    query = Query(
        decision_id=(decision_id := new_decision_id()),
        request_key=request_key(decision_id),
        model=AUTO,
        prompts={"qwen3": np.arange(500, dtype=np.int32)},
        text="",
        arrived_s=NOW_S,
        max_tokens=1000,
        priority=0,
        ttft_slo_s=0.5,
        cost_weight=5e-4,
        latency_weight=0.0,
        policy="constrained",
    )
    with ExitStack() as engines:
        for model in settings.models:
            assert isinstance(model.engine, EmulatedEngineSettings)
            scheduler = model.engine.scheduler_config(model.context_tokens)
            batch_time = model.engine.batch_time.batch_time()
            rates = throughput_rates(scheduler, batch_time)
            spec = model.instance_spec(f"{model.name}-0", scheduler, batch_time, *rates)
            router.add_instance(spec, engines.enter_context(published(scheduler, running, 0)))
        decision = benchmark(router.route, query, dry_run=True)
    assert len(decision.candidates) == 3
    assert {forecast.estimator for forecast in decision.candidates} == {Estimator.SFS}
