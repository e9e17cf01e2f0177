"""What a whole decision costs: three instances, and pools too large to forecast whole."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from engines import NOW_S, published, snapshot_of
from pytest_benchmark.fixture import BenchmarkFixture

from app.config import EmulatedEngineSettings, ModelSettings, PoolSettings, load_pool
from app.estimators import throughput_rates
from app.identity import new_decision_id, request_key
from app.prediction import PriorPredictor
from app.router import Router
from app.types import AUTO, Estimator, InstanceSpec, Query

POOL = Path(__file__).parents[2] / "configs/pools/emulated.yaml"

# Requests running (as many as the KV cache holds) and waiting, both drawn evenly: from, below.
LOADS = {
    "idle": ((0, 3), (0, 1)),
    "light": ((0, 64), (0, 1)),
    "busy": ((0, 200), (0, 1)),
    "queued": ((0, 300), (0, 9)),
    "saturated": ((0, 1000), (0, 100)),
    "backlogged": ((900, 1000), (50, 100)),
}
MIXED = ["idle", "light", "busy", "queued", "saturated"]


# Loads of the replicas of the pool's models, the small one first; a kind's fleets take turns.
MIXES = {
    "1000": [
        [MIXED, MIXED, MIXED],
        [["light"], ["light", "busy"], ["busy", "queued"]],
        [["light"], ["busy", "queued"], ["saturated"]],
    ],
    "1000_saturated": [[["saturated"], ["saturated"], ["saturated"]]],
    "1000_backlogged": [[["backlogged"], ["backlogged"], ["backlogged"]]],
}


@pytest.fixture(scope="module")
def pool() -> PoolSettings:
    return load_pool(POOL)


def router_of(pool: PoolSettings) -> Router:
    return Router(pool, PriorPredictor(pool), lambda: NOW_S + 1e-3)


def spec_of(model: ModelSettings, number: int) -> InstanceSpec:
    assert isinstance(model.engine, EmulatedEngineSettings)
    scheduler = model.engine.scheduler_config(model.context_tokens)
    batch_time = model.engine.batch_time.batch_time()
    rates = throughput_rates(scheduler, batch_time)
    return model.instance_spec(f"{model.name}-{number}", scheduler, batch_time, *rates)


def query(prompt_tokens: int = 500) -> Query:
    return Query(
        decision_id=(decision_id := new_decision_id()),
        request_key=request_key(decision_id),
        model=AUTO,
        prompts={"qwen3": np.arange(prompt_tokens, dtype=np.int32)},
        text="",
        arrived_s=NOW_S,
        max_tokens=1000,
        priority=0,
        ttft_slo_s=0.5,
        cost_weight=5e-4,
        latency_weight=0.0,
        policy="constrained",
    )


@pytest.fixture
def three(pool: PoolSettings) -> Iterator[Router]:
    """The emulated pool's three instances, 32 requests decoding on each."""
    router = router_of(pool)
    with ExitStack() as engines:
        for model in pool.models:
            spec = spec_of(model, 0)
            path = engines.enter_context(published(spec.scheduler, running=32, waiting=0))
            router.add_instance(spec, path)
        yield router


def handle_call_s(calls: int) -> float:
    """Of Ray Serve as ``make serve`` runs it; the faster of a replica's call and the driver's."""
    folder = tempfile.mkdtemp(prefix="ft-", dir="/tmp")
    environment = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    }
    script, medians = Path(__file__).with_name("handle_call.py"), Path(folder) / "medians.json"
    try:
        command = [sys.executable, str(script), str(calls), str(medians)]
        subprocess.run(command, env=environment, check=True, timeout=240)
        return min(json.loads(medians.read_text()).values())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_route(benchmark: BenchmarkFixture, three: Router) -> None:
    call_s = handle_call_s(2000 if benchmark.enabled else 1)
    decision = benchmark(three.route, query(), dry_run=True)
    assert len(decision.candidates) == 3
    assert {forecast.estimator for forecast in decision.candidates} == {Estimator.SFS}
    if benchmark.enabled:
        benchmark.extra_info["route_over_handle_call"] = benchmark.stats.stats.median / call_s


@dataclass
class Fleet:
    """A router and the instances behind it, without engines."""

    router: Router
    specs: list[InstanceSpec]

    def publish(self) -> None:
        """As if every engine had published since: nothing simulated before is of use."""
        for number, spec in enumerate(self.specs):
            self.router.fleet.calibrate(number, spec.batch_time)


def fleet_of(
    pool: PoolSettings, size: int, loads: Sequence[Sequence[str]], random: np.random.Generator
) -> Fleet:
    """Replicas of each model in turn, each under one of its model's ``loads``."""
    fleet = Fleet(router_of(pool), [])
    for number in range(size):
        which = number % len(pool.models)
        spec = spec_of(pool.models[which], number)
        running, waiting = LOADS[random.choice(loads[which])]
        snapshot = snapshot_of(
            spec.scheduler,
            spec.batch_time,
            int(random.integers(*running)),
            int(random.integers(*waiting)),
            random,
        )
        fleet.specs.append(spec)
        fleet.router.add_instance(spec)
        fleet.router.update_snapshot(spec.instance_id, snapshot)
        if random.random() < 0.5:
            delays_s = random.exponential(1.5e-3), random.exponential(2e-3)
            fleet.router.observe_dispatch(spec.instance_id, *delays_s)
    return fleet


def any_query(random: np.random.Generator) -> Query:
    """Targets from tight to none, weights from little to much."""
    return replace(
        query(int(math.exp(random.uniform(math.log(20), math.log(6000))))),
        max_tokens=random.choice([None, int(random.integers(16, 1000))]),
        ttft_slo_s=random.choice([math.exp(random.uniform(math.log(0.03), math.log(5))), math.inf]),
        cost_weight=random.choice([1e-4, 5e-4, 2e-3]),
        latency_weight=random.choice([0.1, 1.0, 5.0]),
        policy=random.choice(["constrained", "lagrangian"]),
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["mixed", "saturated", "backlogged"])
@pytest.mark.parametrize("size", [64, 1000])
def test_route_in_a_large_pool(
    benchmark: BenchmarkFixture, pool: PoolSettings, size: int, kind: str
) -> None:
    random = np.random.default_rng(size)
    fleet = fleet_of(pool, size, [MIXED if kind == "mixed" else [kind]] * len(pool.models), random)

    def next_query() -> tuple[tuple[Query], dict[str, bool]]:
        fleet.publish()
        return (any_query(random),), {"dry_run": True}

    rounds = 300 if benchmark.enabled else 1
    decision = benchmark.pedantic(fleet.router.route, setup=next_query, rounds=rounds)
    assert (decision.pruned > 0) == (size > 64)
    if benchmark.enabled:
        took_s = benchmark.stats.stats.data
        which = f"{size}" if kind == "mixed" else f"{size}_{kind}"
        benchmark.extra_info[f"route_p50_{which}"] = float(np.quantile(took_s, 0.5))
        benchmark.extra_info[f"route_p99_{which}"] = float(np.quantile(took_s, 0.99))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", MIXES)
def test_pruning(benchmark: BenchmarkFixture, pool: PoolSettings, kind: str) -> None:
    """How often fewer forecasts lead to the same choice, and what it costs where they do not."""
    size, decisions = (1000, 300) if benchmark.enabled else (70, 9)
    random = np.random.default_rng(0)
    agreed, utility_lost, ttft_lost = [], [], []

    def decide_both_ways(fleet: Fleet) -> None:
        asked = any_query(random)
        fleet.router.forecast_all = 64
        few = fleet.router.route(asked, dry_run=True).choice
        fleet.router.forecast_all = size
        whole = fleet.router.route(asked).choice
        agreed.append(few.instance_id == whole.instance_id)
        utility_lost.append(whole.utility - few.utility)
        ttft_lost.append(few.ttft_s / whole.ttft_s - 1)

    fleets = [fleet_of(pool, size, loads, random) for loads in MIXES[kind]]
    benchmark.pedantic(
        decide_both_ways,
        setup=lambda: ((fleets[len(agreed) % len(fleets)],), {}),
        rounds=decisions,
    )
    if benchmark.enabled:
        benchmark.extra_info[f"prune_agreement_{kind}"] = float(np.mean(agreed))
        benchmark.extra_info[f"prune_regret_utility_{kind}"] = float(np.mean(utility_lost))
        benchmark.extra_info[f"prune_regret_ttft_{kind}"] = float(np.mean(ttft_lost))
    assert np.mean(agreed) >= 0.99
