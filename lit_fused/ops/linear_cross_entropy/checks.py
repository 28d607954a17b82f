"""What is refused before anything is computed: labels, shapes, dtypes, devices and options that do not fit.

Every check raises a :class:`UserError` that says what was expected, what came, and what to do. None of them makes the
host wait for a GPU: there, labels outside the vocabulary are printed and stop the run by an assertion on the device.
"""

import torch
from torch import Tensor

from lit_fused.errors import UserError
from lit_fused.ops.linear_cross_entropy.building import kernels_can_be_built
from lit_fused.ops.linear_cross_entropy.plan import VocabularyShard

try:
    from lit_fused.ops.linear_cross_entropy.labels_triton import print_labels_out_of_range
except ImportError:  # Triton exists for Linux only
    print_labels_out_of_range = None

IGNORE_INDEX = -100


def check_integers(labels: Tensor) -> None:
    """Labels are a tensor of integers; float labels are the classic mistake."""
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


def check_range(targets: Tensor, vocabulary: int, ignore_index: int = IGNORE_INDEX) -> None:
    """Targets lie in [0, vocabulary) or equal ``ignore_index``."""
    valid = targets != ignore_index
    in_range = ~valid | ((targets >= 0) & (targets < vocabulary))
    expected = f"labels must lie in [0, {vocabulary}) or be {ignore_index} (ignored)"
    if targets.device.type != "cpu":
        if targets.is_cuda and print_labels_out_of_range is not None and kernels_can_be_built():
            print_labels_out_of_range(targets.contiguous(), vocabulary, ignore_index)
        torch._assert_async(in_range.all(), expected)  # pyright: ignore[reportPrivateImportUsage]
    elif not in_range.all():
        used = targets[valid]
        raise UserError(
            f"{expected}, got values from {used.min().item()} to {used.max().item()}; does the tokenizer have more "
            "entries than the model?"
        )


def check_inputs(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    vocabulary: int | None = None,
) -> None:
    """Hidden states (..., D), weight (V, D), targets (...) and bias (V,) fit each other; the targets lie in
    ``vocabulary``, by default V."""
    check_integers(targets)
    if weight.ndim != 2 or hidden_states.ndim < 2 or hidden_states.shape[-1] != weight.shape[1]:
        raise UserError(
            f"hidden states of shape {tuple(hidden_states.shape)} do not fit an output layer's weight of shape "
            f"{tuple(weight.shape)}: expected (..., D) and (V, D); pass the input of that very output layer"
        )
    check_one_per_position(targets, hidden_states, "hidden states")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"bias of shape {tuple(bias.shape)} does not fit {weight.shape[0]} vocabulary entries")
    devices = {"hidden states": hidden_states.device, "weight": weight.device, "labels": targets.device}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UserError(
            f"all tensors must be on one device, got {found}; Lightning moves a batch and its module by itself, "
            f"outside of it call .to(device) on the batch and the model"
        )
    device_type = hidden_states.device.type
    if hidden_states.dtype != weight.dtype and not torch.is_autocast_enabled(device_type):
        raise UserError(
            f"hidden states are {hidden_states.dtype} but the output layer's weight is {weight.dtype}; convert one of "
            "them, or run under torch.autocast (Lightning: precision=bf16-mixed)"
        )
    check_range(targets, weight.shape[0] if vocabulary is None else vocabulary, ignore_index)


def check_one_per_position(targets: Tensor, outputs: Tensor, kind: str) -> None:
    """Outputs (..., D or V), which ``kind`` names, have one target for each position."""
    if targets.shape != outputs.shape[:-1]:
        raise UserError(
            f"labels of shape {tuple(targets.shape)} do not fit {kind} of shape {tuple(outputs.shape)}: "
            f"expected one label per position, {tuple(outputs.shape[:-1])}"
        )


def check_shard(weight: Tensor, shard: VocabularyShard) -> None:
    """The weight's rows are the part of the vocabulary that the shard says they are."""
    rows, start = weight.shape[0], shard.start
    if start < 0 or start + rows > shard.vocabulary or rows > shard.largest:
        raise UserError(
            f"{rows} rows of a weight cannot be the entries from {start} on of a vocabulary of {shard.vocabulary} of "
            f"whose parts the largest has {shard.largest}; give each rank's own first entry, and "
            "the largest number of rows of any"
        )


def check_weights(label_smoothing: float, z_loss: float) -> None:
    """The weights of the loss terms are in range."""
    if not 0 <= label_smoothing <= 1:
        raise UserError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
    if z_loss < 0:
        raise UserError(f"z_loss must not be negative, got {z_loss}; 1e-4 is a usual value")


def check_budget(logits_budget_mib: float | None) -> None:
    """The size of a chunk of logits is positive, or left to the device."""
    if logits_budget_mib is not None and logits_budget_mib <= 0:
        raise UserError(f"logits_budget_mib must be positive, got {logits_budget_mib}; null lets the device decide")


def check_filter(filter_eps: float | None, label_smoothing: float) -> None:
    """A probability below which entries are dropped, with a loss whose gradient is small where the probability is."""
    if filter_eps is None:
        return
    if not isinstance(filter_eps, int | float) or not 0 <= filter_eps < 1:
        raise UserError(
            f"filter_eps must be a probability, at least 0 and below 1, got {filter_eps!r}; 0.000244 (2**-12) is a "
            "usual value, null (None) filters nothing"
        )
    if label_smoothing:
        raise UserError(
            f"filter_eps={filter_eps} drops columns of the vocabulary whose probabilities are small, and with "
            f"label_smoothing={label_smoothing} their gradient is not small; choose one of them: loss=chunked smooths"
        )
