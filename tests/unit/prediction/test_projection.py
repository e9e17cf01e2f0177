from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from planted import features, planted

from app.prediction.features import DESCRIPTION, HASH_BUCKETS
from app.prediction.projection import Projection

PROMPTS = [example.prompt for example in planted(40)]


def rows_of(projection: Projection) -> np.ndarray:
    return np.array([projection.row(prompt) for prompt in PROMPTS])


def test_axes_are_orthonormal_and_keep_what_varies_most() -> None:
    projection = Projection.fit(PROMPTS, 8)
    axes = projection.components
    assert axes.shape == (8, HASH_BUCKETS)
    np.testing.assert_allclose(axes @ axes.T, np.eye(8), atol=1e-9)
    spread = rows_of(projection)[:, :8].var(axis=0)
    assert (np.diff(spread) <= 1e-12).all()


def test_axes_point_to_their_largest_entry() -> None:
    axes = Projection.fit(PROMPTS).components
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)]
    assert (largest > 0).all()


def test_a_row_is_named_column_by_column() -> None:
    projection = Projection.fit(PROMPTS, 3)
    assert projection.names == ["hash_0", "hash_1", "hash_2", *DESCRIPTION]
    rows = rows_of(projection)
    assert rows.shape == (len(PROMPTS), len(projection.names))
    np.testing.assert_array_equal(rows[5], projection.row(PROMPTS[5]))
    np.testing.assert_array_equal(rows[5, 3:], PROMPTS[5].description)
    np.testing.assert_allclose(rows[:, :3].mean(axis=0), 0.0, atol=1e-12)


@pytest.mark.parametrize("components", [0, 3, 8, 16, 20])
def test_components_are_of_the_hash_less_its_mean(components: int) -> None:
    """As fitted, so projected: the core says the same as the formula."""
    projection = Projection.fit(PROMPTS, components)
    hashed = np.array([prompt.hashed for prompt in PROMPTS])
    expected = (hashed - projection.mean) @ projection.components.T
    np.testing.assert_allclose(rows_of(projection)[:, :components], expected, atol=1e-14)


@pytest.mark.parametrize(
    ("buckets", "description", "why"),
    [
        (np.zeros(511, np.int32), np.ones(3), "511 buckets; they must be 512"),
        (np.zeros(512, np.int32), np.zeros(0), "0 values of description"),
    ],
)
def test_what_is_no_prompt_is_named(buckets: Any, description: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Projection.fit(PROMPTS, 3).core.row(buckets, description)


@pytest.mark.parametrize("prompts", [1, 2, 5])
def test_fewer_prompts_than_axes(prompts: int) -> None:
    projection = Projection.fit(PROMPTS[: 2 * prompts : 2])
    assert len(projection.components) == prompts
    assert np.isfinite(rows_of(projection)).all()


def test_prompts_that_are_all_alike() -> None:
    projection = Projection.fit([features()] * 30)
    np.testing.assert_allclose(projection.row(features())[:16], 0.0, atol=1e-12)
    assert np.isfinite(projection.row(features("another", 5, 6))).all()


def test_its_width_is_told_without_a_row() -> None:
    assert Projection.fit(PROMPTS, 3).width == 3 + len(DESCRIPTION)
