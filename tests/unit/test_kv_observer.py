"""Calls of a KV cache written in Python, followed: what is noted, what ends it, what is let go."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import pytest

from sfs_ext import KvEventKind, KvObserver, block_keys

BLOCK_SIZE = 4
TOKENS = list(range(10, 22))


@dataclass
class Block:
    block_id: int


@dataclass
class Request:
    request_id: str


class Cache:
    """As vLLM's, as far as its calls go."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[Block]] = {}

    def hit(self, request_id: str, blocks: list[Block]) -> None:
        self.blocks.setdefault(request_id, []).extend(blocks)

    def fill(self, request: Request, blocks: list[Block], before: int, full: int) -> None:
        pass

    def free(self, request_id: str) -> list[Block]:
        return self.blocks.pop(request_id, [])


def followed() -> tuple[KvObserver, Cache]:
    observer, cache = KvObserver(BLOCK_SIZE), Cache()
    wanted = [(0, "request_id"), (1, "blocks")]
    cache.hit = observer.following(cache.hit, "hit", wanted)  # type: ignore[method-assign]
    cache.free = observer.following(cache.free, "released", [(0, "request_id")])  # type: ignore[method-assign]
    wanted = [(0, "request"), (1, "blocks"), (2, "before"), (3, "full")]
    cache.fill = observer.following(cache.fill, "filled", wanted)  # type: ignore[method-assign]
    return observer, cache


def test_calls_become_events_by_place_and_by_name() -> None:
    observer, cache = followed()
    observer.arrived("a", 7, TOKENS, [], prompt_tokens=9)
    cache.hit("a", blocks=[Block(1)])
    cache.blocks["a"] += [Block(2), Block(3)]
    cache.fill(Request("a"), cache.blocks["a"], before=1, full=3)
    cache.blocks["a"].append(Block(4))
    cache.free(request_id="a")
    observer.ended("a")
    keys = block_keys(np.array(TOKENS, np.int32), BLOCK_SIZE).tolist()
    kind = KvEventKind
    assert observer.take_events().tolist() == [
        (7, 0, kind.WANT),
        (keys[0], 0, kind.KEY),
        (keys[1], 0, kind.KEY),
        (7, 1, kind.TOUCH),
        (7, 2, kind.TAKE),
        (7, 3, kind.TAKE),
        (keys[1], 2, kind.HASH),
        (keys[2], 3, kind.HASH),
        (7, 4, kind.TAKE),
        (7, 0, kind.RELEASE),
        (7, 0, kind.FORGET),
    ]
    assert observer.failure is None


def test_one_that_holds_nothing_notes_nothing_and_raises_as_ever() -> None:
    observer, cache = followed()
    assert cache.free("nobody") == []
    with pytest.raises(TypeError, match="blocks"):
        cache.hit("nobody")  # type: ignore[call-arg]
    assert observer.failure is None
    assert len(observer.take_events()) == 0


@pytest.mark.parametrize("token_ids", [[*TOKENS[:3], 2**32 + 5], TOKENS[:3], [*TOKENS[:3], "x"]])
def test_a_request_that_cannot_be_read_ends_the_journal(token_ids: list[int]) -> None:
    observer, cache = followed()
    observer.arrived("a", 7, token_ids, [], prompt_tokens=4)
    assert observer.failure is not None
    cache.blocks["a"] = [Block(1)]
    assert cache.free("a") == [Block(1)]
    assert len(observer.take_events()) == 0


def test_blocks_that_vanish_end_the_journal() -> None:
    observer, cache = followed()
    observer.arrived("a", 7, TOKENS, [], prompt_tokens=4)
    cache.hit("a", [Block(1), Block(2)])
    cache.fill(Request("a"), [Block(1)], 0, 1)
    assert observer.failure is not None
    assert "holds 1 blocks after 2" in observer.failure


def test_blocks_of_an_unknown_request_end_the_journal() -> None:
    observer, cache = followed()
    cache.blocks["b"] = [Block(1)]
    cache.free("b")
    assert observer.failure is not None
    assert "'b' is unknown" in observer.failure


def test_a_block_number_is_never_cut_short() -> None:
    observer, cache = followed()
    observer.arrived("a", 7, TOKENS, [], prompt_tokens=4)
    cache.fill(Request("a"), [Block(2**32 + 1)], 0, 1)
    assert observer.failure is not None
    assert "more than 32 bits" in observer.failure


def test_what_is_followed_can_go() -> None:
    observer, cache = followed()
    gone, free = weakref.ref(cache), cache.free
    del cache
    assert gone() is None
    with pytest.raises(ReferenceError):
        free("a")
    assert observer.failure is None
