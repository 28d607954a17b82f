"""Let a model train on longer rows: layers' inputs wait on the host, and MLPs see a chunk of the tokens at a time."""

from lit_fused.memory.reduce import checkpointing_of, is_offloaded, reduce_memory

__all__ = ["checkpointing_of", "is_offloaded", "reduce_memory"]
