"""The examples run as scripts, and a project trains on as before once its module, or only its loss, is ours."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchrun
from errors_of import assert_same_gradients
from torch import Tensor

from lit_fused import FusedCausalLMModule, FusedSeq2SeqLMModule

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = EXAMPLES / "printed"
SCRIPTS = ("plain_module", "plain_transformer", "before", "after_loss_only", "after_subclass")
AFTERS = ("after_loss_only", "after_subclass")
VOCAB_SIZE = 503
EPS = torch.finfo(torch.float32).eps


def example(name: str) -> ModuleType:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


class Recorder(L.Callback):
    """Keeps what each optimiser step logged."""

    def __init__(self) -> None:
        self.logged: dict[str, list[float]] = {"train/loss": [], "train/grad_norm": []}

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for name, values in self.logged.items():
            values.append(trainer.callback_metrics[name].item())


@cache
def trained(name: str, precision: str) -> tuple[Any, Recorder, float]:
    """One example's project, trained small on the CPU: its module, what was recorded, and the validation loss."""
    torch.manual_seed(0)
    module = example(name).Pretrainer(example("project").build_model(VOCAB_SIZE))
    recorder = Recorder()
    trainer = example("project").fit(
        module, VOCAB_SIZE, limit_train_batches=6, precision=precision, accelerator="cpu", callbacks=[recorder]
    )
    return module, recorder, trainer.callback_metrics["val/loss"].item()


@cache
def script_output(name: str, folder: Path) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.NamedTemporaryFile("r") as output:
        script = forked.start(EXAMPLES / f"{name}.py", [], cwd=folder, env=env, output=Path(output.name))
        statuses = forked.run_together([script], 120)
        printed = output.read()
    assert statuses == [0], printed[-3000:]
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_each_example_runs_as_a_script_learns_and_leaves_no_file(name: str, folder: Path) -> None:
    losses = dict(re.findall(r"(\w+/loss) ([\d.]+)", script_output(name, folder)))
    vocab_size = example("project").VOCAB_SIZE
    assert losses.keys() == {"train/loss", "val/loss"}
    assert all(float(loss) < math.log(vocab_size) - 1 for loss in losses.values())  # a nat below the uniform guess
    assert list(folder.iterdir()) == []


def measured(output: str) -> list[str]:
    """Return what an output names before its figures, and how its sentences begin: all but numbers and samples."""
    return re.findall(r"\b\w+/\w+(?= [\d.])|^[A-Z][a-z ]+", output, re.MULTILINE)


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[[str], str]:
    """Return what a script prints, in this process: starting one takes longer than most of them. It leaves no file."""

    def run(name: str) -> str:
        monkeypatch.chdir(tmp_path)
        example(name).main()
        assert list(tmp_path.iterdir()) == []
        output = capsys.readouterr().out
        assert measured(output) == measured((PRINTED / f"{name}.txt").read_text())
        return output

    return run


def numbers(pattern: str, output: str) -> list[float]:
    """Return what the groups of a pattern match in an output, as numbers."""
    found = re.findall(pattern, output, re.MULTILINE)
    groups = [group for match in found for group in (match if isinstance(match, tuple) else (match,))]
    return [float(group.replace(",", "")) for group in groups]


@pytest.mark.slow
def test_pretraining_learns_the_look_of_its_text_and_exports_what_transformers_loads(
    printed: Callable[[str], str],
) -> None:
    output = printed("pretrain")
    assert numbers(r"val/loss ([\d.]+)", output)[-1] < math.log(2000) - 2
    assert re.search(r"exported: LlamaForCausalLM of [\d,]+ parameters, \d+ tokens", output)


def test_the_chat_is_learned_with_its_end_of_turn_from_the_answers_tokens_alone(printed: Callable[[str], str]) -> None:
    output = printed("finetune_chat")
    before, after = re.findall(r"(?:before|after): +'(.*)'", output)
    script = example("finetune_chat")
    taught = f"{script.ANSWERS[script.ASKED]}<|im_end|>"
    assert after == taught != before
    shown = re.search(r"(\d+) of (\d+) tokens are trained:\n(.*)\nbefore", output, re.DOTALL)
    assert shown
    assert int(shown[1]) < int(shown[2])
    trained = {f"{text.strip()}<|im_end|>" for text in shown[3].split("<|im_end|>") if text.strip()}
    assert taught in trained
    assert trained < {f"{text}<|im_end|>" for text in script.ANSWERS.values()}  # some are held out


@pytest.mark.slow
def test_pairs_are_learned_until_the_model_writes_the_answers_itself(printed: Callable[[str], str]) -> None:
    assert numbers(r"val/exact_match ([\d.]+)", printed("seq2seq"))[-1] > 0.5


@pytest.mark.slow
def test_masked_words_are_learned_and_filled_in_by_the_exported_model(printed: Callable[[str], str]) -> None:
    output = printed("masked_lm")
    before, after = numbers(r"val/accuracy ([\d.]+) before training, ([\d.]+) after", output)
    assert before < 0.3 < 0.5 < after
    assert all(f"the {animal} said {sound}" in output for animal, sound in [("cow", "moo"), ("dog", "woof")])


@pytest.mark.slow
def test_a_masked_diffusion_model_writes_lines_that_are_like_those_it_learned(printed: Callable[[str], str]) -> None:
    output = printed("masked_diffusion")
    assert numbers(r"(\d+) of 100 lines are of an animal and its own sound", output)[0] > 80
    [bound] = numbers(r"val/loss ([\d.]+)", output)
    assert bound == pytest.approx(math.log(700) / 6, abs=0.15)  # 700 lines, nearly all of six tokens


@pytest.mark.slow
def test_preferences_are_learned_of_sums_that_no_training_pair_has_and_no_answer_alone_tells(tmp_path, monkeypatch):
    script = example("preferences")
    monkeypatch.setattr(sys, "argv", ["preferences.py", str(tmp_path)])
    with redirect_stdout(StringIO()) as output:
        script.main()
    files = (tmp_path / "pairs.jsonl", tmp_path / "validation.jsonl")
    trained, unseen = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert not {pair["prompt"] for pair in trained} & {pair["prompt"] for pair in unseen}
    chosen, rejected = (Counter(pair[side] for pair in trained) for side in ("chosen", "rejected"))
    by_answer = [
        chosen[pair["chosen"]] * rejected[pair["rejected"]] - chosen[pair["rejected"]] * rejected[pair["chosen"]]
        for pair in unseen
    ]
    assert sum(score > 0 for score in by_answer) <= len(unseen) / 2  # what the answers' frequencies alone would tell
    assert int(re.findall(r"right in (\d+)%", output.getvalue())[0]) >= 70


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in PRINTED.iterdir()))
def test_an_example_prints_its_own_first_line_before_any_other_library_says_something(name, tmp_path):
    if name == "float8":
        pytest.importorskip("torchao")
    env = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    script = [sys.executable, str(EXAMPLES / f"{name}.py")]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(script, cwd=tmp_path, env=env, **pipes) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        run.kill()
    assert first == (PRINTED / f"{name}.txt").read_text().splitlines(keepends=True)[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_policy_learns_from_its_own_attempts(printed: Callable[[str], str]) -> None:
    output = printed("grpo_loop")
    rewards = numbers(r"reward ([\d.]+)", output)
    assert len(rewards) == 30
    assert (
        max(rewards[:3]) < 0.3 < 0.45 < min(rewards[-3:])
    )  # Three seeds began at 0.10 to 0.19, and ended at 0.59 to 0.73.
    before, after = numbers(r"(\d+)% *(?:of all|$)", output)
    assert after >= before + 40
    assert "Cause: temperature (theirs is 0.7, not 1)" in output


@pytest.mark.slow
def test_a_student_learns_from_few_rows_what_its_teacher_knows(printed: Callable[[str], str]) -> None:
    teacher, alone, beside, stored, best = numbers(r" ([\d.]+)$", printed("distillation"))
    assert best < teacher < min(beside, stored)
    assert max(beside, stored) < teacher + 0.1 < alone - 1


def test_heads_for_tokens_ahead_have_the_losses_and_gradients_of_their_logits() -> None:
    torch.manual_seed(0)
    script = example("multi_token")
    module = script.MultiToken(script.build_model()).double()
    torch.nn.init.normal_(module.heads[0].weight, std=0.1)
    batch = {name: value[:2] for name, value in script.rows(2, 0)[0].items()}
    states = module.backbone.model(batch["input_ids"]).last_hidden_state
    further = states + F.silu(module.heads[0](states))
    for ahead, own in ((1, states), (2, further)):
        logits = module.backbone.lm_head(own[:, :-ahead]).flatten(0, 1)
        expected = F.cross_entropy(logits, batch["labels"][:, ahead:].flatten())
        parameters = [*module.backbone.parameters(), *([module.heads[0].weight] if ahead == 2 else [])]
        found = module.losses(batch)[ahead - 1]
        assert found.item() == pytest.approx(expected.item(), rel=4 * EPS)
        gradients = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (found, expected)]
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours - theirs).norm() <= 4 * EPS * theirs.norm() + EPS


@pytest.mark.slow
def test_heads_learn_the_tokens_ahead_and_draft_what_is_generated(printed: Callable[[str], str]) -> None:
    output = printed("multi_token")
    losses = numbers(r"loss ([\d.]+) before training, ([\d.]+) after", output)
    assert len(losses) == 8
    assert all(after < before - 2 for before, after in zip(losses[::2], losses[1::2], strict=True))
    assert losses[1::2] == sorted(losses[1::2])  # the further, the harder
    assert numbers(r"(\d+)%", output)[0] > 90


@pytest.mark.slow
def test_a_drafter_writes_what_its_target_writes(printed: Callable[[str], str]) -> None:
    before, after = numbers(r"accepts ([\d.]+)", printed("drafter"))
    assert before < 0.5 < 3.5 < after


@pytest.mark.slow
def test_a_model_learns_to_answer_about_pictures_that_it_has_not_seen(printed: Callable[[str], str]) -> None:
    before, after = numbers(r"(\d+)%", printed("vision_language"))
    assert before < 20 < 80 < after  # 4 % are right by chance.


@pytest.mark.slow
def test_adapters_are_few_learn_and_give_the_same_loss_when_they_are_loaded(printed: Callable[[str], str]) -> None:
    output = printed("lora")
    trained, total = numbers(r"([\d,]+) of ([\d,]+) parameters", output)
    assert trained < total / 10
    ended, loaded = numbers(r"val/loss ([\d.]+)", output)
    assert ended == loaded < math.log(example("project").VOCAB_SIZE) - 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("float8", "torchao"), ("liger_layers", "liger_kernel")])
def test_layers_of_other_libraries_train_beside_the_loss(name: str, package: str, folder: Path) -> None:
    pytest.importorskip(package)
    output = script_output(name, folder)  # in a process of its own: Liger replaces functions of transformers
    losses = numbers(r"(?:train|val)/loss ([\d.]+)", output)
    assert len(losses) == 2
    assert max(losses) < math.log(example("project").VOCAB_SIZE) - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop_by_hand", "loop_fabric", "loop_trainer", "loop_trl"])
def test_a_fused_model_learns_in_every_loop(name: str, printed: Callable[[str], str]) -> None:
    [vocabulary] = numbers(r"ln (\d+)", example(name).__doc__ or "")
    assert numbers(r"(?:train|val)/loss ([\d.]+)", printed(name))[-1] < math.log(vocabulary) - 1


@pytest.mark.slow
def test_lightnings_command_line_trains_from_a_yaml_file(
    printed: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    assert numbers(r"val/loss ([\d.]+)", printed("lightning_cli"))[-1] < math.log(2000) - 1


def test_evaluation_gives_the_mean_over_tokens_and_scores_that_add_up_to_it(printed: Callable[[str], str]) -> None:
    output = printed("evaluate")
    loss, mean = numbers(r"(?:val/loss|mean over tokens) ([\d.]+)", output)
    assert loss == mean
    scores = numbers(r"(-[\d.]+) nats over (\d+) tokens", output)
    assert len(scores) == 16
    assert -sum(scores[::2]) / sum(scores[1::2]) == pytest.approx(loss, abs=1e-4)


def test_the_index_names_every_example_and_the_gallery_shows_what_each_script_prints() -> None:
    index = (EXAMPLES / "README.md").read_text()
    files = {file.relative_to(EXAMPLES).as_posix() for file in EXAMPLES.rglob("*.*")}
    files = {name for name in files if name.endswith((".py", ".sbatch", ".ipynb"))}
    assert files == set(re.findall(r"\]\(([\w/]+\.(?:py|sbatch|ipynb))\)", index))
    scripts = {path.stem for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == {path.stem for path in PRINTED.iterdir()}


def shown(cell: Any) -> set[str]:
    """Return what kinds of output a cell of a notebook has; warnings of libraries do not count."""
    outputs = cell.get("outputs", ())
    return {kind for o in outputs for kind in (*o.get("data", ()), o.get("name"))} - {None, "stderr"}


def printed_by_notebook(name: str, folder: Path) -> str:
    """Return what a notebook prints, whose cells must have the kinds of output that are stored in it."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("nbclient")
    nbclient, nbformat = (importlib.import_module(name) for name in ("nbclient", "nbformat"))
    run = nbformat.read(EXAMPLES / name, as_version=4)
    stored = [shown(cell) for cell in run.cells]
    path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    nbclient.NotebookClient(run, timeout=200, kernel_name="python3").execute(env=env, cwd=str(folder))
    assert [shown(cell) for cell in run.cells] == stored
    assert set().union(*stored) > {"image/png", "stdout"}
    return "".join(output.get("text", "") for cell in run.cells for output in cell.get("outputs", ()))


@pytest.mark.slow
def test_two_devices_that_divide_rows_print_what_one_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = EXAMPLES / "long_context.py"
    one, two = (torchrun.run(script, devices, timeout=200) for devices in (1, 2))
    losses = numbers(r"train/loss ([\d.]+) train/gradient_norm ([\d.]+)", two)
    assert losses == pytest.approx(numbers(r"train/loss ([\d.]+) train/gradient_norm ([\d.]+)", one), abs=2e-4)
    assert len(losses) == 10
    stored = (PRINTED / "long_context.txt").read_text()
    assert {*measured(stored)} <= {*measured(two)}
    assert "each of 2 devices has at most 2,001" in stored


@pytest.mark.slow
def test_the_notebook_runs_from_import_to_an_exported_model(tmp_path: Path) -> None:
    printed = printed_by_notebook("quickstart.ipynb", tmp_path)
    assert numbers(r"val/loss +([\d.]+)", printed)[0] < math.log(32_000) - 3
    assert any(tmp_path.rglob("model.safetensors"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_of_recommenders_ranks_well_and_recommends_what_comes_soon(printed: Callable[[str], str]) -> None:
    output = printed("recommender")
    assert numbers(r"val/ndcg_at_10 ([\d.]+)", output)[0] > 0.6
    had, gets = (list(map(int, re.findall(r"item (\d+)", line))) for line in output.splitlines()[-2:])
    assert len({*gets}) == 5
    assert sum(0 < (item - had[-1]) % 500 < 10 for item in gets) >= 3  # users go on by one to three items


@pytest.mark.slow
def test_the_notebook_of_recommenders_ranks_well_and_trains_on_when_the_catalogue_has_grown(tmp_path: Path) -> None:
    printed = printed_by_notebook("recommender.ipynb", tmp_path)
    assert numbers(r"test/recall_at_10 +([\d.]+)", printed)[0] > 0.7
    assert "item 50 " in printed  # after items 40, 42, 44, 46 and 48
    assert numbers(r"550 items, val/ndcg_at_10 [\d.]+, then ([\d.]+)", printed)[0] > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", AFTERS)
def test_the_fused_loss_spares_at_least_one_copy_of_the_logits(name: str, folder: Path) -> None:
    peaks = [re.search(r"│ peak +│ +([\d.]+)", script_output(n, folder)) for n in ("before", name)]
    if not all(peaks):
        pytest.skip("this machine does not tell a process's peak memory")
    before, after = (float(peak[1]) for peak in peaks if peak)
    tokens = max(batch["labels"].numel() for batch in islice(example("project").build_loaders()[0], 10))
    assert before - after > tokens * example("project").VOCAB_SIZE * 4 / 2**30


@pytest.mark.parametrize("name", AFTERS)
def test_in_float64_every_step_has_the_same_loss_and_gradient_norm_as_before(name: str) -> None:
    # Not exactly the same: the fused loss is handed over in float32, and Llama's norms run in float32 anyway. A step
    # of this learning rate amplifies that in the next gradient; a wrong count of tokens would show as percents.
    before, after = trained("before", "64-true")[1].logged, trained(name, "64-true")[1].logged
    assert len(before["train/loss"]) == 6
    assert before["train/loss"][-1] < before["train/loss"][0]
    assert after["train/loss"] == pytest.approx(before["train/loss"], rel=4 * EPS)
    assert after["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=1e-4)


def test_the_validation_loss_stays_a_mean_of_batches_or_becomes_the_mean_over_tokens() -> None:
    module, _, before = trained("before", "64-true")
    assert trained("after_loss_only", "64-true")[2] == pytest.approx(before, rel=4 * EPS)

    batches = list(example("project").build_loaders(VOCAB_SIZE)[1])
    counts = [(batch["labels"][:, 1:] != -100).sum().item() for batch in batches]
    with torch.no_grad():
        means = [module.next_token_loss(batch).item() for batch in batches]
    over_tokens = sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    assert abs(over_tokens - before) > 1e-5 * before  # the two differ, or this test shows nothing
    assert trained("after_subclass", "64-true")[2] == pytest.approx(over_tokens, rel=4 * EPS)


def test_the_plain_module_has_the_loss_and_gradients_of_its_own_logits() -> None:
    torch.manual_seed(0)
    decoder = example("plain_module").Decoder(VOCAB_SIZE).double()
    module = FusedCausalLMModule(decoder)
    batch = next(iter(example("project").build_loaders(VOCAB_SIZE)[0]))
    logits = decoder.lm_head(decoder(batch["input_ids"], batch["attention_mask"]))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert_same_loss_and_gradients(decoder, module.model(batch).loss, expected)


def test_the_plain_transformer_has_the_loss_and_gradients_of_its_own_logits() -> None:
    torch.manual_seed(0)
    script = example("plain_transformer")
    backbone = script.EncoderDecoder(VOCAB_SIZE).double()
    module = FusedSeq2SeqLMModule(backbone)
    batch = next(iter(example("project").build_loaders(VOCAB_SIZE, script.collate_reversed)[0]))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = F.cross_entropy(backbone.lm_head(backbone(**inputs)).flatten(0, 1), batch["labels"].flatten())
    assert_same_loss_and_gradients(backbone, module.model(batch).loss, expected)


def assert_same_loss_and_gradients(backbone: torch.nn.Module, loss: Tensor, expected: Tensor) -> None:
    assert loss.item() == pytest.approx(expected.item(), rel=4 * EPS)
    assert_same_gradients(loss, expected, backbone.parameters(), 4 * EPS)
