"""One rank of a peer, in the peer's environment. Started by peers.py; ends when its input ends.

Reads a JSON line for each thing to do and answers with one. Whatever the libraries print goes elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.model import State, fill, fingerprint, rows_of


class OrbaxRank:
    """Arrays of JAX over all processes, their first dimension divided."""

    def __init__(self, plan: dict[str, Any]) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        rank, size = plan["rank"], plan["size"]
        if size > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(_meeting_point(plan), size, rank)
        import orbax.checkpoint as ocp

        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("rank",)), PartitionSpec("rank"))
        rows = {name: rows_of(shape[0], rank, size) for name, shape in plan["shapes"].items()}
        local = {n: np.empty((hi - lo, *plan["shapes"][n][1:]), np.float32) for n, (lo, hi) in rows.items()}
        fill(plan["shapes"], {name: rows[name][0] for name in local}, local)
        self._arrays = {
            name: jax.make_array_from_process_local_data(sharding, part, tuple(plan["shapes"][name]))
            for name, part in local.items()
        }
        jax.block_until_ready(self._arrays)
        self._names = list(plan["shapes"])  # a restored tree comes sorted
        self._jax, self._checkpointer = jax, ocp.StandardCheckpointer()

    def save(self, folder: str) -> float:
        begin = time.perf_counter()
        self._checkpointer.save(os.path.abspath(folder), self._arrays)
        blocked_s = time.perf_counter() - begin
        self._checkpointer.wait_until_finished()
        return blocked_s

    def load(self, folder: str) -> None:
        like = {
            name: self._jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in self._arrays.items()
        }
        self._arrays.clear()  # what is there is replaced, not kept beside the new
        self._arrays = self._jax.block_until_ready(self._checkpointer.restore(os.path.abspath(folder), like))

    def zero(self) -> None:
        self._arrays = {name: array * 0 for name, array in self._arrays.items()}

    def fingerprint(self) -> str:
        return fingerprint(np.asarray(self._arrays[name].addressable_data(0)) for name in self._names)


class ByteCheckpointRank:
    """A module of which ByteCheckpoint sees only the state dict."""

    def __init__(self, plan: dict[str, Any]) -> None:
        rank, size = plan["rank"], plan["size"]
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        torch.set_num_threads(1)
        meeting = f"file://{plan['folder']}/.meet-{plan['meeting']}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        import bytecheckpoint

        self._state = State({name: tuple(shape) for name, shape in plan["shapes"].items()}, rank, size)
        self._mesh = DeviceMesh("cpu", list(range(size)))
        self._library = bytecheckpoint

    def state_dict(self) -> dict[str, Any]:
        return self._state.distributed(self._mesh)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # loaded in place

    def save(self, folder: str) -> float | None:
        self._library.save(folder, {"model": self}, framework="fsdp2")
        return None

    def load(self, folder: str) -> None:
        self._library.load(folder, {"model": self}, framework="fsdp2")

    def zero(self) -> None:
        self._state.zero()

    def fingerprint(self) -> str:
        return self._state.fingerprint()


def _meeting_point(plan: dict[str, Any]) -> str:
    """An address that rank 0 chooses and the others read."""
    path = Path(plan["folder"]) / f".meet-{plan['meeting']}"
    if plan["rank"] == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        path.with_suffix(".new").write_text(address, encoding="ascii")
        path.with_suffix(".new").rename(path)
        return address
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(encoding="ascii")
        time.sleep(0.05)
    raise TimeoutError("rank 0 named no address within 60 s")


RANKS = {"Orbax": OrbaxRank, "ByteCheckpoint 0.0.2": ByteCheckpointRank}


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not left behind when the rank is killed
    rank: Any = None
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as replies:
        for line in sys.stdin:
            asked = json.loads(line)
            reply: dict[str, Any] = {}
            try:
                if rank is None:
                    rank = RANKS[asked["peer"]](asked)
                elif asked["do"] == "save":
                    reply["blocked_s"] = rank.save(asked["folder"])
                elif asked["do"] == "load":
                    rank.load(asked["folder"])
                elif asked["do"] == "zero":
                    rank.zero()
                else:
                    reply["fingerprint"] = rank.fingerprint()
            except BaseException as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    for child in multiprocessing.active_children():  # ByteCheckpoint keeps one
        child.kill()
    os._exit(0)  # the libraries' own threads and farewells are not waited for


if __name__ == "__main__":
    main()
