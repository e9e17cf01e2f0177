"""An OpenAI chat request's messages, brought into the one form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# Templates drop a role they do not know, and with it what it said.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class PromptError(ValueError):
    """The messages cannot be made into a prompt; says which one and why."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Content as one string, tool-call arguments as objects. Raises PromptError."""
    if not messages:
        raise PromptError("messages is empty: at least one message is needed")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"{where} is {type(message).__name__}, not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"{where}.role is {role!r}: it must be one of {', '.join(ROLES)}")
    plain = dict(message)
    plain["role"] = ROLES[role]
    plain["content"] = _text(message.get("content"), role, f"{where}.content")
    if message.get("tool_calls"):
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message["tool_calls"])
        ]
    return plain


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise PromptError(f"{where} must be a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise PromptError(f'{where} must be {{"type": "text", "text": ...}}: only text is served')
    return text


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f'{where} must be {{"function": {{"name": ..., "arguments": ...}}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise PromptError(f"{where}.function.arguments is not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
