"""MLPs in chunks of tokens: the wide numbers between two products exist for one chunk at a time, in backward as well.

Which modules act on each token alone is found by an experiment with random weights: chunks have to give what the whole
gives. Of a mixture the experts are chunked, and the router sees all tokens, as its loss is one of all of them.
"""

import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lit_fused.heads import evaluation_mode
from lit_fused.heads.adapters import is_adapter

# With so many chunks the numbers of one are about as many as the layer's input, as an MLP is some times wider.
_CHUNKS = 16
_LEAST = 2048  # tokens, with which a GPU's products are as fast as with more
_OF_EXPERTS = ["hidden_states", "top_k_index", "top_k_weights"]  # arguments of experts, as transformers documents them
_OWN = "lit_fused_own_class"  # attribute of a class
_TOKENS = 12  # of the experiment
_DIFFERS = 1e-4  # by this share of the largest number what is not the same differs at least


@functools.cache
def chunked_class(base: type[nn.Module], dims: int, tokens: int | None) -> type[nn.Module]:
    """Return a class for a module that acts on each token alone, whose forward computes in chunks. One class serves all
    layers, so that ``torch.compile`` takes them for alike: an instance's own ``forward`` it would compile for each.

    Args:
        base: the module's own class. It takes a tensor (..., D), and perhaps others (..., K), and returns (..., D).
        dims: of these tensors.
        tokens: of a chunk; None: a sixteenth of those that come, at least 2048.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs or any(not isinstance(x, Tensor) or x.ndim != dims for x in args):
            return base.forward(self, *args, **kwargs)
        hidden = args[0]
        count = hidden.shape[:-1].numel()
        size = tokens or max(_LEAST, -(-count // _CHUNKS))
        if count <= size:
            return base.forward(self, *args)
        lead = (1,) * (dims - 2) + (count,)
        parts = zip(*(x.reshape(*lead, x.shape[-1]).split(size, -2) for x in args), strict=True)
        if torch.is_grad_enabled():
            made = [checkpoint(base.forward, self, *part, use_reentrant=False) for part in parts]
        else:
            made = [base.forward(self, *part) for part in parts]
        return torch.cat(made, -2).view(hidden.shape)

    def reduced(self: nn.Module, _: Any) -> Any:
        return _empty, (base, dims, tokens), vars(self)  # A copy in another process makes the class anew.

    functools.update_wrapper(forward, base.forward)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduced, _OWN: base, **names})


def own_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a module had before it computed in chunks; None if it does not."""
    return getattr(type(module), _OWN, None)


def _empty(base: type[nn.Module], dims: int, tokens: int | None) -> nn.Module:
    kind = chunked_class(base, dims, tokens)
    return kind.__new__(kind)


class TokenModules:
    """Finds the modules of layers that act on each token alone, for hidden states of ``width`` numbers."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._known: dict[Any, int] = {}  # Modules that are alike are tried once.

    def of(self, layer: nn.Module) -> Iterator[tuple[nn.Module, int]]:
        """Yield each of the outermost ones, and the number of dimensions that it was tried with."""
        for child in layer.children():
            dims = self._tried(child) if self._may_be(child) else 0
            if dims:
                yield child, dims
            else:
                yield from self.of(child)

    @staticmethod
    def _may_be(module: nn.Module) -> bool:
        """Return whether a module has two products, is no adapter around one, and has no router before its experts."""
        parts = [part for part in module.modules() if part is not module]
        is_mixture = any(isinstance(part, nn.ModuleList) or _takes_experts(part) for part in parts)
        products = sum(p.ndim > 1 for p in module.parameters())
        return products > 1 and not is_mixture and not is_adapter(module) and "forward" not in vars(module)

    def _tried(self, module: nn.Module) -> int:
        key = type(module), repr(module), repr([(p.shape, type(p)) for p in module.parameters()]), _settings(module)
        if key not in self._known:
            self._known[key] = next((dims for dims in (3, 2) if self._acts_on_tokens(module, dims)), 0)
        return self._known[key]

    @torch.no_grad()
    def _acts_on_tokens(self, module: nn.Module, dims: int) -> bool:
        generator = torch.Generator().manual_seed(0)
        weights, device = _random_weights(module, generator)
        dtype = torch.float32 if weights else next(module.parameters()).dtype
        dtype = dtype if dtype.is_floating_point else torch.bfloat16
        args = [torch.randn(_TOKENS, self.width, generator=generator, device="cpu")]
        if _takes_experts(module):
            experts = max((p.shape[0] for p in module.parameters() if p.ndim == 3), default=1)
            args.append(torch.randint(experts, (_TOKENS, min(2, experts)), generator=generator, device="cpu"))
            args.append(torch.rand(args[1].shape, generator=generator, device="cpu"))
        args = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in args]

        def run(tokens: slice, *shape: int) -> Tensor:
            of_them = [x[tokens] if dims == 2 else x[tokens].view(*shape, x.shape[-1]) for x in args]
            return functional_call(module, weights, tuple(of_them))

        try:
            with evaluation_mode(module):
                whole = run(slice(None), 2, _TOKENS // 2)
                parts = [run(slice(first, first + 4), 1, 4) for first in range(0, _TOKENS, 4)]
        except Exception:  # It takes something else, and raises what it likes.
            return False
        if not isinstance(whole, Tensor) or whole.numel() != args[0].numel():
            return False
        whole, joined = whole.view(_TOKENS, -1).float(), torch.cat([part.view(4, -1) for part in parts]).float()
        differs = _DIFFERS if dtype == torch.float32 else 100 * _DIFFERS
        return bool(whole.std(0).amax() > 0 and (whole - joined).abs().amax() <= differs * whole.abs().amax())


def _takes_experts(module: nn.Module) -> bool:
    return [*inspect.signature(type(module).forward).parameters][1:] == _OF_EXPERTS


def _settings(module: nn.Module) -> str:
    return repr(
        [(k, v) for part in module.modules() for k, v in vars(part).items() if isinstance(v, int | float | str)]
    )


def _random_weights(module: nn.Module, generator: torch.Generator) -> tuple[dict[str, Tensor], torch.device]:
    """Return numbers for a module's tensors, and their device, the CPU. Its own may be on the meta device, or zeros,
    which would hide what mixes tokens. A quantised module runs with its own: {}. All experts get the same."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    if any(not tensor.is_floating_point() or tensor.element_size() < 2 for tensor in tensors.values()):
        return {}, next(module.parameters()).device
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        shape = (1, *tensor.shape[1:]) if tensor.ndim == 3 else tensor.shape
        numbers = torch.randn(shape, generator=generator, device="cpu")
        fan_in = tensor.shape[-1] if tensor.ndim > 1 else 4
        made[name] = (numbers / math.sqrt(max(1, fan_in)) + (0 if tensor.ndim > 1 else 1)).expand(tensor.shape)
    return made, torch.device("cpu")
