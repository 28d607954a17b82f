"""Context parallelism: the tokens of each row divided over ranks, for rows that one device has no memory for.

``Trainer(strategy=ContextStrategy(4))`` or ``strategy=context`` names it, and the strategy names its own placement. Only
planning, which runs its forward passes on fake tensors, knows this room.
"""

from lit_fused.context.context_strategy import ContextStrategy as ContextStrategy
