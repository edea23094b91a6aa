"""Runs for the tests of views and mounts: every way to store an array, with the arrays kept to compare with."""

import json
import os
import threading

import ml_dtypes
import numpy as np

import ckptfs
from ckptfs.ranks import Group
from ckptfs.shards import LocalShard
from ckptfs.views import Dir, File, Link, walk

SMALL = ckptfs.Settings(
    chunk_bytes=64 << 10, extent_bytes=16 << 10, block_bytes=128 << 10, io_bytes=64 << 10, small_file_bytes=4 << 10
)
CONFIG = {"model_type": "none", "hidden_size": 8}
ASSETS = {
    "config.json": json.dumps(CONFIG),
    "tokenizer.json": "{}",
    "sub/notes.txt": "not in hf/",
    "model.safetensors": "old weights, which are not to be shown",
    "big.txt": "x" * 70_000,
}


def arrays(seed=1):
    """Name → array; names as they are saved."""
    rng = np.random.default_rng(seed)

    def floats(*shape):
        return rng.standard_normal(shape).astype("f4")

    return {
        "model/layers.0.attn.weight": floats(96, 200),
        "model/layers.0.attn.bias": floats(200),
        "model/layers.1.attn.weight": floats(300, 257),
        "model/layers.1.small": floats(3, 5).astype(ml_dtypes.bfloat16),
        "model/layers.10.eight": floats(70, 900).astype(ml_dtypes.float8_e4m3fn),
        "model/embed": floats(1000, 128).astype(ml_dtypes.bfloat16),
        "model/flags": rng.integers(0, 2, 77).astype(bool),
        "model/count": np.array(5, "i8"),
        "model/empty": np.zeros((0, 4), "f4"),
        "model/odd name é": rng.integers(0, 99, (4, 4)).astype("i2"),
        "optim/exp_avg": floats(300, 257),
    }


def nested(found):
    tree = {}
    for name, value in found.items():
        head, _, rest = name.partition("/")
        tree.setdefault(head, {})[rest] = value
    return tree


def save(url, step=1, seed=1, settings=SMALL, assets=ASSETS, **how):
    """One rank; `model/tied` is a second name of the embedding."""
    found = arrays(seed)
    tree = nested(found)
    tree["model"]["tied"] = tree["model"]["embed"]
    with ckptfs.Run(url, settings=settings) as run:
        run.save(step, tree, assets=assets, **how)
    return found


def save_in_panels(url, step=1, seed=1, ranks=3, settings=SMALL, assets=ASSETS):
    """Arrays of two dimensions are cut by columns, one part a rank."""
    found = arrays(seed)
    groups = Group.threads(ranks)
    errors = []

    def part(name, array, rank):
        if array.ndim != 2 or array.shape[1] < ranks or not array.size:
            return array
        ends = [array.shape[1] * r // ranks for r in range(ranks + 1)]
        box = [[0, ends[rank]], [array.shape[0], ends[rank + 1]]]
        local = np.ascontiguousarray(array[:, ends[rank] : ends[rank + 1]])
        return LocalShard([local], array.shape, ["boxes", [box]])

    def save_rank(rank):
        try:
            tree = nested({name: part(name, array, rank) for name, array in found.items()})
            with ckptfs.Run(url, group=groups[rank], settings=settings) as run:
                run.save(step, tree, assets=assets)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return found


def export(root: Dir, folder):
    """Write the whole tree to disk through the files' own `read_into`; what changes by itself is left out."""
    os.makedirs(folder, exist_ok=True)
    for path, node in walk(root):
        if ".ckptfs" in path.split("/"):
            continue
        where = os.path.join(folder, path)
        if isinstance(node, Dir):
            os.makedirs(where, exist_ok=True)
        elif isinstance(node, Link):
            os.symlink(node.target, where)
        elif isinstance(node, File):
            with node.open() as reader, open(where, "wb") as out:
                buffer = memoryview(bytearray(1 << 20))
                done = 0
                while done < node.size:
                    count = reader.read_into(done, buffer)
                    out.write(buffer[:count])
                    done += count
    return folder


def flip(path, at, bit=1):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
