"""What vLLM does with its KV blocks, event by event, for a mirror of its prefix cache elsewhere.

Follows the calls that change blocks, on one manager of full attention and its pool; what no call
shows cannot happen there. Costs nothing while requests decode within a block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sfs_ext import KvEventKind, block_keys, kv_event_dtype

logger = logging.getLogger(__name__)

NOBODY = 0
"""Owner of the blocks of a cache that is reset."""

WANT, KEY, TAKE, TOUCH, HASH, RELEASE, FORGET = (
    int(kind)
    for kind in (
        KvEventKind.WANT,
        KvEventKind.KEY,
        KvEventKind.TAKE,
        KvEventKind.TOUCH,
        KvEventKind.HASH,
        KvEventKind.RELEASE,
        KvEventKind.FORGET,
    )
)


class KvJournal:
    """``manager``, ``pool``: vLLM's SingleTypeKVCacheManager and BlockPool."""

    def __init__(self, manager: Any, pool: Any, owner_of: Callable[[Any], int]) -> None:
        """``owner_of``: a request's key in snapshots."""
        self._events: list[tuple[int, int, int]] = []
        self._owner_of = owner_of
        self._pool = pool
        self._block_size: int = manager.block_size
        self._requests: dict[str, _Content] = {}
        self.failure: Exception | None = None
        """What ended the journal, if anything did: from then on it tells nothing."""
        self._after(manager.add_local_computed_blocks, self._hit)
        self._given(manager.allocate_new_blocks, self._allocated)
        self._before(manager.free, self._freed)
        self._after(pool.cache_full_blocks, self._cached)
        self._before(pool.reset_prefix_cache, self._resetting)

    def arrived(self, request: Any) -> None:
        self._guarded(self._arrived, request)

    def _arrived(self, request: Any) -> None:
        if request.request_id in self._requests:
            return  # more input of a session that is there
        content = _Content(request, self._owner_of(request), self._block_size)
        self._requests[request.request_id] = content
        self._events.append((content.owner, 0, WANT))
        self._events.extend((key, 0, KEY) for key in content.keys)

    def ended(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            content = self._requests.pop(request_id, None)
            if content is not None:
                self._events.append((content.owner, 0, FORGET))

    def take_events(self) -> NDArray[Any]:
        """kv_event_dtype, shape (n,), since the last call."""
        events = np.array(self._events, kv_event_dtype)
        self._events.clear()
        return events

    def _hit(self, _: None, request_id: str, blocks: Sequence[Any], *rest: Any) -> None:
        owner = self._requests[request_id].owner
        self._events.extend((owner, block.block_id, TOUCH) for block in blocks)

    def _allocated(self, blocks: Sequence[Any], request_id: str, *rest: Any) -> None:
        owner = self._requests[request_id].owner
        self._events.extend((owner, block.block_id, TAKE) for block in blocks)

    def _freed(self, request_id: str) -> None:
        content = self._requests.get(request_id)
        if content is not None:
            self._events.append((content.owner, 0, RELEASE))

    def _cached(
        self,
        _: None,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        **rest: Any,
    ) -> None:
        content = self._requests[request.request_id]
        content.extend_to(num_full_blocks)
        self._events.extend(
            (content.keys[i], blocks[i].block_id, HASH)
            for i in range(num_cached_blocks, num_full_blocks)
        )

    def _resetting(self) -> None:
        """All blocks are free, or vLLM refuses."""
        blocks = self._pool.blocks
        if self._pool.get_num_free_blocks() != len(blocks) - 1:
            return
        hashed = [block.block_id for block in blocks if block.block_hash is not None]
        self._events.append((NOBODY, 0, WANT))
        self._events.extend((NOBODY, block_id, TAKE) for block_id in hashed)
        self._events.extend([(NOBODY, 0, RELEASE), (NOBODY, 0, FORGET)])

    def _after(self, call: Any, follow: Callable[..., None]) -> None:
        """From now on, whenever the method is called, ``follow`` gets its result and arguments."""

        def followed(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self._guarded(follow, result, *args, **kwargs)
            return result

        setattr(call.__self__, call.__name__, followed)

    def _given(self, call: Any, follow: Callable[..., None]) -> None:
        """As ``_after``, for a call in every step of every request that mostly returns nothing."""

        def followed(*args: Any) -> Any:
            result = call(*args)
            if result:
                self._guarded(follow, result, *args)
            return result

        setattr(call.__self__, call.__name__, followed)

    def _before(self, call: Any, follow: Callable[..., None]) -> None:
        def followed(*args: Any, **kwargs: Any) -> Any:
            self._guarded(follow, *args, **kwargs)
            return call(*args, **kwargs)

        setattr(call.__self__, call.__name__, followed)

    def _guarded(self, follow: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A failure costs the router its view, and must not cost the engine."""
        if self.failure is not None:
            return
        try:
            follow(*args, **kwargs)
        except Exception as failure:
            self.failure = failure
            self._events.clear()
            logger.exception("the KV journal ends here")


class _Content:
    """The keys of a request's full blocks: those of its tokens, which routers can make as well;
    where vLLM looks at more than tokens, of its own block hashes, which nobody else has."""

    __slots__ = ("_block_size", "_request", "by_tokens", "keys", "owner")

    def __init__(self, request: Any, owner: int, block_size: int) -> None:
        self.owner = owner
        self._request = request
        self._block_size = block_size
        self.by_tokens = request.prompt_token_ids is not None and not (
            request.cache_salt or request.lora_request or request.mm_features
        )
        self.keys: list[int] = []
        self.extend_to(request.num_prompt_tokens // block_size)

    def extend_to(self, blocks: int) -> None:
        known = len(self.keys)
        if blocks <= known:
            return
        if self.by_tokens:
            span = slice(known * self._block_size, blocks * self._block_size)
            token_ids = np.array(self._request._all_token_ids[span], np.int32)
            before = (self.keys[-1],) if known else ()
            self.keys += block_keys(token_ids, self._block_size, *before).tolist()
        else:
            hashes = self._request.block_hashes[known:blocks]
            self.keys += [int.from_bytes(block_hash[:8], "little") for block_hash in hashes]
