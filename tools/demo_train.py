"""The training job of the demo: a small transformer, sharded as the launcher says. Run by tools/demo.py."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptfs

VOCAB, WIDTH, LAYERS, LENGTH, BATCH = 2048, 256, 4, 64, 8


class Model(nn.Module):
    """A causal transformer of about 5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    """The whole batch of a step, the same whatever the number of ranks."""
    start = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (start + torch.arange(LENGTH + 1) * 7) % VOCAB


def fingerprint(tree: object) -> str:
    """One hash of every bit of model and optimizer state, independent of the layout."""
    total = hashlib.blake2b(digest_size=8)

    def visit(value: object) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                total.update(str(key).encode())
                visit(value[key])
        elif isinstance(value, torch.Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            total.update(full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    visit(tree)
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--save-at", type=int, default=-1)
    parser.add_argument("--die-at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    run = ckptfs.Run(args.run)
    first = 0

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    if run.steps():
        tree = ckptfs.state_of(model, optimizer, step=0)
        run.load(tree)
        ckptfs.restore(model, optimizer, tree)
        first = tree["step"]
        again = ckptfs.state_of(model, optimizer)
        say(f"resumed at step {first} on {world} rank(s), state {fingerprint(again)}")
    for step in range(first, args.until):
        tokens = batch(step)
        mine = tokens.chunk(world)[rank]
        logits = model(mine[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCAB), mine[:, 1:].reshape(-1))
        # Not after the last update: Gloo's thread lets go of a collective's tensors a little after the wait for it, and
        # that aborts a process whose interpreter is already ending.
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
            mean /= world
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(f"step {step:3d}  loss {mean.item():.6f}")
        if step + 1 == args.save_at:
            tree = ckptfs.state_of(model, optimizer, step=step + 1)
            result = run.save(step + 1, tree)
            state = fingerprint({key: tree[key] for key in ("model", "optim")})
            say(
                f"saved step {step + 1} from {world} rank(s): {result.nbytes / 1e6:.1f} MB "
                f"in {result.total_s:.2f} s, state {state}"
            )
        if step == args.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
