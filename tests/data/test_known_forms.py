"""Records of the forms that data sets have, as JSON lines, a JSON list or Parquet, are known by their columns."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CHATML_UNMARKED, make_tokenizer
from datasets import Dataset

from lit_fused.data import ChatEncoding, InstructionEncoding, PairEncoding, PreferenceEncoding
from lit_fused.data.records import load_records
from lit_fused.errors import UserError


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(name: str, kind: str, arguments: str) -> list[dict[str, Any]]:
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
    properties = {kind: {"type": "string"}}
    return [
        user("Please."),
        assistant(None, tool_calls=[call]),
        {"role": "tool", "tool_call_id": name, "content": "{}"},
        assistant("Done."),
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}},
    ]


CHATML: Any = {"chat_template": "chatml"}
*WEATHER, WEATHER_TOOL = called("weather", "city", '{"city": "Oslo"}')
*NEWS, NEWS_TOOL = called("news", "days", '{"days": 2}')
FORMS: dict[str, tuple[Any, list[dict[str, Any]], list[str]]] = {
    "OpenAI": (
        ChatEncoding(**CHATML),
        [{"messages": [user("add"), assistant("3")]}, {"messages": [{**user("add"), "name": "me"}, assistant("4")]}],
        ["3<|im_end|>", "4<|im_end|>"],
    ),
    "OpenAI tools": (
        ChatEncoding(**CHATML),
        [
            {"messages": WEATHER, "tools": [WEATHER_TOOL]},
            {"messages": NEWS, "tools": [NEWS_TOOL]},
            {"messages": [user("add"), assistant("3")]},
        ],
        [
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>Done.<|im_end|>',
            '<tool_call>\n{"name": "news", "arguments": {"days": 2}}\n</tool_call><|im_end|>Done.<|im_end|>',
            "3<|im_end|>",
        ],
    ),
    "ShareGPT": (
        ChatEncoding(**CHATML),
        [{"id": "1", "conversations": [{"from": "human", "value": "add"}, {"from": "gpt", "value": "3"}]}],
        ["3<|im_end|>"],
    ),
    "Alpaca": (
        InstructionEncoding(),
        [{"instruction": "add", "input": "", "output": "3"}, {"instruction": "add", "input": "1", "output": "4"}],
        ["3</s>", "4</s>"],
    ),
    "prompts": (
        InstructionEncoding(),
        [{"prompt": "add", "completion": "3"}],
        ["3</s>"],
    ),
    "prompts of messages": (
        InstructionEncoding(**CHATML),
        [{"prompt": [user("add")], "completion": [assistant("3")]}],
        ["3<|im_end|>"],
    ),
    "preferences": (
        PreferenceEncoding(),
        [{"prompt": "add", "chosen": "3", "rejected": "4"}],
        ["3</s>4</s>"],
    ),
    "UltraFeedback": (
        PreferenceEncoding(**CHATML),
        [
            {
                "prompt": "add",
                "chosen": [user("add"), assistant("3")],
                "rejected": [user("add"), assistant("4")],
                "messages": [user("add"), assistant("3")],
                "score_chosen": 8.0,
            }
        ],
        ["3<|im_end|>4<|im_end|>"],
    ),
    "single answers": (
        PreferenceEncoding(),
        [{"prompt": "add", "completion": "3", "label": True}],
        ["3</s>"],
    ),
}


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_the_answers_of_a_file_of_a_known_form_are_learned(form, kind, tmp_path: Path):
    encoding, records, answers = FORMS[form]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        Dataset.from_list(records).to_parquet(path)
    else:
        text = json.dumps(records) if kind == "json" else "".join(json.dumps(record) + "\n" for record in records)
        path.write_text(text)
    encoder = encoding.encoder(make_tokenizer(), 1000)
    encoded = encoder(load_records(path).to_list())
    assert [encoder.tokenizer.decode(one.tokens[one.loss_mask]) for one in encoded] == answers


TEXT = {"text": "a", "id": 1}
PAIR = {"chosen": [user("a"), assistant("b")], "rejected": [assistant("c")]}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        ChatEncoding,
        TEXT,
        "no conversations .no column messages .*; their columns are text, id; set data.mess",
    ),
    (
        ChatEncoding,
        {"messages": [user("a"), assistant(3)]},
        r"message 2 \(assistant\) must be text; got '3'",
    ),
    (ChatEncoding, {"messages": [{"content": "hello"}]}, "message 1 has no role"),
    (InstructionEncoding, TEXT, "no completion, no prompt.; their columns are text, id; set data.prompt .*data=chat"),
    (InstructionEncoding, {"prompt": "a", "completion": 3}, "must be texts, .* got prompt: 'a', completion: '3'"),
    (PairEncoding, TEXT, "no column source and no target; their columns are text, id; set data.source_column"),
    (PreferenceEncoding, {"prompt": "a", "chosen": "b"}, "no preferences .*; their columns are prompt, chosen; set"),
    (PreferenceEncoding, PAIR, "lists of messages that begin with the same ones"),
]


@pytest.mark.parametrize(("encoding", "record", "said"), REFUSED)
def test_a_record_of_another_form_is_refused_with_its_columns_and_what_maps_them(encoding, record, said):
    with pytest.raises(UserError, match=said):
        encoding().encoder(make_tokenizer(CHATML_UNMARKED), 100)([record])


def test_an_answer_of_weight_0_is_context_only():
    encoder = ChatEncoding().encoder(make_tokenizer(CHATML_UNMARKED), 100)
    messages = [user("a"), assistant("dog", weight=0), user("b"), assistant("fox", weight=1)]
    (encoded,) = encoder([{"messages": messages}])
    assert encoder.tokenizer.decode(encoded.tokens[encoded.loss_mask]) == "fox<|im_end|>"
