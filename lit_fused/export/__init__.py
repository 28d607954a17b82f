"""Write trained models as Hugging Face folders; ``python -m lit_fused.export`` does it for a checkpoint on the disk."""
