import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.config import EmulatedEngineSettings, PoolSettings
from app.estimators import throughput_rates
from app.policies import POLICIES
from app.prediction import PriorPredictor
from app.router import NoCandidate, Router, _View
from app.types import Estimator, InstanceSpec, Query
from sfs_ext import BatchTime, SchedulerConfig, forecast_dtype, query_dtype

NOW_S = 1_000_000.0
LONG_QUEUE = tuple((key, 1000) for key in range(1, 13))


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(pool: PoolSettings, clock: Clock) -> Router:
    return Router(pool, PriorPredictor(pool), clock)


def spec(pool: PoolSettings, model: str, number: int = 0) -> InstanceSpec:
    settings = {m.name: m for m in pool.models}[model]
    assert isinstance(settings.engine, EmulatedEngineSettings)
    scheduler = settings.engine.scheduler_config(settings.context_tokens)
    batch_time = settings.engine.batch_time.batch_time()
    rates = throughput_rates(scheduler, batch_time)
    return settings.instance_spec(f"{model}-{number}", scheduler, batch_time, *rates)


Ask = Callable[..., Query]
Start = Callable[[SchedulerConfig], Any]


@pytest.fixture
def engines(router: Router, pool: PoolSettings, engine: Start) -> dict[str, Any]:
    """An idle engine for each model, published at NOW_S."""
    started = {}
    for model in ("small", "large"):
        one = spec(pool, model)
        started[one.instance_id] = engine(one.scheduler)
        started[one.instance_id].publish(NOW_S)
        router.add_instance(one, started[one.instance_id].path)
    return started


def test_the_better_model_answers_while_it_is_in_time(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    decision = router.route(query(ttft_slo_s=0.2))
    small, large = decision.candidates
    assert decision.choice is large
    assert decision.reason == "large-0: best utility 0.675 of 2 that answer within 200 ms."
    assert (small.estimator, large.estimator) == (Estimator.SFS, Estimator.SFS)
    assert small.cost_microusd == pytest.approx(100 * 0.1 + 200 * 0.4)
    assert small.utility == pytest.approx(0.4 - 5e-4 * 90)
    # One batch holds the whole prompt and gives the first token.
    assert small.ttft_s == pytest.approx(5e-3 + 100 * 1e-5 + 1e-10 * 100 * 101 / 2, abs=1e-4)
    assert small.ttft_s == small.waiting_s + small.prefill_s
    assert decision.decision_s > 0


def test_a_queue_sends_the_query_elsewhere(
    router: Router, pool: PoolSettings, engines: dict[str, Any], query: Ask
) -> None:
    engines["large-0"].publish(NOW_S, LONG_QUEUE)
    decision = router.route(query(ttft_slo_s=0.05))
    small, large = decision.candidates
    assert decision.choice is small
    assert (small.feasible, large.feasible) == (True, False)
    assert large.waiting == 12
    # Eq. 6 beside the simulation.
    rates = spec(pool, "large")
    eq_6_s = 12_100 / rates.prefill_tokens_per_s + rates.decode_step_s
    assert large.throughput_ttft_s == pytest.approx(eq_6_s)


def test_where_none_is_in_time_the_soonest_answers(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    engines["large-0"].publish(NOW_S, LONG_QUEUE)
    decision = router.route(query(ttft_slo_s=0.001))
    assert decision.choice.instance_id == "small-0"
    assert decision.reason.endswith("none answers within 1 ms.")


def test_a_snapshot_over_the_network_counts_as_one_in_shared_memory(
    router: Router, pool: PoolSettings, engine: Start, query: Ask
) -> None:
    remote = spec(pool, "large")
    router.add_instance(remote)
    data = engine(remote.scheduler).publish(NOW_S, LONG_QUEUE)
    assert router.update_snapshot("large-0", data)
    assert not router.update_snapshot("large-0", data)
    assert not router.update_snapshot("gone", data)
    assert router.route(query()).choice.waiting == 12


def test_a_burst_does_not_herd(router: Router, engines: dict[str, Any], query: Ask) -> None:
    chosen = [router.route(query(1500, ttft_slo_s=0.1)).choice.instance_id for _ in range(12)]
    assert set(chosen) == {"small-0", "large-0"}
    last = router.route(query(), dry_run=True)
    assert sum(f.waiting for f in last.candidates) == 12


def test_a_dry_run_books_nothing(router: Router, engines: dict[str, Any], query: Ask) -> None:
    router.route(query(), dry_run=True)
    assert all(f.waiting == 0 for f in router.route(query(), dry_run=True).candidates)


def test_a_released_query_no_longer_counts(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    decision = router.route(query())
    assert router.route(query(), dry_run=True).candidates[1].waiting == 1
    router.release(decision)
    assert router.route(query(), dry_run=True).candidates[1].waiting == 0


def test_a_released_query_counts_while_the_engine_still_has_it(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    asked = query()
    decision = router.route(asked)
    engines["large-0"].publish(NOW_S + 0.001, ((asked.request_key, 100),))
    router.release(decision)
    assert router.route(query(), dry_run=True).candidates[1].waiting == 1
    engines["large-0"].publish(NOW_S + 0.002)
    assert router.route(query(), dry_run=True).candidates[1].waiting == 0


def test_a_booking_ends_when_a_snapshot_names_it(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    asked = query()
    router.route(asked)
    engines["large-0"].publish(NOW_S + 0.001, ((asked.request_key, 100),))
    assert router.route(query(), dry_run=True).candidates[1].waiting == 1


def test_delays_observed_join_the_forecast(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    before = router.route(query(), dry_run=True).candidates[0]
    router.observe_dispatch("small-0", 0.010, 0.004)
    router.observe_dispatch("gone", 1.0, 1.0)
    after = router.route(query(), dry_run=True).candidates[0]
    assert after.waiting_s - before.waiting_s == pytest.approx(0.010, abs=1e-6)
    assert after.prefill_s - before.prefill_s == pytest.approx(0.004, abs=1e-6)
    assert after.throughput_ttft_s - before.throughput_ttft_s == pytest.approx(0.014, abs=1e-6)


def test_time_since_the_ingress_counts_as_waiting(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    now = router.route(query(), dry_run=True).candidates[0]
    late = router.route(query(arrived_s=NOW_S - 0.5), dry_run=True).candidates[0]
    assert late.waiting_s - now.waiting_s == pytest.approx(0.5)


def test_a_stale_engine_is_estimated_without_its_snapshot(
    router: Router, engines: dict[str, Any], clock: Clock, query: Ask
) -> None:
    for engine in engines.values():
        engine.publish(NOW_S, ((7, 100),))
    clock.now_s += 2
    small, large = router.route(query(arrived_s=clock.now_s)).candidates
    assert (small.estimator, large.estimator) == (Estimator.LPS, Estimator.PRIOR)
    assert large.ttft_s == pytest.approx(0.12)
    assert math.isnan(large.throughput_ttft_s)


def test_a_silent_engine_is_no_candidate(
    router: Router, engines: dict[str, Any], clock: Clock, query: Ask
) -> None:
    clock.now_s += 6
    engines["small-0"].publish(clock.now_s)
    decision = router.route(query(arrived_s=clock.now_s))
    assert [f.instance_id for f in decision.candidates] == ["small-0"]


def test_engines_that_have_all_fallen_silent_are_an_outage(
    router: Router, engines: dict[str, Any], clock: Clock, query: Ask
) -> None:
    clock.now_s += 6
    with pytest.raises(NoCandidate, match="silent") as refused:
        router.route(query())
    assert refused.value.status == 503


def test_before_the_first_snapshot_lps_or_the_prior_speak(
    router: Router, pool: PoolSettings, query: Ask
) -> None:
    router.add_instance(spec(pool, "small"))
    router.add_instance(spec(pool, "large"))
    small, large = router.route(query()).candidates
    assert (small.estimator, large.estimator) == (Estimator.LPS, Estimator.PRIOR)
    assert math.isnan(small.snapshot_age_s)


def test_lps_sees_the_rate_at_which_the_router_sends(
    pool: PoolSettings, clock: Clock, query: Ask
) -> None:
    lps_pool = pool.model_copy(
        update={"router": pool.router.model_copy(update={"estimator": "lps"})}
    )
    router = Router(lps_pool, PriorPredictor(lps_pool), clock)
    router.add_instance(spec(pool, "small"))
    # 20 a second against a capacity of 10, until the first horizon has passed.
    for _ in range(400):
        clock.now_s += 0.05
        decision = router.route(query(arrived_s=clock.now_s))
    assert decision.choice.estimator == Estimator.LPS
    assert decision.choice.ttft_s == math.inf
    assert not decision.choice.feasible


def test_a_models_name_keeps_the_model(router: Router, engines: dict[str, Any], query: Ask) -> None:
    decision = router.route(query(model="small"))
    assert [f.model for f in decision.candidates] == ["small"]


def test_round_robin_goes_over_replicas(router: Router, pool: PoolSettings, query: Ask) -> None:
    for number in range(3):
        router.add_instance(spec(pool, "small", number))
    turns = [router.route(query(policy="round_robin")).choice.instance_id for _ in range(4)]
    assert turns == ["small-0", "small-1", "small-2", "small-0"]


@pytest.mark.parametrize("policy", ["constrained", "round_robin"])
def test_round_robin_keeps_its_turn_amid_other_traffic(
    router: Router, engines: dict[str, Any], query: Ask, policy: str
) -> None:
    turns = []
    for _ in range(4):
        turns.append(router.route(query(policy="round_robin")).choice.instance_id)
        router.route(query(model="large", policy=policy))
    assert turns == ["small-0", "large-0", "small-0", "large-0"]


def test_round_robin_keeps_its_turn_amid_other_policies(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    turns = []
    for _ in range(4):
        turns.append(router.route(query(policy="round_robin")).choice.instance_id)
        assert router.route(query(policy="latency_agnostic")).choice.instance_id == "large-0"
    assert turns == ["small-0", "large-0", "small-0", "large-0"]


def test_the_kv_cache_bounds_the_prompt(router: Router, pool: PoolSettings, query: Ask) -> None:
    one = spec(pool, "small")
    cache = SchedulerConfig(
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        block_size=16,
        num_blocks=11,
        max_model_len=4096,
    )
    router.add_instance(replace(one, scheduler=cache))
    assert router.route(query(159)).choice.instance_id == "small-0"
    with pytest.raises(NoCandidate, match=r"is 159 \(a context of 160\)"):
        router.route(query(160))


def test_max_tokens_caps_the_expected_answer(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    assert router.route(query(max_tokens=16)).choice.predicted_output_tokens == 16


def test_a_prompt_too_long_for_some_leaves_the_others(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    decision = router.route(query(5000))
    assert [f.instance_id for f in decision.candidates] == ["large-0"]


@pytest.mark.parametrize(
    ("asked", "exclude", "status", "param", "says"),
    [
        ({"model": "gpt"}, frozenset(), 404, "model", "no model 'gpt'; there are auto, small"),
        ({"prompt_tokens": 8192}, frozenset(), 400, "messages", "8192 tokens; .* is 8191"),
        ({"model": "small", "max_tokens": 4000}, frozenset(), 400, "max_tokens", "at most 3996"),
        ({}, frozenset({"small-0", "large-0"}), 503, None, "no instance of auto"),
    ],
)
def test_a_refusal_says_what_and_why(
    router: Router,
    engines: dict[str, Any],
    query: Ask,
    asked: dict[str, Any],
    exclude: frozenset[str],
    status: int,
    param: str | None,
    says: str,
) -> None:
    with pytest.raises(NoCandidate, match=says) as refused:
        router.route(query(**asked), exclude)
    assert (refused.value.status, refused.value.param) == (status, param)


def test_an_excluded_instance_is_no_candidate(
    router: Router, engines: dict[str, Any], query: Ask
) -> None:
    decision = router.route(query(), exclude=frozenset({"large-0"}))
    assert decision.choice.instance_id == "small-0"


def test_instances_come_go_and_are_recalibrated(
    router: Router, pool: PoolSettings, engines: dict[str, Any], query: Ask
) -> None:
    one = spec(pool, "small")
    slow = replace(one, batch_time=BatchTime(1.0, 0.0, 0.0, 0.0))
    router.add_instance(slow, engines["small-0"].path)
    small, large = router.route(query(), dry_run=True).candidates
    assert (small.instance_id, large.instance_id) == ("small-0", "large-0")
    assert small.ttft_s == pytest.approx(1.0)
    decision = router.route(query(model="large"))
    router.remove_instance("large-0")
    router.remove_instance("large-0")
    router.release(decision)
    (left,) = router.route(query(), dry_run=True).candidates
    assert left.instance_id == "small-0"


def test_how_far_lengths_stray_is_learnt_of_instances_there_and_to_come(
    router: Router, pool: PoolSettings, engine: Start, query: Ask
) -> None:
    one, another = (spec(pool, "small", number) for number in (0, 1))
    seats = tuple((key, 100) for key in range(1, one.scheduler.max_num_seqs + 1))

    def serve(instance: InstanceSpec) -> Any:
        full = engine(instance.scheduler)
        full.publish(NOW_S, seats, predicted_output_tokens=30)
        router.add_instance(instance, full.path)
        return full

    def ttft_s() -> list[float]:
        return [one.ttft_s for one in router.route(query(), dry_run=True).candidates]

    served = serve(one)
    (believed,) = ttft_s()
    with pytest.raises(ValueError, match="small: a length sigma of nan"):
        router.observe_length_sigma("small", math.nan)
    router.observe_length_sigma("small", 0.51)  # hardly another than the prior's
    router.observe_length_sigma("large", 1.5)
    served.publish(NOW_S, seats, predicted_output_tokens=30)
    assert ttft_s() == [believed]
    router.observe_length_sigma("small", 1.5)
    assert ttft_s() == [believed]  # of a state that is forecast already
    served.publish(NOW_S, seats, predicted_output_tokens=30)
    serve(another)
    stray = ttft_s()
    assert stray[0] == stray[1] < 0.9 * believed  # the first of all to end does so sooner


def test_a_model_may_be_repriced(
    router: Router, pool: PoolSettings, engines: dict[str, Any], query: Ask
) -> None:
    before = router.route(query(model="small"), dry_run=True).choice
    one = spec(pool, "small")
    router.add_instance(replace(one, model=replace(one.model, price_in_usd_per_mtok=10.0)))
    after = router.route(query(model="small"), dry_run=True).choice
    assert after.cost_microusd - before.cost_microusd == pytest.approx(100 * 9.9)
    assert after.utility < before.utility


def test_an_instance_of_an_unknown_model_is_refused(router: Router, pool: PoolSettings) -> None:
    one = spec(pool, "small")
    with pytest.raises(ValueError, match="no model 'other'"):
        router.add_instance(replace(one, model=replace(one.model, name="other")))


def test_a_missing_shared_memory_is_named_and_can_be_given_later(
    router: Router, pool: PoolSettings, engine: Start
) -> None:
    one = spec(pool, "small")
    with pytest.raises(FileNotFoundError):
        router.add_instance(one, "/nowhere")
    later = engine(one.scheduler)
    later.publish(NOW_S)
    router.add_instance(one, later.path)
    assert router.fleet.snapshot(0) is not None


def test_rows_of_the_core_are_read_by_their_names() -> None:
    assert _View._fields == forecast_dtype.names
    assert query_dtype.names == (
        *("instance", "prompt_tokens", "predicted_output_tokens"),
        *("max_tokens", "priority", "arrival_s", "prompt"),
    )


@pytest.fixture
def crowd(
    router: Router, pool: PoolSettings, engine: Start, query: Ask
) -> Callable[[Router], None]:
    """Adds twelve replicas of each model to a router: with queues, and one silent, one unseen."""
    published: dict[str, Any] = {}

    def join(joined: Router) -> None:
        for number in range(12):
            for model in ("small", "large"):
                one = spec(pool, model, number)
                if number == 5:
                    joined.add_instance(one)
                    continue
                if one.instance_id not in published:
                    published[one.instance_id] = engine(one.scheduler)
                    # Few long prompts or many short ones; the large model's are longer.
                    waiting = 1 + 7 * number % 12
                    prompt_tokens = (3000 if model == "large" else 2500) // waiting**2
                    queue = tuple((key, prompt_tokens) for key in range(1, waiting + 1))
                    at_s = NOW_S - 6 if number == 3 else NOW_S - 1e-3 * number
                    published[one.instance_id].publish(at_s, queue)
                joined.add_instance(one, published[one.instance_id].path)
                if number % 2:
                    joined.observe_dispatch(one.instance_id, 2e-3 * number, 2e-4)

    return join


@pytest.fixture
def pruning(pool: PoolSettings, clock: Clock) -> Router:
    """One that forecasts few at any size of the pool."""
    return Router(pool, PriorPredictor(pool), clock, forecast_all=0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_tokens": 20},
        {"ttft_slo_s": 0.05},
        {"ttft_slo_s": 0.001, "latency_weight": 0.2},
        {"prompt_tokens": 2000, "ttft_slo_s": 0.12, "latency_weight": 5.0},
        {"model": "small", "max_tokens": 50},
    ],
)
def test_pruning_keeps_the_choice(
    router: Router,
    pruning: Router,
    crowd: Callable[[Router], None],
    query: Ask,
    policy: str,
    asked: dict[str, Any],
) -> None:
    crowd(router)
    crowd(pruning)
    for _ in range(30):
        one = query(policy=policy, **asked)
        whole, few = router.route(one).choice, pruning.route(one).choice
        assert (few.instance_id, few.ttft_s) == (whole.instance_id, whole.ttft_s)


def test_a_pruned_decision_counts_what_it_left_out(
    pruning: Router, crowd: Callable[[Router], None], query: Ask
) -> None:
    crowd(pruning)
    decision = pruning.route(query(ttft_slo_s=0.2))
    assert {f.model for f in decision.candidates} == {"large"}
    assert decision.pruned == 24 - len(decision.candidates)
    assert decision.reason.endswith(f"; {decision.pruned} more were not worth a forecast.")


def test_no_model_worth_more_is_left_out(
    pruning: Router, crowd: Callable[[Router], None], query: Ask
) -> None:
    crowd(pruning)
    decision = pruning.route(query(ttft_slo_s=0.001))
    assert {f.model for f in decision.candidates} == {"small", "large"}


def test_a_small_pool_is_forecast_whole(router: Router, pool: PoolSettings, query: Ask) -> None:
    for number in range(64):
        router.add_instance(spec(pool, "small", number))
    decision = router.route(query(), dry_run=True)
    assert (len(decision.candidates), decision.pruned) == (64, 0)
    router.add_instance(spec(pool, "large"))
    assert router.route(query(), dry_run=True).pruned > 0


def test_round_robin_goes_over_a_large_pool(
    pruning: Router, crowd: Callable[[Router], None], query: Ask
) -> None:
    crowd(pruning)
    turns = [pruning.route(query(policy="round_robin")).choice.instance_id for _ in range(44)]
    assert len(set(turns)) == 22
    assert turns[:22] == turns[22:]


def test_a_large_pool_that_has_fallen_silent_is_an_outage(
    pruning: Router, engines: dict[str, Any], pool: PoolSettings, clock: Clock, query: Ask
) -> None:
    for model in ("small", "large"):
        pruning.add_instance(spec(pool, model), engines[f"{model}-0"].path)
    clock.now_s += 6
    with pytest.raises(NoCandidate, match="silent"):
        pruning.route(query())
    engines["small-0"].publish(clock.now_s)
    assert pruning.route(query()).choice.instance_id == "small-0"


def test_threads_may_route_at_once(router: Router, engines: dict[str, Any], query: Ask) -> None:
    def send() -> None:
        for _ in range(50):
            router.route(query())

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(f.waiting for f in router.route(query(), dry_run=True).candidates) == 200
