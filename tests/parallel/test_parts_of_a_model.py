"""Models of which a batch needs only parts (vision towers, unused layers), on two ranks: as one process."""

import pytest
from strategy_cases import assert_as_in_one_process

CASES = {
    "llava_everywhere": {"ddp": "", "fsdp2": ""},
    "llava_on_one_rank": {"ddp": ""},
    "qwen_vl_on_one_rank": {"ddp": ""},
    "gemma3_everywhere": {"fsdp2": ""},
    "unused": {"ddp": ""},
}


@pytest.mark.slow
def test_two_ranks_with_different_images_train_as_one_process(tmp_path):
    assert_as_in_one_process(tmp_path, CASES)
