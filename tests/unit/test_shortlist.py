import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.policies import POLICIES
from app.shortlist import FEW, MOST, NO_DIFFERENCE_S, ORDERS, Indices, Loads, shortlist


def batches(
    policy: str,
    ttft_s: Sequence[float],
    residents: Sequence[int] | None = None,
    age_s: Sequence[float] | None = None,
    last: int = -1,
    least_ttft_s: Sequence[float] | None = None,
    forecast_s: Sequence[float] | None = None,
) -> list[list[int]]:
    n = len(ttft_s)
    found_s = ttft_s if forecast_s is None else forecast_s
    listed: list[list[int]] = []

    def forecast(batch: Indices) -> float:
        listed.append(batch.tolist())
        return min((found_s[i] for batch in listed for i in batch), default=math.inf)

    loads = Loads(
        ttft_s=np.array(ttft_s, float),
        least_ttft_s=np.array(ttft_s if least_ttft_s is None else least_ttft_s, float),
        residents=np.array(residents or [0] * n, np.int32),
        age_s=np.array(age_s or [0.0] * n),
        position=np.arange(n),
        last_position=last,
    )
    shortlist(policy, loads, 1.0, 5.0, forecast)
    return listed


def test_every_policy_has_an_order() -> None:
    assert ORDERS.keys() == POLICIES.keys()


@pytest.mark.parametrize("policy", ["constrained", "lagrangian", "latency_agnostic"])
@given(ttft_s=st.lists(st.sampled_from([0.1, 0.2, 0.3, math.inf]), max_size=40))
def test_the_soonest_come_first(policy: str, ttft_s: list[float]) -> None:
    listed = [
        i for batch in batches(policy, ttft_s, least_ttft_s=[0.0] * len(ttft_s)) for i in batch
    ]
    assert listed == sorted(range(len(ttft_s)), key=lambda i: (ttft_s[i], i))


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
        min_size=1,
        max_size=MOST,
    )
)
def test_the_soonest_is_found_wherever_its_load_has_it(
    rows: list[tuple[float, float, float]],
) -> None:
    forecast_s, share, ttft_s = zip(*rows, strict=True)
    least_s = [s * f for s, f in zip(share, forecast_s, strict=True)]
    listed = batches("constrained", ttft_s, least_ttft_s=least_s, forecast_s=forecast_s)
    found_s = min(forecast_s[i] for batch in listed for i in batch)
    assert found_s <= min(forecast_s) + NO_DIFFERENCE_S


def test_who_cannot_be_sooner_is_left_out() -> None:
    assert batches("constrained", [0.1] * FEW + [0.2] * 50) == [[*range(FEW)]]


def test_they_come_few_at_a_time_and_not_too_many() -> None:
    listed = batches("constrained", [0.1] * 100, least_ttft_s=[0.05] * 100)
    assert [len(batch) for batch in listed] == [FEW] * (MOST // FEW)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.2])), max_size=20))
def test_the_shortest_queues_come_first(rows: list[tuple[int, float]]) -> None:
    residents, ttft_s = [row[0] for row in rows], [row[1] for row in rows]
    [listed] = batches("shortest_queue", ttft_s, residents)
    assert listed == sorted(range(len(rows)), key=lambda i: (*rows[i], i))[:FEW]


@given(n=st.integers(1, 20), last=st.integers(-1, 19))
def test_turns_go_round(n: int, last: int) -> None:
    [listed] = batches("round_robin", [0.1] * n, last=last)
    cycle = [*range(last + 1, n), *range(min(last + 1, n))]
    assert listed == cycle[:FEW]


def test_the_silent_are_left_out_and_the_unseen_come_besides() -> None:
    ages_s = [math.nan, 2.0, 6.0] + [0.1] * 20
    first, *_ = batches("constrained", [0.1] * 3 + [0.5] * 20, age_s=ages_s)
    assert first == [*range(3, 3 + FEW), 0, 1]


def test_where_all_are_silent_nobody_is_listed() -> None:
    assert batches("constrained", [0.1], age_s=[6.0]) == [[]]
    assert batches("constrained", []) == [[]]
