"""The placement of each strategy, and that nothing outside of ``parallel/`` tells strategies apart."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from tiny_models import tiny_model

import lit_fused
from lit_fused import LanguageModel, LinearCrossEntropyLoss, UserError
from lit_fused.context.context_strategy import Context
from lit_fused.models.compilation import compile_backbone
from lit_fused.parallel import FSDP2Strategy, ReplicatedStrategy, placement_of
from lit_fused.parallel.placement import OneDevice, Replicated
from lit_fused.parallel.sharded import Sharded
from lit_fused.pipeline import PipelineStrategy
from lit_fused.pipeline.strategy import Pipelined

PACKAGE = Path(lit_fused.__file__).parent


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (SingleDeviceStrategy(torch.device("cpu")), OneDevice),
        (DDPStrategy(), Replicated),
        (ReplicatedStrategy(), Replicated),
        (ModelParallelStrategy(), Sharded),
        (FSDP2Strategy(), Sharded),
        (PipelineStrategy(2), Pipelined),
        (lit_fused.ContextStrategy(2), Context),
    ],
)
def test_a_strategy_has_one_placement(strategy, kind):
    placement = placement_of(strategy)
    assert type(placement) is kind
    assert placement_of(strategy) is placement


def test_lightnings_fsdp1_is_refused_at_set_up_by_a_sentence_that_names_fsdp2():
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    with pytest.raises(
        UserError, match="^FSDPStrategy is not supported.*fsdp2 .lit_fused.parallel.FSDP2Strategy"
    ) as said:
        placement_of(FSDPStrategy()).set_up(model, training=True, compile="none")
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(("how", "cuts"), [("none", False), ("regional", False), ("whole", True)])
def test_ddp_cuts_a_compiled_graph_at_its_buckets_only_if_it_is_of_the_whole_model(how, cuts):
    model = LanguageModel(tiny_model("llama"), LinearCrossEntropyLoss())
    compile_backbone(model, how)
    seen: list[Any] = []

    def compute(batch: Any) -> Any:
        seen.append(torch._dynamo.config.optimize_ddp)

    Replicated(None).run(model, {}, compute, 1.0)
    assert seen == [cuts]


def test_no_strategy_is_told_by_its_class_outside_of_parallel():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in ("parallel", "pipeline", "planning"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                names = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.args[1])}
                if any(name.endswith("Strategy") for name in names):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []
