"""lm-evaluation-harness's command, with the model ``lit_fused``: evaluate without logits.

    python -m lit_fused.evaluation --model lit_fused --model_args pretrained=FOLDER --tasks hellaswag,lambada_openai

All options are those of ``lm_eval``.
"""

import sys

from lit_fused.errors import UserError, needing

if __name__ == "__main__":
    try:
        with needing("python -m lit_fused.evaluation", "evaluation"):
            from lit_fused.evaluation.harness import main
    except UserError as error:
        sys.exit(str(error))
    main()
