"""Time and memory of a distillation from hidden states: ours, Liger's chunked JSD, and whole logits.

python benchmarks/distillation_head.py --tokens 8192 --student 1024 --teacher 2048 --vocabulary 151936   # on a GPU
python benchmarks/distillation_head.py --device cpu --tokens 256 --student 16 --teacher 32 --vocabulary 500 --turns 1
"""

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fused.ops import TeacherHead, linear_distillation


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: TeacherHead) -> Tensor:
    """Return the mean JSD(0.5) of whole logits in float32."""
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    log_q = (teacher.hidden_states @ teacher.weight.T).float().log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - torch.tensor(2.0).log()
    parts = [F.kl_div(log_m, log, log_target=True, reduction="sum") for log in (log_p, log_q)]
    return (parts[0] + parts[1]) / 2 / len(targets)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: TeacherHead) -> Tensor:
    return linear_distillation(hidden, weight, targets, teacher, divergence="jsd", statistics=False)[0]


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: TeacherHead) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5)
    return loss(hidden, weight, teacher.hidden_states, teacher.weight, targets)


def measured(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], turns: int) -> tuple[float, float]:
    """Return the median milliseconds of forward and backward, and the peak MiB beside the inputs (0 on a CPU)."""
    hidden, weight, targets, *of_teacher = tensors
    on_gpu, times, peak = hidden.is_cuda, [], 0.0
    for _ in range(turns + 1):
        hidden.grad = weight.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
        function(hidden, weight, targets, TeacherHead(of_teacher[0], of_teacher[1])).backward()
        if on_gpu:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times[1:])[turns // 2], peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    for name, value in {"tokens": 8192, "student": 1024, "teacher": 2048, "vocabulary": 151936, "turns": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32

    def drawn(*size: int) -> Tensor:
        return (torch.randn(size, device=options.device) / size[-1] ** 0.25).to(dtype)

    tokens, vocabulary = options.tokens, options.vocabulary
    hidden, weight = (drawn(rows, options.student).requires_grad_() for rows in (tokens, vocabulary))
    targets = torch.randint(vocabulary, (tokens,), device=options.device)
    tensors = hidden, weight, targets, drawn(tokens, options.teacher), drawn(vocabulary, options.teacher)
    for function in (ours, liger, plain):
        try:
            took, peak = measured(function, tensors, options.turns)
        except (ImportError, RuntimeError) as error:
            print(f"{function.__name__:>6}  {str(error).splitlines()[0]}")
            continue
        print(f"{function.__name__:>6}  {took:9.1f} ms  {peak:9.0f} MiB")


if __name__ == "__main__":
    main()
