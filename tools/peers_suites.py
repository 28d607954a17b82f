"""Run the tests of cut-cross-entropy and of Liger-Kernel with our functions in the place of theirs, and count.

    git clone https://github.com/apple/ml-cross-entropy
    git clone https://github.com/linkedin/Liger-Kernel
    python tools/peers_suites.py ml-cross-entropy Liger-Kernel --out docs/evidence/peers.md

Both need `pip install 'lit-fused[liger]'`. Without a GPU the tests run on the CPU. The functions here have the peers'
signatures: whoever moves from one of them finds what stands for what.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lit_fused import linear_cross_entropy, token_scores


def cut_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: int = 0,
    return_lse: bool = False,
    **_: Any,
) -> Any:
    """Do what ``cut_cross_entropy.linear_cross_entropy`` does; what chooses its kernels has no meaning here."""
    if shift:
        e, targets = e[..., : -int(shift), :], targets[..., int(shift) :]
    options: dict[str, Any] = {"softcap": softcap, "ignore_index": ignore_index}
    if not return_lse:
        return linear_cross_entropy(e, c, targets, bias=bias, reduction=reduction, **options)[0]
    scores = token_scores(e, c, targets, bias, entropy=False, **options)
    return _reduced(-scores.log_prob, targets != ignore_index, reduction), scores.lse


class LigerOutput(NamedTuple):
    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None


def liger_function(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *_: Any,
) -> LigerOutput:
    """Do what ``LigerFusedLinearCrossEntropyFunction.apply`` does, but for weights of classes."""
    if ce_weight is not None:
        pytest.skip("weights of classes together with a softcap")
    head: Any = {"softcap": softcap, "ignore_index": ignore_index}
    if accum_dtype is not None:
        head["float32_accumulation"] = accum_dtype == torch.float32
    added: Any = {"label_smoothing": label_smoothing, "z_loss": lse_square_scale}
    loss, _stats = linear_cross_entropy(input, weight, target, bias=bias, reduction=reduction, **head, **added)
    scores, valid = token_scores(input, weight, target, bias, entropy=False, **head), target != ignore_index
    if use_token_scaling:
        loss = _reduced(-scores.log_prob.detach().exp() * scores.log_prob, valid, reduction)
    return LigerOutput(
        loss,
        _reduced(lse_square_scale * scores.lse.square(), valid, reduction) if return_z_loss else None,
        _reduced((scores.top1 == target).float(), valid, reduction) if return_token_accuracy else None,
        scores.top1 if return_predicted_tokens else None,
    )


class LigerLoss(torch.nn.Module):
    """Do what ``LigerFusedLinearCrossEntropyLoss`` does."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return liger_functional(_input, lin_weight, target, bias, **self.options)


def liger_functional(*operands: Any, **options: Any) -> Any:
    from liger_kernel.transformers.functional import CrossEntropyOutput

    output = liger_function(*operands, **options)
    beside = any(value is not None for value in output[1:])
    return CrossEntropyOutput(**output._asdict()) if beside else output.loss


def _reduced(numbers: Tensor, valid: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return numbers
    return numbers.sum() / (valid.sum() if reduction == "mean" else 1)


class Suite(NamedTuple):
    name: str
    files: list[str]
    selected: str  # of pytest's -k: only what calls the function, once for all kernels of the peer
    replaced: dict[str, Any]


SUITES = [
    Suite(
        "cut-cross-entropy",
        ["tests/test_cce_loss_forward.py", "tests/test_cce_loss_backward.py"],
        "not torch_compile and not cce_exact",
        {"cut_cross_entropy.linear_cross_entropy": cut_cross_entropy},
    ),
    Suite(
        "Liger-Kernel",
        ["test/transformers/test_fused_linear_cross_entropy.py"],
        "",
        {
            "liger_kernel.ops.LigerFusedLinearCrossEntropyFunction": type("", (), {"apply": liger_function}),
            "liger_kernel.transformers.functional.liger_fused_linear_cross_entropy": liger_functional,
            "liger_kernel.transformers.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyLoss": LigerLoss,
        },
    ),
]


_TEXT = (
    "The tests of the fused loss in checkouts of [cut-cross-entropy](https://github.com/apple/ml-cross-entropy) and "
    "[Liger-Kernel](https://github.com/linkedin/Liger-Kernel), with `linear_cross_entropy` and `token_scores` in the "
    "place of their functions: `tools/peers_suites.py` has the wrappers."
)


class Counts:
    """Counts the outcomes of tests, and keeps why they were skipped."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.reasons: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1
        if report.outcome == "skipped":
            self.reasons[report.longrepr[2]] = self.reasons.get(report.longrepr[2], 0) + 1


def run(suite: Suite, checkout: Path) -> None:
    """Run a suite in this process, and print its counts as JSON in the last line."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
        sys.path.insert(0, str(copy))
        for file in suite.files if not torch.cuda.is_available() else []:
            text = (copy / file).read_text().replace("torch.cuda.is_available()", "True").replace('"cuda"', '"cpu"')
            (copy / file).write_text(text.replace("torch.cuda.manual_seed", "torch.manual_seed"))
        for name, function in suite.replaced.items():
            module, _, attribute = name.rpartition(".")
            setattr(importlib.import_module(module), attribute, function)
        counts = Counts()
        files = [str(copy / file) for file in suite.files]
        pytest.main(["-q", "-p", "no:cacheprovider", "-k", suite.selected, "--rootdir", str(copy), *files], [counts])
    print(json.dumps([counts.outcomes, counts.reasons]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Peers' test suites with our functions.")
    parser.add_argument("checkouts", type=Path, nargs=2)
    parser.add_argument("--suite", type=int, help="run one of the two in this process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.suite is not None:
        run(SUITES[options.suite], options.checkouts[options.suite].resolve())
        return
    rows = ["|suite, at|passed|failed|skipped: why|", "|---|---:|---:|---|"]
    for number, (suite, checkout) in enumerate(zip(SUITES, options.checkouts, strict=True)):
        command = [sys.executable, __file__, *map(str, options.checkouts), "--suite", str(number)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        outcomes, reasons = json.loads(ended.stdout.splitlines()[-1])
        git = ["git", "-C", str(checkout), "log", "-1", "--format=%h"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        why = "; ".join(f"{count}: {reason.removeprefix('Skipped: ')}" for reason, count in reasons.items())
        numbers = f"{outcomes.get('passed', 0)}|{outcomes.get('failed', 0)}|{why}"
        rows.append(f"|{suite.name}, {commit}|{numbers}|")
        print(ended.stdout[-3000:] if outcomes.get("failed") else rows[-1], flush=True)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "A CPU"
    page = f"""# Peers' own tests with our functions

```bash
python tools/peers_suites.py ml-cross-entropy Liger-Kernel --out docs/evidence/peers.md
```

{_TEXT} {where}; torch {torch.__version__.partition("+")[0]}.

{chr(10).join(rows)}
"""
    if options.out:
        options.out.write_text(page)


if __name__ == "__main__":
    main()
