from __future__ import annotations

import json
import math

import pytest

from app.config import PoolSettings
from app.evaluation.length_error import (
    ERRORS,
    EXACT,
    Cell,
    LengthError,
    LengthErrorStudy,
    Rule,
    markdown,
    run,
)


def test_the_study_on_a_small_engine(pool: PoolSettings) -> None:
    study = LengthErrorStudy(model="small", loads=(0.4, 1.3), requests=150, warm_up=50)
    results = run(pool, study)
    half = len(Rule) * len(ERRORS)
    calm, crowded = results.cells[:half], results.cells[half:]

    for load, cells in zip(study.loads, (calm, crowded), strict=True):
        assert [(c.error, c.rule) for c in cells] == [
            (error, rule) for error in ERRORS for rule in Rule
        ]
        assert {cell.rate_qps for cell in cells} == {load * results.capacity_qps}
        assert {cell.accuracy.requests for cell in cells} == {150}
        # One truth, whatever is predicted.
        assert len({cell.accuracy.observed_mean_s for cell in cells}) == 1

    assert sum(cell.unsound for cell in results.cells) == 0
    exact = [cell for cell in results.cells if cell.alone_error_s is not None]
    assert [(cell.load, cell.error, cell.rule) for cell in exact] == [
        (load, EXACT, Rule.NAIVE) for load in study.loads
    ]
    for cell in exact:
        assert cell.alone_error_s is not None
        assert cell.alone_error_s < 1e-9

    # Beyond capacity queries wait until others end, and then lengths matter.
    assert crowded[0].accuracy.observed_mean_s > 3 * calm[0].accuracy.observed_mean_s
    naive = {cell.error: cell for cell in crowded if cell.rule is Rule.NAIVE}
    wrong = LengthError(sigma=1.0)
    assert naive[wrong].accuracy.mape > 2 * naive[EXACT].accuracy.mape
    assert naive[LengthError(bias=2.0)].accuracy.bias > naive[LengthError(bias=0.5)].accuracy.bias

    # What finishes tells a running router that predictions are twice too long.
    too_long = {c.rule: c.accuracy for c in crowded if c.error == LengthError(bias=2.0)}
    assert too_long[Rule.CORRECTED].mape < 0.7 * too_long[Rule.CONDITIONAL].mape

    _check_table(markdown(results).splitlines(), results.cells)
    written = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert len(written["cells"]) == len(results.cells)


def _check_table(lines: list[str], cells: tuple[Cell, ...]) -> None:
    rows = lines[2 : 2 + len(cells) // len(Rule)]
    assert [row.split(" | ")[3] for row in rows] == 2 * [
        "exact", "s = 0.2", "s = 0.4", "s = 0.6", "s = 1", "x 0.5", "x 2",
    ]  # fmt: skip
    assert {row.count("|") for row in lines[: 2 + len(rows)]} == {17}
    assert "infinite, not positive or at the bound: 0" in lines[-2]
    assert lines[-1].startswith("from true lengths, had nobody come later: off by ")


def test_a_model_that_is_not_there_is_named(pool: PoolSettings) -> None:
    with pytest.raises(ValueError, match="no model 'huge' in the pool; there are small, large"):
        run(pool, LengthErrorStudy(model="huge"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loads": ()}, "loads"),
        ({"loads": (0.5, 0.0)}, "loads"),
        ({"loads": (math.inf,)}, "loads"),
        ({"requests": 0}, "requests"),
        ({"warm_up": -1}, "warm_up"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthErrorStudy(**wrong)  # type: ignore[arg-type]
