"""Log-likelihoods of texts: the model's own, in float64 and over architectures, and no logits on the way."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shapes_seen import shapes
from tiny_models import MODELS, VOCABULARY, ScaledInTraining, sharpen, tiny_backbone, tiny_llama, tiny_model
from tiny_seq2seq import tiny_seq2seq
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lit_fused
from lit_fused.errors import UserError
from lit_fused.evaluation.text_scores import TextScore
from lit_fused.losses import LinearCrossEntropyLoss
from lit_fused.models.language_model import LanguageModel
from lit_fused.objectives.distillation import scores_to_store
from lit_fused.objectives.preference_loss import answers_to_store

TEXTS = [[5, 9, 3], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [], [96, 95, 94, 93]]


@torch.no_grad()
def expected(model: Any, context: list[int], text: list[int]) -> Tensor:
    """The log-probabilities of a text's tokens, from logits of one row without padding."""
    if not text:
        return torch.empty(0, dtype=torch.float64)
    model.eval()
    options = {"use_cache": False} if isinstance(model, PreTrainedModel) else {}
    output: Any = model(input_ids=torch.tensor([[*context, *text]]), **options)
    layer: Any = model.get_output_embeddings()
    logits = output.logits if hasattr(output, "logits") else layer(output)
    log_probs = F.log_softmax(logits[0].double(), -1)
    places = torch.arange(len(context), len(context) + len(text))
    return log_probs[places - 1, torch.tensor(text, dtype=torch.long)]


def check(found: TextScore, truth: Tensor, tolerance: float) -> None:
    assert found.num_tokens == len(truth) == len(found.log_probs)
    assert torch.allclose(found.log_probs.double(), truth, rtol=tolerance, atol=tolerance)
    assert found.log_likelihood == pytest.approx(truth.sum().item(), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_score_of_each_text_is_that_of_its_logits_whatever_the_batches(dtype):
    model = sharpen(tiny_model("llama", dtype))
    for batch_size in (1, 2, 8):
        found = lit_fused.score(model, None, TEXTS, batch_size=batch_size)
        for one, text in zip(found, TEXTS, strict=True):
            check(one, expected(model, text[:1], text[1:]), 1e-5 if dtype == torch.float32 else 1e-10)
    assert [one.num_tokens for one in found] == [2, 0, 8, 0, 3]


QUICK = {"gemma2", "granite", "phi", "mixtral"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS])
def test_the_score_is_that_of_the_logits_for_every_formula_of_a_head(name):
    model = sharpen(tiny_model(name))
    for one, text in zip(lit_fused.score(model, None, TEXTS), TEXTS, strict=True):
        check(one, expected(model, text[:1], text[1:]), 2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi"])
def test_the_scores_that_mode_score_stores_are_those_of_the_texts(name):
    model = tiny_model(name).eval()
    ids = torch.randint(3, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(0))
    of_texts = torch.stack([found.log_probs for found in lit_fused.score(model, None, ids.tolist())])
    language = LanguageModel(model, LinearCrossEntropyLoss())
    batch = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(scores_to_store(language, batch, 4)[2][:, :-1], of_texts)
    torch.testing.assert_close(-language.token_losses(batch)[:, :-1], of_texts)
    (of_answers,) = answers_to_store(language, batch | {"desirable": torch.tensor([1, 0, 1, 0])})
    torch.testing.assert_close(of_answers.flatten().double(), of_texts.double().sum(-1), atol=1e-5, rtol=1e-6)


def test_a_backbone_that_is_no_transformers_model_is_scored():
    model = sharpen(tiny_backbone())
    for one, text in zip(lit_fused.score(model, None, TEXTS), TEXTS, strict=True):
        check(one, expected(model, text[:1], text[1:]), 1e-5)


def test_a_model_with_adapters_also_on_its_output_layer_is_scored_with_them():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(sharpen(tiny_model("llama")), config)
    for one, text in zip(lit_fused.score(model, None, TEXTS), TEXTS, strict=True):
        check(one, expected(model.get_base_model(), text[:1], text[1:]), 2e-5)


def test_bfloat16_log_probabilities_are_no_further_from_float64_than_those_of_rounded_logits():
    model = sharpen(tiny_model("llama", torch.bfloat16)).eval()
    texts = torch.randint(3, VOCABULARY, (4, 60), generator=torch.Generator().manual_seed(0)).tolist()
    found = torch.cat([one.log_probs for one in lit_fused.score(model, None, texts, batch_size=1)])
    layer: Any = model.get_output_embeddings()
    hidden: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: hidden.append(args[0][0, :-1].double()))
    usual = torch.cat([expected(model, text[:1], text[1:]) for text in texts])
    handle.remove()
    log_probs = F.log_softmax(torch.stack(hidden) @ layer.weight.double().T, -1)
    exact = log_probs.gather(-1, torch.tensor(texts)[:, 1:, None]).flatten().detach()
    assert (found - exact).norm() <= 1.05 * (usual - exact).norm()


def test_an_encoder_decoder_is_refused():
    with pytest.raises(UserError, match="is an encoder-decoder"):
        lit_fused.score(tiny_seq2seq("t5"), None, TEXTS)


def test_a_context_is_not_scored_and_answers_to_one_question_share_its_row():
    model = sharpen(tiny_model("llama"))
    contexts = [[3, 4, 5]] * 4 + [[3, 4]]
    answers = [[6], [7], [8, 9], [10], [5, 6]]
    rows: list[tuple[int, ...]] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, args, __: rows.append(tuple(args[0].shape)))
    found = lit_fused.score(model, None, answers, contexts)
    handle.remove()
    assert rows[-1] == (2, 4), "[3, 4, 5] predicts four of them, and [3, 4, 5, 8] the other"
    for one, context, answer in zip(found, contexts, answers, strict=True):
        check(one, expected(model, context, answer), 1e-5)


def test_is_greedy_says_whether_greedy_decoding_writes_the_text():
    model: Any = sharpen(tiny_model("llama")).eval()
    prompt = torch.tensor([[5, 6, 7]])
    written = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 3:]
    greedy = written.tolist()
    other = [*greedy[:2], (greedy[2] + 1) % VOCABULARY, greedy[3]]
    found = lit_fused.score(model, None, [greedy, other], [prompt[0].tolist()] * 2)
    assert [one.is_greedy for one in found] == [True, False]


def words(**options: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    if options:
        template = processors.TemplateProcessing(special_tokens=[("w1", 1), ("w2", 2)], **options)
        tokenizer.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2")


def test_strings_are_scored_as_their_tokens_and_special_tokens_are_no_trap():
    model = sharpen(tiny_model("llama"))
    [plain] = lit_fused.score(model, words(), ["w5 w6 w7"])
    check(plain, expected(model, [5], [6, 7]), 1e-5)
    [alone] = lit_fused.score(model, words(), "w5 w6 w7")  # not a text of each character
    check(alone, expected(model, [5], [6, 7]), 1e-5)
    [started] = lit_fused.score(model, words(single="w1 $A"), ["w5 w6 w7"])
    check(started, expected(model, [1], [5, 6, 7]), 1e-5)
    [after] = lit_fused.score(model, words(), [" w7 w8"], ["w5 w6"])
    check(after, expected(model, [5, 6], [7, 8]), 1e-5)
    [ended] = lit_fused.score(model, words(single="$A w2"), [" w7 w8"], ["w5 w6"])
    check(ended, expected(model, [5, 6], [7, 8, 2]), 1e-5)


def test_a_model_in_training_is_evaluated_and_left_in_training():
    model = tiny_model("gpt2", resid_pdrop=0.5)
    [first] = lit_fused.score(model, None, [[5, 6, 7, 8]])
    assert model.training
    check(first, expected(model, [5], [6, 7, 8]), 1e-5)


class ScaledLater(type(tiny_llama())):
    """A scale of logits that no probe of eight tokens can see."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = super().forward(*args, **kwargs)
        if kwargs["input_ids"].shape[1] > 8:
            output.logits = 1.1 * output.logits
        return output


def test_a_model_whose_logits_are_another_formula_is_refused_by_its_first_batch():
    model = sharpen(tiny_llama(ScaledLater))
    with pytest.raises(UserError, match="not the formula") as caught:
        lit_fused.score(model, None, [list(range(3, 33))])
    assert "score it with its logits" in str(caught.value)
    assert lit_fused.score(sharpen(tiny_llama(ScaledInTraining)), None, TEXTS), "it is in evaluation mode"


def test_no_tensor_has_the_vocabulary_for_more_rows_than_a_chunk_and_the_models_logits_are_never_built():
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, VOCABULARY, (16, 200), generator=generator).tolist()
    lit_fused.score(model, None, texts[:1], batch_size=1)

    def of_more_rows_than(seen: set[tuple[int, ...]], rows: int) -> set[tuple[int, ...]]:
        return {s for s in seen if VOCABULARY in s and torch.Size(s).numel() > rows * VOCABULARY}

    tokens = 16 * 199
    with shapes() as seen:
        lit_fused.score(model, None, texts, batch_size=16)
    assert not of_more_rows_than(seen, tokens // 2 + 128), "a chunk: half of the tokens, rounded up"
    with shapes() as seen, torch.no_grad():
        model(input_ids=torch.tensor(texts))
    assert of_more_rows_than(seen, tokens), "the check sees logits"
