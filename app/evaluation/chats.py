"""Conversations whose every turn sends the whole history again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from app.config import PoolSettings
from app.evaluation.arrivals import Arrival, lognormal, lognormal_tokens, plain_query, random_tokens
from app.evaluation.virtual_pool import emulated
from app.records import DecisionRecord
from app.types import TokenIds

SYSTEM_TOKENS_MEAN, SYSTEM_TOKENS_SIGMA = 2_000.0, 0.5
"""Lognormal, of a tenant's system prompt; sigma here and below is of the logarithm."""
USER_TOKENS_MEAN, USER_TOKENS_SIGMA = 70.0, 1.0
"""Lognormal, of what a user writes in a turn. Answers are as the emulated engines' settings say."""
TURNS_MEAN, TURNS_MAX = 5.0, 20
"""Geometric."""
THINK_S_MEAN, THINK_S_SIGMA = 8.0, 0.8
"""Lognormal, from the end of an answer to the next turn."""
LONGEST = 0.25
"""Of a context, are a system prompt, a message and an answer at most."""


class Chats:
    """They begin as a Poisson process, the k-th tenant's as often as 1/k says. What is said, and
    the times to think, do not depend on who answers, nor on when."""

    def __init__(
        self, settings: PoolSettings, chats_per_s: float, chats: int, tenants: int, seed: int
    ) -> None:
        self._settings = settings
        self._context_tokens = min(model.context_tokens for model in settings.models)
        longest = int(LONGEST * self._context_tokens)
        random = np.random.default_rng(seed)
        self.begin_s: list[float] = np.cumsum(random.exponential(1 / chats_per_s, chats)).tolist()
        system_tokens = lognormal_tokens(
            random, SYSTEM_TOKENS_MEAN, SYSTEM_TOKENS_SIGMA, tenants, longest
        )
        system = [random_tokens(random, count) for count in system_tokens.tolist()]
        popularity = 1.0 / np.arange(1, tenants + 1)
        chosen = random.choice(tenants, chats, p=popularity / popularity.sum())
        turns = np.minimum(random.geometric(1 / TURNS_MEAN, chats), TURNS_MAX)
        self._open: dict[str, _Chat] = {}
        self._chats = [
            _Chat(number, system[tenant], self._turns(random, count, longest))
            for number, (tenant, count) in enumerate(
                zip(chosen.tolist(), turns.tolist(), strict=True)
            )
        ]

    def first_turns(self) -> Iterable[Arrival]:
        for chat, at_s in zip(self._chats, self.begin_s, strict=True):
            yield self._say(chat, at_s)

    def next_turn(self, record: DecisionRecord) -> Iterable[Arrival]:
        """What its user says after that answer, if there is anything to say, and room for it."""
        chat = self._open.pop(record.decision.decision_id)
        turn = chat.turns[chat.turn]
        answer = turn.answers[record.decision.choice.model][: record.output_tokens]
        chat.history = np.concatenate([chat.history, answer])
        chat.turn += 1
        if chat.turn < len(chat.turns) and self._has_room(chat):
            yield self._say(chat, record.finished_s + turn.think_s)

    def _say(self, chat: _Chat, at_s: float) -> Arrival:
        turn = chat.turns[chat.turn]
        chat.history = np.concatenate([chat.history, turn.message])
        number = chat.number * TURNS_MAX + chat.turn
        query = plain_query(self._settings, number, at_s, chat.history)
        self._open[query.decision_id] = chat
        return Arrival(query, turn.answers)

    def _has_room(self, chat: _Chat) -> bool:
        """Whoever answers."""
        turn = chat.turns[chat.turn]
        longest_answer = max(map(len, turn.answers.values()))
        return len(chat.history) + len(turn.message) + longest_answer <= self._context_tokens

    def _turns(self, random: np.random.Generator, count: int, longest: int) -> list[_Turn]:
        messages = lognormal_tokens(
            random, USER_TOKENS_MEAN, USER_TOKENS_SIGMA, count, longest
        ).tolist()
        lengths = {}
        for model in self._settings.models:
            answer = emulated(model).output_tokens
            lengths[model.name] = lognormal_tokens(
                random, answer.mean, answer.sigma, count, longest
            ).tolist()
        think_s = lognormal(random, THINK_S_MEAN, THINK_S_SIGMA, count).tolist()
        return [
            _Turn(
                message=random_tokens(random, messages[i]),
                answers={
                    name: random_tokens(random, tokens[i]) for name, tokens in lengths.items()
                },
                think_s=think_s[i],
            )
            for i in range(count)
        ]


@dataclass(frozen=True, slots=True)
class _Turn:
    message: TokenIds
    answers: dict[str, TokenIds]
    """By model."""
    think_s: float
    """After the answer."""


@dataclass(slots=True)
class _Chat:
    number: int
    history: TokenIds
    turns: list[_Turn]
    turn: int = 0
    """The next one, or the one under way."""
