"""A PCA of the signed token hash, fitted on the training prompts (the paper's appendix B.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from app.prediction.features import DESCRIPTION, HASH_BUCKETS
from app.types import PromptFeatures
from sfs_ext import Projection as CoreProjection

COMPONENTS = 16


@dataclass(frozen=True)
class Projection:
    mean: NDArray[np.float64]
    """(HASH_BUCKETS,)"""
    components: NDArray[np.float64]
    """(components, HASH_BUCKETS), orthonormal."""

    @classmethod
    def fit(cls, prompts: Sequence[PromptFeatures], components: int = COMPONENTS) -> Projection:
        """Fewer components where there are fewer prompts."""
        hashed = np.array([prompt.hashed for prompt in prompts]).reshape(-1, HASH_BUCKETS)
        mean = hashed.mean(axis=0)
        axes = np.linalg.svd(hashed - mean, full_matrices=False)[2][:components]
        return cls(mean, axes * _signs(axes)[:, None])

    @property
    def names(self) -> list[str]:
        """Of the columns of ``row``."""
        return [*(f"hash_{i}" for i in range(len(self.components))), *DESCRIPTION]

    @property
    def width(self) -> int:
        return len(self.components) + len(DESCRIPTION)

    @cached_property
    def core(self) -> CoreProjection:
        """ValueError for arrays of other shapes."""
        return CoreProjection(self.mean, self.components)

    def row(self, prompt: PromptFeatures) -> NDArray[np.float64]:
        """(width,)"""
        return self.core.row(prompt.buckets, prompt.description)


def _signs(axes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Makes each axis point to its largest entry's side: an SVD leaves that to chance."""
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1)[:, None], axis=1)[:, 0]
    return np.where(largest < 0, -1.0, 1.0)
