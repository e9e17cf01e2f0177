import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.policies import (
    Options,
    Policy,
    constrained,
    feasible,
    lagrangian,
    latency_agnostic,
    round_robin,
    shortest_queue,
)

# Few distinct values, so that ties are common.
UTILITIES = st.sampled_from([-1.0, -0.25, 0.0, 0.5, 0.625, 1.0])
TTFTS_S = st.sampled_from([0.0, 0.125, 0.25, 0.5, 2.0, math.inf])
SLOS_S = st.sampled_from([0.125, 0.3, 1.0, math.inf])


def options(
    utility: Sequence[float],
    ttft_s: Sequence[float],
    residents: Sequence[int] | None = None,
    slo_s: float = math.inf,
    delta: float = 0.0,
    last: int = -1,
) -> Options:
    n = len(utility)
    return Options(utility, ttft_s, residents or [0] * n, range(n), slo_s, delta, last)


@st.composite
def any_options(draw: st.DrawFn) -> Options:
    rows = draw(st.lists(st.tuples(UTILITIES, TTFTS_S, st.integers(0, 3)), min_size=1, max_size=6))
    utility, ttft_s, residents = (list(column) for column in zip(*rows, strict=True))
    delta = draw(st.sampled_from([0.0, 0.5, 1.0, 4.0]))
    last = draw(st.integers(-1, len(rows) - 1))
    return options(utility, ttft_s, residents, draw(SLOS_S), delta, last)


def minimum(o: Options, among: Sequence[int], loss: Sequence[float]) -> int:
    """The first of those with least loss and, among these, least latency."""
    least = [i for i in among if loss[i] == min(loss[j] for j in among)]
    soonest = min(o.ttft_s[i] for i in least)
    return next(i for i in least if o.ttft_s[i] == soonest)


@given(any_options())
def test_constrained_is_eq_3(o: Options) -> None:
    in_time = [i for i, t in enumerate(o.ttft_s) if t <= o.ttft_slo_s and t != math.inf]
    if in_time:
        expected = minimum(o, in_time, [-u for u in o.utility])
    else:
        expected = o.ttft_s.index(min(o.ttft_s))
    assert constrained(o).index == expected


@given(any_options())
def test_lagrangian_is_eq_5(o: Options) -> None:
    ends = [i for i, t in enumerate(o.ttft_s) if t != math.inf]
    if ends:
        loss = [o.latency_weight * t - u if t != math.inf else math.inf
                for u, t in zip(o.utility, o.ttft_s, strict=True)]  # fmt: skip
        assert lagrangian(o).index == minimum(o, ends, loss)


@given(any_options())
def test_at_delta_0_lagrangian_is_latency_agnostic(o: Options) -> None:
    indifferent = options(o.utility, o.ttft_s)
    assert lagrangian(indifferent).index == latency_agnostic(o).index


@given(any_options())
def test_shortest_queue_has_the_fewest_residents(o: Options) -> None:
    ends = [i for i, t in enumerate(o.ttft_s) if t != math.inf] or range(len(o.ttft_s))
    assert shortest_queue(o).index == minimum(o, ends, o.residents)


@given(any_options())
def test_no_policy_picks_an_endless_wait_where_another_ends(o: Options) -> None:
    if min(o.ttft_s) < math.inf:
        for policy in (constrained, lagrangian, round_robin, shortest_queue, latency_agnostic):
            assert o.ttft_s[policy(o).index] < math.inf


@given(any_options(), UTILITIES, TTFTS_S)
def test_what_is_worth_less_than_the_least_utility_is_not_chosen(
    o: Options, utility: float, ttft_s: float
) -> None:
    more = options([*o.utility, utility], [*o.ttft_s, ttft_s], None, o.ttft_slo_s, o.latency_weight)
    for policy in (constrained, lagrangian, latency_agnostic):
        choice = policy(o)
        if utility < choice.least_utility:
            assert policy(more).index == choice.index


@pytest.mark.parametrize("policy", [round_robin, shortest_queue])
def test_where_utility_has_no_say_any_may_be_chosen(policy: Policy) -> None:
    assert policy(options([0.5, 0.9], [0.1, 0.2])).least_utility == -math.inf


def test_ties_go_to_the_earlier_position() -> None:
    tied = Options([0.5, 0.5], [0.1, 0.1], [1, 1], [7, 3], math.inf, 0.0, last_position=-1)
    for policy in (constrained, lagrangian, latency_agnostic, shortest_queue, round_robin):
        assert policy(tied).index == 1


def test_round_robin_goes_round() -> None:
    turns, last = [], -1
    for _ in range(5):
        last = round_robin(options([0, 0, 0], [1, 1, 1], last=last)).index
        turns.append(last)
    assert turns == [0, 1, 2, 0, 1]


def test_round_robin_skips_those_that_are_not_there() -> None:
    seen = Options([0, 0], [1, 1], [0, 0], [4, 9], math.inf, 0.0, last_position=4)
    assert round_robin(seen).index == 1


def test_reasons_say_what_was_weighed() -> None:
    three = ([0.5, 0.613, 0.9], [0.1, 0.25, 0.7])
    assert constrained(options(*three, slo_s=0.3)).reason == (
        "best utility 0.613 of 2 that answer within 300 ms"
    )
    assert constrained(options(*three, slo_s=0.05)).reason == (
        "soonest of 3, 100 ms; none answers within 50 ms"
    )
    assert lagrangian(options(*three, delta=1.0)).reason == (
        "best utility less latency of 3, 0.5 less 1/s for 100 ms"
    )


def test_an_endless_wait_meets_no_target() -> None:
    assert feasible(0.3, 0.3)
    assert not feasible(math.inf, math.inf)


def test_nan_and_emptiness_are_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        options([math.nan], [0.1])
    with pytest.raises(ValueError, match="no candidate"):
        options([], [])
