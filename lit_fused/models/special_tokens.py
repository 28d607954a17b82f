"""Give a text one beginning-of-text and one end-of-text token where it spells them out and its encoding adds them."""

from transformers import PreTrainedTokenizerBase


def one_of_each(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a text with one beginning-of-text token in front, where there are several, and one
    end-of-text token behind.

    A prompt "<s>[INST] ..." of a chat template has two of the former if the tokenizer adds its own: no model was
    trained on that."""
    bos, eos, begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id, 0, len(tokens)
    while isinstance(bos, int) and tokens[begin : begin + 2] == [bos, bos]:
        begin += 1
    while isinstance(eos, int) and end - begin > 1 and tokens[end - 2 : end] == [eos, eos]:
        end -= 1
    return tokens[begin:end]


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many end-of-text tokens, 0 or 1, the tokenizer itself appends to a text."""
    ends = [tokenizer(text)["input_ids"][-1:] == [tokenizer.eos_token_id] for text in ("", "a")]  # type: ignore[index]
    return int(all(ends))
