"""A trained predictor as one file: JSON, versioned, with the hash of what it was trained on.

Trees are kept as the core's arrays: it checks all that it is given, as LightGBM does not.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy import typing as npt
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)

from app.config import TokenizerSettings
from app.prediction.features import FEATURE_VERSION, HASH_BUCKETS
from app.prediction.figures import Validation
from app.prediction.forest import Trees
from app.prediction.learned import QUANTILES, Learned, ModelCard
from app.prediction.projection import Projection
from app.prediction.quality import QualityCalibration
from sfs_ext import forest_node_dtype

FORMAT_VERSION = 2

Count = Annotated[int, Field(ge=0, le=2**53)]
UnixTime = Annotated[float, Field(ge=0.0, lt=253_402_300_800.0)]
"""Before the year 10000, as dates are."""


class ArtifactError(ValueError):
    """A predictor's file that cannot be used; names the file and why."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Card(_Strict):
    name: str
    parameters_billions: PositiveFloat | None
    context_tokens: Annotated[Count, Field(gt=0)]
    length_examples: Count
    quality_examples: Count


class StoredForest(_Strict):
    """``Trees``; each array little endian, base64."""

    nodes: str
    roots: str
    output_trees: str
    category_words: str

    @classmethod
    def of(cls, trees: Trees) -> StoredForest:
        return cls(**{name: encoded(getattr(trees, name)) for name in cls.model_fields})

    def trees(self) -> Trees:
        """ValueError, naming the field, for what is no array of its type."""
        return Trees(
            nodes=_decoded(self.nodes, "forest.nodes", forest_node_dtype),
            roots=_decoded(self.roots, "forest.roots", np.int32),
            output_trees=_decoded(self.output_trees, "forest.output_trees", np.int32),
            category_words=_decoded(self.category_words, "forest.category_words", np.uint32),
        )


class Artifact(_Strict):
    format_version: int
    feature_version: int
    tokenizer: TokenizerSettings
    """Whose token ids the features are of."""
    trained_s: UnixTime
    data_sha256: str
    prompts: Count
    cards: tuple[Card, ...]
    pca_mean: str
    pca_components: str
    """float64, little endian, base64."""
    forest: StoredForest
    quality_calibration: QualityCalibration | None
    length_factors: tuple[NonNegativeFloat, ...]
    """Of the mean, then of the quantiles 0.1, 0.5 and 0.9."""
    gain_shares: dict[str, dict[str, float]]
    """Of what is predicted, by column: what boosters went by."""
    validation: Validation | None
    """None where there were too few prompts to hold any back."""

    @model_validator(mode="after")
    def _whole(self) -> Artifact:
        if self.feature_version != FEATURE_VERSION:
            raise ValueError(
                f"features of version {self.feature_version}; this computes version "
                f"{FEATURE_VERSION}: train it again"
            )
        if len(self.length_factors) not in (0, 1 + len(QUANTILES)):
            raise ValueError(f"length_factors must be {1 + len(QUANTILES)} or none")
        if self.quality_calibration is None and not self.length_factors:
            raise ValueError("it predicts neither quality nor length")
        if not self.cards:
            raise ValueError("cards must name at least one model")
        for name in ("mean_score", "mean_prediction"):
            means = getattr(self.quality_calibration, name, None)
            if means is not None and len(means) != len(self.cards):
                raise ValueError(f"quality_calibration.{name} must be as many as cards")
        return self

    def learned(self) -> Learned:
        """ValueError for arrays that do not fit, or are not sound."""
        mean = _decoded(self.pca_mean, "pca_mean", np.float64, (HASH_BUCKETS,))
        components = _decoded(self.pca_components, "pca_components", np.float64, (-1, HASH_BUCKETS))
        for name, array in (("pca_mean", mean), ("pca_components", components)):
            if not np.isfinite(array).all():
                raise ValueError(f"{name} must be finite")
        learned = Learned(
            projection=Projection(mean, components),
            cards=tuple(
                ModelCard(card.name, card.parameters_billions, card.context_tokens)
                for card in self.cards
            ),
            trees=self.forest.trees(),
            calibration=self.quality_calibration,
            length_factors=self.length_factors,
        )
        _ = learned.ensemble  # what the core refuses, it refuses here
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
    if (version := file.predictor.get("format_version")) != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: format version {version}; this reads {FORMAT_VERSION}: train it again"
        )
    try:
        return Artifact.model_validate(file.predictor)
    except ValidationError as error:
        raise ArtifactError(f"{path}: {_first(error)}") from error


def encoded(array: NDArray[Any]) -> str:
    """Little endian, base64."""
    # Filled in, not converted: what lies between the fields of a record would be left as it was.
    little = np.zeros(array.shape, array.dtype.newbyteorder("<"))
    little[...] = array
    return base64.b64encode(little.tobytes()).decode()


def _decoded(
    text: str, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = (-1,)
) -> NDArray[Any]:
    native = np.dtype(dtype)
    try:
        data = base64.b64decode(text, validate=True)
        array = np.frombuffer(data, native.newbyteorder("<")).reshape(shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return array.astype(native)


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
