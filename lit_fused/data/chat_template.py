"""Choose the chat template that writes conversations: the tokenizer's own, ChatML, or that of a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AddedToken, PreTrainedTokenizerBase

from lit_fused.data.encoding import RecordEncoding
from lit_fused.errors import UserError

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
# ChatML, with tools and calls as Hermes and Qwen 2.5 write them. A tool's answer is a turn of the role "tool".
CHATML = (
    "{% set system = messages[0]['content'] + '\\n\\n' if messages and messages[0]['role'] == 'system' else '' %}"
    "{% if tools %}{{ '<|im_start|>system\\n' + system }}"
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and system) %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] %}"
    "{{ ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n{\"name\": \"' }}"
    "{{ call['function']['name'] + '\", \"arguments\": ' + call['function']['arguments'] | tojson }}"
    "{{ '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def with_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Return ``tokenizer`` with its own chat template (None), or with another one's text. ChatML's two tokens are added
    to a tokenizer that lacks them; the model's vocabulary grows with it. UserError: there is no template."""
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template; set data.chat_template to a file with one (Jinja), or to chatml, "
            f"which adds the tokens {' and '.join(CHATML_TOKENS)} where they are not in it yet"
        )
    if chat_template == CHATML:
        missing = [token for token in CHATML_TOKENS if token not in tokenizer.get_vocab()]
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in missing])
        tokenizer.eos_token = CHATML_TOKENS[1]  # generation stops there
    return tokenizer


@dataclass(kw_only=True)
class TemplatedEncoding(RecordEncoding):
    """Some documents are conversations.

    Attributes:
        chat_template: None: the tokenizer's own. Or "chatml", or a file with a template (Jinja), or its text, which
            each of them becomes.
        template_kwargs: What else the template reads, such as ``{"enable_thinking": False}``.
    """

    chat_template: str | Path | None = None
    template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.template_kwargs = dict(self.template_kwargs or {})
        self.chat_template = _text_of(self.chat_template)


def _text_of(chat_template: str | Path | None) -> str | None:
    text = str(chat_template)
    if chat_template is None or "{%" in text or "{{" in text:
        return None if chat_template is None else text
    try:
        return CHATML if text == "chatml" else Path(text).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"data.chat_template must be chatml or a file with a Jinja template: {error}") from error
