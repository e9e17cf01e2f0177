import math
from dataclasses import replace

import pytest

from app.config import EmulatedEngineSettings, PoolSettings
from app.estimators import Observation, estimate, lps_waiting_s, throughput_rates
from app.types import Estimator, InstanceSpec, LpsParameters


@pytest.fixture
def spec(pool: PoolSettings) -> InstanceSpec:
    small, _ = pool.models
    assert isinstance(small.engine, EmulatedEngineSettings)
    scheduler = small.engine.scheduler_config(small.context_tokens)
    return small.instance_spec(
        "small-0", scheduler, small.engine.batch_time.batch_time(), 1e4, 0.02
    )


@pytest.fixture
def seen(spec: InstanceSpec) -> Observation:
    return Observation(
        spec=spec,
        prompt_tokens=500,
        arrival_qps=5.0,
        servable=True,
        fresh=True,
        simulated=True,
        simulated_waiting_s=0.3,
        simulated_prefill_s=0.1,
        queued_prefill_tokens=2000,
    )


@pytest.mark.parametrize(
    ("preferred", "waiting_s", "prefill_s"),
    [
        (Estimator.SFS, 0.3, 0.1),
        (Estimator.THROUGHPUT, 0.2, 0.07),
        (Estimator.LPS, 0.05, 0.07),
    ],
)
def test_the_preferred_estimator_speaks(
    seen: Observation, preferred: Estimator, waiting_s: float, prefill_s: float
) -> None:
    said = estimate(preferred, seen)
    assert said.estimator == preferred
    assert (said.waiting_s, said.prefill_s) == pytest.approx((waiting_s, prefill_s))


@pytest.mark.parametrize("preferred", [Estimator.SFS, Estimator.THROUGHPUT, Estimator.LPS])
def test_without_a_fresh_snapshot_lps_speaks_then_the_prior(
    seen: Observation, preferred: Estimator
) -> None:
    blind = replace(seen, fresh=False)
    assert estimate(preferred, blind).estimator == Estimator.LPS
    said = estimate(preferred, replace(blind, spec=replace(seen.spec, lps=None)))
    assert said.estimator == Estimator.PRIOR
    assert said.waiting_s + said.prefill_s == pytest.approx(0.04)


def test_a_simulation_that_met_its_bound_leaves_the_word_to_the_throughput(
    seen: Observation,
) -> None:
    endless = replace(seen, simulated=False, simulated_waiting_s=math.inf)
    said = estimate(Estimator.SFS, endless)
    assert (said.estimator, said.waiting_s) == (Estimator.THROUGHPUT, pytest.approx(0.2))


def test_what_can_never_be_admitted_waits_for_ever(seen: Observation) -> None:
    for preferred in (Estimator.SFS, Estimator.LPS):
        assert estimate(preferred, replace(seen, fresh=False, servable=False)).waiting_s == math.inf


def test_at_k_1_lps_is_mm1() -> None:
    assert lps_waiting_s(LpsParameters(10.0, 1.0), 5.0) == pytest.approx(0.5 / (10 - 5))


def test_variability_scales_the_wait_as_in_gg1() -> None:
    one = LpsParameters(10.0, 1.0)
    assert lps_waiting_s(one, 5.0, 2.0, 4.0) == pytest.approx(3 * lps_waiting_s(one, 5.0))


@pytest.mark.parametrize("arrival_qps", [10.0, 12.0])
def test_at_capacity_the_wait_is_infinite_never_negative(arrival_qps: float) -> None:
    assert lps_waiting_s(LpsParameters(10.0, 25.0), arrival_qps) == math.inf


def test_without_arrivals_nobody_waits() -> None:
    assert lps_waiting_s(LpsParameters(10.0, 25.0), 0.0) == 0.0


def test_rates_follow_from_the_batch_time(spec: InstanceSpec) -> None:
    prefill_tokens_per_s, decode_step_s = throughput_rates(spec.scheduler, spec.batch_time)
    full_budget_s = 5e-3 + 2048 * 1e-5 + 1e-10 * 2048 * 2049 / 2
    assert prefill_tokens_per_s == pytest.approx(2048 / full_budget_s)
    assert decode_step_s == pytest.approx(5e-3 + 32 * 1e-5 + 1e-8 * 32 * 1024)
