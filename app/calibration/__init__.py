"""From an engine's step records to what forecasts need of it."""

from app.calibration.batch_time import BatchTimeFit, fit_batch_time, slowdown

__all__ = ["BatchTimeFit", "fit_batch_time", "slowdown"]
