"""A trained predictor as one file: JSON, versioned, with the hash of what it was trained on.

Boosters are kept in LightGBM's own text form, so the file is read by any LightGBM and by eyes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from app.config import TokenizerSettings
from app.prediction.features import DESCRIPTION, FEATURE_VERSION, HASH_BUCKETS
from app.prediction.learned import QUANTILES, Learned, ModelCard
from app.prediction.projection import Projection
from app.prediction.quality import QualityCalibration
from app.prediction.validation import Validation

FORMAT_VERSION = 1


class ArtifactError(ValueError):
    """A predictor's file that cannot be used; names the file and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Card(_Strict):
    name: str
    parameters_billions: PositiveFloat | None
    context_tokens: PositiveInt
    length_examples: NonNegativeInt
    quality_examples: NonNegativeInt


class Calibration(_Strict):
    mean_score: tuple[float, ...]
    mean_prediction: tuple[float, ...]
    common: float
    own: float


class Artifact(_Strict):
    format_version: int
    feature_version: int
    tokenizer: TokenizerSettings
    """Whose token ids the features are of."""
    trained_s: float
    """Unix time."""
    data_sha256: str
    prompts: int
    cards: tuple[Card, ...]
    pca_mean: str
    pca_components: str
    """float64, little endian, base64."""
    quality_booster: str | None
    quality_calibration: Calibration | None
    length_boosters: tuple[str, ...]
    """Of the mean, then of the quantiles 0.1, 0.5 and 0.9."""
    length_factors: tuple[float, ...]
    validation: Validation | None
    """None where there were too few prompts to hold any back."""

    @model_validator(mode="after")
    def _whole(self) -> Artifact:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format version {self.format_version}; this reads {FORMAT_VERSION}")
        if self.feature_version != FEATURE_VERSION:
            raise ValueError(
                f"features of version {self.feature_version}; this computes version "
                f"{FEATURE_VERSION}: train it again"
            )
        if (self.quality_booster is None) != (self.quality_calibration is None):
            raise ValueError("quality_booster and quality_calibration go together")
        if len(self.length_boosters) not in (0, 1 + len(QUANTILES)):
            raise ValueError(f"length_boosters must be {1 + len(QUANTILES)} or none")
        if self.quality_booster is None and not self.length_boosters:
            raise ValueError("it holds no booster")
        if len(self.length_factors) != len(self.length_boosters):
            raise ValueError("length_factors must be as many as length_boosters")
        if not self.cards:
            raise ValueError("cards must name at least one model")
        for name in ("mean_score", "mean_prediction"):
            means = getattr(self.quality_calibration, name, None)
            if means is not None and len(means) != len(self.cards):
                raise ValueError(f"quality_calibration.{name} must be as many as cards")
        return self

    def learned(self) -> Learned:
        """ValueError for boosters or arrays that do not fit."""
        mean = _decoded(self.pca_mean, "pca_mean", (HASH_BUCKETS,))
        components = _decoded(self.pca_components, "pca_components", (-1, HASH_BUCKETS))
        calibration = self.quality_calibration
        learned = Learned(
            projection=Projection(mean, components),
            cards=tuple(
                ModelCard(card.name, card.parameters_billions, card.context_tokens)
                for card in self.cards
            ),
            quality=booster_of(self.quality_booster) if self.quality_booster is not None else None,
            calibration=QualityCalibration(**calibration.model_dump()) if calibration else None,
            lengths=tuple(map(booster_of, self.length_boosters)),
            length_factors=self.length_factors,
        )
        columns = len(components) + len(DESCRIPTION) + 3
        for forest in learned.forests:
            if forest.features != columns:
                raise ValueError(
                    f"a booster of {forest.features} features; there are {columns} columns"
                )
        return learned


class _File(_Strict):
    sha256: str
    """Of the predictor's JSON as it stands in the file, without blanks, keys in order."""
    predictor: dict[str, Any]


def save(artifact: Artifact, path: str | Path) -> None:
    """The file appears whole or not at all: a pool may be watching it."""
    path = Path(path)
    predictor = artifact.model_dump(mode="json")
    text = json.dumps({"sha256": _sha256(predictor), "predictor": predictor}, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    try:
        hidden.write_text(text, encoding="utf-8")
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def load(path: str | Path) -> Artifact:
    """Raises ArtifactError, OSError."""
    data = Path(path).read_bytes()
    try:
        file = _File.model_validate(json.loads(data))
        found = _sha256(file.predictor)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: no predictor: {_first(error)}") from error
    if found != file.sha256:
        raise ArtifactError(f"{path}: corrupt: its checksum is not that of its content")
    try:
        return Artifact.model_validate(file.predictor)
    except ValidationError as error:
        raise ArtifactError(f"{path}: {_first(error)}") from error


def encoded(array: NDArray[np.float64]) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f8").tobytes()).decode()


def _decoded(text: str, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    try:
        array = np.frombuffer(base64.b64decode(text, validate=True), "<f8").reshape(shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite")
    return array


def booster_of(text: str) -> lightgbm.Booster:
    """ValueError for what is none."""
    try:
        return lightgbm.Booster(model_str=text)
    except lightgbm.basic.LightGBMError as error:
        raise ValueError(f"no booster: {error}") from error


def _sha256(predictor: Mapping[str, Any]) -> str:
    text = json.dumps(predictor, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
