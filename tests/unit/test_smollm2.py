from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra 'cpu'")
torch = pytest.importorskip("torch", reason="needs the extra 'cpu'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'cpu'")

from deployments import smollm2  # noqa: E402

HEADS, KV_HEADS, LAYERS = 4, 2, 3
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "1", "2"]


@pytest.fixture
def model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def reader(model: transformers.LlamaForCausalLM, tmp_path: Path) -> gguf.GGUFReader:
    """The model as llama.cpp would keep it."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL] * 3 + [kinds.NORMAL] * 5)
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.numpy()
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
        if heads:
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(path)


@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2)])
def test_the_unpacked_model_is_the_model(
    model: transformers.LlamaForCausalLM,
    reader: gguf.GGUFReader,
    layers: tuple[int, ...],
    tmp_path: Path,
) -> None:
    smollm2._write_model(reader, layers, tmp_path / "out")
    unpacked = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32
    ).eval()
    model.model.layers = torch.nn.ModuleList(model.model.layers[layer] for layer in layers)
    model.config.num_hidden_layers = len(layers)
    ids = torch.tensor([[1, 3, 4, 5, 6, 7, 3]])
    with torch.no_grad():
        expected, got = model(ids, use_cache=False).logits, unpacked(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)


def test_the_tokenizer_splits_digits_and_knows_its_specials(
    reader: gguf.GGUFReader, tmp_path: Path
) -> None:
    smollm2._write_model(reader, (0,), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("<s>ab12b</s>").input_ids == [1, 5, 6, 7, 4, 2]
    assert tokenizer.decode([5, 6, 7]) == "ab12"
    assert tokenizer.eos_token_id == 2
    message = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "ab"


def test_models_already_there_are_left_alone(tmp_path: Path) -> None:
    for name in smollm2.MODELS:
        (tmp_path / name).mkdir()
    assert smollm2.make_models(tmp_path) == [tmp_path / name for name in smollm2.MODELS]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(smollm2.MODELS)
