"""Evaluate causal language models without logits: log-likelihoods of texts, and lm-evaluation-harness's tasks."""
