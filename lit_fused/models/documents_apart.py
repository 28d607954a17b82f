"""Find out, by experiment, how a model keeps the documents that are packed into one row apart.

A batch marks its documents by "position_ids" (B, T) that start again where a document starts, without an
"attention_mask". Most transformers models then confine attention to each document; some need a finished mask; some have
a recurrence or a convolution that no mask stops. No error would show this, so the first such batch tries the model out.

If documents cannot attend to each other, other tokens in the first document leave the outputs of the second unchanged,
to the last bit. (Experts that gather tokens of all rows round differently; the same row at another place in the batch
measures by how much.) The second document must also give the same outputs as the first document of a row, and in a
forward pass without packing, up to the precision's rounding.

A path between documents can be closed by the weights that a model starts with: a projection of zeros, a convolution
that copies its input. Training opens it. So the first of these comparisons is made twice, with the model's weights and
with noise added to them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.utils.generic import is_flash_attention_requested

from lit_fused.errors import UserError
from lit_fused.heads.model_state import probing
from lit_fused.heads.probe import PLAIN_WEIGHTS

# A model receives its documents as positions, of which it makes masks or FlexAttention's blocks; or as finished masks.
Form = Literal["blocks", "positions", "masks"]

_LONGEST = 2048  # The experiment's rows have at most this many tokens.
_SHORT = 16  # The short document has this many tokens, the long one has the rest.


def may_be_packed(batch: Mapping[str, Any]) -> bool:
    """Return whether "position_ids" can mark documents. Looks at names and shapes alone, equal on all ranks."""
    positions = batch.get("position_ids")
    return isinstance(positions, Tensor) and positions.ndim == 2 and batch.get("attention_mask") is None


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Return whether a row holds more than one document. Waits for a GPU."""
    return may_be_packed(batch) and bool((batch["position_ids"].diff(dim=-1) != 1).any())


def arguments(model: PreTrainedModel, batch: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Return the arguments that ``model`` needs in addition to a packed batch. FlashAttention needs the documents'
    ends; transformers finds them itself for a single row only."""
    config, positions = model.config.get_text_config(), batch["position_ids"]
    found = varlen_arguments(model, positions)
    if form == "masks":
        inputs: Any = batch.get("input_ids", batch.get("inputs_embeds"))
        shape = torch.empty(*inputs.shape[:2], 1, dtype=model.dtype, device=positions.device)
        positions = positions.expand(len(inputs), -1)
        found["attention_mask"] = create_masks_for_generate(config, shape, None, None, position_ids=positions)
    return found


def varlen_arguments(model: Any, positions: Tensor) -> dict[str, Any]:
    """Return FlashAttention's keyword arguments for documents that begin where ``positions`` (B, T) do not continue,
    and none for another kind of attention. Waits for a GPU."""
    if not is_flash_attention_requested(model.config.get_text_config()):
        return {}
    begins = positions.diff(dim=-1, prepend=positions[:, :1]) != 1
    starts = begins.flatten().nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    longest = positions.shape[1]  # FlashAttention accepts an upper bound.
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


@torch.no_grad()
def find(model: Any, positions: Tensor, forms: Iterable[Form]) -> Form | UserError:
    """Return the first form in which a language model keeps documents of rows like ``positions`` (B, T) apart, or what
    it is refused with."""
    packed, alone = experiment(positions.shape[1], model.vocabulary, positions.device)
    seen_by_loss = model.logits if model.loss.builds_logits else model.hidden_states
    faults: dict[Form, str] = {}
    with probing(model.backbone):
        for form in forms:
            model.packing = form
            try:
                with noise_in(model.backbone):
                    with_noise = seen_by_loss(packed)[0]
                seen = seen_by_loss(packed)[0], seen_by_loss(alone)[0]
                fault = difference(*seen, model.backbone, with_noise)
            except UserError as error:
                return error
            except Exception as error:  # The model raised it because of the arguments of this form.
                fault = f"it cannot be given them ({type(error).__name__}: {error})"
            if fault is None:
                return form
            faults[form] = fault
    return refusal(model.name, faults["positions"])


def experiment(length: int, vocabulary: int, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return two batches: four rows (4, T) of a short and a long document, and the long document alone (1, n).

    The second row has another short document, the third row repeats the first, and the fourth begins with the long
    document. The tokens are the same on every rank, so that all ranks reach the same verdict.
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


@contextmanager
def noise_in(model: nn.Module) -> Iterator[None]:
    """Add noise to every parameter in a block, the same on all ranks: to a matrix as much as keeps the size of its
    inputs, to others a tenth. Their numbers come back from copies in the CPU's memory."""
    _drop_copies(model)
    parameters = [p.data for p in model.parameters() if p.is_floating_point() and type(p) in PLAIN_WEIGHTS]
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    saved = [part.to("cpu", copy=True) for part in parts]
    for seed, (p, part) in enumerate(zip(parameters, parts, strict=True)):
        generator = torch.Generator(part.device).manual_seed(seed)
        noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32)
        part += noise * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.1)
    _drop_copies(model)
    try:
        yield
    finally:
        for part, numbers in zip(parts, saved, strict=True):
            part.copy_(numbers)
        _drop_copies(model)


def _drop_copies(model: nn.Module) -> None:
    """Free copies of weights, which do not change with them: those that autocast has in half precision, and those that
    FSDP2 has gathered from ranks."""
    torch.clear_autocast_cache()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def difference(packed: Tensor, alone: Tensor, model: nn.Module, with_noise: Tensor | None = None) -> str | None:
    """Return what shows that documents are not apart, or None. Call it in the precision's context.

    ``model`` has given hidden states or logits of the batches of :func:`experiment`: (4, T, D) and (1, n, D); and of
    the first of them ``with_noise``, from which nothing is concluded if it is not finite.
    """
    error = rounding(model, packed.device)
    for seen in (packed,) if with_noise is None or not with_noise.isfinite().all() else (packed, with_noise):
        second, other, again = seen[:3, _SHORT:].float()
        size = second.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        leak, noise = (((second - row).norm(dim=-1) / size).max().item() for row in (other, again))
        if not leak <= max(error / 4, 1e-5, 4 * noise):
            trained = "" if seen is packed else ", once training has changed its weights"
            return (
                f"other tokens in the first of two documents change what the second gives by {leak:.2g} of it{trained}"
            )
    second, first = packed[0, _SHORT:].float(), packed[3, :-_SHORT].float()
    moved = ((second - first).norm() / second.norm()).item()
    shift = ((first - alone[0].float()).norm() / second.norm()).item()
    if not (moved <= max(2 * error, 1e-4) and shift <= max(16 * error, 1e-4)):
        return f"the second of two documents gives something else than alone, by {max(moved, shift):.2g} of it"
    return None


def refusal(name: str, fault: str, otherwise: str = "") -> UserError:
    """Return the error for a ``fault`` that :func:`difference` found; ``otherwise`` is added to the alternatives."""
    return UserError(
        f"{name} does not keep documents in one row apart: {fault}. With packing=documents it would learn from text "
        f"that has nothing to do with it; choose data.packing=none (a document a row) or data.packing=stream{otherwise}"
    )


def rounding(model: nn.Module, device: torch.device) -> float:
    """Return the relative error of one product of a model: TF32's where torch may use it, else its dtype's. Call it in
    the precision's context."""
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else next(model.parameters()).dtype
    if getattr(model, "is_loaded_in_4bit", False):  # Its layers compute in bfloat16, whatever its parameters are.
        dtype = torch.bfloat16
    tf32 = device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return 2**-10 if tf32 else torch.finfo(dtype).eps
