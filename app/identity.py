"""How a decision is named, and its name in snapshots."""

from __future__ import annotations

import secrets
from hashlib import blake2b


def new_decision_id() -> str:
    return f"dec-{secrets.token_hex(12)}"


def request_key(decision_id: str) -> int:
    """Unsigned 64 bit, the same in every process: Python's own hash of a string is not."""
    return int.from_bytes(blake2b(decision_id.encode(), digest_size=8).digest(), "little")
