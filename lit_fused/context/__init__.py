"""Context parallelism: the tokens of each row divided over ranks, for rows that one device has no memory for.

No other room knows this one: ``Trainer(strategy=ContextStrategy(4))`` or ``strategy=context`` names it, and the
strategy names its own placement.
"""

from lit_fused.context.context_strategy import ContextStrategy as ContextStrategy
