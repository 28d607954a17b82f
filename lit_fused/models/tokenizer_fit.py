"""Fit the vocabulary of a pretrained model to the tokenizer of its data."""

from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lit_fused.errors import UserError
from lit_fused.heads import peft_model
from lit_fused.models.language_model import LanguageModel
from lit_fused.models.load import Origin, grow_vocabulary, origin_of


def fit_vocabulary(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Grow the vocabulary of a model of ``lit_fused.from_pretrained`` to the tokenizer's, and warn if that is not its
    own. UserError for adapters around the model, below which its new rows would stay frozen."""
    inner = model.transformers_model
    origin = origin_of(inner)
    if inner is None or origin is None:
        return
    name = type(inner).__name__
    _compare_with_own(tokenizer, origin, name)
    entries, before = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())), model.vocabulary
    if entries <= before or any(isinstance(p, DTensor) for p in model.parameters()):
        return
    if peft_model(model.backbone) is not None:
        raise UserError(
            f"the tokenizer has {entries} entries but the pretrained {name} only {before}, and its new rows would stay "
            f"frozen below the adapters: set vocab_size={entries} where the model is loaded (model.model.vocab_size), "
            "and train them (model.peft_config.modules_to_save or trainable_token_indices)"
        )
    rows = grow_vocabulary(inner, entries, origin.pad_to_multiple_of)
    model.replace_head(None)
    grows = f"its vocabulary grows to {rows}, each new row the mean of the old ones."
    rank_zero_info(f"The tokenizer has {entries} entries, {name} has {before}: {grows}")


@rank_zero_only
def _compare_with_own(tokenizer: PreTrainedTokenizerBase, origin: Origin, name: str) -> None:
    """Warn if tokens have other numbers in the tokenizer than in the one that the model was pretrained with."""
    try:
        own = AutoTokenizer.from_pretrained(
            origin.path, revision=origin.revision or "main", trust_remote_code=False
        ).get_vocab()
    except Exception:  # The model has no tokenizer, or one that cannot be read, to compare with.
        return
    given = tokenizer.get_vocab()
    other = sum(given.get(token) != number for token, number in own.items())
    if other:
        rank_zero_warn(
            f"the data's tokenizer is not that of the pretrained {name}: {other} of its {len(own)} entries have "
            f"another number or none, so that what it has learned of them belongs to others now; choose "
            f"data.tokenizer={origin.path} unless you mean to train a new vocabulary"
        )
