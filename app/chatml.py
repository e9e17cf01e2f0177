"""Qwen3's chat format: ChatML with tools and reasoning, as its published template renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.chat import Tool

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
    '"arguments": <args-json-object>}\n</tool_call>'
)


def render_chatml(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], enable_thinking: bool
) -> str:
    """The prompt up to where the assistant begins. ``messages`` from ``plain_messages``, ``tools``
    from ``plain_tools``."""
    turns = [*_system(messages, tools)]
    last_query = _last_query(messages)
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "user" or (role == "system" and i > 0):
            turns.append(_turn(role, content))
        elif role == "assistant":
            turns.append(_turn(role, _assistant(messages, i, last_query)))
        elif role == "tool":
            opens = i == 0 or messages[i - 1]["role"] != "tool"
            closes = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            response = f"\n<tool_response>\n{content}\n</tool_response>"
            turns.append(
                ("<|im_start|>user" if opens else "")
                + response
                + ("<|im_end|>\n" if closes else "")
            )
    turns.append("<|im_start|>assistant\n")
    if not enable_thinking:
        turns.append("<think>\n\n</think>\n\n")
    return "".join(turns)


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _system(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[str]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        listed = "".join(f"\n{_json(tool)}" for tool in tools)
        head = "" if system is None else f"{system}\n\n"
        return [_turn("system", f"{head}{_TOOLS_HEAD}{listed}{_TOOLS_TAIL}")]
    return [] if system is None else [_turn("system", system)]


def _last_query(messages: Sequence[dict[str, Any]]) -> int:
    """Reasoning is kept only after the last thing a user asked; tool responses ask nothing."""
    for i in range(len(messages) - 1, -1, -1):
        content = messages[i]["content"]
        response = content.startswith("<tool_response>") and content.endswith("</tool_response>")
        if messages[i]["role"] == "user" and not response:
            return i
    return len(messages) - 1


def _assistant(messages: Sequence[dict[str, Any]], i: int, last_query: int) -> str:
    message = messages[i]
    content: str = message["content"]
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = ""
        if "</think>" in content:
            reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
    text = content
    if i > last_query and (i + 1 == len(messages) or reasoning):
        text = "<think>\n" + reasoning.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
    for n, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        separator = "\n" if content or n > 0 else ""
        arguments = _json(function["arguments"])
        name = function["name"]
        text += (
            f'{separator}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        )
    return text
