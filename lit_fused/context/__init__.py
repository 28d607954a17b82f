"""Context parallelism: the tokens of each row divided over ranks, for rows that one device has no memory for.

``Trainer(strategy=ContextStrategy(4))`` or ``strategy=context`` names it, and the strategy its own placement. Planning
alone knows this room: it runs its forward passes on fake tensors.
"""

from lit_fused.context.context_strategy import ContextStrategy as ContextStrategy
