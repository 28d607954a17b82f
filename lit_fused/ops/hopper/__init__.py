"""The exact path for bfloat16 on Hopper GPUs: it computes the softmax inside the matrix product."""
