"""Run ``python -m lit_fused``, which is the command ``lit-fused``."""

from lit_fused.app.cli import main

if __name__ == "__main__":
    main()
