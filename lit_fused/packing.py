"""Rows that hold several documents: does a model keep them apart?

A batch says where documents begin by "position_ids" (B, T) that begin anew there, without an "attention_mask". Most
models of transformers then confine attention to each document. Some do not look at positions, but take the finished
mask. Some have layers that no mask stops: a recurrence or a convolution runs on into the next document. Nothing in a
run would tell; so the model is asked, by experiment, with the first such batch.

The one trick: if documents do not see each other, then other tokens in the first leave what the second gives as it is,
to the last bit. What rounding does where experts gather tokens of all rows, the same row at another place shows. The
second gives what it gives as the first, and that is what it gives alone, in a forward pass that knows nothing of
packing, as far as the precision goes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.generic import is_flash_attention_requested

from lit_fused.errors import UserError

# How a model is told of documents: by positions alone, or by finished masks as well.
Form = Literal["positions", "masks"]
FORMS: tuple[Form, ...] = ("positions", "masks")

_LONGEST = 2048  # tokens of the experiment's rows
_SHORT = 16  # tokens of the short document; the long one has the rest


def may_be_packed(batch: Mapping[str, Any]) -> bool:
    """Whether "position_ids" tell documents apart, if any begin anew. Looks at names and shapes alone, which are the
    same on every rank."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None  # refused elsewhere
    return isinstance(positions, Tensor) and positions.ndim == 2 and batch.get("attention_mask") is None


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether a row holds more than one document. Waits for a GPU."""
    return may_be_packed(batch) and bool((batch["position_ids"].diff(dim=-1) != 1).any())


def arguments(model: PreTrainedModel, batch: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """What ``model`` is given in addition to a packed batch.

    FlashAttention takes the documents' ends: left to itself, transformers passes them on for a single row only.
    """
    config, positions = model.config.get_text_config(), batch["position_ids"]
    found = varlen_arguments(model, positions)
    if form == "masks":
        inputs: Any = batch.get("input_ids", batch.get("inputs_embeds"))
        shape = torch.empty(*inputs.shape[:2], 1, dtype=model.dtype, device=positions.device)
        positions = positions.expand(len(inputs), -1)
        found["attention_mask"] = create_masks_for_generate(config, shape, None, None, position_ids=positions)
    return found


def varlen_arguments(model: Any, positions: Tensor) -> dict[str, Any]:
    """FlashAttention's keyword arguments for documents that begin where ``positions`` (B, T) do not go on; none for
    another kind of attention. Waits for a GPU."""
    if not is_flash_attention_requested(model.config.get_text_config()):
        return {}
    begins = positions.diff(dim=-1, prepend=positions[:, :1]) != 1
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    longest = positions.shape[1]  # an upper bound will do
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def experiment(length: int, vocabulary: int, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two batches: four rows (4, T) of two documents, a short one and a long one, and the long one alone (1, n).

    The second row has another short document, the third is the first again, and the fourth begins with the long one.
    The tokens are the same on every rank, so that all come to the same verdict; no random number is used up.
    """
    length = min(max(length, 2 * _SHORT), _LONGEST)
    entries = min(vocabulary, 4096)
    tokens = torch.arange(length, device=device).square().mul(7).add(3).remainder(entries)
    short, long = tokens[:_SHORT], tokens[_SHORT:]
    other = (short + 1).remainder(entries)
    rows = torch.stack([torch.cat(parts) for parts in ((short, long), (other, long), (short, long), (long, short))])
    begins = torch.tensor([_SHORT] * 3 + [len(long)], device=device)[:, None]
    positions = torch.arange(length, device=device).expand(4, -1)
    positions = torch.where(positions < begins, positions, positions - begins)
    alone = long[None]
    return {"input_ids": rows, "labels": rows, "position_ids": positions}, {"input_ids": alone, "labels": alone}


def difference(packed: Tensor, alone: Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with what a model gave, hidden states or logits; None: nothing.

    Args:
        packed: (4, T, D) for the first batch of :func:`experiment`.
        alone: (1, n, D) for the second.
        dtype: in which the model computed.
    """
    second, other, again = packed[:3, _SHORT:].float()
    first = packed[3, :-_SHORT].float()
    size = second.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    leak, noise = (((second - row).norm(dim=-1) / size).max().item() for row in (other, again))
    moved = ((second - first).norm() / second.norm()).item()
    shift = ((first - alone[0].float()).norm() / second.norm()).item()
    rounding = _rounding(dtype, packed.device)
    if not leak <= max(rounding / 4, 1e-5, 4 * noise):
        return f"other tokens in the first of two documents change what the second gives by {leak:.2g} of it"
    if not (moved <= max(2 * rounding, 1e-4) and shift <= max(16 * rounding, 1e-4)):
        return f"the second of two documents gives something else than alone, by {max(moved, shift):.2g} of it"
    return None


def first_exact(run: Callable[[Form], tuple[Tensor, Tensor]], dtype: torch.dtype, name: str) -> Form:
    """The first of :data:`FORMS` in which documents are apart.

    Args:
        run: gives the two tensors of :func:`difference`.
        dtype: in which the model computes.
        name: of the model.

    Raises:
        UserError: there is none.
    """
    faults = list(_faults(run, dtype))
    if faults[-1] is None:
        return FORMS[len(faults) - 1]
    raise refusal(name, faults[0] or "")


def refusal(name: str, fault: str, otherwise: str = "") -> UserError:
    """The sentence for a model of that name, of which :func:`difference` says ``fault``; ``otherwise`` ends it."""
    return UserError(
        f"{name} does not keep documents in one row apart: {fault}. With packing=documents it would learn from text "
        f"that has nothing to do with it; choose data.packing=none (a document a row) or data.packing=stream{otherwise}"
    )


def _faults(run: Callable[[Form], tuple[Tensor, Tensor]], dtype: torch.dtype) -> Iterator[str | None]:
    for form in FORMS:
        try:
            fault = difference(*run(form), dtype)
        except UserError:
            raise
        except Exception as error:  # the model's own, about what it was given
            fault = f"it cannot be given them ({type(error).__name__}: {error})"
        yield fault
        if fault is None:
            return


def _rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of one product; TF32's where that is allowed."""
    tf32 = device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2**-10 if tf32 else torch.finfo(dtype).eps
