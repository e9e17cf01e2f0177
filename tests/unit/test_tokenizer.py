import pytest

from app.chat import PromptError, plain_messages
from app.config import HuggingFaceTokenizerSettings, QwenTokenizerSettings
from app.tokenizer import QwenTokenizer, Tokenizers, TokenizerUnavailable

IM_START, IM_END = 151644, 151645


@pytest.fixture(scope="module")
def qwen() -> QwenTokenizer:
    return QwenTokenizer()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The capital of France is", [785, 6722, 315, 9625, 374]),
        ("Grüße, 世界! 👋", [6464, 2391, 23455, 11, 220, 99489, 0, 61804, 233]),
        ("a\u0301 <|im_end|>", [1953, 220, IM_END]),
        ("", []),
    ],
)
def test_text_has_the_ids_of_qwen3s_own_tokenizer(
    qwen: QwenTokenizer, text: str, ids: list[int]
) -> None:
    assert qwen.encode_text(text).tolist() == ids


def test_a_chat_has_the_ids_of_qwen3s_own_template(qwen: QwenTokenizer) -> None:
    messages = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    assert qwen.encode_chat(messages).tolist() == [
        *[IM_START, 8948, 198, 2610, 525, 50537, 13, IM_END, 198],
        *[IM_START, 872, 198, 3838, 374, 220, 17, 10, 17, 30, IM_END, 198],
        *[IM_START, 77091, 198, 151667, 271, 151668, 271],
    ]


def test_a_combining_mark_after_a_control_token_does_not_change_it(qwen: QwenTokenizer) -> None:
    assert qwen.encode_text("<|im_end|>\u0338").tolist()[0] == IM_END


def test_thinking_is_off_unless_asked_for(qwen: QwenTokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert qwen.render(messages).endswith("assistant\n<think>\n\n</think>\n\n")
    assert qwen.render(messages, None, {"enable_thinking": True}).endswith("assistant\n")


def test_tools_and_their_answers_are_rendered(qwen: QwenTokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    call = {"function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "wind"},
    ]
    text = qwen.render(messages, tools)
    assert '\n<tools>\n{"type": "function", "function": {"name": "weather"}}\n</tools>' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in text
    assert (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
        "\n<tool_response>\nwind\n</tool_response><|im_end|>\n"
    ) in text


def test_earlier_reasoning_is_dropped(qwen: QwenTokenizer) -> None:
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
        {"role": "user", "content": "sure?"},
    ]
    text = qwen.render(messages)
    assert "one and one" not in text
    assert "<|im_start|>assistant\n2<|im_end|>\n" in text


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = plain_messages([{"role": "developer", "content": parts}])
    assert (message["role"], message["content"]) == ("system", "a\nb")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is 'robot'"),
        ([{"role": "user"}], r"messages\[0\].content must be a string"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[0\].*only text",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ],
            r"messages\[0\].tool_calls\[0\].function.arguments is not JSON",
        ),
    ],
)
def test_what_cannot_be_a_prompt_is_named(messages: list[dict[str, object]], says: str) -> None:
    with pytest.raises(PromptError, match=says):
        plain_messages(messages)


def test_the_pool_loads_each_tokenizer_once() -> None:
    tokenizers = Tokenizers({"qwen3": QwenTokenizerSettings(kind="qwen")})
    assert tokenizers["qwen3"] is tokenizers["qwen3"]


def test_a_missing_tokenizer_is_named(tmp_path: object) -> None:
    path = f"{tmp_path}/nowhere"
    tokenizers = Tokenizers({"t": HuggingFaceTokenizerSettings(kind="huggingface", path=path)})
    with pytest.raises(TokenizerUnavailable, match="nowhere"):
        tokenizers["t"]
