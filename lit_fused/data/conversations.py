"""Read conversations: messages as OpenAI's files and as ShareGPT's have them, in the form that chat templates read."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from lit_fused.data.encoding import LeftOut
from lit_fused.errors import UserError, check_number

Message = dict[str, Any]  # "role", "content" (a string), perhaps "tool_calls" and what else a template reads

_COLUMNS = ("messages", "conversations", "conversation")  # that are known to hold messages
# ShareGPT's names of the speakers.
_ROLES = {"human": "user", "observation": "tool", "function_response": "tool"}
_ROLES |= dict.fromkeys(("gpt", "chatgpt", "model", "bot", "function_call"), "assistant")


def unknown_form(what: str, columns: Iterable[str], options: str) -> UserError:
    """Return the error for data whose columns no known form has; ``options`` map them."""
    return UserError(f"these data hold no {what}; their columns are {', '.join(columns) or 'none'}; set {options}")


def check_border(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, tokens: list[int], whole: list[int]
) -> None:
    """Raise LeftOut unless ``tokens``, of a prompt and of an answer alone, say what those of both together do."""
    if tokenizer.decode(tokens) != tokenizer.decode(whole):
        raise LeftOut(
            "the prompt's end and the completion's beginning share a token, and the tokenizer cannot encode the "
            "completion alone; a space or a line break between them must be at the beginning of the completion"
        )


def read_conversation(record: Mapping[str, Any], column: str | None = None) -> tuple[list[Message], list[Any] | None]:
    """Return the messages and the tools (or None) of a record. Tools are a list, or JSON of one."""
    known = [column] if column else _COLUMNS
    column = next((name for name in known if name in record), None)
    if column is None:
        hint = "data.messages_column to the one with the messages, or choose data=instruction for prompts with answers"
        raise unknown_form(f"conversations (no column {' or '.join(known)})", record, hint)
    messages = record[column]
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise UserError(f'{column} must be a list of {{"role", "content"}}; got {str(messages)[:80]!r}')
    return read_messages(messages), read_tools(record)


def read_tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools, functions = record.get("tools"), record.get("functions")  # The latter is OpenAI's older name.
    found: Any = tools or functions
    found = json.loads(found) if isinstance(found, str) and found.strip() else found
    return [tool if tools else {"type": "function", "function": tool} for tool in found or ()] or None


def read_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Return messages whose content is a string and whose calls have their arguments as a mapping."""
    return [_message(dict(message), number) for number, message in enumerate(messages, start=1)]


def _message(message: Message, number: int) -> Message:
    if "from" in message and "role" not in message:
        speaker = message.pop("from")
        message = {"role": _ROLES.get(speaker, speaker), "content": message.pop("value", ""), **message}
    if "role" not in message:
        raise UserError(f"message {number} has no role; got {str(message)[:80]!r}")
    message["role"] = {"function": "tool"}.get(message["role"], message["role"])
    if "function_call" in message:  # OpenAI's older name
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_call(call) for call in calls]
    content = message.get("content")
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = "".join(map(_text_of, content))
    if not isinstance(content, str):
        raise UserError(f"the content of message {number} ({message['role']}) must be text; got {str(content)[:80]!r}")
    return {**message, "content": content}


def _text_of(part: Any) -> str:
    part = {"text": part} if isinstance(part, str) else part
    if not isinstance(part.get("text"), str):
        raise LeftOut(f"a message has a part of type {part.get('type')}, and only text is learned")
    return part["text"]


def _call(call: Message) -> Message:
    """Return a call in the form that transformers documents."""
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {"type": "function", **{key: call[key] for key in ("id",) if key in call}, "function": function}


def says(message: Mapping[str, Any]) -> bool:
    """Return whether a message is the assistant's and not empty."""
    said = [message.get(key) for key in ("content", "tool_calls", "reasoning_content", "thinking")]
    is_empty = not any(value.strip() if isinstance(value, str) else value for value in said)
    return message["role"] == "assistant" and not is_empty


def weight_of(message: Mapping[str, Any]) -> float:
    """Return the factor on the loss of a message, "weight", 1 by default."""
    return loss_weight("weight of a message", message.get("weight"))


def loss_weight(name: str, value: Any) -> float:
    """Return a factor on a loss as Python's own, 1 for None. UserError unless it is a finite number of 0 or more."""
    check_number(f"the {name}", 1 if value is None else value, "be a number of 0 or more", lambda x: 0 <= x < math.inf)
    return 1.0 if value is None else float(value)
