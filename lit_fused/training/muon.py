"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimiser."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """Steps ``matrices`` by ``torch.optim.Muon``, and the other parameters by ``torch.optim.AdamW``.

    Muon's update is scaled to the size of AdamW's, so both take one learning rate and one weight decay. Matrices may be
    sharded (DTensor): Muon orthogonalises the whole of each.

    Args:
        params: parameters, or groups of them with their own ``lr`` and ``weight_decay``.
        matrices: those of ``params`` that Muon steps. A module of this package gives the 2-D parameters that are not
            in an embedding or the output layer.
        lr: of both.
        betas, eps: of AdamW.
        weight_decay: of both, for groups without their own.
        momentum, ns_steps: of Muon: its momentum and its Newton-Schulz iterations.
    """

    def __init__(
        self,
        params: Iterable[Any],
        matrices: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        ns_steps: int = 5,
    ) -> None:
        ours, given = {id(p) for p in matrices}, list(params)
        groups = [dict(group) for group in given] if given and isinstance(given[0], dict) else [{"params": given}]
        divided: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
        for group in groups:
            for name, found in divided.items():
                part = [p for p in group["params"] if (id(p) in ours) == (name == "muon")]
                found += [{**group, "params": part, "algorithm": name}] if part else []
        self._parts: dict[str, Optimizer] = {}
        if divided["muon"]:
            options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": weight_decay}
            self._parts["muon"] = Muon(divided["muon"], lr, momentum=momentum, ns_steps=ns_steps, **options)
        if divided["adamw"]:
            self._parts["adamw"] = AdamW(divided["adamw"], lr, betas, eps, weight_decay)
        whole = [group for part in self._parts.values() for group in part.param_groups]
        super().__init__(whole, {"lr": lr, "weight_decay": weight_decay, "algorithm": "adamw", "differentiable": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | None:  # type: ignore[override]
        """Step both parts, and return the loss of ``closure``."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for name, part in self._parts.items():  # A state that was loaded is this object's alone.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.step()
        return loss
