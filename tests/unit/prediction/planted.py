"""Prompts of which a test knows who answers them best, and at what length."""

from __future__ import annotations

import numpy as np

from app.prediction.examples import Example
from app.prediction.features import prompt_features
from app.prediction.learned import ModelCard
from app.types import PromptFeatures

CARDS = (ModelCard("small", 0.6, 4096), ModelCard("large", None, 8192))
TOKENS_OF_CODE = np.arange(100, 140, dtype=np.int32)


def features(text: str = "Hello", *token_ids: int) -> PromptFeatures:
    return prompt_features(np.array(token_ids or (1, 2, 3), np.int32), text)


def planted(prompts: int, seed: int = 0, score_noise: float = 0.15) -> list[Example]:
    """Large is better at code, which its tokens show, and small at the rest; a keyword makes
    answers six times as long; large writes half as much again. Without noise, scores are 0.85,
    0.8 and 0.4."""
    random = np.random.default_rng(seed)
    examples = []
    for i in range(prompts):
        is_code, is_long = random.random() < 0.5, random.random() < 0.5
        token_ids = random.integers(200, 2000, random.integers(10, 60)).astype(np.int32)
        if is_code:
            token_ids = np.concatenate((token_ids, random.choice(TOKENS_OF_CODE, 20)))
        text = f"{'A detailed essay' if is_long else 'Hello'} {i}"
        prompt = prompt_features(token_ids, text)
        for card in CARDS:
            tokens = (360 if is_long else 60) * (1.5 if card.name == "large" else 1.0)
            score = 0.4 if is_code != (card.name == "large") else 0.8
            score += 0.05 * (card.name == "large") * is_code
            examples.append(
                Example(
                    prompt_id=f"prompt-{i}",
                    model=card.name,
                    prompt=prompt,
                    task="code" if is_code else "",
                    output_tokens=int(max(1, tokens * np.exp(random.normal(0, 0.4)))),
                    quality=float(np.clip(score + random.normal(0, score_noise), 0, 1)),
                )
            )
    return examples
