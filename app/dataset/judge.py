"""Every answer scored by a model that sees all answers to a prompt at once, and not whose."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.dataset import rubric
from app.dataset.answers import Answer
from app.dataset.budget import Budget, Prices
from app.dataset.endpoint import CallFailed, Endpoint, EndpointError, Reply, Send, api_of
from app.dataset.journal import Journal
from app.dataset.panel import Panel, panels
from app.dataset.progress import progress
from app.dataset.scores import Verdict, answer_hash, read_score_rows
from app.dataset.tally import Tally
from app.dataset.workers import work_off

OPENING_CALLS = 3
"""When a run's first ones are all refused alike, so would be the others."""


@dataclass(frozen=True, slots=True)
class Judging:
    """Who judges, and how."""

    url: str
    judge_model: str
    seed: int = 1
    """Of the order in which the answers to a prompt are shown."""
    concurrency: int = 4
    timeout_s: float = 120.0
    """For each attempt."""
    reasks: int = 2
    """Of a judge that returned what cannot be read."""
    prices: Prices | None = None
    budget_usd: float | None = None
    """For the whole file of scores, earlier runs included."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More of each request's body."""
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        api_of(self.url)
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        if self.reasks < 0:
            raise ValueError(f"reasks must be at least 0, not {self.reasks}")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be positive and finite, not {self.timeout_s}")
        if self.budget_usd is not None:
            if self.prices is None:
                raise ValueError("a budget needs prices: of tokens in and of tokens out")
            if not 0 <= self.budget_usd < math.inf:
                raise ValueError(
                    f"budget_usd must be finite and not below 0, not {self.budget_usd}"
                )


@dataclass(slots=True)
class Judged:
    """What a run came to."""

    already: int
    """Prompts whose answers all had a score."""
    unanswered: int
    """Prompts that no model answered."""
    tally: Tally = field(default_factory=Tally)
    left: int = 0
    """Prompts that the budget did not suffice to ask about."""
    exhausted: bool = False
    """Something was not asked for the budget's sake."""
    cost_usd: float | None = None
    """Of this run; None without prices."""
    spent_usd: float | None = None
    """Of the whole file."""


async def judge(judging: Judging, answers: Sequence[Answer], journal: Journal) -> Judged:
    """Appends a verdict's rows as it comes, or once a call came to anything but a refusal.

    A prompt is judged where each of its answers, as it is now, has a score. Otherwise all of them
    are judged together, anew too, for scores are comparable within one verdict; the newest stand.
    Raises EndpointError, RowError, OSError; EndpointError, with nothing appended, where the first
    calls are all refused for the same reason.
    """
    scored, spent_usd = _earlier(journal, judging.judge_model)
    every = panels(answers)
    pending = [panel for panel in every if not panel.is_judged(scored)]
    prompts = {answer.prompt.prompt_id for answer in answers}
    judged = Judged(already=len(every) - len(pending), unanswered=len(prompts) - len(every))
    budget = Budget(judging.prices, judging.budget_usd, spent_usd)
    async with Endpoint(
        judging.url, judging.timeout_s, judging.concurrency, judging.api_key, trust_env=True
    ) as endpoint:
        opening = _Opening()
        bench = _Bench(judging, endpoint, budget, opening, judged.tally)
        held: list[Verdict] = []

        def write() -> None:
            while held:
                journal.append(*held.pop(0).rows())

        with progress("judging", len(pending), judged.tally) as advance:

            async def decide(panel: Panel) -> None:
                verdict = await bench.verdict(panel)
                if verdict is None:
                    judged.left += 1
                    return
                held.append(verdict)
                if opening.over:
                    write()
                advance()

            await work_off(pending, decide, judging.concurrency)
        write()
    judged.exhausted = budget.exhausted
    if judging.prices is not None:
        judged.cost_usd, judged.spent_usd = budget.spent_usd - spent_usd, budget.spent_usd
    return judged


class _Bench:
    """Where panels are judged, on one budget."""

    def __init__(
        self,
        judging: Judging,
        endpoint: Endpoint,
        budget: Budget,
        opening: _Opening,
        tally: Tally,
    ) -> None:
        self._judging, self._endpoint, self._budget = judging, endpoint, budget
        self._opening, self._tally = opening, tally

    async def verdict(self, panel: Panel) -> Verdict | None:
        """None where the budget did not suffice to begin."""
        lettered = panel.lettered(self._judging.seed)
        letters = list(lettered)
        shown = {letter: answer.text or "" for letter, answer in lettered.items()}
        messages = rubric.messages(panel.prompt, shown)
        bill = _Bill()
        for _ in range(1 + self._judging.reasks):
            try:
                reply = await self._ask(messages, bill)
                scores = rubric.parse(reply.text, letters)
            except _Exhausted:
                if bill.cost_usd is None:
                    return None
                sentence = f"{bill.problem}; the budget did not suffice to ask again"
                return self._failed(panel, bill, CallFailed("budget", sentence))
            except CallFailed as failure:
                return self._failed(panel, bill, failure)
            except rubric.Unparsable as error:
                cut_off = " (cut off)" if reply.finish_reason == "length" else ""
                bill.problem = f"{error}{cut_off}"
                messages = [*messages, *rubric.correction(reply.text, bill.problem)]
            else:
                self._tally.done += 1
                return self._verdict(panel, bill, _by_model(scores, lettered), None)
        asked = 1 + self._judging.reasks
        sentence = f"no sound scores, asked {asked} times; at last: {bill.problem}"
        return self._failed(panel, bill, CallFailed("unparsable", sentence))

    async def _ask(self, messages: Sequence[Mapping[str, Any]], bill: _Bill) -> Reply:
        """Raises CallFailed, EndpointError, _Exhausted."""
        body = {
            **self._judging.fields,
            "model": self._judging.judge_model,
            "messages": messages,
        }
        said = json.dumps(messages, ensure_ascii=False).encode()

        async def paid(send: Send) -> Reply:
            return await self._paid(send, len(said), bill)

        number = self._opening.begin()
        try:
            reply = await self._endpoint.chat(body, paid)
        except CallFailed as failure:
            if bill.cost_usd is None and failure.refusal is not None:
                self._opening.refused(number, failure)
            else:
                self._opening.over = True
            raise
        self._opening.over = True
        return reply

    async def _paid(self, send: Send, prompt_bytes: int, bill: _Bill) -> Reply:
        """One attempt. Raises CallFailed, _Exhausted."""
        estimate_usd = self._budget.estimate_usd(prompt_bytes)
        if not await self._budget.promise(estimate_usd):
            raise _Exhausted
        try:
            reply = await send()
        except CallFailed as failure:
            bill.problem = str(failure)
            if failure.billed:
                bill.add(None, None, await self._budget.settle(estimate_usd, None, None))
            else:
                await self._budget.release(estimate_usd)
            raise
        tokens = reply.prompt_tokens, reply.output_tokens
        bill.add(*tokens, await self._budget.settle(estimate_usd, *tokens))
        return reply

    def _failed(self, panel: Panel, bill: _Bill, failure: CallFailed) -> Verdict:
        self._tally.fail(failure.kind, str(failure))
        return self._verdict(panel, bill, {}, str(failure))

    def _verdict(
        self,
        panel: Panel,
        bill: _Bill,
        scores: dict[str, tuple[float, str]],
        failure: str | None,
    ) -> Verdict:
        return Verdict(
            prompt_id=panel.prompt.prompt_id,
            judge_model=self._judging.judge_model,
            scores=scores,
            failure=failure,
            prompt_tokens=bill.prompt_tokens,
            output_tokens=bill.output_tokens,
            cost_usd=bill.cost_usd,
        )


class _Opening:
    """A run's first calls. Over, for good, once any call came to anything but a refusal, or two
    of the first were refused for different reasons."""

    def __init__(self) -> None:
        self.over = False
        self._begun = 0
        self._refusals: list[tuple[int, str]] = []

    def begin(self) -> int:
        self._begun += 1
        return self._begun

    def refused(self, number: int, failure: CallFailed) -> None:
        """EndpointError where that was the last of the first calls, and all were refused alike."""
        if self.over or failure.refusal is None or number > OPENING_CALLS:
            return
        self._refusals.append(failure.refusal)
        if len(set(self._refusals)) > 1:
            self.over = True
        elif len(self._refusals) == OPENING_CALLS:
            raise EndpointError(f"all of the first {OPENING_CALLS} calls: {failure}") from failure


class _Exhausted(Exception):
    """The budget promises nothing any more."""


@dataclass(slots=True)
class _Bill:
    """Of one verdict's calls, every attempt at each; None until one says."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: float | None = None
    problem: str = ""
    """What was last wrong with one."""

    def add(
        self, prompt_tokens: int | None, output_tokens: int | None, cost_usd: float | None
    ) -> None:
        if prompt_tokens is not None:
            self.prompt_tokens = (self.prompt_tokens or 0) + prompt_tokens
        if output_tokens is not None:
            self.output_tokens = (self.output_tokens or 0) + output_tokens
        if cost_usd is not None:
            self.cost_usd = (self.cost_usd or 0.0) + cost_usd


def _earlier(journal: Journal, judge_model: str) -> tuple[dict[tuple[str, str], str | None], float]:
    """Hashes of the answers that have a score, and what they cost."""
    scored: dict[tuple[str, str], str | None] = {}
    spent_usd = 0.0
    for read, row in read_score_rows(journal.path):
        if read.judge_model != judge_model:
            raise row.error(f"is of {read.judge_model}: a file holds the scores of one judge")
        spent_usd += read.judge_cost_usd or 0.0
        if read.model is not None and read.score is not None:
            scored[read.prompt_id, read.model] = read.answer_hash
    return scored, spent_usd


def _by_model(
    scores: Mapping[str, float], lettered: Mapping[str, Answer]
) -> dict[str, tuple[float, str]]:
    return {
        lettered[letter].model: (score / rubric.HIGHEST, answer_hash(lettered[letter]))
        for letter, score in scores.items()
    }
