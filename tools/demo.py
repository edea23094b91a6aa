"""The main job, end to end: train on 4 ranks, save, kill, resume on 2 and on 1, read the step with plain Zarr."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def torchrun(ranks: int, *args: object, ok: bool = True) -> str:
    """The training job on this many processes; its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(HERE / "demo_train.py"), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    if ok and done.returncode:
        sys.exit(f"the training job failed:\n{done.stdout}\n{done.stderr[-4000:]}")
    return done.stdout


def state(text: str) -> str:
    found = re.search(r"state ([0-9a-f]{16})", text)
    if found is None:
        sys.exit(f"the training job printed no state:\n{text}")
    return found[1]


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) +loss ([\d.]+)", text)}


def chapter(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


def show(text: str) -> None:
    for line in text.strip().splitlines():
        print(f"   {line}")


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ckptfs-demo-") as folder:
        run = f"{folder}/run7"
        chapter("1. Train a small transformer with FSDP2 on 4 ranks, save step 4, and kill the job two steps later")
        first = torchrun(4, run, "--until", 8, "--save-at", 4, "--die-at", 5, ok=False)
        show(first)
        print("   (killed with SIGKILL)")
        saved = state(first)

        chapter("2. Resume on 2 ranks")
        second = torchrun(2, run, "--until", 8)
        show(second)
        chapter("3. Resume on 1 rank, no sharding at all")
        third = torchrun(1, run, "--until", 8)
        show(third)
        for text in (second, third):
            if state(text) != saved:
                sys.exit(f"the state differs after loading: {saved} was saved, {state(text)} came back")
        before, after = losses(first), losses(second)
        drift = max(abs(before[step] - after[step]) for step in before.keys() & after.keys())
        print(f"\n   model and optimizer state are bit-equal on 4, 2 and 1 ranks: {saved}")
        print(f"   losses of the repeated steps agree within {drift:.1e} (sums run in another order on other layouts)")

        import zarr

        import ckptfs

        chapter("4. The same step through plain Zarr, and as slices")
        with ckptfs.open(f"{run}@latest") as checkpoint:
            group = zarr.open_group(checkpoint.url, mode="r")
            name = "model/layers.0.linear1.weight"
            ours, theirs = checkpoint[name].numpy(), group[name][:]
            if not (ours == theirs).all():
                sys.exit("zarr reads other values than ckptfs")
            print(f"   zarr.open_group(step)['{name}'] → {theirs.shape} {theirs.dtype}, equal to ours")
            before_bytes = checkpoint.bytes_read
            part = checkpoint[name][8:12]
            print(
                f"   checkpoint['{name}'][8:12] → {tuple(part.shape)}, "
                f"{checkpoint.bytes_read - before_bytes} bytes read"
            )
        chapter("5. On disk")
        show(
            subprocess.run(["find", run, "-maxdepth", "2"], capture_output=True, text=True, check=True).stdout.replace(
                folder, ""
            )
        )
        from ckptfs.cli import main as cli

        chapter("6. ckptfs verify")
        code = cli(["verify", f"{run}@latest"])
        if code:
            sys.exit(code)
        extra = HERE / "demo_mount.py"
        if extra.exists():
            subprocess.run([sys.executable, str(extra), run], check=True)
    print(f"\nDone in {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    main()
