from __future__ import annotations

import json
from typing import Any

import pytest

from app.config import PoolSettings
from app.evaluation.multi_turn import CONTENDERS, MultiTurnStudy, markdown, run


def test_the_study_on_a_small_pool(pool_data: dict[str, Any]) -> None:
    # Prefill that costs enough for hits to be worth it.
    pool_data["models"][0]["engine"]["batch_time"]["b1_s"] = 1e-4
    pool = PoolSettings.model_validate(pool_data)
    study = MultiTurnStudy(models=("small",), replicas=2, chats_per_s=1.5, chats=60, tenants=3)
    results = run(pool, study)

    assert tuple(row.contender for row in results.rows) == CONTENDERS
    informed, uninformed, *_ = results.rows
    assert informed.hit_rate > uninformed.hit_rate
    assert informed.ttft_mean_s < uninformed.ttft_mean_s
    assert informed.forecasts.mape < uninformed.forecasts.mape / 2
    assert uninformed.forecasts.bias > 0, "what is cached is taken for new"
    for row in results.rows:
        assert row.requests > 60
        assert 0 < row.ttft_p50_s <= row.ttft_p95_s
        assert 0 < row.hit_rate < 1
        assert 0 <= row.on_time <= 1

    table = markdown(results).splitlines()
    assert [row.split(" | ")[:2] for row in table[2:]] == [
        ["| constrained", "yes"],
        ["| constrained", "no"],
        ["| shortest_queue", "no"],
        ["| round_robin", "no"],
    ]
    assert {row.count("|") for row in table} == {13}
    written = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert written["rows"][0]["contender"] == {"policy": "constrained", "journaled": True}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicas": 0}, "replicas"),
        ({"chats": 0}, "chats"),
        ({"tenants": 0}, "tenants"),
        ({"chats_per_s": 0.0}, "chats_per_s"),
        ({"ttft_slo_ms": -1.0}, "ttft_slo_ms"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiTurnStudy(**wrong)  # type: ignore[arg-type]
