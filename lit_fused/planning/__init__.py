"""Predict what training takes of a GPU's memory, without the GPU: ``lit_fused.plan``.

Two training steps run on tensors without bytes (``ledger``), on which output heads allocate what they do on the GPU
(``planned_heads``). No other room knows this one.
"""

from lit_fused.planning.planned_run import Plan, plan
from lit_fused.planning.planned_step import PlanOptions
from lit_fused.planning.spread import Spread

__all__ = ["Plan", "PlanOptions", "Spread", "plan"]
