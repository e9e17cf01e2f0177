from __future__ import annotations

import math

import pytest

from app.evaluation.accuracy import Pair, by_model, markdown, measure


def pairs(*predicted_and_observed_s: tuple[float, float], model: str = "small") -> list[Pair]:
    return [Pair(model, "sfs", p, o) for p, o in predicted_and_observed_s]


def test_errors_by_hand() -> None:
    # Errors: -10%, +20%, 0%, +50%.
    row = measure("small", "sfs", pairs((0.9, 1.0), (2.4, 2.0), (0.5, 0.5), (0.3, 0.2)))

    assert row.requests == 4
    assert row.observed_mean_s == pytest.approx(3.7 / 4)
    assert row.mape == pytest.approx(0.8 / 4)
    assert row.bias == pytest.approx(0.6 / 4)
    assert row.p50 == pytest.approx(0.10), "the second of four, not a mean of two"
    assert row.p95 == pytest.approx(0.50)


def test_an_infinite_forecast_stays_infinite() -> None:
    row = measure("small", "lps", pairs((math.inf, 1.0), (1.1, 1.0), (1.2, 1.0)))

    assert row.mape == math.inf
    assert row.bias == math.inf
    assert row.p50 == pytest.approx(0.2)
    assert row.p95 == math.inf


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no forecast of sfs for small"),
        (pairs((1.0, 0.0)), "observed TTFT of small must be positive"),
        (pairs((1.0, math.nan)), "observed TTFT of small must be positive"),
        (pairs((math.nan, 1.0)), "a forecast of sfs for small is nan"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: list[Pair], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure("small", "sfs", given)


def test_one_row_for_each_model_and_estimator_and_then_for_all() -> None:
    rows = by_model(
        [
            Pair("b", "sfs", 1.1, 1.0),
            Pair("a", "sfs", 1.0, 1.0),
            Pair("a", "throughput", 2.0, 1.0),
        ]
    )

    assert [(r.model, r.estimator, r.requests) for r in rows] == [
        ("a", "sfs", 1),
        ("a", "throughput", 1),
        ("b", "sfs", 1),
        ("all", "sfs", 2),
        ("all", "throughput", 1),
    ]
    assert rows[3].mape == pytest.approx(0.05)


def test_markdown() -> None:
    rows = by_model([Pair("a", "sfs", 0.9, 1.0), Pair("a", "lps", math.inf, 1.0)])

    assert markdown(rows).splitlines()[:4] == [
        "| model | estimator | requests | mean TTFT, ms | MAPE | p50 | p95 | bias |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        "| a | lps | 1 | 1000.0 | inf | inf | inf | +inf% |",
        "| a | sfs | 1 | 1000.0 | 10.0% | 10.0% | 10.0% | -10.0% |",
    ]
