"""How much of what boosters say is believed."""

from __future__ import annotations

import numpy as np
import pytest

from app.prediction.quality import Floats, QualityCalibration

PROMPTS, MODELS = 400, 3
PROMPT_IDS = [f"prompt-{i}" for i in range(PROMPTS) for _ in range(MODELS)]
PLACES = np.tile(np.arange(MODELS), PROMPTS)


def calibrated(scores: Floats, predictions: Floats) -> QualityCalibration:
    return QualityCalibration.fit(PROMPT_IDS, PLACES, scores, predictions, MODELS)


def effects(seed: int = 0) -> tuple[Floats, Floats]:
    """What a prompt's answers have in common, and what each has of its own, without means."""
    random = np.random.default_rng(seed)
    common = np.repeat(random.normal(0, 0.1, PROMPTS), MODELS)
    own = random.normal(0, 0.1, PROMPTS * MODELS)
    own -= np.repeat(own.reshape(-1, MODELS).mean(axis=1), MODELS)
    own -= (np.bincount(PLACES, own) / PROMPTS)[PLACES]
    return common - common.mean(), own


def test_what_held_is_believed_as_far_as_it_held() -> None:
    common, own = effects()
    means = np.array([0.4, 0.5, 0.6])[PLACES]
    found = calibrated(means + 0.5 * common + 0.25 * own, 0.3 + common + own)
    assert (found.common, found.own) == (pytest.approx(0.5), pytest.approx(0.25))
    assert found.mean_score == pytest.approx((0.4, 0.5, 0.6))
    assert found.mean_prediction == pytest.approx((0.3, 0.3, 0.3))
    # 0.3 of the prompt, and -0.1, 0.0 and 0.1 of each model.
    applied = found.apply([0.5, 0.6, 0.7])
    assert applied == pytest.approx([0.4 + 0.125, 0.5 + 0.15, 0.6 + 0.175])


def test_never_more_than_all_and_never_the_contrary() -> None:
    common, own = effects()
    found = calibrated(0.5 + 3 * common - own, 0.5 + common + own)
    assert (found.common, found.own) == (1.0, 0.0)


def test_noise_is_hardly_ever_believed() -> None:
    """Two standard errors: of a slope that is nought, one in forty lies above."""
    random = np.random.default_rng(1)
    common, own = effects()
    believed = 0
    for _ in range(40):
        noise = calibrated(0.5 + random.normal(0, 0.2, len(PLACES)), 0.5 + common + own)
        believed += (noise.common > 0) + (noise.own > 0)
    assert believed <= 8


def test_where_predictions_are_all_alike_every_prompt_gets_the_means() -> None:
    common, own = effects()
    found = calibrated(0.5 + common + own, np.full(len(PLACES), 0.5))
    assert (found.common, found.own) == (0.0, 0.0)
    assert found.apply([9.0, 9.0, -9.0]) == list(found.mean_score)


def test_what_is_said_stays_a_quality() -> None:
    found = QualityCalibration(
        mean_score=(0.1, 0.9), mean_prediction=(0.5, 0.5), common=1.0, own=1.0
    )
    assert found.apply([-1.0, 3.0]) == [0.0, 1.0]


def test_one_model_has_nothing_of_its_own() -> None:
    random = np.random.default_rng(2)
    scores, places = random.random(50), np.zeros(50, np.int64)
    ids = [str(i) for i in range(50)]
    found = QualityCalibration.fit(ids, places, scores, scores, 1)
    assert (found.common, found.own) == (pytest.approx(1.0), 0.0)


def test_one_answer() -> None:
    one = np.array([0.7])
    found = QualityCalibration.fit(["a"], np.array([0]), one, one, 1)
    assert found.apply([0.2]) == [0.7]


def test_what_is_said_of_a_model_without_scores_is_not_said_of_the_prompt() -> None:
    """Of its booster's 0.5, nothing may be taken for how well any model answers this prompt."""
    common, own = effects()
    scores, predictions = 0.5 + common, 0.5 + common + own
    found = QualityCalibration.fit(PROMPT_IDS, PLACES, scores, predictions, MODELS + 1)
    assert found.common > 0.9
    said = found.apply([0.5, 0.5, 0.5, 0.5])
    assert said == pytest.approx([0.5] * 4, abs=1e-3)
