"""Checks of labels, shapes and dtypes before anything is computed: of what a kernel would take without a word.

None of them makes the host wait for a GPU: there, an assertion on the device stops the run.
"""

import torch
from torch import Tensor

from .frozen_columns import frozen_columns
from .user_error import UserError, check_number

IGNORE_INDEX = -100
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_integers(labels: Tensor | None) -> Tensor:
    """Refuse labels that are not a tensor of integers, and return them as int64: in 8 bits -100 would be 156, and a
    vocabulary of 300 would have 44 entries."""
    if not isinstance(labels, Tensor) or not labels.ndim:
        got = "a single number" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise UserError(
            f"labels must be a tensor with one integer per position, got {got}; make them so in the dataset or its "
            "collate function"
        )
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise UserError(
            f"labels must be integer class indices (torch.int64), got {labels.dtype}; convert them where the batch "
            "is made, in the dataset or its collate function: labels = labels.long()"
        )
    return labels.long()


def check_range(targets: Tensor, vocabulary: int, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Refuse targets outside [0, vocabulary) that are not ``ignore_index``, and return which targets are valid."""
    if ignore_index is not IGNORE_INDEX:
        check_number("ignore_index", ignore_index, "be a whole number", lambda x: True, whole=True)
    valid = targets != ignore_index
    in_range = ~valid | ((targets >= 0) & (targets < vocabulary))
    expected = f"labels must lie in [0, {vocabulary}) or be {ignore_index} (ignored)"
    if targets.device.type != "cpu":
        torch._assert_async(in_range.all(), expected)  # pyright: ignore[reportPrivateImportUsage]
    elif not in_range.all():
        used = targets[valid]
        raise UserError(
            f"{expected}, got values from {used.min().item()} to {used.max().item()}; does the tokenizer have more "
            "entries than the model?"
        )
    return valid


def check_inputs(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    vocabulary: int | None = None,
) -> Tensor:
    """Refuse hidden states (..., D), a weight (V, D), targets (...) below ``vocabulary``, by default V, and a bias (V,)
    that do not fit each other, and return which targets are valid (...)."""
    alone = hidden_states.ndim == 1 and isinstance(targets, Tensor)  # one token without a batch
    targets = check_integers(targets[None])[0] if alone else check_integers(targets)
    frozen = frozen_columns(weight)
    width = weight.shape[-1] + (0 if frozen is None else frozen.width)
    if weight.ndim != 2 or not hidden_states.ndim or hidden_states.shape[-1] != width:
        raise UserError(
            f"hidden states of shape {tuple(hidden_states.shape)} do not fit an output layer's weight of shape "
            f"{tuple(weight.shape)}: expected (..., D) and (V, D); pass the input of that very output layer"
        )
    check_one_per_position(targets, hidden_states, "hidden states")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"bias of shape {tuple(bias.shape)} does not fit {weight.shape[0]} vocabulary entries")
    # A product with a weight on the meta device would leave what was in memory before.
    devices = hidden_states.device, weight.device, targets.device, weight.device if bias is None else bias.device
    if len({*devices}) > 1:
        raise UserError(
            "hidden states, weight, labels and bias must be on one device, got {}, {}, {}, {}".format(*devices)
        )
    dtypes = {hidden_states.dtype, weight.dtype}
    is_cast = torch.is_autocast_enabled(hidden_states.device.type) and torch.float64 not in dtypes
    if not dtypes <= {*_DTYPES} or (len(dtypes) > 1 and not is_cast):
        raise UserError(
            f"hidden states are {hidden_states.dtype} and the output layer's weight is {weight.dtype}; give both one "
            "floating point dtype, or run under torch.autocast (Lightning: precision=bf16-mixed)"
        )
    return check_range(targets, weight.shape[0] if vocabulary is None else vocabulary, ignore_index)


def check_selected(selected: Tensor, targets: Tensor, vocabulary: int) -> None:
    """Refuse selected entries unless they are integers (..., K) in [-1, vocabulary) for targets (...)."""
    selected = check_integers(selected)
    if selected.shape[:-1] != targets.shape:
        raise UserError(
            f"selected entries of shape {tuple(selected.shape)} do not fit targets of shape {tuple(targets.shape)}: "
            f"expected {(*targets.shape, 'K')}, K entries of the vocabulary per token, -1 for none"
        )
    check_range(selected, vocabulary, -1)


def check_token_weights(token_weights: Tensor, hidden_states: Tensor) -> None:
    """Refuse weights of tokens unless there is one for each hidden state, and none wants a gradient."""
    check_one_per_position(token_weights, hidden_states, "hidden states", "token_weights")
    if token_weights.requires_grad and torch.is_grad_enabled():
        raise UserError(
            "token_weights want a gradient, and a fused loss has none for them; detach them, or multiply the losses of "
            "reduction='none' by them"
        )


def check_one_per_position(targets: Tensor, outputs: Tensor, kind: str, name: str = "labels") -> None:
    """Refuse targets unless there is one for each position of outputs (..., D or V), which ``kind`` names."""
    if targets.shape != outputs.shape[:-1]:
        raise UserError(
            f"{name} of shape {tuple(targets.shape)} do not fit {kind} of shape {tuple(outputs.shape)}: "
            f"expected one {name.removesuffix('s')} per position, {tuple(outputs.shape[:-1])}"
        )
