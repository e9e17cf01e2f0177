"""Predictors whose checksum is right and whose content is anybody's: refused by name, or finite."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import features

from app.config import PoolSettings
from app.prediction import artifact as artifacts
from app.prediction import report
from app.prediction.artifact import Artifact, ArtifactError
from app.prediction.trained import TrainedPredictor

Json = dict[str, Any]

PROMPTS = [features(), features("Write a detailed essay. " * 40, *range(500))]

ARRAYS = [
    ("pca_mean",),
    ("pca_components",),
    *(("forest", name) for name in ("nodes", "roots", "output_trees", "category_words")),
]
WORDS = [
    *(np.array(number, "<i4").tobytes() for number in (0, 1, -1, 77, 2**31 - 1, -(2**31))),
    *(np.array(n, "<f8").tobytes() for n in (np.nan, np.inf, -np.inf, 0.0, 1e99, 1e308, -1e308)),
]
VALUES = st.sampled_from(
    [
        *(None, True, 0, 1, -1, 2**31, 2**70, 10**400, 0.5, 1e-320, 1e308, -1e308, "", "x"),
        *([], {}, [1.0] * 4, [1e308] * 4, [0.0] * 2, [-1e99, 1e99]),
    ]
)


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """A word or a stretch of an array, overwritten, cut out or put in, some times over."""
    content = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(0, len(content) // 4 - 1))) * 4
        word = draw(st.sampled_from(WORDS) | st.binary(min_size=1, max_size=1))
        kind = draw(st.sampled_from(["over", "over", "over", "repeat", "cut", "end", "grow"]))
        if kind == "over":
            content[place : place + len(word)] = word
        elif kind == "repeat":
            count = draw(st.integers(1, 200))
            content[place : place + 32 * count] = (word * 32)[:32] * count
        elif kind == "cut":
            del content[place : place + draw(st.sampled_from([1, 4, 32]))]
        elif kind == "end":
            del content[place:]
        else:
            content += content[: draw(st.sampled_from([4, 32, 4096, len(content)]))]
    return bytes(content)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, child in inner:
        found.append((*path, key))
        if isinstance(child, dict | list):
            found += places_of(child, (*path, key))
    return found


def use(predictor: Json, path: Path, pool: PoolSettings) -> None:
    text = {"sha256": artifacts._sha256(predictor), "predictor": predictor}
    path.write_text(json.dumps(text))
    try:
        loaded = artifacts.load(path)
        TrainedPredictor(loaded, pool)
    except ArtifactError:
        return
    report.whole(loaded)
    learned = loaded.learned()
    for prompt in PROMPTS:
        said = learned.predict(prompt)
        assert said.quality is not None or said.lengths is not None
        assert all(0.0 <= quality <= 1.0 for quality in said.quality or [])
        for length in said.lengths or []:
            assert all(math.isfinite(tokens) and tokens >= 1.0 for tokens in length)
            assert length.low <= length.median <= length.high


hostile = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "predictor.json"


@hostile
@given(data=st.data())
def test_arrays(data: st.DataObject, artifact: Artifact, path: Path, pool: PoolSettings) -> None:
    predictor = artifact.model_dump(mode="json")
    *outer, name = data.draw(st.sampled_from(ARRAYS))
    holder = predictor[outer[0]] if outer else predictor
    content = data.draw(damages(base64.b64decode(holder[name])))
    holder[name] = base64.b64encode(content).decode()
    use(predictor, path, pool)


@hostile
@given(data=st.data())
def test_fields(data: st.DataObject, artifact: Artifact, path: Path, pool: PoolSettings) -> None:
    predictor = artifact.model_dump(mode="json")
    places = [place for place in places_of(predictor) if place[0] != "validation"]
    for *outer, name in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2)):
        holder: Any = predictor
        try:
            for key in outer:
                holder = holder[key]
            holder[name] = data.draw(VALUES)
        except (TypeError, LookupError):
            continue  # the first change took it away
    use(predictor, path, pool)
