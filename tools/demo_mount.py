"""A run mounted: listed, read by numpy, and loaded as a Hugging Face model where a step is one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import ckptfs


def tree_of(folder: Path, depth: int, indent: str = "") -> list[str]:
    """The first entries of every folder, as `tree` shows them."""
    lines = []
    entries = sorted(folder.iterdir())
    for entry in entries[:6]:
        if entry.is_symlink():
            lines.append(f"{indent}{entry.name} -> {os.readlink(entry)}")
        elif entry.is_dir():
            lines.append(f"{indent}{entry.name}/")
            lines += tree_of(entry, depth - 1, indent + "  ") if depth else []
        else:
            lines.append(f"{indent}{entry.name}  {entry.stat().st_size:,} bytes")
    return lines + ([f"{indent}… {len(entries) - 6} more"] if len(entries) > 6 else [])


def read_arrays(run: ckptfs.Run, step: Path) -> None:
    """Some .npy files of the mount against the checkpoint itself."""
    files = sorted(step.glob("params/**/*.npy"))[:3]
    with run.latest as checkpoint:
        for path in files:
            mapped = np.load(path, mmap_mode="r")
            name = os.getxattr(path, "user.ckptfs.name").decode()
            if mapped.tobytes() != checkpoint[name].numpy().tobytes():
                sys.exit(f"{path} holds other bytes than the checkpoint")
            print(f"   numpy.load('{path.relative_to(step)}', mmap_mode='r') → {mapped.shape} {mapped.dtype}, equal")


def load_model(folder: Path) -> None:
    from safetensors import safe_open

    weights = sorted(folder.glob("*.safetensors"))
    with safe_open(weights[0], "np") as opened:
        print(f"   safetensors.safe_open('hf/{weights[0].name}') → {len(list(opened.keys()))} tensors")
    config = folder / "config.json"
    if not config.is_file() or "model_type" not in json.loads(config.read_text()):
        return
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder)
    count = sum(value.numel() for value in model.parameters())
    print(f"   AutoModel.from_pretrained('hf') → {type(model).__name__}, {count:,} parameters")
    del model


def small_model(folder: str) -> ckptfs.Run:
    """A run with a tiny Llama in it, for runs that have no Hugging Face model of their own."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    run = ckptfs.Run(folder)
    run.save(1, {"model": LlamaModel(config).state_dict()}, assets={"config.json": config.to_json_string()})
    return run


def main() -> None:
    run = ckptfs.Run(sys.argv[1])
    title = "7. Mounted: every step as files"
    print(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n{title}")
    with run.mount() as mounted:
        print("\n".join("   " + line for line in tree_of(Path(mounted), 2)))
        step = Path(mounted, os.readlink(Path(mounted, "latest")))
        read_arrays(run, step)
        if (step / "hf").is_dir():
            load_model(step / "hf")
        has_model = (step / "hf" / "config.json").is_file()
    if not has_model:
        with tempfile.TemporaryDirectory(prefix="ckptfs-llama-") as folder:
            with small_model(f"{folder}/run").mount(step=1) as mounted:
                print(f"   a run with a Hugging Face config.json: {', '.join(sorted(os.listdir(f'{mounted}/hf')))}")
                load_model(Path(mounted, "hf"))
    print("   unmounted")


if __name__ == "__main__":
    main()
