from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from app.config import EmulatedEngineSettings, PoolSettings, SettingsError, load_pool

POOLS = Path(__file__).parents[2] / "configs" / "pools"


def refusal(tmp_path: Path, data: object) -> str:
    path = tmp_path / "pool.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    with pytest.raises(SettingsError) as caught:
        load_pool(path)
    assert str(path) in str(caught.value)
    return str(caught.value).replace(str(path), "pool.yaml")


@pytest.mark.parametrize("name", ["emulated", "qwen3_h100", "cpu"])
def test_the_pools_that_come_with_the_project_load(name: str) -> None:
    assert load_pool(POOLS / f"{name}.yaml").models


@pytest.mark.parametrize(
    ("section", "key", "with_unit"),
    [
        ("router", "ttft_slo", "ttft_slo_ms"),
        ("router", "lambda", "lambda_per_microusd"),
        ("router", "stale_after", "stale_after_s"),
    ],
)
def test_a_key_that_lacks_its_unit_is_named_with_it(
    tmp_path: Path, pool_data: dict[str, Any], section: str, key: str, with_unit: str
) -> None:
    pool_data[section] = {key: 3.0}
    said = refusal(tmp_path, pool_data)
    assert said == f"pool.yaml: {section}.{key}: unknown key; its unit is missing: {with_unit}"


def test_a_missing_unit_deep_inside_is_named(tmp_path: Path, pool_data: dict[str, Any]) -> None:
    batch_time = pool_data["models"][1]["engine"]["batch_time"]
    batch_time["b0"] = batch_time.pop("b0_s")
    said = refusal(tmp_path, pool_data)
    assert "models[1].engine.batch_time.b0: unknown key; its unit is missing: b0_s" in said


def test_a_misspelt_key_is_answered_with_the_nearest(
    tmp_path: Path, pool_data: dict[str, Any]
) -> None:
    pool_data["router"] = {"polcy": "constrained"}
    assert "router.polcy: unknown key; did you mean policy?" in refusal(tmp_path, pool_data)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("router", "policy"), "fastest", "router.policy: "),
        (("router", "delta_per_s"), float("nan"), "router.delta_per_s: "),
        (("router", "ttft_slo_ms"), -5.0, "router.ttft_slo_ms: "),
        (("router", "silent_after_s"), 0.5, "silent_after_s (0.5) must be at least stale_after_s"),
        (("models", 0, "price_in_usd_per_mtok"), "0.1", "models[0].price_in_usd_per_mtok: "),
        (("models", 0, "prior", "quality"), 1.5, "models[0].prior.quality: "),
        (("models", 0, "tokenizer"), "gpt", "models[0].tokenizer: 'gpt' is not one of"),
        (("models", 1, "name"), "small", "models[1].name: 'small' is there twice"),
        (("models", 1, "name"), "auto", "models[1].name: 'auto' "),
        (("models", 0, "context_tokens"), 16001, "context_tokens (16001) must fit the KV cache"),
        (("models", 0, "engine", "kind"), "tgi", "models[0].engine: "),
        (("models", 0, "engine", "scheduler", "num_blocks"), 1.5, "scheduler.num_blocks: "),
        *(
            (
                ("models", 0, "engine", "scheduler", key),
                3_000_000_000,
                f"models[0].engine.scheduler.{key}: Input should be less than or equal to",
            )
            for key in ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks")
        ),
        (("models", 0, "replicas"), 3_000_000_000, "models[0].replicas: Input should be less"),
        (("models", 0, "context_tokens"), 3_000_000_000, "models[0].context_tokens: Input"),
        # The core's own refusals.
        (
            ("models", 0, "engine", "scheduler", "block_size"),
            65537,
            "models[0].engine.scheduler: Value error, scheduler config: block_size <= 65536",
        ),
        (
            ("models", 0, "engine", "scheduler", "num_blocks"),
            1,
            "models[0].engine.scheduler: Value error, scheduler config: num_blocks >= 2",
        ),
        (
            ("models", 0, "context_tokens"),
            2**28 + 1,
            "models[0]: Value error, context_tokens (268435457): scheduler config: max_model_len",
        ),
        (
            ("models", 0, "context_tokens"),
            1,
            "models[0]: Value error, context_tokens (1): scheduler config: max_model_len >= 2",
        ),
        (
            ("models", 0, "engine", "batch_time"),
            {"b0_s": 0.0, "b1_s": 1e-5, "b2_s": 0.0, "b3_s": 0.0},
            "models[0].engine.batch_time: Value error, b0_s + host_s must be above 0",
        ),
        (
            ("models", 0, "engine", "batch_time"),
            {"b0_s": 1e308, "b1_s": 0.0, "b2_s": 0.0, "b3_s": 0.0, "host_s": 1e308},
            "models[0].engine.batch_time: Value error, batch time: coefficients must be finite",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, pool_data: dict[str, Any], path: tuple[Any, ...], value: object, says: str
) -> None:
    pool_data.setdefault("router", {})
    at: Any = pool_data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert says in refusal(tmp_path, pool_data)


def test_a_missing_key_is_named(tmp_path: Path, pool_data: dict[str, Any]) -> None:
    del pool_data["models"][0]["prior"]["ttft_ms"]
    assert "models[0].prior.ttft_ms: Field required" in refusal(tmp_path, pool_data)


def test_the_model_may_not_outgrow_vllms_own_limit(pool_data: dict[str, Any]) -> None:
    pool_data["models"][0]["engine"] = {
        "kind": "vllm",
        "model": "any/model",
        "num_gpus": 0,
        "args": {"max_model_len": 2048},
    }
    with pytest.raises(ValidationError, match=r"engine.args.max_model_len \(2048\)"):
        PoolSettings.model_validate(pool_data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the keys router, tokenizers, models"),
        ("router: [", "while parsing"),
        ("router: {policy: constrained, policy: lagrangian}", "key 'policy' is there twice"),
        (f"router: {'9' * 5000}", "4300"),
        ("router: 2020-13-45", "month"),
        ("[" * 5000, "recursion"),
    ],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.yaml"):
        load_pool(tmp_path / "nowhere.yaml")


def test_exponents_without_a_point_are_numbers(tmp_path: Path, pool_data: dict[str, Any]) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(pool_data) + "router: {lambda_per_microusd: 5e-4}\n")
    assert load_pool(path).router.lambda_per_microusd == 5e-4


def test_the_largest_cache_has_room_for_the_longest_context(pool_data: dict[str, Any]) -> None:
    small = pool_data["models"][0]
    small["engine"]["scheduler"] |= {"num_blocks": 2**31 - 1, "block_size": 65536}
    small["context_tokens"] = 2**28
    assert PoolSettings.model_validate(pool_data).models[0].context_tokens == 2**28


@pytest.mark.parametrize("key", ["b0_s", "host_s"])
def test_either_constant_makes_a_batch_take_time(pool_data: dict[str, Any], key: str) -> None:
    zeros = dict.fromkeys(("b0_s", "b1_s", "b2_s", "b3_s", "host_s"), 0.0)
    pool_data["models"][0]["engine"]["batch_time"] = zeros | {key: 1e-3}
    engine = PoolSettings.model_validate(pool_data).models[0].engine
    assert engine.batch_time is not None
    assert engine.batch_time.batch_time().b0_s == 1e-3


def test_settings_become_the_cores_types(pool: PoolSettings) -> None:
    small, _ = pool.models
    assert isinstance(small.engine, EmulatedEngineSettings)
    scheduler = small.engine.scheduler_config(small.context_tokens)
    batch_time = small.engine.batch_time.batch_time()
    assert (scheduler.max_model_len, scheduler.num_blocks) == (4096, 1001)
    assert batch_time.b0_s == pytest.approx(5.0e-3)
    spec = small.instance_spec("small-0", scheduler, batch_time, 1e5, 0.01)
    assert spec.prior_ttft_s == pytest.approx(0.04)
    assert spec.lps is not None
    assert spec.lps.capacity_qps == 10
