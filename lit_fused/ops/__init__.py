"""Plain tensor functions: no Lightning, no Hugging Face, no configuration below this line."""
