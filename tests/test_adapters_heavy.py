"""The adapters inside the real frameworks: Lightning, Hugging Face's Trainer, Accelerate."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptfs
from ckptfs.adapters import dcp as adapter

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]


def weights_equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# --- Lightning -------------------------------------------------------------------------------------------


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning")


def module_of(lightning):
    class Net(lightning.LightningModule):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

        def training_step(self, batch, _index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Net


def trainer_of(lightning, folder, steps, **how):
    return lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **how,
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lightning_saves_and_resumes(lightning, tmp_path, asynchronous):
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from ckptfs.adapters.lightning import CkptfsCheckpointIO

    net = module_of(lightning)
    data = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=4)
    plugin = CkptfsCheckpointIO()
    top = -1 if asynchronous else 2  # Lightning removes in the foreground what may not be saved yet
    keep = ModelCheckpoint(dirpath=tmp_path / "ck", every_n_train_steps=2, save_top_k=top, monitor="step", mode="max")
    trainer = trainer_of(
        lightning, tmp_path, 6, callbacks=[keep], plugins=[AsyncCheckpointIO(plugin) if asynchronous else plugin]
    )
    model = net()
    trainer.fit(model, data)
    left = sorted(os.listdir(tmp_path / "ck"))
    assert left == [f"epoch=0-step={step}.ckpt" for step in ((2, 4, 6) if asynchronous else (4, 6))]
    path = tmp_path / "ck" / left[-1]
    stored = ckptfs.open(path)
    assert torch.equal(stored["state_dict/net.0.weight"][...], model.net[0].weight.detach())
    assert not any(name.endswith((".pt", ".pkl")) for _, _, files in os.walk(path) for name in files)
    again = net()
    resumed = trainer_of(lightning, tmp_path, 8, plugins=[CkptfsCheckpointIO()], enable_checkpointing=False)
    resumed.fit(again, data, ckpt_path=str(path))
    assert resumed.global_step == 8
    straight = trainer_of(lightning, tmp_path, 8, plugins=[CkptfsCheckpointIO()], enable_checkpointing=False)
    straight.fit(model, data, ckpt_path=str(path))
    assert weights_equal(again.state_dict(), model.state_dict())


def test_lightning_reads_its_own_files(lightning, tmp_path):
    from ckptfs.adapters.lightning import CkptfsCheckpointIO

    trainer = trainer_of(lightning, tmp_path, 1, enable_checkpointing=False)
    trainer.fit(module_of(lightning)(), torch.utils.data.DataLoader(torch.randn(4, 4)))
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    plugin = CkptfsCheckpointIO(split={"state_dict/net.0.weight": (1, 2)})
    found = plugin.load_checkpoint(tmp_path / "old.ckpt", weights_only=False)
    plugin.save_checkpoint(found, tmp_path / "old.ckpt")
    assert ckptfs.open(tmp_path / "old.ckpt").param("state_dict/net.0.weight").layout.blocks == 2
    assert weights_equal(plugin.load_checkpoint(tmp_path / "old.ckpt")["state_dict"], found["state_dict"])
    plugin.remove_checkpoint(tmp_path / "old.ckpt")
    assert os.listdir(tmp_path) == []


SHARDED = """
import sys, warnings
import torch
from torch import nn
import lightning
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
import ckptfs
from ckptfs.adapters import dcp
warnings.filterwarnings("ignore")
dcp.install(everywhere=True)

class Net(lightning.LightningModule):
    def configure_model(self):
        torch.manual_seed(0)
        self.net = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, _index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

def trainer(steps):
    return lightning.Trainer(max_steps=steps, accelerator="cpu", devices=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"))

folder = sys.argv[1]
data = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
first = trainer(2)
first.fit(Net(), data)
first.save_checkpoint(folder + "/a.ckpt")
assert "state_dict/net.0.weight" in ckptfs.open(folder + "/a.ckpt"), list(ckptfs.open(folder + "/a.ckpt"))
second = trainer(4)
second.fit(Net(), data, ckpt_path=folder + "/a.ckpt")
assert second.global_step == 4
print("ok")
"""


def test_lightning_sharded_strategy(lightning, torchrun, tmp_path):
    result = torchrun(2, SHARDED, tmp_path)
    assert all("ok" in text.splitlines() for text in result.by_rank), result.tail()


# --- Hugging Face ----------------------------------------------------------------------------------------


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hf_trainer(folder, callback, steps, model, **how):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.arange(8) % 64, "labels": torch.arange(8) % 64} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_steps=1, **how,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])


def test_trainer_callback_saves_and_resumes(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from ckptfs.adapters.trainer import CkptfsCallback

    model = llama()
    callback = CkptfsCallback(str(tmp_path / "run"), every_steps=2, split={"model/*.o_proj.weight": (1, 2)})
    trainer = hf_trainer(tmp_path, callback, 4, model)
    trainer.train()
    run = ckptfs.Run(tmp_path / "run")
    assert run.steps() == [2, 4]
    stored = run.latest
    for name, value in model.state_dict().items():
        assert torch.equal(stored[f"model/{name}"][...], value), name
    split = [name for name in stored if stored.param(name).layout.blocks == 2]
    assert split == stored.match("model/*.o_proj.weight") != []
    assert "config.json" in stored.manifest.assets
    other = llama()
    again = hf_trainer(tmp_path, CkptfsCallback(str(tmp_path / "run"), resume=True, every_steps=3), 6, other)
    again.train()
    assert again.state.global_step == 6
    assert run.steps() == [2, 4, 6]
    assert run[6].tree()["progress"] == {"global_step": 6, "epoch": again.state.epoch}


def test_accelerate_by_its_hooks(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, _ = accelerator.prepare(llama(), torch.optim.AdamW(llama().parameters(), lr=0.1))

    def save_weights(models, weights, output_dir):
        ckptfs.save(f"{output_dir}/ckptfs", {"models": list(weights)}, overwrite=True)
        weights.clear()  # Accelerate then writes none itself

    def load_weights(models, input_dir):
        while models:
            one = models.pop()
            one.load_state_dict(ckptfs.load(f"{input_dir}/ckptfs")["models"][0])

    accelerator.register_save_state_pre_hook(save_weights)
    accelerator.register_load_state_pre_hook(load_weights)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    accelerator.save_state(str(tmp_path / "state"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert weights_equal(dict(model.state_dict()), before)
    assert not [name for name in os.listdir(tmp_path / "state") if name.endswith(".safetensors")]


# --- torch's own names, replaced ---------------------------------------------------------------------------


def test_code_that_names_torchs_classes(tmp_path):
    dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    adapter.install(everywhere=True)
    try:
        dcp.save({"a": torch.ones(3) * 2}, storage_writer=dcp.FileSystemWriter(tmp_path / "one"))
        dcp.save({"a": torch.ones(3) * 3}, checkpoint_id=tmp_path / "two")
        for name, value in (("torch", 1), ("one", 2), ("two", 3)):
            by_id, by_class = {"a": torch.zeros(3)}, {"a": torch.zeros(3)}
            dcp.load(by_id, checkpoint_id=tmp_path / name)
            dcp.load(by_class, storage_reader=dcp.FileSystemReader(tmp_path / name))
            assert by_id["a"].tolist() == by_class["a"].tolist() == [value] * 3
        assert ckptfs.open(tmp_path / "one")["a"][...].tolist() == [2, 2, 2]
        assert ckptfs.open(tmp_path / "two")["a"][...].tolist() == [3, 3, 3]
    finally:
        adapter.uninstall()
    assert dcp.FileSystemWriter.__module__.startswith("torch.")
