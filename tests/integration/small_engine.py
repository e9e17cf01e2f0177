"""Settings of a small emulated engine that schedules synchronously."""

from __future__ import annotations

from typing import Any

from app.config import EmulatedEngineSettings


def small_engine(
    batch_time: dict[str, Any], output_tokens: dict[str, Any]
) -> EmulatedEngineSettings:
    return EmulatedEngineSettings.model_validate(
        {
            "kind": "emulated",
            "scheduler": {
                "max_num_batched_tokens": 2048,
                "max_num_seqs": 64,
                "block_size": 16,
                "num_blocks": 4000,
                "async_scheduling": False,
            },
            "batch_time": batch_time,
            "output_tokens": output_tokens,
        }
    )
