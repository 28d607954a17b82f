"""The forms of a conversation that chat templates expect, and marks that show what a template leaves out.

OpenAI's files have tool calls with arguments as a JSON string and no content, and texts as lists of parts. Templates
disagree on each: arguments as a mapping or a string, an empty content as None or "", text as a string or parts. Which
form a template takes is tried, with marks in place of what is said, called and answered: each has to appear.
"""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from lit_fused.errors import UserError

Message = dict[str, Any]

# Python's spelling of None and of mappings: a template that writes it expects another form.
_PYTHON_VALUES = ("None", "{'")


class LostError(UserError):
    """Says what of a conversation the chat template leaves out."""


def has_calls(messages: list[Message]) -> bool:
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the conversation in each form, the one that transformers documents first, and its own content first."""
    nothing = [None, ""] if any(message["content"] is None for message in messages) else ["", None]
    of_calls = product(nothing, (False, True)) if has_calls(messages) else [("", False)]
    for in_parts, (of_nothing, as_text) in product((False, True), of_calls):
        yield [_in_form(message, in_parts, of_nothing, as_text) for message in messages]


def _in_form(message: Message, in_parts: bool, nothing: str | None, as_text: bool) -> Message:
    content = message["content"] or (nothing if "tool_calls" in message else "")
    formed = {**message, "content": [{"type": "text", "text": content}] if in_parts and content else content}
    if "tool_calls" in message:
        formed["tool_calls"] = [
            _replace(call, arguments=_arguments(_function(call).get("arguments"), as_text))
            for call in message["tool_calls"]
        ]
    return formed


def _arguments(arguments: Any, as_text: bool) -> Any:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(value, ensure_ascii=False)
    return value if isinstance(value, dict) else arguments


def _function(call: Any) -> dict[str, Any]:
    """Return the name and the arguments of a call, which transformers' templates also take without a mapping around."""
    return call.get("function", call)


def _replace(call: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], **changes}} if "function" in call else {**call, **changes}


def marked(messages: list[Message]) -> tuple[list[Message], dict[str, str]]:
    """Return the messages with marks as values, and what each mark stands for."""
    marks: dict[str, str] = {}

    def mark(value: Any, what: str) -> Any:
        if isinstance(value, dict):
            return {key: inner if key == "type" else mark(inner, what) for key, inner in value.items()}
        if isinstance(value, list):
            return [mark(inner, what) for inner in value]
        thoughts, closed, said = value.rpartition("</think>") if isinstance(value, str) else ("", "", "value")
        if not said.strip():
            return value
        name = f"zq{len(marks)}qz"
        marks[name] = what
        return ("<think>hm" if "<think>" in thoughts else "hm") + closed + name if closed else name

    copies = []
    for number, message in enumerate(messages, start=1):
        of_message = f"of message {number} ({message['role']})"
        copy = {key: "hm" if key in ("reasoning_content", "thinking") else value for key, value in message.items()}
        if message["content"]:
            copy["content"] = mark(message["content"], f"the content {of_message}")
        if "tool_calls" in message:
            copy["tool_calls"] = [_marked_call(call, of_message, mark) for call in message["tool_calls"]]
        copies.append(copy)
    return copies, marks


def _marked_call(call: dict[str, Any], of_message: str, mark: Any) -> dict[str, Any]:
    name, arguments = (_function(call).get(key) for key in ("name", "arguments"))
    what = f"the tool call {name} {of_message}"
    if isinstance(arguments, str):
        return _replace(call, name=mark(name, what), arguments=json.dumps({"value": mark(arguments, what)}))
    return _replace(call, name=mark(name, what), arguments=mark(arguments, what))


def refuse_lost(text: str, marks: dict[str, str]) -> None:
    """Raise :class:`LostError` unless a text rendered from marked messages holds all marks, and nothing of Python."""
    lost = next((what for mark, what in marks.items() if mark not in text), None)
    if lost is None and any(value in text for value in _PYTHON_VALUES):
        lost = "the form of tool calls, and writes them as Python's values"
    if lost is not None:
        raise LostError(
            f"the chat template leaves out {lost}; set data.chat_template to a file whose template writes tool calls "
            "and what tools answer, or leave such conversations out"
        )


def openai_message(message: Message, number: int) -> Message:
    """Return a message with its parts of text joined, calls as ``tool_calls``, and the role "tool", also for OpenAI's
    older ``function_call`` and "function". UserError for a part that is no text, or a call without a name."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_of(part, number) for part in content)
    if isinstance(call := message.pop("function_call", None), dict):
        message["tool_calls"] = [{"type": "function", "function": call}]
    if message.get("role") == "function":
        message["role"] = "tool"
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(_function(call), dict) and isinstance(_function(call).get("name"), str)
        for call in calls
    ):
        raise UserError(
            f'tool_calls of message {number} must be a list of {{"function": {{"name": ..., "arguments": ...}}}}; '
            f"got {json.dumps(calls, default=str)[:100]}"
        )
    if not calls:
        message.pop("tool_calls", None)
    return message


def _text_of(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type", "without a type") if isinstance(part, dict) else type(part).__name__
    raise UserError(
        f"message {number} has a part of type {kind}; only parts of text can be learned: leave such conversations out"
    )
