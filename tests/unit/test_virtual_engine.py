"""The engine in virtual time: it does what replay does, however it is run, and its snapshots
foretell what it does next."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sfs_ext import (
    HEARTBEAT_S,
    BatchTime,
    Fleet,
    ForecastStatus,
    KvJournalMessage,
    KvMirror,
    SchedulerConfig,
    VirtualEngine,
    block_keys,
    query_dtype,
)
from sfs_ext._core import replay

BATCH_TIME = BatchTime(4e-3, 1e-5, 1e-8, 1e-10)
IDLE_SLEEP_S = 1e-3
STOP, LENGTH, ABORT = 1, 2, 3


def config(**changed: Any) -> SchedulerConfig:
    limits: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "block_size": 8,
        "num_blocks": 41,
        "max_model_len": 256,
    }
    return SchedulerConfig(**limits | changed)


@dataclass(frozen=True)
class Item:
    arrival_s: float
    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    max_tokens: int
    priority: int = 0
    abort_s: float = math.inf


def item(arrival_s: float, prompt_tokens: int, output_tokens: int, **changed: Any) -> Item:
    ids = np.arange(prompt_tokens + output_tokens, dtype=np.int32)
    limits = {"max_tokens": output_tokens + 1} | changed
    return Item(arrival_s, ids[:prompt_tokens], ids[prompt_tokens:], **limits)


def submit(engine: VirtualEngine, key: int, request: Item) -> None:
    engine.submit(
        request_id=key,
        arrival_s=request.arrival_s,
        prompt_token_ids=request.prompt,
        output_tokens=len(request.answer),
        max_tokens=request.max_tokens,
        predicted_output_tokens=len(request.answer),
        priority=request.priority,
        answer_token_ids=request.answer,
    )
    if math.isfinite(request.abort_s):
        engine.abort(key, request.abort_s)


def token_times(events: NDArray[Any], requests: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in range(requests)]
    for key, tokens, finish, at_s in events.tolist():
        if finish != ABORT:
            times[key].append(at_s)
            assert tokens == len(times[key])
    return times


def replayed(limits: SchedulerConfig, workload: list[Item]) -> list[list[float]]:
    _, times = replay(
        limits,
        [
            {
                "arrival_s": request.arrival_s,
                "rank": rank,
                "prompt_tokens": len(request.prompt),
                "output_tokens": len(request.answer),
                "max_tokens": request.max_tokens,
                "priority": request.priority,
                "abort_s": request.abort_s,
                "block_keys": block_keys(
                    np.concatenate([request.prompt, request.answer]), limits.block_size
                ).tolist(),
            }
            for rank, request in enumerate(workload)
        ],
        batch_time=BATCH_TIME,
        idle_sleep_s=IDLE_SLEEP_S,
    )
    return times


@st.composite
def workloads(draw: st.DrawFn) -> list[Item]:
    """Few tokens make many equal prefixes; few blocks make preemptions."""
    drawn = []
    arrival_s = 0.0
    for _ in range(draw(st.integers(1, 12))):
        arrival_s += draw(st.sampled_from([0.0, 1e-3, 0.011, 0.3]))
        shared = draw(st.integers(0, 100))
        own = draw(st.integers(1, 60))
        outputs = draw(st.integers(1, 60))
        content = np.zeros(shared + own + outputs, np.int32)
        content[shared:] = draw(st.integers(0, 3))
        abort_s = draw(st.one_of(st.just(math.inf), st.floats(0, 0.2).map(arrival_s.__add__)))
        drawn.append(
            Item(
                arrival_s=arrival_s,
                prompt=content[: shared + own],
                answer=content[shared + own :],
                max_tokens=draw(st.integers(1, 60)),
                priority=draw(st.integers(0, 2)),
                abort_s=abort_s,
            )
        )
    return drawn


configs = st.builds(
    config,
    async_scheduling=st.booleans(),
    enable_prefix_caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    long_prefill_token_threshold=st.sampled_from([0, 16]),
)


@settings(max_examples=200)
@given(configs, workloads())
def test_it_does_what_replay_does(limits: SchedulerConfig, workload: list[Item]) -> None:
    engine = VirtualEngine(limits, BATCH_TIME)
    for key, request in enumerate(workload):
        submit(engine, key, request)
    assert token_times(engine.run_until(math.inf), len(workload)) == replayed(limits, workload)


@settings(max_examples=200)
@given(configs, workloads(), st.lists(st.floats(0, 0.01), min_size=1))
def test_nor_does_it_matter_how_it_is_run(
    limits: SchedulerConfig, workload: list[Item], strides_s: list[float]
) -> None:
    engine = VirtualEngine(limits, BATCH_TIME)
    events = []
    for key, request in enumerate(workload):
        # Runs up to its arrival, in strides and event by event, looked at from time to time.
        for stride_s in strides_s:
            while engine.next_event_s < request.arrival_s - stride_s:
                events.append(engine.step())
            assert engine.snapshot().header["free_blocks"] <= limits.num_blocks - 1
            events.append(engine.run_until(request.arrival_s - stride_s))
        events.append(engine.run_until(request.arrival_s))
        submit(engine, key, request)
    events.append(engine.run_until(math.inf))
    assert engine.next_event_s == math.inf
    assert token_times(np.concatenate(events), len(workload)) == replayed(limits, workload)


@settings(max_examples=200)
@given(
    st.builds(config, async_scheduling=st.booleans(), enable_prefix_caching=st.booleans()),
    workloads(),
    st.lists(st.floats(0, 1), min_size=1, max_size=3).map(sorted),
)
def test_its_snapshots_and_its_journal_foretell_the_first_token(
    limits: SchedulerConfig, workload: list[Item], asked_s: list[float]
) -> None:
    engine = VirtualEngine(limits, BATCH_TIME)
    fleet = Fleet()
    fleet.add(limits, BATCH_TIME)
    position = 0
    sent: list[Item] = []
    # No prompt holds what an answer says: whoever waits might hit what is yet to be written, which
    # nobody can know.
    workload = [
        Item(w.arrival_s, w.prompt, np.full_like(w.answer, 1_000 + key), max_tokens=60)
        for key, w in enumerate(workload)
    ]
    for now_s in asked_s:
        for request in workload[len(sent) :]:
            if request.arrival_s < now_s:
                submit(engine, len(sent), request)
                sent.append(request)
        engine.run_until(now_s)
        snapshot = engine.snapshot()
        if limits.enable_prefix_caching:
            assert fleet.update_journal(0, engine.journal_message(position))
            position = int(snapshot.header["kv_position"])
        fleet.update(0, snapshot.to_bytes())
        # Those that have come since the snapshot are known to whoever sent them.
        coming = [
            (k, r) for k, r in enumerate(sent) if r.arrival_s > snapshot.header["published_s"]
        ]
        for key, request in coming:
            fleet.book(
                instance=0,
                request_id=key,
                arrival_s=request.arrival_s,
                prompt_tokens=len(request.prompt),
                predicted_output_tokens=len(request.answer),
                max_tokens=60,
                prompt=request.prompt,
            )
        query = item(now_s, 50, 20, max_tokens=60)
        question = np.array([(0, 50, 20, 60, 0, now_s, 0)], query_dtype)
        [forecast] = fleet.forecast(now_s, question, [query.prompt])
        for key, _ in coming:
            fleet.unbook(0, key)
        assert forecast["status"] == ForecastStatus.OK
        without_later = copy.copy(engine)
        submit(without_later, 99, query)
        events = without_later.run_until(math.inf)
        [first] = events[(events["id"] == 99) & (events["tokens"] == 1)]
        assert forecast["ttft_s"] == pytest.approx(first["at_s"] - now_s, abs=1e-9)


def test_the_journal_reaches_back_as_far_as_ever() -> None:
    """Past what is kept of it a checkpoint stands in, however far a reader has fallen behind."""
    limits = config(num_blocks=33)
    engine = VirtualEngine(limits, BATCH_TIME)
    follower, late_comer = KvMirror(limits.num_blocks), KvMirror(limits.num_blocks)
    for key in range(40):
        submit(engine, key, item(0.01 * key, 40 + key, 20))
    for now_s in np.arange(0, 6, 0.02).tolist():
        engine.run_until(now_s)
        header = engine.snapshot().header
        assert follower.advance(engine.journal_message(follower.position))
        assert follower.position == header["kv_position"]
        assert follower.free_blocks == header["free_blocks"]
    assert engine.next_event_s == math.inf
    whole = KvJournalMessage.from_bytes(engine.journal_message(0))
    assert (whole.from_position, whole.to_position) == (0, follower.position)
    assert len(whole.events) < whole.to_position
    assert late_comer.advance(whole.to_bytes())
    np.testing.assert_array_equal(late_comer.compact(), follower.compact())


def test_without_prefix_caching_there_is_no_journal() -> None:
    engine = VirtualEngine(config(enable_prefix_caching=False), BATCH_TIME)
    assert engine.snapshot().header["kv_journaled"] == 0
    with pytest.raises(RuntimeError, match="without prefix caching"):
        engine.journal_message(0)


def test_one_event_after_the_other() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    assert engine.next_event_s == math.inf
    assert len(engine.step()) == 0
    submit(engine, 7, item(0.5, 20, 2))
    assert engine.next_event_s == 0.5
    assert len(engine.step()) == 0
    first_s = 0.5 + BATCH_TIME.seconds(20, 0, 210)
    assert engine.next_event_s == first_s
    assert engine.step().tolist() == [(7, 1, 0, first_s)]
    second_s = first_s + BATCH_TIME.seconds(1, 20, 0)
    assert engine.step().tolist() == [(7, 2, STOP, second_s)]


def test_what_happens_at_the_end_of_a_stretch_waits_for_who_arrives_then() -> None:
    engine = VirtualEngine(config(enable_prefix_caching=False), BATCH_TIME)
    submit(engine, 1, item(0.5, 20, 1))
    assert len(engine.run_until(0.5)) == 0
    submit(engine, 2, item(0.5, 20, 1))
    first_s = 0.5 + BATCH_TIME.seconds(40, 0, 420)
    assert engine.run_until(math.inf)["at_s"].tolist() == [first_s, first_s]


def test_time_does_not_run_backwards() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    engine.run_until(2.0)
    submit(engine, 1, item(1.0, 20, 1))
    assert engine.run_until(math.inf)["at_s"] == pytest.approx(2.0 + BATCH_TIME.seconds(20, 0, 210))


def test_an_aborted_request_is_heard_of_between_batches() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    submit(engine, 1, item(0.0, 20, 5, abort_s=1e-6))
    engine.abort(2, 0.0)
    first_s = BATCH_TIME.seconds(20, 0, 210)
    assert engine.run_until(math.inf).tolist() == [(1, 0, ABORT, first_s)]


def test_an_idle_engine_says_so_every_heartbeat() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    assert (engine.snapshot().header["sequence"], engine.snapshot().header["published_s"]) == (1, 0)
    engine.run_until(3.5 * HEARTBEAT_S)
    header = engine.snapshot().header
    assert (header["sequence"], header["published_s"]) == (4, 3 * HEARTBEAT_S)
    submit(engine, 1, item(4.25 * HEARTBEAT_S, 20, 1))
    engine.run_until(4.25 * HEARTBEAT_S + 1e-3)
    header = engine.snapshot().header
    assert (header["sequence"], header["published_s"]) == (6, 4.25 * HEARTBEAT_S)
    assert (header["running"], header["in_flight_batches"]) == (1, 1)
    engine.run_until(10 * HEARTBEAT_S)
    assert len(engine.snapshot().residents) == 0


def test_a_copy_goes_its_own_way() -> None:
    engine = VirtualEngine(config(async_scheduling=True), BATCH_TIME)
    submit(engine, 1, item(0.0, 100, 30))
    engine.run_until(0.02)
    other = copy.copy(engine)
    expected = engine.run_until(math.inf)
    submit(other, 2, item(0.02, 100, 30))
    assert other.run_until(math.inf)["at_s"].max() > expected["at_s"].max()
    assert engine.next_event_s == math.inf


def test_a_conversation_hits_its_history() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    submit(engine, 1, item(0.0, 60, 30))
    engine.run_until(1.0)
    assert (engine.admitted_prompt_tokens, engine.prefix_hit_tokens) == (60, 0)
    submit(engine, 2, item(1.0, 100, 1))
    engine.run_until(2.0)
    # The last token of the first answer was never computed: 89 tokens make 11 blocks of 8.
    assert (engine.admitted_prompt_tokens, engine.prefix_hit_tokens) == (160, 88)


def test_what_could_never_run_is_refused() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    with pytest.raises(ValueError, match="can never be admitted"):
        submit(engine, 1, item(0.0, 256, 1))
    assert engine.next_event_s == math.inf


def test_times_that_are_none_are_refused() -> None:
    engine = VirtualEngine(config(), BATCH_TIME)
    with pytest.raises(ValueError, match="arrival_s is no time"):
        submit(engine, 1, item(math.nan, 10, 2))
    with pytest.raises(ValueError, match="at_s is no time"):
        engine.abort(1, math.nan)
    assert math.isinf(engine.next_event_s)
