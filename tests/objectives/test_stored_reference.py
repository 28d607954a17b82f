"""A reference whose log-probabilities are stored with the data is the reference beside the model."""

import copy
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from chat_templates import make_tokenizer
from lightning_helpers import quiet_trainer
from tiny_models import tiny_model

from lit_fused import FusedPreferenceModule, PreferenceLoss
from lit_fused.app.commands.scoring import ScoreOptions, write_scores
from lit_fused.data import PreferenceEncoding, TokenDataModule
from lit_fused.data.stored_scores import StoredScores
from lit_fused.errors import UserError

PAIRS = [{"prompt": f"{n} +", "chosen": f" {n} fox" * (1 + n % 2), "rejected": " dog" * (1 + n % 3)} for n in range(20)]
SINGLE = [{"prompt": f"{n} +", "completion": " fox" * (1 + n % 3), "label": n % 2 == 0} for n in range(20)]


def data_of(folder, records=PAIRS, **options: Any) -> TokenDataModule:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    make_tokenizer().save_pretrained(folder / "tokenizer")
    settings: dict[str, Any] = {"block_size": 16, "batch_size": 3, "tokenizer": folder / "tokenizer"}
    data = TokenDataModule(path, PreferenceEncoding(), cache_dir=folder / "cache", **(settings | options))
    data.prepare_data()
    data.setup("fit")
    return data


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Return models that differ by their seeds."""
    model: Any = tiny_model("llama", vocab_size=len(make_tokenizer()))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return model.to(dtype)


def write(folder, data, reference):
    module = FusedPreferenceModule(reference, reference="stored").eval()
    write_scores(folder / "scores.parquet", ScoreOptions(), data, module, "a reference", quiet_trainer(folder))
    return folder / "scores.parquet"


def module_of(objective="dpo", **options: Any) -> FusedPreferenceModule:
    return FusedPreferenceModule(model_of(), PreferenceLoss(objective), partial(torch.optim.SGD, lr=0.1), **options)


@pytest.mark.parametrize(
    ("objective", "packing", "workers"),
    [("dpo", "padded", 0), ("dpo", "padded", 1), ("dpo", "packed", 0), ("kto", "padded", 0), ("kto", "packed", 0)],
)
def test_loss_and_gradients_are_those_with_the_reference_beside_it(tmp_path, objective, packing, workers):
    reference, records = model_of(1), SINGLE if objective == "kto" else PAIRS
    path = write(tmp_path, data_of(tmp_path, records, packing=packing), copy.deepcopy(reference))
    stored, beside = module_of(objective, reference="stored"), module_of(objective, reference=reference)
    data = data_of(tmp_path, records, packing=packing, scores=path, num_workers=workers)
    seen, divergences = 0, []
    for batch in [*data.train_dataloader(), *data.val_dataloader()]:
        of_reference = [name for name in batch if name.endswith("reference_log_prob")]
        assert len(of_reference) == (2 if objective == "kto" else 1)
        for name in of_reference:
            assert batch[name].dtype == torch.float64
            assert batch[name].shape == batch["desirable"].shape
        found = []
        for module in (stored, beside):
            given = {n: value for n, value in batch.items() if module is stored or n not in of_reference}
            output = module.model(given)
            loss = output.loss
            divergences.append(output.stats.get("kl", loss).item())
            found.append((loss, torch.autograd.grad(loss, [*module.parameters()])))
        (loss, gradients), (other, others) = found
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=0)
        assert abs(loss.item() - (0.5 if objective == "kto" else math.log(2))) > 1e-4  # The reference is another model.
        for gradient, wanted in zip(gradients, others, strict=True):
            assert (gradient - wanted).norm() <= 1e-10 * torch.stack([g.norm() for g in others]).norm()
        seen += batch["desirable"].numel() // (1 if objective == "kto" else 2)
    assert seen >= len(records) - 1  # What does not fill a batch is for the next epoch.
    assert max(divergences) > 0


def test_a_fit_with_a_file_logs_and_trains_what_a_fit_with_the_model_does(tmp_path):
    reference, found = model_of(1), []
    path = write(tmp_path, data_of(tmp_path), copy.deepcopy(reference))
    for scores, given in ((path, "stored"), (None, reference)):
        module = module_of(reference=given)
        trainer = quiet_trainer(tmp_path, max_epochs=1, precision="64-true", accumulate_grad_batches=2)
        trainer.fit(module, data_of(tmp_path, scores=scores))
        found.append((dict(trainer.callback_metrics), [p.detach() for p in module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_stored_sums_are_not_rounded_to_the_precision_of_the_model(tmp_path):
    seen = []

    class Watched(FusedPreferenceModule):
        def compute_loss(self, batch):
            seen.append(batch["reference_log_prob"])
            return super().compute_loss(batch)

    data = data_of(tmp_path)
    data = data_of(tmp_path, scores=write(tmp_path, data, model_of(1)))
    module = Watched(model_of(0, torch.float32), PreferenceLoss(), reference="stored")
    quiet_trainer(tmp_path, max_steps=1, precision="bf16-true").fit(module, data)
    assert {values.dtype for values in seen} == {torch.float64}
    assert (torch.cat(seen) != torch.cat(seen).bfloat16()).any()


def refusal(function) -> str:
    with pytest.raises(UserError) as raised:
        function()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_scores_of_other_pairs_or_of_swapped_answers_are_refused(tmp_path):
    path = write(tmp_path, data_of(tmp_path), model_of(1, torch.float32))
    assert StoredScores(path).header.model == "a reference"
    swapped = [record | {"chosen": record["rejected"], "rejected": record["chosen"]} for record in PAIRS]
    assert "are of other data" in refusal(lambda: data_of(tmp_path, swapped, scores=path).train_dataloader())
    assert "of other data: these have" in refusal(lambda: data_of(tmp_path, PAIRS[:-4], scores=path).train_dataloader())


def test_a_file_and_a_reference_that_do_not_fit_are_refused(tmp_path):
    path = write(tmp_path, data_of(tmp_path), model_of(1))
    fits = [
        ({"reference": "copy"}, path, "this run has another one or none; choose module.reference=stored"),
        ({"objective": "simpo"}, path, "this run has another one or none"),
        ({"reference": "stored"}, None, "reference=stored needs the log-probabilities of a reference; write them"),
    ]
    for options, scores, message in fits:
        trainer, data = quiet_trainer(tmp_path, max_steps=1), data_of(tmp_path, scores=scores)
        assert message in refusal(lambda: trainer.fit(module_of(**options), data))  # noqa: B023
