"""Predictors of quality and output length."""

from app.prediction.predictor import Predictor
from app.prediction.prior import PriorPredictor

__all__ = ["Predictor", "PriorPredictor"]
