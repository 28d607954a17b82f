"""Pipeline parallelism: a decoder's layers divided over ranks, between which micro-batches travel."""
