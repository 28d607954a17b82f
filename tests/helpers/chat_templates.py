"""Small chat templates of the shapes that published models have, and a tokenizer for each."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lit_fused.data.chat_template import CHATML

# The name of a template -> its text, the beginning-of-text token and the end of an answer.
CHATML_UNMARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The marks leave the end of the turn out.
CHATML_CONTENT_MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_MARKED = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# Thoughts are kept behind the last question only, and a last answer without any is given empty ones.
QWEN3 = (
    "{% set ns = namespace(last_query=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role in ('user', 'system') %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}{% set reasoning = '' %}"
    "{% if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last_query and (loop.last or reasoning) %}"
    "{{ '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% elif message.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + content + '</tool_response><|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# As DeepSeek's R1: the prompt opens the thoughts, but an answer is written without them.
THOUGHTS_OPENED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<|user|>' + message['content'] }}"
    "{% else %}{{ '<|assistant|>' + message['content'].split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# Tokens that swallow the white space behind them.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As Qwen 3.5's with thoughts: the prompt opens them, and an answer without any closes them behind a line break.
THOUGHTS_CONTINUED = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|im_start|>user\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# name: (template, what ends an answer, whether it takes a system message)
TEMPLATES = {
    "ours": (CHATML, "<|im_end|>", True),
    "chatml_marked": (CHATML_MARKED, "<|im_end|>", True),
    "chatml": (CHATML_UNMARKED, "<|im_end|>", True),
    "chatml_content_marked": (CHATML_CONTENT_MARKED, "<|im_end|>", True),
    "llama3": (LLAMA3, "<|eot_id|>", True),
    "llama3_marked": (LLAMA3_MARKED, "<|eot_id|>", True),
    "gemma": (GEMMA, "<end_of_turn>", False),
    "mistral": (MISTRAL, "</s>", False),
    "phi3": (PHI3, "<|end|>", True),
}

SPECIAL_TOKENS = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]
TEXT = ["the quick brown fox jumps over the lazy dog. How are you? \n\nI am well, thank you! 12 + 30 = 42 日本 🎉"] * 5


def make_tokenizer(template: str | None = None, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """A tokenizer trained on the spot.

    kind: "bytes", byte-level BPE; "lines", the same with a token for two line breaks, which it uses at a text's end;
        "trimmed", the same with offsets that leave white space out, as Llama 3's do;
        "metaspace", BPE with "▁" at the beginning of the text, as SentencePiece's; "llama2", the same behind each
        special token, too, as Llama 2's.
    """
    sentencepiece = kind in ("metaspace", "llama2")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if sentencepiece else None))
    if sentencepiece:
        if kind == "metaspace":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = list("▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?!.,\n0123456789+=日本🎉éñ'\"<>/:")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    swallowing = [
        AddedToken(token, rstrip=True, special=True) for token in ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    ]
    special = [*SPECIAL_TOKENS, *swallowing, *(["<unk>"] if sentencepiece else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, *["two\n\n\nlines"] * (5 if kind == "lines" else 0)], trainer)
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    built.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    built.chat_template = template
    return built
