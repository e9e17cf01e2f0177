from collections.abc import Callable

from app.config import PoolSettings
from app.prediction import PriorPredictor
from app.types import Query


def test_priors_speak_for_each_model_in_order(
    pool: PoolSettings, query: Callable[..., Query]
) -> None:
    small, large = pool.models
    models = [large.spec(), small.spec()]
    predictions = PriorPredictor(pool).predict(query(), models)
    assert [(p.quality, p.output_tokens, p.source) for p in predictions] == [
        (0.8, 200, "prior"),
        (0.4, 200, "prior"),
    ]
