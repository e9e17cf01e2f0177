import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.chat import PromptError, plain_messages
from app.config import HuggingFaceTokenizerSettings, QwenTokenizerSettings
from app.tokenizer import (
    RENDERER_KEYWORDS,
    HuggingFaceTokenizer,
    QwenTokenizer,
    Tokenizer,
    Tokenizers,
    TokenizerUnavailable,
)

IM_START, IM_END = 151644, 151645
HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% if style %}{{ 'style ' + style }}{% endif %}{{ raise_exception('no') if refuse }}"
    "{{ documents[0].title if documents }}{{ 1 // ratio if ratio is defined }}"
    "{{ tools | tojson if tools }}"
)


@pytest.fixture(scope="module")
def qwen() -> QwenTokenizer:
    return QwenTokenizer()


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """Bytes, and a template that reads a few variables."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'cpu'")
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=TEMPLATE
    ).save_pretrained(path)
    return HuggingFaceTokenizer(str(path))


@pytest.fixture(params=["qwen", "hugging_face"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    chosen: Tokenizer = request.getfixturevalue(request.param)
    return chosen


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
    with pytest.raises(PromptError, match=r"^chat_template_kwargs.enable_thinking is 'false'"):
        qwen.render(messages, None, {"enable_thinking": "false"})


def test_a_variable_of_another_models_template_changes_nothing(qwen: QwenTokenizer) -> None:
    assert qwen.render(HI, None, {"style": "terse"}) == qwen.render(HI)


def test_a_callers_variables_reach_the_template(hugging_face: HuggingFaceTokenizer) -> None:
    variables = {"style": "terse", "documents": [{"title": "T"}]}
    assert hugging_face.render(HI, None, variables) == "user: hi\nstyle terseT"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "add_generation_prompt", "messages", "conversation"]
)
def test_a_caller_cannot_set_what_the_renderer_sets(tokenizer: Tokenizer, name: str) -> None:
    with pytest.raises(PromptError, match=f"^chat_template_kwargs may not have {name}:"):
        tokenizer.encode_chat(HI, None, {name: "{{ 'mine' }}"})


def test_every_keyword_of_transformers_own_is_known(hugging_face: HuggingFaceTokenizer) -> None:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    for function in (
        PreTrainedTokenizerBase.apply_chat_template,
        chat_template_utils.render_jinja_template,
    ):
        # Documents are the caller's to give.
        keywords = inspect.signature(function).parameters.keys() - {"documents", "kwargs"}
        assert keywords <= RENDERER_KEYWORDS


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"style": 5}, "with chat_template_kwargs style .*TypeError"),
        ({"refuse": True}, "with chat_template_kwargs refuse .*TemplateError: no"),
        ({"documents": 5}, "with chat_template_kwargs documents .*TypeError"),
        ({"ratio": 0}, "with chat_template_kwargs ratio .*ZeroDivisionError"),
    ],
)
def test_what_breaks_the_template_is_the_callers_error(
    hugging_face: HuggingFaceTokenizer, variables: dict[str, Any], says: str
) -> None:
    with pytest.raises(PromptError, match=f"^messages {says}"):
        hugging_face.encode_chat(HI, None, variables)


@pytest.mark.parametrize(
    ("messages", "tools", "variables", "where"),
    [
        ([*HI, {"role": "user", "content": "a\ud800"}], None, None, r"messages\[1\]"),
        ([{"role": "user", "content": "a", "name": "\udfff"}], None, None, r"messages\[0\]"),
        (HI, [{"function": {"\ud800": 1}}], None, r"tools\[0\]"),
        (HI, None, {"style": "\ud800"}, "chat_template_kwargs"),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
                }
            ],
            None,
            None,
            r"messages\[0\]",
        ),
    ],
)
def test_half_a_character_is_refused_where_it_stands(
    tokenizer: Tokenizer, messages: Any, tools: Any, variables: Any, where: str
) -> None:
    with pytest.raises(PromptError, match=rf"^{where} has a lone surrogate, U\+D[8F]"):
        tokenizer.encode_chat(messages, tools, variables)


def test_half_a_character_is_refused_in_plain_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"^prompt has a lone surrogate, U\+D83D"):
        tokenizer.encode_text("\ud83d")
    assert len(tokenizer.encode_text("\U0001f44b")) > 0


def test_a_blank_too_long_to_split_is_refused(qwen: QwenTokenizer) -> None:
    assert len(qwen.encode_text(" " * 500_000 + "a")) > 1
    blank = " " * 1_000_000
    with pytest.raises(PromptError, match=r"^prompt has 1000000 blanks in a row"):
        qwen.encode_text(blank)
    with pytest.raises(PromptError, match=r"^messages has 1000000 blanks in a row"):
        qwen.encode_chat([{"role": "user", "content": f"a{blank}b"}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One wrong value among many right ones gets farther than wrong ones alone."""
    return st.integers(0, 15).flatmap(lambda n: usual if n else JSON)


def an_object(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    optional = {name: mostly(usual) for name, usual in fields.items()}
    return mostly(st.fixed_dictionaries({}, optional=optional))


TEXT = st.text()
NULLABLE_TEXT = st.none() | TEXT
ARGUMENTS = st.sampled_from(["{}", '{"a": "\\ud800"}', '{"a": [1e999]}', "9" * 5000]) | JSON
PART = mostly(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}))
CALL = an_object(
    id=TEXT,
    type=st.just("function"),
    function=mostly(st.fixed_dictionaries({"name": mostly(TEXT), "arguments": ARGUMENTS})),
)
MESSAGE = mostly(
    st.fixed_dictionaries(
        {
            "role": mostly(st.sampled_from(["system", "developer", "user", "assistant", "tool"])),
            "content": mostly(TEXT | st.lists(PART, max_size=3)),
        },
        optional={
            "name": mostly(NULLABLE_TEXT),
            "tool_call_id": mostly(NULLABLE_TEXT),
            "reasoning_content": mostly(NULLABLE_TEXT),
            "tool_calls": mostly(st.none() | st.lists(CALL, max_size=2)),
        },
    )
)


@given(
    messages=mostly(st.lists(MESSAGE, max_size=4)),
    tools=mostly(st.none() | st.lists(st.dictionaries(TEXT, JSON), max_size=2)),
    variables=mostly(st.none() | st.dictionaries(TEXT, JSON, max_size=2)),
)
def test_any_json_is_a_prompt_or_a_prompt_error(
    qwen: QwenTokenizer, messages: Any, tools: Any, variables: Any
) -> None:
    refusal = None
    try:
        ids = qwen.encode_chat(messages, tools, variables)
    except PromptError as error:
        refusal = str(error)
    if refusal is None:
        assert ids.dtype == np.int32
        assert ids[0] == IM_START
    else:
        assert refusal.startswith(("messages", "tools", "chat_template_kwargs"))


@pytest.mark.parametrize("nesting", [500, 900, 1000, 5000])
def test_any_nesting_is_a_prompt_or_a_prompt_error(tokenizer: Tokenizer, nesting: int) -> None:
    nested: dict[str, Any] = {}
    for _ in range(nesting):
        nested = {"a": nested}
    arguments = '{"a":' * nesting + "1" + "}" * nesting
    call = {"function": {"name": "f", "arguments": arguments}}
    refused = 0
    for messages, tools in (
        (HI, [nested]),
        ([{"role": "assistant", "tool_calls": [call]}], None),
    ):
        try:
            tokenizer.encode_chat(messages, tools)
        except PromptError:
            refused += 1
    assert nesting < 5000 or refused == 2


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
        (5, "^messages is int, not a list"),
        ([5], r"messages\[0\] is int, not an object"),
        ([{"role": "user", "content": "", "name": 5}], r"messages\[0\].name is int"),
        ([{"role": "tool", "content": "", "tool_call_id": []}], r"tool_call_id is list"),
        ([{"role": "assistant", "reasoning_content": 5}], r"reasoning_content is int, not a str"),
        ([{"role": "assistant", "tool_calls": 5}], r"messages\[0\].tool_calls is int, not a list"),
        ([{"role": "assistant", "tool_calls": [5]}], r"tool_calls\[0\] must be"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 0}}]}],
            r"tool_calls\[0\].function.arguments is int, not an object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            r"tool_calls\[0\].function.arguments is list, not an object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}],
            r"tool_calls\[0\].id is int, not a string",
        ),
    ],
)
def test_what_cannot_be_a_prompt_is_named(messages: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        plain_messages(messages)


def test_the_pool_loads_each_tokenizer_once() -> None:
    tokenizers = Tokenizers({"qwen3": QwenTokenizerSettings(kind="qwen")})
    assert tokenizers["qwen3"] is tokenizers["qwen3"]


def test_a_tool_that_is_no_object_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"^tools\[1\] is int, not an object"):
        tokenizer.encode_chat(HI, [{}, 5])  # type: ignore[list-item]


@pytest.mark.parametrize("arguments", [None, "", "{}"])
def test_a_call_may_have_no_arguments(arguments: str | None) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    (message,) = plain_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    path = f"{tmp_path}/nowhere"
    tokenizers = Tokenizers({"t": HuggingFaceTokenizerSettings(kind="huggingface", path=path)})
    with pytest.raises(TokenizerUnavailable, match="nowhere"):
        tokenizers["t"]
