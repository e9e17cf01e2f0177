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
    messages = _list(messages, "messages")
    if not messages:
        raise PromptError("messages is empty: at least one message is needed")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def said(messages: Sequence[Message]) -> str:
    """What the messages say, without the template. Raises PromptError."""
    return "\n".join(message["content"] for message in plain_messages(messages))


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Raises PromptError."""
    plain = []
    for i, tool in enumerate([] if tools is None else _list(tools, "tools")):
        plain.append(dict(require_object(tool, f"tools[{i}]")))
        require_json(tool, f"tools[{i}]")
    return plain


def require_object(value: Any, where: str) -> Mapping[str, Any]:
    """Raises PromptError."""
    if not isinstance(value, Mapping):
        raise PromptError(f"{where} is {type(value).__name__}, not an object")
    return value


def require_json(value: Any, where: str) -> None:
    """PromptError for what cannot be written as JSON in UTF-8, a lone surrogate above all."""
    try:
        require_unicode(json.dumps(value, ensure_ascii=False), where)
    except (TypeError, RecursionError) as error:
        raise PromptError(f"{where} cannot be written as JSON: {error}") from error


def require_unicode(text: str, where: str) -> None:
    """PromptError for a lone surrogate: tokenizers would replace it, or break."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} has a lone surrogate, U+{ord(text[error.start]):04X}: that is no character"
        ) from error


def _plain(message: Message, where: str) -> dict[str, Any]:
    role = require_object(message, where).get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptError(f"{where}.role is {role!r}: it must be one of {', '.join(ROLES)}")
    plain = dict(message)
    plain["role"] = ROLES[role]
    plain["content"] = _text(message.get("content"), role, f"{where}.content")
    for field in ("name", "tool_call_id", "reasoning_content"):
        _require_text_or_null(message, field, where)
    if message.get("tool_calls") is not None:
        calls = _list(message["tool_calls"], f"{where}.tool_calls")
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    require_json(plain, where)
    return plain


def _text(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list | tuple):
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
    for field in ("id", "type"):
        _require_text_or_null(call, field, where)
    arguments, where = function.get("arguments"), f"{where}.function.arguments"
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{where} is not JSON: {error}") from error
    # Models that call without arguments write null or nothing.
    arguments = {} if arguments in (None, "") else require_object(arguments, where)
    return {**call, "function": {**function, "arguments": arguments}}


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise PromptError(f"{where} is {type(value).__name__}, not a list")
    return value


def _require_text_or_null(holder: Mapping[str, Any], field: str, where: str) -> None:
    value = holder.get(field)
    if value is not None and not isinstance(value, str):
        raise PromptError(f"{where}.{field} is {type(value).__name__}, not a string")
