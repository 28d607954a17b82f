"""mode=fit_batch: the search, what counts as running out of memory, and what is left after it."""

import csv
import json
import weakref
from pathlib import Path

import pytest
import torch
from commands import Finished, run_forked, train
from composed import composed
from hydra.utils import instantiate
from torch import Tensor

from lit_fused import CrossEntropyLoss, UserError
from lit_fused.app.commands import largest_batch
from lit_fused.app.commands.largest_batch import fit_batch, largest
from lit_fused.app.commands.trial_bench import Bench, FitBatchOptions, is_out_of_memory

ROOT = Path(__file__).parents[2]
TINY = [
    *("data=synthetic", "data.vocab_size=2048", "data.block_size=64", "model.config.hidden_size=32"),
    *("model.config.intermediate_size=64", "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2"),
    *("model.config.num_key_value_heads=2", "model.config.max_position_embeddings=128"),
]


def searched(peak_of, limit: float, most: int = 4096, careful: bool = False, **options) -> tuple[int, list[int]]:
    """(what was found, the sizes that were tried)"""
    tried = []

    def fits(size: int) -> float | None:
        tried.append(size)
        return peak_of(size) if peak_of(size) <= limit else None

    return largest(fits, 1, most, fixed_gib=peak_of(0), limit_gib=limit, careful=careful, **options), tried


@pytest.mark.parametrize("limit", [1.0, 2.4, 2.6, 11.0, 17.3, 100.0, 700.0])
@pytest.mark.parametrize(
    "peak_of",
    [lambda n: 2.0 + 0.5 * n, lambda n: 2.0 + 0.1 * n + 0.01 * n * n, lambda n: 2.0 + n // 7],
    ids=["straight", "square", "steps"],
)
def test_the_largest_size_is_found_in_few_trials(peak_of, limit):
    expected = max((n for n in range(1, 4097) if peak_of(n) <= limit), default=0)
    found, tried = searched(peak_of, limit)
    assert found == expected
    assert len(tried) == len(set(tried))
    assert len(tried) <= 24  # twelve to double, and as many to narrow down
    assert len(tried) <= 14 or peak_of(2) - peak_of(1) != 0.5  # a straight line is followed


@pytest.mark.parametrize("limit", [1.0, 2.7, 17.3, 700.0])
@pytest.mark.parametrize(
    "peak_of", [lambda n: 2.0 + 0.5 * n, lambda n: 2.0 + 0.1 * n + 0.01 * n * n], ids=["straight", "square"]
)
def test_a_careful_search_never_goes_beyond_the_limit(peak_of, limit):
    found, tried = searched(peak_of, limit, careful=True)
    assert all(peak_of(size) <= limit for size in tried)
    expected = max((n for n in range(1, 4097) if peak_of(n) <= limit), default=0)
    assert 0.9 * expected - 1 <= found <= expected


def test_a_search_ends_with_the_largest_size_that_is_allowed_and_is_as_exact_as_it_need_be():
    assert searched(lambda n: 0.001 * n, 100.0, most=1000)[0] == 1000
    found, tried = searched(lambda n: 0.01 * n, 33.7, unit=lambda low: max(low // 32 // 64 * 64, 1))
    assert 3370 - 64 <= found <= 3370
    assert len(tried) < 16


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.27 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (chained(RuntimeError("backend='inductor' raised"), torch.OutOfMemoryError("CUDA out of memory")), True),
        (RuntimeError("out of resource: shared memory, Required: 294912, Hardware limit: 232448"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), False),
        (UserError("labels must lie in [0, 8)"), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_only_running_out_of_memory_is_taken_for_it(error, ran_out):
    assert is_out_of_memory(error) == ran_out


class RunsOut(CrossEntropyLoss):
    """Has no memory for more than 128 tokens, which it finds out in the middle of a step."""

    held: "weakref.ref[Tensor] | None" = None

    def compute(self, model, batch):
        output = super().compute(model, batch)
        if batch["labels"].numel() > 128:
            large = torch.zeros(1 << 20)
            self.held = weakref.ref(large)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.27 GiB")
        return output


@pytest.mark.slow
def test_a_step_that_runs_out_leaves_nothing_behind_and_the_next_one_runs(tmp_path):
    cfg = composed(*TINY, "loss=standard", "optimizer.lr=0.1")
    bench, loss = Bench(cfg, FitBatchOptions(memory_gib=8), str(tmp_path)), RunsOut()
    bench.module.model.loss = loss
    assert bench.run(2, 64) is not None
    assert bench.run(4, 64) is None
    assert loss.held is not None
    assert loss.held() is None, "the failed step's tensors are alive"
    assert all(p.grad is None for p in bench.module.parameters())
    trial = bench.run(2, 64)
    assert trial is not None
    assert trial.tokens_per_sec > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_error_of_another_kind_is_raised(tmp_path):
    class Wrong(CrossEntropyLoss):
        def compute(self, model, batch):
            raise RuntimeError("Triton Error [CUDA]: invalid argument")

    bench = Bench(composed(*TINY, "loss=standard"), FitBatchOptions(memory_gib=8), str(tmp_path))
    bench.module.model.loss = Wrong()
    with pytest.raises(RuntimeError, match="Triton Error"):
        bench.run(1, 64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "on a CPU needs a limit, fit_batch.memory_gib=..., the GiB"),
        (["fit_batch.memory_gib=1e6"], "is more than the .* GiB that are available here; give less"),
        (["fit_batch.memory_gib=1", "fit_batch.losses=[]"], "fit_batch.losses is empty"),
        (["fit_batch.memory_gib=1", "fit_batch.losses=[chunkd]"], "there is no conf/loss/chunkd.yaml"),
        (["fit_batch.memory_gib=1", "strategy=fsdp2", "trainer.devices=2"], "runs on one device.*mode=plan predicts"),
        (["fit_batch.memory_gib=1", "experiment=reverse"], "needs data.block_size"),
    ],
)
def test_what_cannot_be_measured_is_refused(overrides, message, monkeypatch):
    monkeypatch.setattr(largest_batch, "_loss_node", missing_loss)
    with pytest.raises(Exception, match=message) as caught:
        fit_batch(composed(*overrides))
    assert isinstance(caught.value, UserError) or isinstance(caught.value.__cause__, UserError)


def missing_loss(cfg, name):
    """As in a run of the command, which has Hydra's search path."""
    if not (ROOT / "conf" / "loss" / f"{name}.yaml").exists():
        raise UserError(f"fit_batch.losses: there is no conf/loss/{name}.yaml")
    return cfg.loss


@pytest.mark.slow
def test_a_missing_loss_is_refused_by_the_command(tmp_path):
    done = command(tmp_path, "fit_batch.losses=[chunkd]", "fit_batch.memory_gib=4")
    assert done.status == 1
    assert "there is no conf/loss/chunkd.yaml" in done.plain


def command(folder: Path, *overrides: str) -> Finished:
    return train(folder, "mode=fit_batch", *TINY, *overrides, "hydra.run.dir=run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_finds_more_for_the_chunked_loss_and_stays_below_the_limit(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import lit_fused.app.commands.trial_bench as f; print(f.process_gib())")
    libraries = run_forked(program, tmp_path, [], [{}])
    limit = round(float(libraries.output.split()[-1]) + 0.5, 2)
    # a sequence's logits are 100 MB, its layer 30 MB: far above what a process takes more in one run than in another
    sizes = ["model.config.intermediate_size=16384", "data.vocab_size=65536"]
    done = command(tmp_path, f"fit_batch.memory_gib={limit}", *sizes)
    assert done.status == 0, done.output
    assert "Largest micro-batch" in done.plain
    whole = json.loads((tmp_path / "run" / "fit_batch.json").read_text())
    standard, chunked = whole["losses"]
    assert [standard["loss"], chunked["loss"]] == ["standard", "chunked"]
    assert chunked["batch_size"] > 1.5 * standard["batch_size"]
    assert chunked["batch_times_standard"] == pytest.approx(chunked["batch_size"] / standard["batch_size"])
    assert chunked["sequence_size"] == 128
    assert chunked["sequence_is_models_limit"]
    assert all(row[f"{kind}_peak_gib"] <= limit for row in (standard, chunked) for kind in ("batch", "sequence"))
    with (tmp_path / "run" / "fit_batch.csv").open() as file:
        assert [int(row["batch_size"]) for row in csv.DictReader(file)] == [
            standard["batch_size"],
            chunked["batch_size"],
        ]
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {
        *("fit_batch.json", "fit_batch.csv", "train.log", ".hydra", ".lock", ".holder")
    }


def test_options_are_checked_by_the_configuration():
    assert instantiate(composed().fit_batch) == FitBatchOptions()
