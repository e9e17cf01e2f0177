"""What a predictor sees of a prompt: the same function for training and for serving.

After the paper's appendix B.4: a signed hash of the token ids, counts, and indicators of the length
and the kind of answer that is asked for.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from app.types import PromptFeatures, TokenIds

FEATURE_VERSION: Final = 1
"""Grows with any change of what is computed here: a model trained on another version is refused."""

HASH_BUCKETS: Final = 512
INSTRUCTION_CHARACTERS: Final = 2_000
"""Of a long prompt's head and tail, where instructions stand: between them lies what they are
about, and reading all of it would take milliseconds."""

_LENGTH_NUMBER = re.compile(
    r"\b(?:\d+|one|two|three|four|five|ten)[ -]?"
    r"(?:words?|sentences?|paragraphs?|characters?|lines?|pages?|bullets?|points?|items?)\b"
)
_WORD = re.compile(r"[a-z]+")

_WORDS_OF: Final = {
    "asks_short": "brief briefly short concise concisely succinct succinctly tldr simple shortly",
    "asks_long": "detailed detail details thorough comprehensive essay lengthy depth elaborate",
    "task_list": "list lists enumerate name suggest ideas examples options steps",
    "task_summarize": "summarize summarise summary abstract gist condense shorten",
    "task_explain": "explain describe why how discuss",
    "task_write": "write story poem compose letter email article blog song script draft",
    "task_code": "code python function program javascript java sql html css regex bash algorithm",
    "task_translate": "translate translation",
    "task_calculate": "calculate compute solve equation sum math probability percent",
    "task_rewrite": "rewrite rephrase paraphrase edit correct proofread improve grammar",
    "task_classify": "classify categorize label sentiment identify detect extract",
    "task_compare": "compare contrast difference differences versus vs better",
    "task_ask": "what who when where which is are can does do",
}
_WORDS: Final = [frozenset(words.split()) for words in _WORDS_OF.values()]

INDICATORS: Final = ("asks_number", *_WORDS_OF)
DESCRIPTION: Final = (
    "prompt_tokens",
    "characters",
    "sentences",
    "characters_per_token",
    *INDICATORS,
)
"""Names of ``PromptFeatures.description``, in order. What the hash is divided by is the first."""


def prompt_features(token_ids: TokenIds, text: str) -> PromptFeatures:
    """``token_ids``: of the templated prompt; ``text``: what was said, without the template."""
    hashes = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)
    signs = 1.0 - 2.0 * ((hashes >> np.uint64(9)) & np.uint64(1)).astype(np.float64)
    places = (hashes & np.uint64(HASH_BUCKETS - 1)).astype(np.int64)
    buckets = np.bincount(places, weights=signs, minlength=HASH_BUCKETS).astype(np.int32)
    return PromptFeatures(buckets, _describe(len(token_ids), text))


def _describe(prompt_tokens: int, text: str) -> NDArray[np.float64]:
    instructions = _instructions(text).lower()
    words = frozenset(_WORD.findall(instructions))
    return np.array(
        [
            prompt_tokens,
            len(text),
            _sentences(text),
            len(text) / max(1, prompt_tokens),
            _LENGTH_NUMBER.search(instructions) is not None,
            *(not words.isdisjoint(asked) for asked in _WORDS),
        ],
        np.float64,
    )


def _instructions(text: str) -> str:
    if len(text) <= 2 * INSTRUCTION_CHARACTERS:
        return text
    return f"{text[:INSTRUCTION_CHARACTERS]}\n{text[-INSTRUCTION_CHARACTERS:]}"


def _sentences(text: str) -> int:
    """Ends of sentences before a blank, and the end of the text."""
    return 1 + sum(text.count(end) for end in (". ", "! ", "? ", ".\n", "!\n", "?\n"))
