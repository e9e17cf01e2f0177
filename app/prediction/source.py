"""Where a running router has its predictor from: a file that may change under it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from app.config import PoolSettings
from app.prediction import artifact as artifacts
from app.prediction.artifact import ArtifactError
from app.prediction.trained import TrainedPredictor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    predictor: TrainedPredictor
    trained_s: float
    """Unix time."""


class PredictorFile:
    """Blocking, and quick where nothing has changed."""

    def __init__(self, settings: PoolSettings, path: str | Path) -> None:
        self._settings = settings
        self._path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._missed = False

    def newer(self) -> Loaded | None:
        """What the file holds, if it is another than when it was last asked for. A file that
        cannot be used is said once, and changes nothing."""
        try:
            now = self._path.stat()
            version = (now.st_mtime_ns, now.st_size, now.st_ino)
            if version == self._seen:
                return None
            artifact = artifacts.load(self._path)
            loaded = Loaded(TrainedPredictor(artifact, self._settings), artifact.trained_s)
        except OSError as error:  # it may pass
            if not self._missed:
                logger.warning("the predictor cannot be read: %s", error)
            self._missed = True
            return None
        except ArtifactError as error:
            logger.error("%s is not taken up, the predictor stays as it was: %s", self._path, error)
            self._seen = version
            return None
        self._seen, self._missed = version, False
        logger.info("predictor of %d prompts, %s", artifact.prompts, artifact.data_sha256[:12])
        return loaded
