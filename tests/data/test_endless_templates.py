"""Chat templates that never end or fill the memory are stopped, and a sentence says so."""

import resource
import signal
import time

import pytest

from lit_fused.data import ChatEncoding
from lit_fused.data.chat_template import CHATML
from lit_fused.data.tokenizer import train_tokenizer
from lit_fused.errors import UserError
from lit_fused.models import template_limits
from lit_fused.models.generation import encode_prompt

LOOP = "{% for i in range(90000) %}"
TEMPLATES = {
    "loops": (LOOP * 3 + "{% endfor %}" * 3, "takes more than 0.2 s"),
    "text": ("{{ 'x' * 10000000000 }}", "takes more than 1 GiB"),
    "doubled": ("{% set n = namespace(t='x') %}" + LOOP + "{% set n.t = n.t ~ n.t %}{% endfor %}", "takes more than"),
    "wide": ("{{ '%9999999999d' % 1 }}", "takes more than 1 GiB"),
    "power": ("{{ 10 ** 10 ** 10 }}", r"computes a power \(\*\*\)"),
}


@pytest.fixture
def tokenizer():
    return train_tokenizer(["a b c"], 260)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_without_end_is_stopped_where_it_is_rendered(name, tokenizer, monkeypatch):
    monkeypatch.setattr(template_limits, "_SECONDS", 0.2)
    monkeypatch.setattr(template_limits, "_BYTES", 2**26)  # Less is sooner reached; the sentence has the real limit.
    template, said = TEMPLATES[name]
    tokenizer.chat_template = template
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    start = time.process_time()
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(UserError, match=said):
        ChatEncoding().encoder(tokenizer, 8)([record])
    with pytest.raises(UserError, match=said):
        encode_prompt("a", tokenizer, chat=True)
    assert time.process_time() - start < 8
    assert before == (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_stars_in_a_text_are_no_power_and_prompts_keep_their_tokens(tokenizer):
    tokenizer.chat_template = "**" + CHATML
    tokens = encode_prompt("a", tokenizer, chat=True)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert tokens[0].tolist() == expected["input_ids"]
