"""What the warm-up drives through an engine is enough to fit its batch times."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from small_engine import small_engine

from deployments.emulated_engine import EmulatedEngine
from deployments.timing import Timing, at_present, measured
from deployments.warm_up import warm_up
from sfs_ext import BatchTime

SETTINGS = small_engine(
    batch_time={"b0_s": 4e-3, "b1_s": 1e-5, "b2_s": 1e-7, "b3_s": 1e-9},
    output_tokens={"mean": 50, "sigma": 0.5},
)

# Twice what the settings say: the engine's own steps bring it back.
SLOWER = BatchTime(8e-3, 2e-5, 2e-7, 2e-9)


def test_fits_the_engine_it_drove(tmp_path: Path) -> None:
    async def drive() -> Timing:
        engine = EmulatedEngine(SETTINGS, 4096, str(tmp_path / "snapshot"))
        try:
            with pytest.raises(ValueError, match="a fit needs"):
                measured(engine.snapshot_path)
            await warm_up(engine, "model", time_limit_s=20)
            timing = measured(engine.snapshot_path)
            doubled = replace(timing, batch_time=SLOWER, prefill_tokens_per_s=1000.0)
            back = at_present(doubled, engine.snapshot_path)
            assert back.batch_time.b0_s == pytest.approx(4e-3, rel=0.2)
            assert back.prefill_tokens_per_s == pytest.approx(2000, rel=0.2)
            return timing
        finally:
            await engine.stop()

    timing = asyncio.run(drive())
    assert timing.source == "steps"
    true = SETTINGS.batch_time.batch_time()
    for batch in [(1, 100, 0), (8, 8000, 0), (512, 0, 512 * 513 // 2), (2048, 0, 2048 * 2049 // 2)]:
        assert timing.batch_time.seconds(*batch) == pytest.approx(true.seconds(*batch), rel=0.15)
