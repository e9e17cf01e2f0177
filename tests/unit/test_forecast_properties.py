"""What holds of forecasts from any state that an engine has come to.

The states are real: engines with short batches publish them while they work off random requests.
"""

from __future__ import annotations

import base64
import bisect
import random
import select
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from numpy.typing import NDArray

from sfs_ext import (
    BatchTime,
    EmulatedEngine,
    Fleet,
    ForecastStatus,
    SchedulerConfig,
    Snapshot,
    SnapshotReader,
    query_dtype,
    resident_dtype,
    snapshot_dtype,
)
from sfs_ext._core import replay

# Of the engines, so that a state is reached soon, and of the forecasts.
ENGINE_BATCH_TIME = BatchTime(2e-4, 1e-7, 0.0, 0.0)
BATCH_TIME = BatchTime(4e-3, 1e-5, 1e-8, 1e-10)
NOW_S = 1_000_000.0
WAITING = 1
OFFSETS_S = st.sampled_from([0.0, 0.0, 1e-3, 0.02, 0.1, 0.5, 2.0])


@dataclass(frozen=True)
class State:
    """A snapshot, apart: ``head`` is what comes before the header in its bytes."""

    head: bytes
    header: np.void
    residents: NDArray[np.void]

    @property
    def published_s(self) -> float:
        return float(self.header["published_s"])

    def bytes(self) -> bytes:
        count = np.uint32(len(self.residents)).tobytes()
        return (
            self.head[:12]
            + count
            + self.head[16:]
            + self.header.tobytes()
            + self.residents.tobytes()
        )


def state_of(snapshot: Snapshot) -> State:
    data, residents = snapshot.to_bytes(), snapshot.residents
    end = len(data) - residents.nbytes
    header = np.frombuffer(data[end - snapshot_dtype.itemsize : end], snapshot_dtype)[0]
    return State(data[: end - snapshot_dtype.itemsize], header, residents)


def config(**changed: Any) -> SchedulerConfig:
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "block_size": 16,
        "num_blocks": 2001,
        "max_model_len": 2048,
    }
    return SchedulerConfig(**limits | changed)


def states_of(
    folder: Path, limits: SchedulerConfig, live: int, most_outputs: int, least_running: int = 1
) -> list[State]:
    """Snapshots of one engine that always has ``live`` requests, in which a batch is under way."""
    dice = random.Random(repr(limits))
    path = str(folder / "engine")
    engine = EmulatedEngine(limits, ENGINE_BATCH_TIME, path)
    reader = SnapshotReader(path)
    states: list[State] = []
    submitted = ended = tokens = 0
    try:
        while len(states) < 24:
            for _ in range(live - (submitted - ended)):
                submitted += 1
                outputs = dice.randint(1, most_outputs)
                engine.submit(
                    submitted,
                    np.arange(dice.randint(1, 400), dtype=np.int32) + 1000 * submitted,
                    outputs,
                    outputs + dice.randint(0, 50),
                    dice.choice([0.0, outputs, outputs / 2]),
                    dice.randint(0, 3),
                    time.time(),
                )
            select.select([engine], [], [])
            events = engine.poll()
            assert engine.error() is None
            ended += int(np.count_nonzero(events["finish"]))
            tokens += len(events)
            snapshot = reader.read()
            if snapshot is None or tokens < live:
                continue
            state = state_of(snapshot)
            if state.header["running"] >= least_running and state.header["in_flight_batches"] > 0:
                states.append(state)
                tokens = 0
    finally:
        engine.stop()
    return states


AMPLE = [config(async_scheduling=on, num_blocks=20001) for on in (False, True)]
TIGHT = [
    config(num_blocks=201, async_scheduling=on, policy=policy, watermark=0.01 if on else 0.0)
    for on in (False, True)
    for policy in ("fcfs", "priority")
]
OTHERS = [
    config(enable_chunked_prefill=False, max_num_batched_tokens=2048),
    config(long_prefill_token_threshold=64, async_scheduling=True),
]
# Hundreds run, each for long, and blocks for half of what they would hold.
LARGE = [
    config(
        num_blocks=8001,
        max_num_seqs=400,
        max_num_batched_tokens=4096,
        async_scheduling=on,
        policy=policy,
    )
    for on, policy in ((False, "priority"), (True, "fcfs"))
]


class Pools:
    def __init__(self, new_folder: Callable[[], Path]) -> None:
        def pool(configs: list[SchedulerConfig], *engine: int) -> list[State]:
            return [s for limits in configs for s in states_of(new_folder(), limits, *engine)]

        self.ample = pool(AMPLE, 40, 60)
        self.any = self.ample + pool(TIGHT, 40, 120) + pool(OTHERS, 40, 60)
        self.large = pool(LARGE, 500, 1600, 200)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Pools:
    return Pools(lambda: tmp_path_factory.mktemp("engine"))


def state_at(place: int, states: list[State]) -> State:
    state = states[place % len(states)]
    note(f"snapshot, packed: {base64.b85encode(zlib.compress(state.bytes())).decode()}")
    return state


def fleet_at(state: State, **kind: Any) -> Fleet:
    fleet = Fleet(**kind)
    fleet.add(Snapshot.from_bytes(state.bytes()).config, BATCH_TIME)
    assert fleet.update(0, state.bytes())
    return fleet


@dataclass(frozen=True)
class Asked:
    """A query of instance 0; ``after_s`` the snapshot it comes."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    after_s: float

    def of(self, fleet: Fleet, published_s: float) -> np.void:
        query = np.zeros(1, query_dtype)
        query["prompt_tokens"] = self.prompt_tokens
        query["predicted_output_tokens"] = self.output_tokens
        query["max_tokens"] = self.max_tokens
        query["priority"] = self.priority
        query["arrival_s"] = published_s + self.after_s
        forecast: np.void = fleet.forecast(published_s, query)[0]
        return forecast

    def book(self, fleet: Fleet, key: int, published_s: float) -> None:
        fleet.book(
            0,
            key,
            published_s + self.after_s,
            self.prompt_tokens,
            self.output_tokens,
            self.max_tokens,
            self.priority,
        )


def asked(after_s: st.SearchStrategy[float] = OFFSETS_S) -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        prompt_tokens=st.integers(1, 1000),
        output_tokens=st.integers(0, 300),
        max_tokens=st.integers(1, 300),
        priority=st.integers(0, 3),
        after_s=after_s,
    )


PLACES = st.integers(0, 10_000)


def same(a: np.void, b: np.void) -> bool:
    return a.tobytes() == b.tobytes()


def close(a: np.void, b: np.void) -> bool:
    """Equal but for how sums of times were rounded."""
    counts = ["status", "batches", "running", "waiting", "booked", "queued_prefill_tokens"]
    times = [[f[name] for name in ("ttft_s", "waiting_s", "prefill_s")] for f in (a, b)]
    return all(a[name] == b[name] for name in counts) and np.allclose(*times, rtol=1e-9, atol=1e-9)


@given(place=PLACES, queries=st.lists(asked(), min_size=1, max_size=5), data=st.data())
def test_asking_changes_nothing(
    pools: Pools, place: int, queries: list[Asked], data: st.DataObject
) -> None:
    """Any order, any number of times, through simulations kept from other queries and not.

    Times agree to 1e-9 with those of a fleet that was asked nothing else, not bit for bit: a stride
    through many batches ends where the query comes for which it was kept, and the sum of their
    times is rounded there."""
    state = state_at(place, pools.any)
    alone = [query.of(fleet_at(state), state.published_s) for query in queries]
    fleet = fleet_at(state)
    order = data.draw(st.permutations([*range(len(queries)), *range(len(queries))]))
    for number in order:
        assert close(queries[number].of(fleet, state.published_s), alone[number])
    again = [query.of(fleet, state.published_s) for query in queries]
    assert [query.of(fleet, state.published_s).tobytes() for query in queries] == [
        forecast.tobytes() for forecast in again
    ]


@given(place=PLACES, steps=st.lists(asked(), max_size=8), data=st.data())
def test_bookings_count_however_they_came_and_went(
    pools: Pools, place: int, steps: list[Asked], data: st.DataObject
) -> None:
    """Queries, bookings and their withdrawal in any order: as asked of a fleet with only the
    bookings that are left."""
    state = state_at(place, pools.any)
    fleet = fleet_at(state)
    booked: dict[int, Asked] = {}
    for key, step in enumerate(steps, start=1_000_000):
        action = data.draw(st.sampled_from(["ask", "book", "unbook"]))
        if action == "book":
            step.book(fleet, key, state.published_s)
            booked[key] = step
        elif action == "unbook" and booked:
            gone = data.draw(st.sampled_from(sorted(booked)))
            assert fleet.unbook(0, gone)
            del booked[gone]
        else:
            fresh = fleet_at(state)
            for other, booking in booked.items():
                booking.book(fresh, other, state.published_s)
            assert close(step.of(fleet, state.published_s), step.of(fresh, state.published_s))
    query = data.draw(asked())
    for key in booked:
        assert fleet.unbook(0, key)
    assert close(query.of(fleet, state.published_s), query.of(fleet_at(state), state.published_s))


@given(
    place=PLACES,
    query=asked(),
    shift=st.integers(-(2**31) * 2**22, 2**22 * (2**31 - 2_000_000_000)),
)
def test_a_shift_of_the_clock_shifts_nothing(
    pools: Pools, place: int, query: Asked, shift: int
) -> None:
    """Bit for bit, where no time is rounded: those of our years are multiples of 2**-22 s."""
    state = state_at(place, pools.any)
    shift_s = shift / 2**22
    header, residents = state.header.copy(), state.residents.copy()
    header["published_s"] += shift_s
    header["in_flight"]["started_s"] += shift_s
    residents["arrival_s"] += shift_s
    then = State(state.head, header, residents)
    after_s = round(query.after_s * 2**22) / 2**22
    query = Asked(**vars(query) | {"after_s": after_s})
    before = query.of(fleet_at(state), state.published_s)
    assert same(query.of(fleet_at(then), then.published_s), before)


@given(place=PLACES, first=asked(st.just(-0.001)), query=asked())
def test_a_booking_counts_as_a_resident(
    pools: Pools, place: int, first: Asked, query: Asked
) -> None:
    """Bit for bit, where the snapshot could have named it: it had come, a batch was under way."""
    state = state_at(place, pools.any)
    fleet = fleet_at(state)
    first.book(fleet, 1_000_000, state.published_s)
    booked = query.of(fleet, state.published_s)

    resident = np.zeros(1, resident_dtype)
    resident["id"] = 1_000_000
    resident["arrival_s"] = state.published_s + first.after_s
    resident["prompt_tokens"] = first.prompt_tokens
    resident["max_tokens"] = first.max_tokens
    resident["predicted_output_tokens"] = first.output_tokens
    resident["priority"] = first.priority
    resident["status"] = WAITING
    header, queue_place = state.header.copy(), len(state.residents)
    header["waiting"] += 1
    if Snapshot.from_bytes(state.bytes()).config.policy == "priority":
        key = (first.priority, resident["arrival_s"][0])
        others = state.residents[["priority", "arrival_s"]].tolist()
        queue_place = bisect.bisect(others, key, lo=int(header["running"]))
    residents = np.insert(state.residents, queue_place, resident)
    named = query.of(fleet_at(State(state.head, header, residents)), state.published_s)
    assert booked["booked"] == 1
    assert named["booked"] == 0
    booked["booked"] = 0
    assert same(booked, named)


@given(place=PLACES, queries=st.lists(asked(), min_size=1, max_size=3))
def test_grouped_stepping_is_plain_stepping(pools: Pools, place: int, queries: list[Asked]) -> None:
    state = state_at(place, pools.any)
    grouped, plain = fleet_at(state), fleet_at(state, plain_stepping=True)
    for query in queries:
        assert close(query.of(grouped, state.published_s), query.of(plain, state.published_s))


def test_grouped_stepping_is_plain_stepping_where_hundreds_run(
    pools: Pools,
) -> None:
    """With preemptions ahead: the answers to come want more blocks than there are."""
    dice = random.Random(1)
    preempting = 0
    for state in pools.large:
        wanted = sum(
            -(-int(r["prompt_tokens"] + (r["predicted_output_tokens"] or r["max_tokens"])) // 16)
            for r in state.residents[: state.header["running"]]
        )
        preempting += wanted > 8000
        query = Asked(
            dice.randint(1, 1000), 100, 200, dice.randint(0, 3), dice.choice([0.0, 1.0, 20.0])
        )
        grouped, plain = (
            query.of(fleet_at(state, plain_stepping=on), state.published_s) for on in (False, True)
        )
        assert close(grouped, plain)
    assert preempting > len(pools.large) / 2


@given(
    place=PLACES,
    ahead=st.lists(asked(st.just(0.0)), max_size=4),
    more=asked(st.just(0.0)),
    query=asked(st.just(0.0)),
)
def test_work_directly_ahead_never_makes_the_first_token_earlier(
    pools: Pools, place: int, ahead: list[Asked], more: Asked, query: Asked
) -> None:
    """That is, where the work

    - comes under FCFS, without a threshold for long prefills that depends on how many are present:
      those before it get then in every step what they would have got without it;
    - is the last before the query, so that these are all who could get something else;
    - comes with the query: else the steps that it makes longer could let the query catch one that
      it would have missed;
    - makes nobody be preempted: blocks are ample.

    Then the query is computed in the same steps or later ones, and they take as long or longer.
    Chunked prefill makes no difference. Work that somebody stands behind who stands before the
    query, or that comes earlier, can make the first token earlier: see the anomalies below."""
    state = state_at(place, pools.ample)
    fleet = fleet_at(state)
    for key, booking in enumerate(ahead, start=1_000_000):
        booking.book(fleet, key, state.published_s)
    before = query.of(fleet, state.published_s)
    more.book(fleet, 2_000_000, state.published_s)
    after = query.of(fleet, state.published_s)
    assert before["status"] == after["status"] == ForecastStatus.OK
    assert after["ttft_s"] >= before["ttft_s"] - 1e-9
    assert after["batches"] >= before["batches"]


Comes = tuple[float, int, int]  # arrival_s, prompt and output tokens


def ttft_of_engine_s(
    limits: SchedulerConfig, batch_time: BatchTime, requests: list[Comes], query: Comes
) -> float:
    workload = [
        {
            "arrival_s": arrival_s,
            "rank": rank,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "max_tokens": output_tokens,
            "priority": 0,
            "abort_s": np.inf,
            "block_keys": [],
        }
        for rank, (arrival_s, prompt_tokens, output_tokens) in enumerate([*requests, query])
    ]
    _, token_times = replay(limits, workload, batch_time=batch_time)
    return token_times[-1][0] - query[0]


def book_all(fleet: Fleet, requests: list[Comes], begun_s: float) -> None:
    for key, (arrival_s, prompt_tokens, output_tokens) in enumerate(requests, start=1):
        Asked(prompt_tokens, output_tokens, output_tokens, 0, arrival_s).book(fleet, key, begun_s)


def ask_for(fleet: Fleet, query: Comes, begun_s: float) -> float:
    arrival_s, prompt_tokens, output_tokens = query
    asked_for = Asked(prompt_tokens, output_tokens, output_tokens, 0, arrival_s)
    return float(asked_for.of(fleet, begun_s)["ttft_s"])


@pytest.mark.parametrize("asked_before", [False, True])
def test_who_comes_after_the_query_stands_behind_it(
    asked_before: bool, engine: Callable[..., Any]
) -> None:
    """Also where the forecast goes on from a simulation that has got beyond both arrivals."""
    limits = config(max_num_batched_tokens=64, enable_prefix_caching=False)
    batch_time = BatchTime(1.0, 0.0, 0.0, 0.0)
    ahead: list[Comes] = [(0.0, 64, 1)] * 9
    later: Comes = (0.7, 640, 1)
    query: Comes = (0.5, 64, 1)
    fleet = Fleet()
    fleet.add(limits, batch_time)
    fleet.update(0, engine(limits).publish(NOW_S))
    book_all(fleet, ahead, NOW_S)
    if asked_before:
        ask_for(fleet, (0.25, 64, 1), NOW_S)
    Asked(later[1], later[2], later[2], 0, later[0]).book(fleet, 100, NOW_S)
    truth = ttft_of_engine_s(limits, batch_time, [*ahead, later], query)
    assert ask_for(fleet, query, NOW_S) == pytest.approx(truth, abs=1e-6)


@dataclass(frozen=True)
class Anomaly:
    """``more`` comes before all others."""

    batch_time: BatchTime
    requests: list[Comes]
    more: Comes
    query: Comes


ANOMALIES = {
    # The added token makes the first batch longer, so that the query catches the second, with a
    # prompt of 1000 tokens, which it would otherwise have had to wait for.
    "an earlier batch is caught": Anomaly(
        BatchTime(1.0, 0.01, 0.0, 0.0),
        requests=[(0.0, 1, 100), (1.0, 1000, 100)],
        more=(0.0, 1, 1),
        query=(1.015, 10, 1),
    ),
    # The added token pushes the last one of the prompt behind it into the second batch, so that the
    # query's batches hold one long context fewer.
    "a long context is decoded later": Anomaly(
        BatchTime(0.01, 0.0, 1e-3, 0.0),
        requests=[(0.0, 1024, 100)],
        more=(0.0, 1, 1),
        query=(0.0, 1024, 1),
    ),
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_list_scheduling_has_anomalies(name: str, engine: Callable[..., Any]) -> None:
    """More work, an earlier first token: by the engine's rules, and so by the forecast."""
    anomaly = ANOMALIES[name]
    limits = config(max_num_batched_tokens=1024, enable_prefix_caching=False)

    def ttft_s(requests: list[Comes]) -> float:
        fleet = Fleet()
        fleet.add(limits, anomaly.batch_time)
        fleet.update(0, engine(limits).publish(NOW_S))
        book_all(fleet, requests, NOW_S)
        truth = ttft_of_engine_s(limits, anomaly.batch_time, requests, anomaly.query)
        assert ask_for(fleet, anomaly.query, NOW_S) == pytest.approx(truth, abs=1e-6)
        return truth

    assert ttft_s([anomaly.more, *anomaly.requests]) < ttft_s(anomaly.requests) - 0.1
