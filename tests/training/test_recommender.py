"""Recommenders against plain logits in float64: losses, gradients, masks, rankings, growth and whole fits."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from head_cases import live_bytes
from lightning_helpers import loader, quiet_trainer
from torch import Tensor, nn

from lit_fused import BidirectionalItems, FusedRecommenderModule, LinearCrossEntropyLoss, SASRec, UserError
from lit_fused.data import InteractionDataModule
from lit_fused.models.item_encoders import MASK
from lit_fused.training import pretrained_items

ITEMS = 37
TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_length": 12, "dropout": 0.0}


def histories(rows: int = 6, length: int = 10, seed: int = 0, left: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, ITEMS + 1, (rows, length), generator=generator)
    for row in range(rows):
        gone = slice(None, row) if left else slice(length - row, None)
        ids[row, gone] = 0
    return ids


def module_of(kind: type = SASRec, loss: LinearCrossEntropyLoss | None = None, **options) -> FusedRecommenderModule:
    torch.manual_seed(0)
    return FusedRecommenderModule(kind(ITEMS, **TINY).double(), loss=loss, **options).double()


def batch_of(ids: Tensor, **more: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids.clone(), **more}


def plain_loss(
    module: FusedRecommenderModule, ids: Tensor, weights: Tensor, smoothing: float, bias: Tensor | float = 0.0
) -> Tensor:
    """The weighted mean cross entropy of the next items, from logits without a column of the padding."""
    logits = module.backbone(ids)[:, :-1] @ module.backbone.item_embedding.weight[1:].T  # type: ignore[union-attr]
    targets, weights = ids[:, 1:], weights[:, 1:]
    valid = targets > 0
    losses = F.cross_entropy((logits + bias)[valid], targets[valid] - 1, reduction="none", label_smoothing=smoothing)
    return (losses * weights[valid]).sum() / weights[valid].sum()


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients_are_those_of_the_full_softmax_in_float64(left, smoothing, weighted):
    module = module_of(loss=LinearCrossEntropyLoss(label_smoothing=smoothing))
    model, ids = module.model, histories(left=left)
    weights = torch.rand(ids.shape, dtype=torch.float64) * 1e-3
    batch = batch_of(ids) | ({"token_weights": weights} if weighted else {})
    ours = model(batch).loss
    found = torch.autograd.grad(ours, list(module.parameters()))
    used = weights if weighted else torch.ones_like(weights)
    truth = plain_loss(module, ids, used, smoothing)
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=0)
    for gradient, expected in zip(found, torch.autograd.grad(truth, list(module.parameters())), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-12)


def test_look_ups_and_output_layer_have_one_gradient_of_their_table():
    many, size = 20_000, 64
    torch.manual_seed(0)
    backbone = SASRec(many, hidden_size=size, num_layers=1, max_length=8, dropout=0.0)
    model = FusedRecommenderModule(backbone, loss=LinearCrossEntropyLoss(logits_budget_mib=0.1)).model
    batch = batch_of(torch.randint(1, many, (1, 4)))  # few, so that the logits are small
    model.prepare_hidden_states()  # type: ignore[operator]
    with live_bytes() as counter:
        model(batch).loss.backward()
    assert counter.peak < 1.2 * (many + 1) * size * 4


def test_a_table_that_is_used_in_other_ways_as_well_has_all_of_its_gradients():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(ITEMS + 1, 8, padding_idx=0)

        def forward(self, input_ids: Tensor) -> Tensor:
            again = self.table(input_ids.flip(1)) + self.table(input=input_ids).sin()
            return self.table(input_ids).cumsum(1) * again + self.table.weight[3:5].mean(0)

        def get_output_embeddings(self) -> nn.Embedding:
            return self.table

    torch.manual_seed(0)
    module, ids = FusedRecommenderModule(Twice().double()).double(), histories()
    table: Any = module.backbone.table
    found = [torch.autograd.grad(module.model(batch_of(ids)).loss, table.weight)[0]]
    logits = module.backbone(ids)[:, :-1] @ table.weight[1:].T
    truth = F.cross_entropy(logits[ids[:, 1:] > 0], ids[:, 1:][ids[:, 1:] > 0] - 1)
    found.append(torch.autograd.grad(truth, table.weight)[0])
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-12)


def test_the_correction_of_popularity_is_a_bias_in_training_and_absent_from_recommendations():
    module, ids = module_of(popularity_correction=0.5), histories()
    counts = torch.arange(ITEMS) / 100  # of weights below 1; none of the first item, which counts as the least popular
    module.model.correct_popularity(counts)  # type: ignore[operator]
    q = counts.double().clamp(min=0.01)
    bias = 0.5 * (q / q.sum()).log()
    truth = plain_loss(module, ids, torch.ones_like(ids, dtype=torch.float64), 0, bias)
    torch.testing.assert_close(module.model(batch_of(ids)).loss, truth, rtol=1e-10, atol=0)
    scores = module.eval().backbone(ids[:1])[:, -1] @ module.backbone.item_embedding.weight[1:].T  # type: ignore
    found = module.recommend(ids[:1], 3, seen=[[]])
    assert found.items.tolist() == (scores.topk(3).indices + 1).tolist()


@pytest.mark.parametrize("kind", [SASRec, BidirectionalItems])
def test_padding_changes_no_hidden_state_on_either_side_and_in_either_mode(kind):
    backbone = module_of(kind).backbone
    ids = histories(1, 7)
    alone = backbone(ids)
    for padded, part in ((F.pad(ids, (0, 4)), slice(0, 7)), (F.pad(ids, (4, 0)), slice(4, None))):
        torch.testing.assert_close(backbone(padded)[:, part], alone, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(backbone.eval()(ids), alone, rtol=1e-10, atol=1e-12)
        assert backbone(torch.zeros(1, 5, dtype=torch.int64)).isfinite().all()


def test_the_check_of_a_batch_hides_items_without_a_draw_from_the_runs_random_numbers():
    module = module_of(BidirectionalItems)
    state = torch.get_rng_state()
    module.model.spot_check(batch_of(histories()))  # type: ignore[operator]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_causal_model_sees_nothing_later_and_a_bidirectional_one_does():
    ids = histories(1, 7)
    changed = ids.clone()
    changed[0, -1] = ids[0, -1] % ITEMS + 1
    for kind, is_same in ((SASRec, True), (BidirectionalItems, False)):
        backbone = module_of(kind).backbone
        assert torch.equal(backbone(ids)[:, :-1], backbone(changed)[:, :-1]) is is_same


def test_a_bidirectional_model_learns_masked_items_alone_and_never_sees_them():
    module, ids = module_of(BidirectionalItems), histories()
    seen: list[Tensor] = []
    module.backbone.register_forward_pre_hook(lambda _, args, named: seen.append(named["input_ids"]), with_kwargs=True)
    output = module.model.train()(batch_of(ids))
    masked = seen[0] == MASK
    assert (seen[0][~masked] == ids[~masked]).all()
    assert masked.any(1)[(ids > 0).any(1)].all()
    assert not masked[ids == 0].any()
    assert int(output.num_tokens) == int(masked.sum())
    logits = module.backbone(input_ids=seen[0])[masked] @ module.backbone.item_embedding.weight[1:].T  # type: ignore
    torch.testing.assert_close(output.loss, F.cross_entropy(logits, ids[masked] - 1), rtol=1e-10, atol=0)
    labels = torch.full_like(ids, -100)
    labels[:, 3] = ids[:, 3]
    with torch.no_grad():
        module.model.eval()({"input_ids": ids, "labels": labels})
    assert ((seen[-1] == MASK) == (labels > 0)).all()


def test_as_many_items_are_masked_in_bf16_true_as_in_any_other_precision():
    """Lightning's bf16-true makes bfloat16 the default dtype around each step. A number that is drawn in it is one of
    256, so that several items of a long row would have the least one, and all of them were masked."""
    model: Any = module_of(BidirectionalItems).model
    ids = torch.randint(1, ITEMS + 1, (20, 200))
    model.mask_fraction = 0.0
    model.train()
    torch.set_default_dtype(torch.bfloat16)
    try:
        masked = model._masked(batch_of(ids))["input_ids"] == MASK
    finally:
        torch.set_default_dtype(torch.float32)
    assert masked.sum(1).tolist() == [1] * 20


@pytest.mark.parametrize("kind", [SASRec, BidirectionalItems])
def test_metrics_are_those_of_a_full_sort_over_batches(kind, tmp_path):
    module = module_of(kind, check_every_n_steps=0)
    ranks, shown, batches = [], set(), []
    for seed in range(3):
        ids = histories(seed=seed)
        labels = torch.full_like(ids, -100)
        last = (ids > 0).sum(1) - 1
        rows = torch.arange(len(ids))
        labels[rows, last] = ids[rows, last]
        seen = ids.masked_fill(labels > 0, 0)
        batches.append({"input_ids": ids, "labels": labels, "seen": seen})
        inputs = ids.masked_fill(labels > 0, MASK) if kind is BidirectionalItems else ids
        at = last if kind is BidirectionalItems else last - 1
        with torch.no_grad():
            states = module.eval().backbone(inputs)[rows, at]
            scores = states @ module.backbone.item_embedding.weight[1:].T  # type: ignore[union-attr]
        for row, target in enumerate(ids[rows, last].tolist()):
            order = [i + 1 for i in scores[row].argsort(descending=True).tolist() if i + 1 not in seen[row].tolist()]
            ranks.append(order.index(target) + 1 if target in order else ITEMS + 1)
            shown |= set(order[:10])
    found = quiet_trainer(tmp_path).validate(module, loader(batches), verbose=False)[0]
    expected = {
        "val/ndcg_at_10": sum(1 / math.log2(r + 1) for r in ranks if r <= 10) / len(ranks),
        "val/recall_at_10": sum(r <= 10 for r in ranks) / len(ranks),
        "val/mrr": sum(1 / r for r in ranks) / len(ranks),
        "val/coverage_at_10": len(shown) / ITEMS,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_a_target_that_is_left_out_is_no_hit_where_the_metrics_k_exceeds_the_catalogue():
    model = module_of(SASRec, check_every_n_steps=0, top_k=ITEMS + 1).model.eval()
    ids = torch.tensor([[1, 2]])
    batch = {"input_ids": ids, "labels": ids, "seen": ids}
    with torch.no_grad():
        assert model(batch).stats[f"recall_at_{ITEMS + 1}"] == 0
        assert model({**batch, "seen": ids[:, :1]}).stats[f"recall_at_{ITEMS + 1}"] == 1


def test_recommendations_leave_out_what_was_seen_and_take_histories_padded_on_either_side():
    for kind in (SASRec, BidirectionalItems):
        module = module_of(kind)
        ids = histories(3, 10)
        found = module.recommend(ids, ITEMS)
        for row, items in zip(ids.tolist(), found.items.tolist(), strict=True):
            unseen = set(range(1, ITEMS + 1)) - set(row)
            assert set(items) - {0} == unseen
            assert items[len(unseen) :] == [0] * (ITEMS - len(unseen))
        left = torch.stack([torch.cat([row[row == 0], row[row > 0]]) for row in ids])
        assert torch.equal(module.recommend(left, 5).items, found.items[:, :5])
        lists = [row[row > 0].tolist() for row in ids]
        assert torch.equal(module.recommend(lists, 5).items, found.items[:, :5])
        assert module.training


def test_a_fit_learns_a_cycle_of_items_and_the_export_recommends_the_same(tmp_path):
    module = FusedRecommenderModule(SASRec(ITEMS, **TINY), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    starts = torch.arange(ITEMS)
    ids = (starts[:, None] + torch.arange(8)) % ITEMS + 1
    trainer = quiet_trainer(tmp_path, max_epochs=60)
    trainer.fit(module, loader([batch_of(ids)]))
    assert (module.recommend(ids, 1).items[:, 0] == ids[:, -1] % ITEMS + 1).all()
    module.save_pretrained(tmp_path / "exported")
    again = FusedRecommenderModule.from_folder(tmp_path / "exported")
    assert torch.equal(again.recommend(ids, 5).items, module.recommend(ids, 5).items)


def test_a_table_grows_and_keeps_its_rows():
    module = module_of()
    model: Any = module.model
    before = model.table.weight.detach().clone()
    model.grow(ITEMS + 5)
    after = model.table.weight
    assert torch.equal(after[: ITEMS + 1], before)
    assert after.shape[0] == ITEMS + 6
    ids = torch.tensor([[1, ITEMS + 5, 2]])
    assert module.model(batch_of(ids)).loss.isfinite()
    with pytest.raises(UserError, match="the model has 42 items and the data only 3"):
        module.model.grow(3)  # type: ignore[operator]


@pytest.mark.parametrize("kind", [SASRec, BidirectionalItems])
def test_new_rows_of_a_table_are_small_so_that_a_step_moves_them_whatever_the_width_and_the_rows_before(kind):
    for width in (16, 256):
        model: Any = FusedRecommenderModule(kind(2000, hidden_size=width)).model
        empty: Any = FusedRecommenderModule(kind(0, hidden_size=width)).model  # as the command makes it
        empty.grow(2000)
        with torch.no_grad():
            trained = model.table.weight[1:].mul_(20).clone()
        model.grow(4000)
        assert torch.equal(model.table.weight[1:2001], trained)
        for rows in (trained / 20, empty.table.weight[1:], model.table.weight[2001:]):
            assert rows.std().item() == pytest.approx(0.02, rel=0.05)
        assert not model.table.weight[0].any()


def cycles(path: Path, turn: int = 1, users: int = 40) -> Path:
    """Write users who walk a cycle of items; ``turn`` = -1 writes the same rows from the last to the first."""
    rows = [(f"u{user}", f"i{(user + t) % 20}", t) for user in range(users) for t in range(3 + user % 5)][::turn]
    users_, items, times = zip(*rows, strict=True)
    pq.write_table(pa.table({"user": users_, "item": items, "timestamp": times}), path)
    return path


def test_items_of_other_numbers_are_refused_in_resume_validation_and_test_and_the_runs_map_stays(tmp_path):
    def fresh() -> FusedRecommenderModule:
        torch.manual_seed(0)
        return FusedRecommenderModule(SASRec(0, **TINY), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))

    path, checkpoint, run = cycles(tmp_path / "x.parquet"), tmp_path / "last.ckpt", tmp_path / "items.parquet"
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    trainer.fit(fresh(), InteractionDataModule(path, folder=tmp_path))
    trainer.save_checkpoint(checkpoint)
    before, numbers = trainer.callback_metrics["val/ndcg_at_10"], run.read_bytes()
    trainer.lightning_module.save_pretrained(tmp_path / "exported")  # type: ignore[operator]
    cycles(path, -1)
    more = pa.concat_tables([pq.read_table(path), pa.table({"user": ["u1"], "item": ["new"], "timestamp": [-1]})])
    for grown in (False, True):
        if grown:  # The table of the model then has another shape than that of the checkpoint.
            pq.write_table(more, path)
        for name in ("fit", "validate", "test"):
            run_it: Any = getattr(quiet_trainer(tmp_path, max_epochs=4), name)
            with pytest.raises(UserError, match="numbered otherwise than in the checkpoint"):
                run_it(fresh(), InteractionDataModule(path, folder=tmp_path), ckpt_path=checkpoint)
            assert run.read_bytes() == numbers
        exported: Any = pretrained_items(tmp_path / "exported")
        for module in (FusedRecommenderModule.from_folder(tmp_path / "exported"), FusedRecommenderModule(exported)):
            with pytest.raises(UserError, match="numbered otherwise than in the checkpoint or export"):
                quiet_trainer(tmp_path).validate(module, InteractionDataModule(path), verbose=False)
    cycles(path, -1)
    data, trainer = InteractionDataModule(path, items=run), quiet_trainer(tmp_path, max_epochs=2)
    assert trainer.validate(fresh(), data, checkpoint, verbose=False)[0]["val/ndcg_at_10"] == pytest.approx(before)


def test_predictions_are_recommendations_after_all_that_a_user_had_and_need_no_counts_of_popularity(tmp_path):
    path = cycles(tmp_path / "x.parquet")
    module: Any = FusedRecommenderModule(SASRec(0, **TINY), popularity_correction=1.0, top_k=20)
    for exclude_seen in (True, False):
        data = InteractionDataModule(path, max_length=4, batch_size=7, exclude_seen=exclude_seen)
        found = quiet_trainer(tmp_path).predict(module, data)
        items = torch.cat([batch["items"] for batch in found])  # type: ignore[index, union-attr]
        for user, row in enumerate(items.tolist()):
            had = set(data.interactions.history(user).tolist())
            assert set(row) - {0} == set(range(1, 21)) - (had if exclude_seen else set())
    bare: Any = FusedRecommenderModule(SASRec(ITEMS, **TINY), popularity_correction=1.0)
    quiet_trainer(tmp_path).predict(bare, loader([{"input_ids": histories()}]))
    with pytest.raises(UserError, match="popularity_correction needs the interactions of each item"):
        quiet_trainer(tmp_path, max_steps=1).fit(bare, loader([batch_of(histories())]))


def test_an_export_is_loaded_whole_or_refused(tmp_path):
    module_of().float().save_pretrained(tmp_path / "exported")
    table = pretrained_items(tmp_path / "exported").get_output_embeddings().weight  # type: ignore[operator]
    assert torch.equal(table, module_of().float().model.table.weight)  # type: ignore[union-attr]

    class Renamed(SASRec):
        def __init__(self) -> None:
            super().__init__(ITEMS, **TINY)
            self.blocks = self.layers
            del self.layers

    with pytest.raises(RuntimeError, match="Missing key"):
        FusedRecommenderModule.from_folder(tmp_path / "exported", Renamed())


def test_a_backbone_of_ones_own(tmp_path):
    class Mean(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.inner = table
            self.mix = nn.Linear(8, 8)

        def get_output_embeddings(self) -> nn.Embedding:
            return self.inner

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.mix(self.inner(input_ids).cumsum(1))

    table = nn.Embedding(ITEMS + 1, 8, padding_idx=0)
    module = FusedRecommenderModule(Mean(table))
    quiet_trainer(tmp_path, max_steps=2).fit(module, loader([batch_of(histories())] * 2))
    assert not table.weight[0].any()
    assert table.weight.grad is None or table.weight.grad[0].abs().sum() == 0


def test_mistakes_are_sentences(tmp_path):
    module, ids = module_of(), histories()
    ids[0, 0] = ITEMS + 1
    with pytest.raises(IndexError):  # of the table, also on a GPU: nothing is looked up in place of an item
        module.model(batch_of(ids))
    with pytest.raises(IndexError):
        module.recommend(torch.tensor([[1, 2, MASK]]))
    with pytest.raises(IndexError):  # of the positions
        module.model(batch_of(torch.ones(1, 13, dtype=torch.int64)))
    weights = torch.full((6, 10), math.nan)
    with pytest.raises(UserError, match="token_weights must be finite and not negative"):
        module.model(batch_of(histories(), token_weights=weights))
    with pytest.raises(UserError, match="the model has no items, and the data name none; choose data=interactions"):
        quiet_trainer(tmp_path, max_steps=1).fit(FusedRecommenderModule(SASRec(0, **TINY)), loader([batch_of(ids)]))
    with torch.no_grad():
        module.backbone.item_embedding.weight[5] = math.nan  # type: ignore[index, union-attr]
    with pytest.raises(UserError, match="some scores of items are not finite"):
        module.recommend(histories())


def test_a_validation_without_labels_has_no_number_for_loss_ranking_or_coverage(tmp_path):
    ids = torch.randint(1, ITEMS + 1, (2, 6))
    batch = batch_of(ids) | {"labels": torch.full_like(ids, -100)}
    with pytest.warns(UserWarning, match="no label was counted"):
        [found] = quiet_trainer(tmp_path, precision="64-true").validate(module_of(), loader([batch]), verbose=False)
    assert found.keys() >= {"val/loss", "val/ndcg_at_10", "val/coverage_at_10"}
    assert all(math.isnan(value) for value in found.values())
