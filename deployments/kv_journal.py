"""What vLLM does with its KV blocks, event by event, for a mirror of its prefix cache elsewhere.

Follows the calls that find, fill and free blocks, on one manager of full attention and its pool;
new blocks that a request takes show in its list of them, which ``StateWriter`` reads. What neither
shows cannot happen there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

from sfs_ext import KvObserver


class KvJournal:
    """``manager``, ``pool``: vLLM's SingleTypeKVCacheManager and BlockPool."""

    def __init__(self, manager: Any, pool: Any, owner_of: Callable[[Any], int]) -> None:
        """``owner_of``: a request's key in snapshots."""
        self.observer = KvObserver(manager.block_size)
        self._owner_of = owner_of
        self._pool = pool
        self._follow(manager.add_local_computed_blocks, "hit", "request_id", "new_computed_blocks")
        self._follow(manager.pop_blocks_for_free, "released", "request_id")
        self._follow(
            pool.cache_full_blocks,
            "filled",
            *("request", "blocks", "num_cached_blocks", "num_full_blocks"),
        )
        self._reset = pool.reset_prefix_cache
        pool.reset_prefix_cache = self._resetting

    def arrived(self, request: Any) -> None:
        """Nothing for one that is there: more input of its session."""
        looks_at_more = request.cache_salt or request.lora_request or request.mm_features
        by_tokens = request.prompt_token_ids is not None and not looks_at_more
        self.observer.arrived(
            request.request_id,
            self._owner_of(request),
            request._all_token_ids if by_tokens else None,
            request.block_hashes,
            request.num_prompt_tokens,
        )

    def ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.observer.ended(request_id)

    def _follow(self, call: Any, kind: str, *wanted: str) -> None:
        """From now on, whenever the method is called, the observer gets these parameters of it."""
        places = list(signature(call).parameters)
        stand_in = self.observer.following(
            call, kind, [(places.index(name), name) for name in wanted]
        )
        setattr(call.__self__, call.__name__, stand_in)

    def _resetting(self) -> bool:
        """All blocks are free, or vLLM refuses."""
        hashed = [block.block_id for block in self._pool.blocks if block.block_hash is not None]
        was_reset: bool = self._reset()
        if was_reset:
            self.observer.reset(hashed)
        return was_reset
