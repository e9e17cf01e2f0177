from __future__ import annotations

import numpy as np

from app.config import PoolSettings
from app.evaluation.arrivals import Arrival
from app.evaluation.chats import TURNS_MAX, Chats
from app.evaluation.virtual_pool import VirtualPool
from app.prediction import PriorPredictor
from app.records import DecisionRecord


class Listener:
    """Hears what the chats say and what they are answered."""

    def __init__(self, chats: Chats) -> None:
        self._chats = chats
        self.said: dict[int, Arrival] = {}
        self.answered: dict[int, DecisionRecord] = {}

    def first_turns(self) -> list[Arrival]:
        return [self._heard(arrival) for arrival in self._chats.first_turns()]

    def next_turn(self, record: DecisionRecord) -> list[Arrival]:
        self.answered[number(record.decision.decision_id)] = record
        return [self._heard(arrival) for arrival in self._chats.next_turn(record)]

    def _heard(self, arrival: Arrival) -> Arrival:
        self.said[number(arrival.query.decision_id)] = arrival
        return arrival


def number(decision_id: str) -> int:
    return int(decision_id.removeprefix("dec-"), 16)


def listen(pool: PoolSettings, policy: str) -> Listener:
    router = pool.router.model_copy(update={"policy": policy})
    pool = pool.model_copy(update={"router": router})
    listener = Listener(Chats(pool, chats_per_s=2.0, chats=40, tenants=3, seed=5))
    served = VirtualPool(pool, PriorPredictor(pool), journaled=False)
    served.run(listener.first_turns(), listener.next_turn)
    return listener


def prompt(arrival: Arrival) -> list[int]:
    ids: list[int] = arrival.query.prompts["qwen3"].tolist()
    return ids


def test_every_turn_says_again_all_that_was_said(pool: PoolSettings) -> None:
    heard = listen(pool, "round_robin")
    assert heard.said.keys() == heard.answered.keys()
    later = [key for key in heard.said if key % TURNS_MAX > 0]
    assert len(later) > 20
    for key in later:
        before, answer = heard.said[key - 1], heard.answered[key - 1]
        model = answer.decision.choice.model
        history = prompt(before) + before.answers[model][: answer.output_tokens].tolist()
        assert prompt(heard.said[key])[: len(history)] == history
        assert len(prompt(heard.said[key])) > len(history)
        assert heard.said[key].query.arrived_s > answer.finished_s


def test_what_is_said_does_not_depend_on_the_pool(pool: PoolSettings) -> None:
    one, other = listen(pool, "round_robin"), listen(pool, "shortest_queue")
    for key in one.said.keys() & other.said.keys():
        ours, theirs = one.said[key], other.said[key]
        assert {m: a.tolist() for m, a in ours.answers.items()} == {
            m: a.tolist() for m, a in theirs.answers.items()
        }
        if key % TURNS_MAX == 0:
            assert prompt(ours) == prompt(theirs)
            assert ours.query.arrived_s == theirs.query.arrived_s


def test_chats_of_a_tenant_begin_alike(pool: PoolSettings) -> None:
    chats = Chats(pool, chats_per_s=2.0, chats=200, tenants=3, seed=5)
    beginnings = [tuple(prompt(arrival)[:10]) for arrival in chats.first_turns()]
    counts = sorted((beginnings.count(b) for b in set(beginnings)), reverse=True)
    # As often as 1, 1/2 and 1/3 say.
    assert counts == sorted(counts, reverse=True) and len(counts) == 3
    np.testing.assert_allclose(np.array(counts) / 200, np.array([6, 3, 2]) / 11, atol=0.08)


def test_no_chat_outgrows_the_context(pool: PoolSettings) -> None:
    heard = listen(pool, "round_robin")
    for key, arrival in heard.said.items():
        answer = heard.answered[key]
        assert answer.finish_reason == "stop"
        assert len(prompt(arrival)) + answer.output_tokens <= 4096
