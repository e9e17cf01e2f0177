"""What predictions cost a decision: quality, mean and quantiles of length, of three models."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from app.prediction.examples import Example
from app.prediction.features import prompt_features
from app.prediction.fitting import Fitted, fit
from app.prediction.learned import ModelCard

PROMPTS = 1_000
SIZES = {"small": 0.6, "middle": 8.2, "large": 32.8}
CARDS = [ModelCard(name, billions, 40_960) for name, billions in SIZES.items()]
DECISIONS = 200
"""As many different ones: a prompt asked for again and again would find every branch predicted."""


def taught() -> tuple[Fitted, list[Example]]:
    random = np.random.default_rng(0)
    examples = []
    for number in range(PROMPTS):
        ids = random.integers(0, 150_000, random.integers(20, 500)).astype(np.int32)
        prompt = prompt_features(ids, "Explain this in 50 words. " * int(random.integers(1, 20)))
        for place, card in enumerate(CARDS):
            tokens = len(ids) * (1 + place) * random.lognormal(0.0, 0.5)
            quality = random.beta(2 + place, 2)
            examples.append(
                Example(str(number), card.name, prompt, "", 1 + int(tokens), float(quality))
            )
    return fit(examples, CARDS), examples


def test_predict(benchmark: BenchmarkFixture) -> None:
    fitted, examples = taught()
    learned = fitted.learned
    prompts = [example.prompt for example in examples[:: len(CARDS)]]
    prompts = prompts[: DECISIONS if benchmark.enabled else 3]
    boosters = [fitted.quality, *fitted.lengths]
    rows = {
        id(prompt): np.hstack(
            (np.tile(learned.projection.row(prompt), (len(CARDS), 1)), learned.model_columns)
        )
        for prompt in prompts
    }

    def ask_boosters(of: NDArray[np.float64]) -> None:
        for booster in boosters:
            for row in of:
                # More threads would wait for busy cores, and flatter the forest.
                booster.predict(row[None], num_threads=1)

    for prompt in prompts:
        of = rows[id(prompt)]
        quality, *lengths = (booster.predict(of) for booster in boosters)
        said = learned.predict(prompt)
        believed = learned.calibration.apply(quality.tolist())
        np.testing.assert_allclose(said.quality, believed, rtol=1e-9)
        expected = np.maximum(np.column_stack(lengths) * learned.length_factors, 1.0)
        expected[:, 1:].sort()
        np.testing.assert_allclose(said.lengths, expected, rtol=1e-9)

    def seconds(ask: Callable[[], object]) -> float:
        began_s = time.perf_counter()
        ask()
        return time.perf_counter() - began_s

    # In turn, the caches have forgotten the forests, as between two decisions of a router; and
    # whatever else the machine does hits both alike.
    in_turn = [
        (
            seconds(lambda prompt=prompt: learned.predict(prompt)),
            seconds(lambda prompt=prompt: ask_boosters(rows[id(prompt)])),
        )
        for prompt in prompts
    ]
    back_to_back = [seconds(lambda of=of: ask_boosters(of)) for of in rows.values()]
    asked = itertools.cycle(prompts)
    benchmark(lambda: learned.predict(next(asked)))
    if benchmark.stats is not None:  # none where they are disabled
        cold, plain_cold = (statistics.median(each) for each in zip(*in_turn, strict=True))
        warm, plain = benchmark.stats.stats.median, statistics.median(back_to_back)
        benchmark.extra_info["predict_share"] = warm / plain
        benchmark.extra_info["predict_share_cold"] = cold / plain_cold
        assert warm / plain < 0.05
