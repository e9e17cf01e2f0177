"""A body that the API does not take is the caller's fault, whatever Python raises for it."""

from __future__ import annotations

import json

import pytest

from deployments.openai_protocol import MAX_NESTING, ApiError, parse_json


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"seed": ' + b"7" * 5000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "nest deeper than 100 levels"),
        (b"[1]", "must be a JSON object, not list"),
        (b'"text"', "must be a JSON object, not str"),
        (b"null", "must be a JSON object, not NoneType"),
        (b"5", "must be a JSON object, not int"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        parse_json(body)
    assert refused.value.status == 400


def test_the_deepest_that_is_taken() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * levels + b"1" + b"}" * levels

    assert parse_json(nested(MAX_NESTING)) == json.loads(nested(MAX_NESTING))
    with pytest.raises(ApiError, match="nest deeper"):
        parse_json(nested(MAX_NESTING + 1))
