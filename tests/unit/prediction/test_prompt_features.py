from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest

from app.prediction.examples import chat_features
from app.prediction.features import (
    DESCRIPTION,
    FEATURE_VERSION,
    HASH_BUCKETS,
    INSTRUCTION_CHARACTERS,
    prompt_features,
)
from app.types import PromptFeatures

CHANGED = "features have changed: models trained before need another FEATURE_VERSION"
NO_TOKENS = np.zeros(0, np.int32)


def said_of(features: PromptFeatures) -> dict[str, float]:
    """What of the description is not zero."""
    pairs = zip(DESCRIPTION, features.description.tolist(), strict=True)
    return {name: value for name, value in pairs if value}


class TestFixedValues:
    """A change of any of these is one of FEATURE_VERSION too, or predictors trained before would
    be taken up and misled."""

    def test_they_are_those_of_this_version(self) -> None:
        assert FEATURE_VERSION == 1, "write down the new version's values below"

    @pytest.mark.parametrize(
        ("token_ids", "buckets"),
        [
            ([0], {428: 1}),
            ([1, 2, 3], {177: -1, 275: 1, 344: -1}),
            ([151644, 151644, 7], {286: 2, 355: 1}),
            ([0, 151935, 2**31 - 1], {10: -1, 283: -1, 428: 1}),
        ],
    )
    def test_hash_of_a_few_ids(self, token_ids: list[int], buckets: dict[int, int]) -> None:
        features = prompt_features(np.array(token_ids, np.int32), "")
        expected = np.zeros(HASH_BUCKETS, np.int32)
        expected[list(buckets)] = list(buckets.values())
        assert features.buckets.tolist() == expected.tolist(), CHANGED
        assert features.hashed.tolist() == (expected / len(token_ids)).tolist()

    def test_hash_of_a_whole_vocabulary(self) -> None:
        buckets = prompt_features(np.arange(152_000, dtype=np.int32), "").buckets
        assert hashlib.sha256(buckets.astype("<i4").tobytes()).hexdigest() == (
            "f861284e228227e598e737ca0805fe384d6d138fe4af11b4cac2cece8806bdfd"
        ), CHANGED

    def test_names(self) -> None:
        assert ",".join(DESCRIPTION) == (
            "prompt_tokens,characters,sentences,characters_per_token,asks_number,asks_short,"
            "asks_long,task_list,task_summarize,task_explain,task_write,task_code,task_translate,"
            "task_calculate,task_rewrite,task_classify,task_compare,task_ask"
        ), CHANGED

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", {"sentences": 1}),
            ("Hello", {"characters": 5, "characters_per_token": 0.5, "sentences": 1}),
            (
                "Summarize in 3 sentences. Be brief! Why?\nWrite Python code.",
                {
                    "characters": 59,
                    "characters_per_token": 5.9,
                    "sentences": 4,
                    "asks_number": 1,
                    "asks_short": 1,
                    "task_summarize": 1,
                    "task_explain": 1,
                    "task_write": 1,
                    "task_code": 1,
                },
            ),
            (
                "List TEN items, translate and compare what is better",
                {
                    "characters": 52,
                    "characters_per_token": 5.2,
                    "sentences": 1,
                    "asks_number": 1,
                    "task_list": 1,
                    "task_translate": 1,
                    "task_compare": 1,
                    "task_ask": 1,
                },
            ),
            (
                "你好。Schreibe ein Gedicht über Ümläute 🙂",
                {"characters": 38, "characters_per_token": 3.8, "sentences": 1},
            ),
            (
                "Calculate, rewrite, classify. In depth",
                {
                    "characters": 38,
                    "characters_per_token": 3.8,
                    "sentences": 2,
                    "asks_long": 1,
                    "task_calculate": 1,
                    "task_rewrite": 1,
                    "task_classify": 1,
                },
            ),
        ],
    )
    def test_description(self, text: str, said: dict[str, float]) -> None:
        features = prompt_features(np.arange(10, dtype=np.int32), text)
        assert said_of(features) == pytest.approx({"prompt_tokens": 10, **said}), CHANGED


def test_words_count_whole_and_numbers_with_what_they_count() -> None:
    for text in ("the barcode listed whatsoever", "3 days", "x3 words", "someone words"):
        said = said_of(prompt_features(NO_TOKENS, text))
        assert not {name for name in said if name.startswith(("asks_", "task_"))}, text
    for text in ("3 words", "12-word", "two paragraphs", "100characters", "one  or\nfive lines"):
        assert "asks_number" in said_of(prompt_features(NO_TOKENS, text)), text


def test_no_tokens_and_no_text() -> None:
    features = prompt_features(NO_TOKENS, "")
    assert not features.buckets.any() and features.buckets.shape == (HASH_BUCKETS,)
    assert not features.hashed.any()
    assert said_of(features) == {"sentences": 1}


def test_without_tokens_characters_still_count() -> None:
    said = said_of(prompt_features(NO_TOKENS, "abc"))
    assert said == {"characters": 3, "sentences": 1, "characters_per_token": 3}


def test_instructions_stand_at_both_ends() -> None:
    between = "lorem " * INSTRUCTION_CHARACTERS
    for text in (f"Translate this: {between}", f"{between} Translate this."):
        assert "task_translate" in said_of(prompt_features(NO_TOKENS, text))
    amid = prompt_features(NO_TOKENS, f"{between} Translate this. {between}")
    assert "task_translate" not in said_of(amid)
    # Up to where head and tail meet, all is read.
    whole = "a" * (INSTRUCTION_CHARACTERS - 5) + " translate "
    whole += "a" * (2 * INSTRUCTION_CHARACTERS - len(whole))
    assert "task_translate" in said_of(prompt_features(NO_TOKENS, whole))


@pytest.mark.parametrize("piece", ["word. ", "1", "one ", "?\n", "é🙂", "\0"])
def test_megabytes_take_a_moment(piece: str) -> None:
    text = piece * (10_000_000 // len(piece.encode()))
    token_ids = np.full(3_000_000, 17, np.int32)
    began_s = time.process_time()
    features = prompt_features(token_ids, text)
    assert time.process_time() - began_s < 3.0
    assert said_of(features)["characters"] == len(text)
    assert abs(features.buckets).sum() == 3_000_000


def test_what_is_learnt_of_is_what_the_router_sees() -> None:
    """Parts and roles are brought into one form; the template's tokens count, its text does not."""

    class Letters:
        def encode_chat(self, messages: Any) -> np.ndarray:
            return np.array([ord(c) for m in messages for c in str(m["content"])], np.int32)

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
        {"role": "assistant", "content": None},
    ]
    tokenizer: Any = Letters()
    seen = chat_features(messages, tokenizer)
    expected = prompt_features(tokenizer.encode_chat(messages), "Be brief.\nWhy?\n")
    assert seen.buckets.tolist() == expected.buckets.tolist()
    assert seen.description.tolist() == expected.description.tolist()
