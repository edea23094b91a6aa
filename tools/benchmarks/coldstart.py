"""`from_pretrained` in a new process, from cold files to the first token: a plain folder, the mount, a lazy view.

The model is a random Llama in fp32. The clock starts after the imports (they are in `detail`) and ends when one token
has gone through the model, so that mapped weights have been read too. Each way's first token is compared. Just before,
as much free memory is touched: whoever reads needs it, and a virtual machine may have given it back.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results
from benchmarks.machine import evict
from benchmarks.model import size_of
from benchmarks.mounts import mounted

if TYPE_CHECKING:
    from benchmarks.jobs import Options

SCENARIO = "cold start"
LAYERS = 8
_PROGRAM = """
import json, sys, time
begin = time.perf_counter()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
{imports}
torch.set_num_threads(1)
sys.path.insert(0, {tools!r})
from benchmarks.machine import measured, touch_free_memory
imports_s = time.perf_counter() - begin
touch_free_memory({nbytes})
with measured() as cost:
    model = {load}
    with torch.no_grad():
        token = model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax().item()
print("COST " + json.dumps(vars(cost) | {{"imports_s": imports_s, "token": token}}))
"""
_LOAD = "LlamaForCausalLM.from_pretrained({path!r})"
_VIEW = (
    "LlamaForCausalLM.from_pretrained(None, config=LlamaConfig.from_pretrained({config!r}), "
    "state_dict=ckptfs.open({path!r}).view('hf'))"
)

# What `import ckptfs` leaves to the first use is imported before the clock starts too, as what transformers needs is.
_VIEW_IMPORTS = "import ckptfs, ckptfs.checkpoint, ckptfs.maps, ckptfs.run, ckptfs.view"


def measure_cold_starts(options: Options, folder: Path) -> None:
    import ckptfs

    model, nbytes = _model(size_of(options.size))
    plain, run = folder / "plain", folder / "run"
    model.save_pretrained(plain)
    configuration = (plain / "config.json").read_text(encoding="utf-8")
    assets = {"config.json": configuration, "generation_config.json": "{}"}
    with ckptfs.Run(run) as opened:
        opened.save(1, {"model": model.state_dict()}, assets=assets)
    del model
    ways = {
        "plain folder": (_code(_LOAD, nbytes, path=str(plain)), plain),
        'state_dict=ck.view("hf")': (_code(_VIEW, nbytes, _VIEW_IMPORTS, path=f"{run}@1", config=str(plain)), run),
    }
    with contextlib.ExitStack() as stack:
        for backend in ("native", "fusepy"):
            name = f"ckptfs mount, {backend}"
            if options.systems and name not in options.systems:
                continue
            try:
                here = stack.enter_context(mounted(run, folder / backend, backend))
                ways[name] = (_code(_LOAD, nbytes, path=str(here / "hf")), run)
            except Exception as error:
                _skip(options, name, error)
        _measure(options, ways, folder, nbytes)


def _measure(options: Options, ways: dict[str, tuple[str, Path]], folder: Path, nbytes: int) -> None:
    tokens: set[int] = set()
    for turn in range(-1 if options.repetitions > 1 else 0, options.repetitions):  # a quick look warms nothing up
        names = list(ways)
        for name in [*names[(turn + 1) % len(names) :], *names[: (turn + 1) % len(names)]]:
            code, files = ways[name]
            if "mount" in name:
                evict(folder / name.rpartition(" ")[2] / "hf")  # what the kernel keeps of the mount itself
            cache = evict(files, drop_caches=options.drop_caches)
            try:
                cost = _run(code, options.timeout_s)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                _skip(options, name, error)
                del ways[name]
                continue
            tokens.add(cost.pop("token"))
            if len(tokens) > 1:
                raise RuntimeError(f"{name} gives another first token than the others")
            if turn >= 0:
                _note(options, name, nbytes, turn, cost, cache)


def _note(options: Options, name: str, nbytes: int, turn: int, cost: dict[str, Any], cache: str) -> None:
    measure = results.Measure(
        options.run,
        SCENARIO,
        "from_pretrained to the first token",
        name,
        nbytes,
        cost["seconds"],
        turn,
        cache=cache,
        peak_memory_bytes=cost["peak_memory_bytes"],
        bytes_read=cost["bytes_read"],
        bytes_written=cost["bytes_written"],
        detail={"imports_s": cost["imports_s"]},
    )
    results.append(options.results, measure)
    print(f"  {SCENARIO}: {name:28} {measure.seconds:8.3f} s", flush=True)


def _model(nbytes: int) -> tuple[Any, int]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = max(64, round((nbytes / (4 * (12 * LAYERS + 32))) ** 0.5 / 64) * 64)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=16 * width,
    )
    torch.manual_seed(9)
    model = LlamaForCausalLM(config)
    return model, sum(value.nbytes for value in model.state_dict().values())


def _code(load: str, nbytes: int, imports: str = "", **values: str) -> str:
    return _PROGRAM.format(
        nbytes=nbytes, imports=imports, load=load.format(**values), tools=str(Path(__file__).resolve().parent.parent)
    )


def _run(code: str, timeout_s: float) -> dict[str, Any]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("COST ")]
    if done.returncode or not lines:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    cost: dict[str, Any] = json.loads(lines[0][5:])
    return cost


def _skip(options: Options, name: str, error: BaseException) -> None:
    results.append(options.results, results.Skip(options.run, SCENARIO, name, f"failed: {error}"))
    print(f"  {SCENARIO}: {name}: skipped: {error}", flush=True)
