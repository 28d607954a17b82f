"""Models of which a batch needs only parts (vision towers, unused layers), on two ranks: as one process, or refused."""

import pytest
from strategy_cases import assert_as_in_one_process

DIVIDED = (
    "pixel_values is in the batches of some ranks and not of others, and layers that are divided over the ranks must "
    "run on all of them or on none"
)
UNUSED = (
    "DDP did not average this step's gradients, as some parameters got none "
    "(model.backbone.extra.weight, model.backbone.extra.bias); choose strategy=ddp"
)
CASES = {
    "llava_everywhere": {"ddp": "", "lightnings_ddp": "", "fsdp2": ""},
    "llava_on_one_rank": {"ddp": "", "lightnings_ddp": "", "fsdp2": DIVIDED},
    "qwen_vl_on_one_rank": {"ddp": ""},
    "gemma3_everywhere": {"fsdp2": ""},
    "unused": {"ddp": "", "lightnings_ddp": UNUSED},
}


@pytest.mark.slow
def test_two_ranks_with_different_images_train_as_one_process_or_say_why_not(tmp_path):
    assert_as_in_one_process(tmp_path, CASES)
