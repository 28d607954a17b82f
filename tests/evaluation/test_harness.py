"""lm-evaluation-harness's model ``lit_fused``: the same results of tasks as its model ``hf``, without logits."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from shapes_seen import shapes
from tiny_models import VOCABULARY, sharpen, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval")

# In the words of the harness's own configurations: arc_easy, lambada_openai, piqa, wikitext, and a perplexity.
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{letters}}",
        "metric_list": [{"metric": "acc"}],
    },
    "choice_of_sentences": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{sentences}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-2]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-2:]|join(' ')}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
    },
    "rolling_words": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "rolling_bits": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["w2"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def words(generator: torch.Generator, count: int) -> str:
    return " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def tokenizer() -> PreTrainedTokenizerFast:
    of_words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=of_words, eos_token="w2", pad_token="w0", unk_token="w0")


def greedy_text(model: Any, start: str) -> str:
    prompt = torch.tensor([tokenizer()(start)["input_ids"]])
    written = model.generate(prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    return " ".join(f"w{i}" for i in written.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in "tasks" local data and a configuration of each task."""
    folder = tmp_path_factory.mktemp("harness")
    model = sharpen(tiny_model("gemma2", max_position_embeddings=48)).eval()
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    with (folder / "test.jsonl").open("w") as file:
        for index in range(12):
            record = {"question": words(generator, 3 + index), "answer": index % 4}
            record["letters"] = words(generator, 4).split()
            record["sentences"] = [words(generator, 2 + length) for length in range(4)]
            record["text"] = words(generator, 10 + 40 * index)  # the longest exceed the model's length
            if index % 2:  # so that the accuracies are not zero
                record["text"] = greedy_text(model, words(generator, 9))
            file.write(json.dumps(record) + "\n")
    (folder / "tasks").mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "test.jsonl")}}}
    for name, task in TASKS.items():
        text = yaml.safe_dump({"task": name, "test_split": "test", **data, **task})
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder


def evaluated(model: Any, folder: Path, batch_size: int | str = 3, tasks: Any = TASKS, **options: Any) -> Any:
    importlib.import_module("lit_fused.evaluation.harness")
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    found = importlib.import_module("lm_eval").simple_evaluate(
        model=model,
        model_args={"pretrained": str(folder / "model"), "dtype": "float32", "max_length": 48, **options},
        tasks=list(tasks),
        device="cpu",
        batch_size=batch_size,
        bootstrap_iters=0,
        task_manager=manager(include_path=str(folder / "tasks"), include_defaults=False),
    )
    return found


def numbers(found: Any) -> dict[tuple[str, str], float]:
    results = found["results"].items()
    return {(task, metric): x for task, of in results for metric, x in of.items() if isinstance(x, float)}


def answers(found: Any) -> list[Any]:
    """The answer to each request: log-likelihood and is-greedy, or a text."""
    return [sample["resps"] for name in TASKS for sample in found["samples"].get(name, ())]


def test_every_result_of_six_tasks_is_that_of_the_harness_own_model(folder: Path) -> None:
    theirs, ours = evaluated("hf", folder), evaluated("lit_fused", folder)
    assert len(numbers(theirs)) >= 9
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-5)
    accuracies = [x for (_, metric), x in numbers(theirs).items() if metric.startswith("acc")]
    assert any(0 < accuracy < 1 for accuracy in accuracies), "a test of some right and some wrong answers"
    for own, other in zip(answers(ours), answers(theirs), strict=True):
        assert len(own) == len(other)
        for one, truth in zip(own, other, strict=True):
            check_answer(one[0], truth[0])


def check_answer(one: Any, truth: Any) -> None:
    if isinstance(truth, tuple | list):
        assert float(one[0]) == pytest.approx(float(truth[0]), rel=1e-5)
        assert str(one[1]) == str(truth[1])
    elif isinstance(truth, float):
        assert one == pytest.approx(truth, rel=1e-5)
    else:
        assert one == truth


def test_batches_of_automatic_size_become_smaller_until_they_fit_and_give_the_same_results(folder: Path) -> None:
    tasks, rows = ("choice", "last_word", "rolling_words"), list[int]()
    harness = importlib.import_module("lit_fused.evaluation.harness").FusedHFLM
    arguments = {"pretrained": str(folder / "model"), "dtype": "float32", "max_length": 48, "device": "cpu"}
    model = harness(**arguments, batch_size="auto", max_batch_size=8)

    def no_memory_for_more_than_five_rows(_: Any, args: Any, kwargs: Any) -> None:
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.model.register_forward_pre_hook(no_memory_for_more_than_five_rows, with_kwargs=True)
    found = numbers(evaluated(model, folder, tasks=tasks))
    assert {8, 7, 6, 5} <= set(rows)
    assert found == pytest.approx(numbers(evaluated("lit_fused", folder, 1, tasks)), rel=1e-5)


@pytest.mark.parametrize("model", ["hf", "lit_fused"])
def test_an_empty_continuation_has_no_likelihood(folder: Path, model: str) -> None:
    importlib.import_module("lit_fused.evaluation.harness")
    registered = importlib.import_module("lm_eval.api.registry").get_model(model)
    request = importlib.import_module("lm_eval.api.instance").Instance("loglikelihood", {}, ("w5 w6", ""), 0)
    with pytest.raises(AssertionError):
        registered(pretrained=str(folder / "model"), device="cpu").loglikelihood([request])


def test_a_model_in_memory_is_evaluated_as_it_is(folder: Path) -> None:
    harness = importlib.import_module("lit_fused.evaluation.harness").FusedHFLM
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    given = harness(pretrained=model, tokenizer=tokenizer(), max_length=48)
    found, expected = (numbers(evaluated(each, folder, tasks=["last_word"])) for each in (given, "hf"))
    assert found == pytest.approx(expected, rel=1e-5)


def test_no_tensor_of_an_evaluation_has_the_vocabulary_for_all_tokens(folder: Path) -> None:
    def largest(model: str) -> int:
        with shapes() as seen:
            evaluated(model, folder, 32, ["rolling_words"])
        return max(torch.Size(s).numel() // VOCABULARY for s in seen if s[-1:] == (VOCABULARY,))

    assert largest("lit_fused") <= 1024, "the slice of the first batch that is compared with the model's own logits"
    assert largest("hf") >= 32 * 47


@pytest.mark.slow
def test_the_command_knows_the_model(folder: Path) -> None:
    model = ["--model", "lit_fused", "--model_args", f"pretrained={folder / 'model'},dtype=float32,max_length=48"]
    tasks = ["--tasks", "last_word", "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out")]
    command = [sys.executable, "-m", "lit_fused.evaluation", *model, *tasks, "--device", "cpu", "--batch_size", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    [path] = (folder / "out").rglob("results_*.json")
    found, expected = json.loads(path.read_text()), evaluated("hf", folder, tasks=["last_word"])
    assert {name: numbers(found)[name] for name in numbers(expected)} == pytest.approx(numbers(expected), rel=1e-5)
