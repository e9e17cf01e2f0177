"""Serve's handles without Serve: the calls reach objects of this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from deployments.hub import Hub


class LocalHub(Hub):
    """The hub without Ray's object store, which would start a cluster."""

    def _put_view(self) -> Any:
        return None


class Handle:
    """A deployment's handle, for what ``target`` does when called."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def options(self, **_: Any) -> Handle:
        return self

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._target, name))


class _Method:
    def __init__(self, function: Any) -> None:
        self._function = function

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        return _Stream(result) if isinstance(result, AsyncGenerator) else result


class _Stream:
    def __init__(self, items: AsyncGenerator[Any, None]) -> None:
        self._items = items
        self.cancelled = False

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        return self._items

    def cancel(self) -> None:
        self.cancelled = True
