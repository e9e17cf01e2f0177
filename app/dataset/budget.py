"""Money that calls may cost, promised before each and counted after it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

TOKENS_PER_BYTE = 1 / 3
"""Of a prompt in UTF-8, rather too many: English has about 1/4."""
OUTPUT_TOKENS_AT_FIRST = 500
"""Expected of a call until one was longer: judges may think before they score."""


@dataclass(frozen=True, slots=True)
class Prices:
    in_usd_per_mtok: float
    out_usd_per_mtok: float

    def __post_init__(self) -> None:
        if not (0 <= self.in_usd_per_mtok < math.inf and 0 <= self.out_usd_per_mtok < math.inf):
            raise ValueError("prices must be finite and not below 0")

    def usd(self, prompt_tokens: float, output_tokens: float) -> float:
        micro_usd = prompt_tokens * self.in_usd_per_mtok + output_tokens * self.out_usd_per_mtok
        return micro_usd / 1e6


class Budget:
    """Once a call would go beyond the limit, none is promised any more, a cheaper one neither.
    Without prices nothing is counted, and nothing limited."""

    def __init__(self, prices: Prices | None, limit_usd: float | None, spent_usd: float) -> None:
        self._prices = prices
        self._limit_usd = limit_usd
        self._under_way: list[float] = []
        self._output_tokens = OUTPUT_TOKENS_AT_FIRST
        self._settled = asyncio.Condition()
        self.spent_usd = spent_usd
        self.exhausted = False

    def estimate_usd(self, prompt_bytes: int) -> float:
        if self._prices is None:
            return 0.0
        return self._prices.usd(prompt_bytes * TOKENS_PER_BYTE, self._output_tokens)

    async def promise(self, estimate_usd: float) -> bool:
        """Whether the call may be made; waits while that hangs on what others under way cost."""
        async with self._settled:
            await self._settled.wait_for(lambda: self._is_decided(estimate_usd))
            if self.exhausted:
                return False
            self._under_way.append(estimate_usd)
            return True

    async def settle(
        self, estimate_usd: float, prompt_tokens: int | None, output_tokens: int | None
    ) -> float | None:
        """What a call that was sent cost: as estimated where the server did not count, or did not
        answer. None without prices."""
        cost_usd = None if self._prices is None else estimate_usd
        if prompt_tokens is not None and output_tokens is not None:
            self._output_tokens = max(self._output_tokens, output_tokens)
            if self._prices is not None:
                cost_usd = self._prices.usd(prompt_tokens, output_tokens)
        await self._return(estimate_usd, cost_usd or 0.0)
        return cost_usd

    async def release(self, estimate_usd: float) -> None:
        """Of a call that was refused, or never sent."""
        await self._return(estimate_usd, 0.0)

    async def _return(self, estimate_usd: float, cost_usd: float) -> None:
        async with self._settled:
            self._under_way.remove(estimate_usd)
            self.spent_usd += cost_usd
            self._settled.notify_all()

    def _is_decided(self, estimate_usd: float) -> bool:
        if self._limit_usd is None or self.exhausted:
            return True
        if self.spent_usd + sum(self._under_way) + estimate_usd <= self._limit_usd:
            return True
        # The calls under way may turn out cheaper than promised, but not free.
        self.exhausted = self.spent_usd + estimate_usd > self._limit_usd
        return self.exhausted
