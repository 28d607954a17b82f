"""Test what a pipeline adds to a fit, in real processes: ragged batches, evaluation, moving checkpoints, refusals."""

import re
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pipeline_job
import pytest
import torch
from errors_of import relative_error
from lightning_helpers import loader, quiet_trainer
from parallel_cases import Case
from parallel_fits import launch as launch_fits
from parallel_fits import resume
from pipeline_job import SETTINGS, module, ragged
from ranks import each
from tiny_models import tiny_model
from transformers import LlamaForCausalLM

import lit_fused
from lit_fused import LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.pipeline import PipelineStrategy
from lit_fused.pipeline.division import divide, prune
from lit_fused.pipeline.stages import (
    SCHEDULES,
    Elsewhere,
    Layout,
    Stage,
    StageForwardPass,
    check_stages,
    find_decoder,
    layers_of_stages,
)

REFUSED = {
    "encoder-decoder": "cannot divide T5ForConditionalGeneration: it is not an embedding, one list of layers",
    "adapters": "strategy=pp cannot divide LlamaForCausalLM: it .* has PEFT's adapters",
    "compiled": r"strategy=pp cannot divide LlamaForCausalLM: it .* is compiled",
    "plain module": "strategy=pp cannot divide TinyBackbone: it is no transformers model",
    "other shape": "cannot divide GPT2LMHeadModel: it has other parameters besides these: transformer.ln_f.weight",
    "scaled": "cannot divide Scaled: its hidden states are not those of its stages one after the other",
    "several streams": r"cannot divide Qwen4ExpForCausalLM: its layers give \(2, 8, 256\) for \(2, 8\) tokens of 64",
    "router": "MixtralForCausalLM has a router's auxiliary loss.*switch it off",
    "loss=model": "loss=model needs the whole model in one process.*choose loss=standard or loss=chunked",
    "training_step": r"OwnStep.training_step must return what super\(\).training_step\(...\) returned",
    "compute_loss": "OwnLoss overrides compute_loss",
    "backward": "OwnBackward overrides backward, which strategy=pp would not call",
    "few layers": "4 pipeline stages need at least as many layers, and the model has 2",
    "other inputs": "this one also has token_type_ids, which no stage would get",
    "different batches": "the ranks of a pipeline got different batches",
    "labels": r"labels must lie in \[0, 97\)",
    "wrong loss": "tokens of a slice, but logits in float64 give",
    "divided otherwise": "was divided for another schedule, or sharded otherwise, before",
    "sharded otherwise": "was divided for another schedule, or sharded otherwise, before",
    "generate": "a model that is divided over a pipeline does not generate text; export it",
}


def test_no_other_room_names_a_pipeline():
    package = Path(lit_fused.__file__).parent
    found = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "pipeline" in path.read_text().lower() and path.relative_to(package).parts[0] != "pipeline"
    ]
    assert not found


def launch(folder: Path, *scenarios: str, processes: int = 2, timeout: float = 150) -> list[dict[str, Any]]:
    return [*each(pipeline_job.run, processes, scenarios, folder, timeout=timeout).values()]


def alone(folder: Path, name: str, loss: Any = None, **options: Any) -> tuple[L.Trainer, Any]:
    """The same fit in one process."""
    trainer, part = quiet_trainer(folder, **(SETTINGS | options)), module(name, loss)
    trainer.fit(part, loader(ragged()), loader(ragged()[:2]))
    return trainer, part


def weights(part: Any) -> dict[str, torch.Tensor]:
    return part.backbone.state_dict()


def test_ragged_batches_train_evaluate_and_predict_as_in_one_process(tmp_path):
    ours, losses = launch(tmp_path, "ragged_batches", "own_losses")
    trainer, part = alone(tmp_path, "llama_tied")
    assert relative_error(ours["weights"], weights(part)) <= 1e-6
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trainer.test(part, loader(ragged()), verbose=False)
    tested = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert {"train/loss", "val/perplexity", "val/accuracy"} < fitted.keys()
    for ranks, expected in ((ours["fitted"], fitted), (ours["tested"], tested)):
        assert ranks[0] == ranks[1], "all stages log the same numbers"
        assert ranks[0] == pytest.approx(expected, rel=1e-5)
    predicted: Any = trainer.predict(part, loader(ragged()))
    for found in ours["predictions"]:
        for batch, expected in zip(found, predicted, strict=True):
            torch.testing.assert_close(batch, expected, rtol=1e-5, atol=1e-5)
    micro = ["before backward", "after backward"]
    assert ours["hooks"] == [*micro, *micro, "step", *micro, *micro, "step", *micro, "step"]

    options = LinearCrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3)
    assert relative_error(losses["callable"], weights(alone(tmp_path, "llama")[1])) <= 1e-6
    assert relative_error(losses["smoothed"], weights(alone(tmp_path, "llama", options)[1])) <= 1e-6
    assert relative_error(losses["filtered"], losses["callable"]) <= 1e-6
    for logged in losses["of the filter"]:  # on every rank, though evaluation came first, which has none of them
        assert logged["train/kept_columns"] == logged["train/exact_tokens"] == 1
        assert logged["train/dropped_mass"] == 0
        assert "val/loss" in logged
        assert "val/kept_columns" not in logged


@pytest.mark.slow
def test_a_checkpoint_moves_between_schedules_numbers_of_stages_and_a_single_device(tmp_path):
    once, _ = alone(tmp_path, "qwen3_tied")
    once.save_checkpoint(tmp_path / "single.ckpt")
    (ours,) = launch(tmp_path, "moves")
    assert relative_error(ours["moved"], weights(alone(tmp_path, "qwen3_tied", max_epochs=3)[1])) <= 1e-6
    twice = weights(alone(tmp_path, "qwen3_tied", max_epochs=2)[1])
    assert relative_error(ours["from a single device"], twice) <= 1e-6

    for name, epochs in (("folder.ckpt", 2), ("file.ckpt", 3)):
        trainer, part = quiet_trainer(tmp_path, **(SETTINGS | {"max_epochs": epochs})), module("qwen3_tied")
        trainer.fit(part, loader(ragged()), ckpt_path=tmp_path / name)
        assert relative_error(weights(part), twice if epochs == 2 else ours["moved"]) <= 1e-6
    assert relative_error(ours["by way of FSDP2"], ours["moved"]) <= 1e-6
    assert ours["val/loss"] == pytest.approx(ours["again val/loss"], rel=1e-6)
    for refused in ours["refused"]:
        assert re.search("is of another model: .* weights differ", refused)


@pytest.mark.slow
def test_what_a_pipeline_would_get_wrong_is_refused_on_every_rank(tmp_path):
    (found,) = launch(tmp_path, "refusals")
    assert found.pop("divided") == found.pop("sharded") == [None, None]
    assert found.keys() == REFUSED.keys()
    for name, message in REFUSED.items():
        for refusal in found[name]:
            assert re.search(message, str(refusal)), (name, refusal)


def test_numbers_that_do_not_fit_are_refused_before_any_process_starts():
    def refused(message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            PipelineStrategy(*arguments, **options)

    refused("schedule must be one of 1F1B, GPipe.*got '2F2B'", 2, schedule="2F2B")
    refused("must be a whole number, 1 or more", 2, 0)


def test_the_stage_that_has_the_head_has_fewer_layers():
    assert [len(layers) for layers in layers_of_stages(28, 2, head=3.4)] == [16, 12]
    assert [len(layers) for layers in layers_of_stages(28, 4, head=3.4)] == [8, 8, 8, 4]
    assert [len(layers) for layers in layers_of_stages(4, 3, head=20.0)] == [2, 1, 1]
    config = tiny_model("qwen3", num_hidden_layers=28, vocab_size=1500).config  # A head of some six layers' size
    model: Any = LanguageModel(lit_fused.from_config(config), LinearCrossEntropyLoss())
    divide(model, Layout("1F1B", 2), 0, torch.device("cpu"), None)
    assert [isinstance(layer, Elsewhere) for layer in model.backbone.model.layers] == 16 * [False] + 12 * [True]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_layer_and_every_stage_has_one_place(schedule):
    layout = Layout(schedule, 4)
    stages = [stage for rank in range(4) for stage in layout.stages_of(rank)]
    assert sorted(stages) == list(range(layout.num_stages))
    assert all(stage in layout.stages_of(layout.rank_of(stage)) for stage in stages)
    layers = layers_of_stages(11, layout.num_stages)
    assert [layer for part in layers for layer in part] == list(range(11))
    assert max(map(len, layers)) - min(map(len, layers)) <= 1


@pytest.mark.parametrize(
    "name",
    ["llama_tied", "gpt_neox", *(pytest.param(n, marks=pytest.mark.slow) for n in ("granite", "gemma2", "cohere"))],
)
def test_a_rank_keeps_its_own_layers_and_no_others(name):
    model = LanguageModel(tiny_model(name, num_hidden_layers=4), LinearCrossEntropyLoss())
    model.prepare_hidden_states()
    decoder, ranges = find_decoder(model), layers_of_stages(4, 2)
    stages = [Stage(decoder, layers) for layers in ranges]
    check_stages(model, decoder, stages)
    of_stages = [{n for n, p in model.named_parameters() if any(p is q for q in s.parameters())} for s in stages]
    alive = {n: weakref.ref(p) for n, p in model.named_parameters()}
    assert of_stages[0] | of_stages[1] == alive.keys()
    vocabulary, tied = model.vocabulary, decoder.is_tied
    assert len(of_stages[0] & of_stages[1]) == tied
    prune(model, decoder, ranges[:1])
    del stages[1:]
    kept = {n for n, p in model.named_parameters()}
    assert kept == of_stages[0] == {n for n, p in alive.items() if p() is not None}
    assert model.vocabulary == vocabulary


def test_a_model_that_cannot_be_checked_behind_the_last_stage_is_named():
    class AsksForMore(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs, output_hidden_states=True)
            assert len(output.hidden_states) == 3
            return output

    config: Any = tiny_model("llama").config
    model = LanguageModel(AsksForMore(config), LinearCrossEntropyLoss())
    model.prepare(torch.device("cpu"))
    ids = torch.arange(12)[None]
    batch = {"input_ids": ids, "labels": ids, "hidden_states": torch.randn(1, 12, config.hidden_size)}
    with pytest.warns(UserWarning, match="the spot check is left out: the forward of AsksForMore does not run"):
        StageForwardPass(model, find_decoder(model)).spot_check(batch)


@pytest.mark.slow
def test_pipelines_side_by_side_resume_exactly(tmp_path):
    cases = [Case("pp_ddp", "llama"), Case("pp_fsdp2", "llama_tied"), Case("pp_fsdp2", "qwen3_tied")]
    for case, result in launch_fits(resume, cases, tmp_path, timeout=250).items():
        assert relative_error(result["resumed"], result["at once"]) <= 1e-6, case


@pytest.mark.parametrize("architecture", ["llama", "granite", "cohere", "gemma2"])
def test_a_model_without_weights_has_the_head_of_its_small_twin(architecture):
    config = tiny_model(architecture).config
    model: Any = LanguageModel(lit_fused.from_config(config), LinearCrossEntropyLoss())
    whole: Any = LanguageModel(tiny_model(architecture), LinearCrossEntropyLoss())
    whole.prepare_hidden_states()
    divide(model, Layout("1F1B", 2), 1, torch.device("cpu"), None)
    lit_fused.materialize(model)
    assert str(model.head) == str(whole.head)
    assert model.head.layer is model.backbone.get_output_embeddings()
