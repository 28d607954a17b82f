"""Checkpoints from a stranger, and damaged ones: nothing in them runs, and one sentence says what is wrong."""

import io
import os
import pickle
import re
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_helpers import loader, quiet_trainer, ragged_batches
from tiny_models import tiny_model
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from lit_fused import FusedCausalLMModule, UserError
from lit_fused.checkpoints import consolidate, read_weights
from lit_fused.checkpoints.form import weights_in
from lit_fused.checkpoints.movable import MovableCheckpointIO, keep_own_paths, prepare_checkpoints
from lit_fused.checkpoints.reading import CheckpointFolder, check_same_model, is_plain, latest_in, write_checksum
from lit_fused.data import SyntheticDataModule


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("file")
    trainer = quiet_trainer(folder, max_steps=1)
    trainer.fit(FusedCausalLMModule(tiny_model("llama")), loader(ragged_batches(1)))
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


@pytest.fixture
def folder(file, tmp_path) -> Path:
    """The checkpoint as a sharded strategy writes it."""
    saved, path = torch.load(file), tmp_path / "folder.ckpt"
    flat = {"param_groups.x.lr": saved["optimizer_states"][0]["param_groups"][0]["lr"]}
    save({"state_dict": saved.pop("state_dict"), "optimizer_0": flat}, checkpoint_id=path, no_dist=True)
    del saved["optimizer_states"]
    torch.save(saved, path / "meta.pt")
    write_checksum(path)
    return path


READERS: dict[str, Any] = {
    "read_weights": read_weights,
    "resume": MovableCheckpointIO().load_checkpoint,
    "consolidate": lambda path: consolidate(path, path.with_name(f"{os.urandom(4).hex()}.ckpt")),
}


def replaced(metadata: Path, change: Any) -> None:
    """Write what ``change`` makes of a list of tensors in its place, with the right checksum."""
    content = pickle.loads(metadata.read_bytes())
    metadata.write_bytes(pickle.dumps(change(content) or content))
    write_checksum(metadata.parent)


@pytest.mark.parametrize("reader", READERS)
def test_a_folders_list_of_tensors_runs_no_code(reader, folder, tmp_path):
    READERS[reader](folder)
    listed = folder / ".metadata"
    original = listed.read_bytes()
    payload = f"cos\nsystem\n(S'touch {tmp_path / 'ran'}'\ntR0".encode()
    attacks = [original[:2] + payload + original[2:], pickle.dumps(Runs(tmp_path / "ran"))]
    for attack in attacks:
        listed.write_bytes(attack)
        (folder / "metadata.crc32").unlink(missing_ok=True)
        with pytest.raises(UserError, match=r"folder.ckpt is not opened: it names (os|posix).system"):
            READERS[reader](folder)
        assert not (tmp_path / "ran").exists()


def test_values_beside_the_tensors_run_no_code_also_under_lightnings_own_strategy(folder, tmp_path):
    data = io.BytesIO()
    torch.save(Runs(tmp_path / "ran"), data)

    def with_payload(metadata: Metadata) -> None:
        info = next(i for index, i in metadata.storage_data.items() if index.fqn.endswith(".lr"))
        (folder / "payload").write_bytes(data.getvalue())
        info.relative_path, info.offset, info.length = "payload", 0, len(data.getvalue())

    replaced(folder / ".metadata", with_payload)
    strategy = ModelParallelStrategy()
    prepare_checkpoints(strategy)
    for read in (READERS["resume"], strategy.load_checkpoint):
        with pytest.raises(UserError, match=r"is not opened: it names (os|posix).system"):
            read(folder)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("elsewhere", ["../secret", "/etc/passwd", "..", "a/../../b"])
def test_a_folder_that_names_files_elsewhere_is_refused(elsewhere, folder):
    def named_elsewhere(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = elsewhere

    replaced(folder / ".metadata", named_elsewhere)
    with pytest.raises(UserError, match=re.escape(f"names {elsewhere}, outside of it")):
        read_weights(folder)


def packed(path: Path, name: str) -> None:
    """Compress, as torch.save never does, the entries of an archive that have such a name."""
    with zipfile.ZipFile(path) as stored:
        entries = [(record, stored.read(record)) for record in stored.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for record, content in entries:
            kind = zipfile.ZIP_DEFLATED if re.search(name, record.filename) else zipfile.ZIP_STORED
            archive.writestr(record.filename, content, kind)


def shared(path: Path) -> None:
    """Have two entries of an archive share their bytes: a hundred could be a hundred times as large as the file."""
    with zipfile.ZipFile(path, "a") as archive:
        first = next(r for r in archive.infolist() if "/data/" in r.filename)
        again = zipfile.ZipInfo(f"{first.filename}0")
        for attribute in ("header_offset", "file_size", "compress_size", "CRC", "compress_type"):
            setattr(again, attribute, getattr(first, attribute))
        archive.filelist.append(again)
        archive.writestr("archive/more", b"")  # With it the list of entries is written anew.


@pytest.mark.parametrize("reader", ["read_weights", "resume", "the latest"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: packed(path, r"data\.pkl$"), "data.pkl in it is compressed"),
        (lambda path: packed(path, r"/data/"), "in it is compressed"),
        (shared, "in it have the same bytes"),
    ],
)
def test_an_archive_that_unpacks_to_more_than_its_size_is_refused_before_it_is_read(
    change, reason, reader, file, tmp_path
):
    path = Path(shutil.copy(file, tmp_path / "bomb.ckpt"))
    change(path)
    with pytest.raises(UserError, match=f"bomb.ckpt is damaged .*{reason}") as error:
        latest_in(tmp_path) if reader == "the latest" else READERS[reader](path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("reader", ["resume", "consolidate"])
def test_packed_entries_of_a_folder_are_refused_before_they_are_read(reader, folder):
    packed(folder / "meta.pt", r"data\.pkl$")
    with pytest.raises(UserError, match="folder.ckpt is damaged .*in it is compressed"):
        READERS[reader](folder)


def test_a_folder_whose_list_names_a_decompressor_is_refused(folder):
    def with_decompressor(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]

    replaced(folder / ".metadata", with_decompressor)
    with pytest.raises(UserError, match="folder.ckpt is not opened: its .metadata has compressed entries"):
        read_weights(folder)


def flipped(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_is_found_in_every_file_and_the_sentence_names_a_neighbour(file, folder, tmp_path):
    shutil.copy(file, tmp_path / "good.ckpt")
    copied = Path(shutil.copy(file, tmp_path / "one.ckpt"))
    with zipfile.ZipFile(copied) as archive:
        record = max((r for r in archive.infolist() if "/data/" in r.filename), key=lambda r: r.file_size)
        flipped(copied, copied.read_bytes().index(archive.read(record)) + record.file_size // 2)
    assert torch.load(copied), "torch does not notice"
    for path in (copied, folder):
        if path is folder:
            flipped(next(folder.glob("*.distcp")), 70000)
        for name in ("read_weights", "resume"):
            with pytest.raises(
                UserError, match=rf"{path.name} is damaged .*; use another checkpoint, such as .*\.ckpt$"
            ) as error:
                READERS[name](path)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_a_flipped_bit_is_found_beside_the_tensors(name, folder):
    size = (folder / name).stat().st_size
    for at in range(size // 3, size, size // 7):
        content = (folder / name).read_bytes()
        flipped(folder / name, at)
        try:
            READERS["resume"](folder)
        except UserError as error:
            assert re.search("folder.ckpt (is damaged|is not opened)", str(error))  # noqa: PT017
        else:
            assert name == "meta.pt", "a bit of padding was flipped, or of a date"
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", [".metadata", "meta.pt", "__0_0.distcp"])
@pytest.mark.parametrize("left", [None, 0, 0.5])
def test_a_file_of_a_folder_that_is_missing_or_cut_is_named(name, left, folder):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if left is not None:
        (folder / name).write_bytes(content[: int(left * len(content))])
    with pytest.raises(UserError, match=rf"folder.ckpt is (damaged|a folder without) .*{re.escape(name)}") as error:
        READERS["resume"](folder)
    assert "\n" not in str(error.value)


def contents(file: Path) -> dict[str, bytes]:
    whole, other, foreign = file.read_bytes(), io.BytesIO(), io.BytesIO()
    torch.save({"weights": 1}, other)
    torch.save(Path("x"), foreign)
    return {
        "is damaged .*": b"",
        "is damaged .* ": whole[: len(whole) // 2],
        "is no checkpoint of a Lightning run .*": b"no checkpoint",
        "is no checkpoint of a Lightning run .* ": pickle.dumps({"state_dict": {}}),
        "is no checkpoint of a Lightning run .it has no pytorch-lightning_version.": other.getvalue(),
        "is not opened: it names pathlib": foreign.getvalue(),
    }


@pytest.mark.parametrize("reader", ["read_weights", "resume"])
def test_what_is_no_whole_checkpoint_is_refused_in_one_sentence(reader, file, tmp_path):
    for sentence, content in contents(file).items():
        path = tmp_path / "bad.ckpt"
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"bad.ckpt {sentence.strip()}") as error:
            READERS[reader](path)
        assert "\n" not in str(error.value)
        assert "weights_only" not in str(error.value)


LOOP, ABSENT = "epoch_loop.batch_progress", object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return fit(tmp_path_factory.mktemp("saved"), 1)


def fit(folder: Path, steps: int, ckpt_path: Path | None = None) -> Path:
    data = SyntheticDataModule(64, 12, 2, num_train_batches=4, num_val_batches=1)
    trainer = quiet_trainer(folder, max_steps=steps, limit_val_batches=0)
    trainer.fit(FusedCausalLMModule(tiny_model("llama")), data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / "one.ckpt")
    return folder / "one.ckpt"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("state_dict", "model.backbone.model.norm.weight"), "x"),
        (("optimizer_states",), []),
        (("optimizer_states", 0, "state"), {}),
        (("optimizer_states", 0, "param_groups", 0), "x"),
        (("lr_schedulers",), []),
        (("lr_schedulers", 0, "lr_lambdas"), ABSENT),
        (("loops",), ABSENT),
        (("callbacks",), ABSENT),
        (("loops", "fit_loop", LOOP), ABSENT),
        (("loops", "fit_loop", LOOP, "current", "ready"), "x"),
        (("lit_fused_random_states", 0, "cpu"), torch.ones(2)),
        (("lit_fused_optimizer_options", 0, 0, "lr"), "x"),
        (("SyntheticDataModule", "data", "number of samples"), ABSENT),
    ],
)
def test_what_is_of_another_form_than_a_run_saves_is_refused_in_one_sentence(place, value, saved, tmp_path):
    content = node = torch.load(saved, weights_only=True)
    *outer, last = place
    for key in outer:
        node = node[key]
    if value is ABSENT:
        del node[last]
    else:
        node[last] = value
    bad, good = tmp_path / "bad.ckpt", shutil.copy(saved, tmp_path)
    torch.save(content, bad)
    with pytest.raises(UserError, match=r"bad.ckpt is damaged(, or of a run with other settings)? \(.*") as error:
        fit(tmp_path / "other", 2, bad)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(f"; use another checkpoint, such as {good}")


NORM = "model.backbone.model.norm.weight"


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int64, "integers"), (torch.bool, "boolean"), (torch.cfloat, "com")])
def test_a_weight_of_another_kind_of_numbers_is_refused_by_its_name_in_files_and_folders(
    dtype, kind, saved, folder, tmp_path
):
    content = torch.load(saved, weights_only=True)
    refused = rf"1 of \d+ parameters differ \({re.escape(NORM)}: {kind}.* there, floating-point numbers here\)"
    module, path = FusedCausalLMModule(tiny_model("llama")), tmp_path / "bad.ckpt"
    content["state_dict"][NORM] = content["state_dict"][NORM].to(dtype)
    torch.save(content, path)
    for call in (
        lambda: fit(tmp_path / "other", 2, path),
        lambda: quiet_trainer(tmp_path).validate(module, loader(ragged_batches(1)), ckpt_path=path),
    ):
        with pytest.raises(UserError, match=refused):
            call()
    save({"state_dict": content["state_dict"]}, checkpoint_id=folder, no_dist=True)
    write_checksum(folder)
    with pytest.raises(UserError, match=refused):
        check_same_model(CheckpointFolder(folder).stored_weights(), weights_in(module.state_dict()))


def test_a_weight_of_another_precision_is_loaded(saved, tmp_path):
    content = torch.load(saved, weights_only=True)
    content["state_dict"][NORM] = content["state_dict"][NORM].bfloat16()
    torch.save(content, tmp_path / "half.ckpt")
    assert fit(tmp_path / "other", 2, tmp_path / "half.ckpt").is_file()


def test_an_optimiser_without_moments_has_no_state_and_is_resumed(tmp_path):
    for steps, ckpt_path in ((1, None), (2, tmp_path / "one.ckpt")):
        module = FusedCausalLMModule(tiny_model("llama"), optimizer=partial(torch.optim.SGD, lr=0.1))
        trainer = quiet_trainer(tmp_path, max_steps=steps)
        trainer.fit(module, loader(ragged_batches(4)), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert torch.load(tmp_path / "one.ckpt")["global_step"] == 2


@pytest.mark.parametrize("moment", [torch.zeros(1), torch.tensor(0.5), torch.zeros(3, 5), torch.zeros(2).to_sparse()])
def test_a_moment_of_another_shape_never_reaches_a_fused_kernel_which_looks_at_no_shapes(moment, saved, tmp_path):
    content = torch.load(saved, weights_only=True)
    optimizer = content["optimizer_states"][0]
    optimizer["param_groups"][0]["fused"] = True  # as a checkpoint of a GPU has it
    for name in ("exp_avg", "exp_avg_sq", "step"):
        changed = {parameter: entries | {name: moment} for parameter, entries in optimizer["state"].items()}
        if name == "step" and not moment.ndim:
            continue
        torch.save(content | {"optimizer_states": [optimizer | {"state": changed}]}, tmp_path / "bad.ckpt")
        with pytest.raises(UserError, match=rf"bad.ckpt is damaged.* \(its optimiser's {name} is \(.*was expected"):
            fit(tmp_path / "other", 2, tmp_path / "bad.ckpt")


def test_a_moment_in_another_order_of_memory_is_read_by_its_places_in_the_tensor(saved, tmp_path):
    content = torch.load(saved, weights_only=True)
    ends = []
    for fused, changed in ((False, False), (True, False), (True, True)):
        optimizer = content["optimizer_states"][0]
        optimizer["param_groups"][0]["fused"] = fused
        for entries in optimizer["state"].values() if changed else ():
            if entries["exp_avg"].ndim == 2:
                entries["exp_avg"] = entries["exp_avg"].t().contiguous().t()
        torch.save(content, tmp_path / "other.ckpt")
        fit(tmp_path / f"{fused} {changed}", 2, tmp_path / "other.ckpt")
        ends.append(torch.load(next((tmp_path / f"{fused} {changed}").rglob("*.ckpt")))["state_dict"])
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight)
        assert torch.equal(ends[2][name], ends[1][name])


def test_weights_alone_are_evaluated_but_not_resumed(file, tmp_path):
    saved = torch.load(file)
    del saved["optimizer_states"], saved["lr_schedulers"]
    torch.save(saved, tmp_path / "weights.ckpt")
    batches = loader(ragged_batches(1))
    module = FusedCausalLMModule(tiny_model("llama"))
    quiet_trainer(tmp_path).validate(module, batches, ckpt_path=tmp_path / "weights.ckpt")
    with pytest.raises(UserError, match="weights.ckpt has weights alone"):
        quiet_trainer(tmp_path, max_steps=2).fit(module, batches, ckpt_path=tmp_path / "weights.ckpt")


def test_only_values_that_cannot_run_code_are_plain():
    plain = {"a": [None, True, 1, 2.5, 1j, "b", b"c", torch.ones(2), torch.float16], 3: ({4}, {"d": ()})}
    assert is_plain(plain)
    for other in (object(), len, Path("a"), torch.nn.Linear(1, 1), torch.device("cpu")):
        assert not is_plain(other)
        assert not is_plain({"a": [plain, (other,)]})
        assert not is_plain({(1, other): plain})


@pytest.mark.parametrize("worst", ["b.ckpt", "gone.ckpt", "link.ckpt"])
def test_of_the_paths_in_a_checkpoint_the_runs_own_stay_with_their_scores_and_others_are_forgotten(worst, tmp_path):
    folder = tmp_path / "moved"
    folder.mkdir()
    for name in ("a.ckpt", "b.ckpt", "../elsewhere.ckpt"):
        (folder / name).touch()
    (folder / "link.ckpt").symlink_to(tmp_path / "elsewhere.ckpt")
    callback = ModelCheckpoint(folder, monitor="val/loss", save_top_k=2)
    scores = {f"/old/{name}": torch.tensor(float(n)) for n, name in enumerate(("a.ckpt", "b.ckpt", "link.ckpt"))}
    state = {"best_model_path": "/old/a.ckpt", "kth_best_model_path": f"/old/{worst}", "last_model_path": "/old/.."}
    states: dict[str, Any] = {callback.state_key: state | {"best_k_models": scores, "best_model_score": 0}, "of": 1}
    keep_own_paths(states, [callback])
    found, best = states[callback.state_key], str(folder / "a.ckpt")
    assert (found["best_model_path"], found["best_model_score"], found["last_model_path"]) == (best, 0, "")
    is_own = worst == "b.ckpt"
    assert found["kth_best_model_path"] == (str(folder / worst) if is_own else "")
    # Lightning removes the worst of the best ones when a better one comes: without its name, it counts anew.
    assert found["best_k_models"] == ({best: 0.0, str(folder / "b.ckpt"): 1.0} if is_own else {})
    assert (found["dirpath"], states["of"]) == (str(folder), 1)
