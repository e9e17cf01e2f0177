import pytest

from app.rates import ArrivalRate, RunningMean


def test_steady_arrivals_give_their_rate() -> None:
    rate = ArrivalRate(horizon_s=10.0)
    for i in range(1000):
        rate.arrived(i * 0.25)
    assert rate.per_s(999 * 0.25) == pytest.approx(4.0, rel=0.02)


def test_a_rate_decays_by_e_in_a_horizon() -> None:
    rate = ArrivalRate(horizon_s=10.0)
    rate.arrived(5.0)
    assert rate.per_s(5.0) == pytest.approx(0.1)
    assert rate.per_s(15.0) == pytest.approx(0.1 / 2.718281828)
    assert ArrivalRate(horizon_s=10.0).per_s(3.0) == 0.0


def test_a_clock_that_steps_back_adds_nothing() -> None:
    rate = ArrivalRate(horizon_s=10.0)
    rate.arrived(5.0)
    assert rate.per_s(4.0) == pytest.approx(0.1)


def test_the_first_value_is_taken_whole_and_later_ones_by_weight() -> None:
    mean = RunningMean(weight=0.1)
    assert mean.value == 0.0
    mean.add(2.0)
    mean.add(3.0)
    assert mean.value == pytest.approx(2.1)


def test_a_mean_refuses_what_it_could_never_forget() -> None:
    with pytest.raises(ValueError, match="finite"):
        RunningMean(weight=0.1).add(float("nan"))
