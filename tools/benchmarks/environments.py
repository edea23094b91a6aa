"""Environments of peers that do not share ours: made when first asked for, kept in a cache folder, never faked.

An environment that builds on torch looks through to the packages of this one, so that all run the same torch build;
the peer's own packages lie in front of them. What cannot be made or imported says why, and that is its row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

INSTALL_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Environment:
    """What is installed, and the line of Python that shows it works."""

    name: str
    requirements: tuple[str, ...]
    check: str
    over_ours: bool = False  # sees the packages of the environment that runs this
    without_dependencies: tuple[str, ...] = ()  # packages whose declared dependencies would bring another torch

    @property
    def recipe(self) -> str:
        """Another text means: make it again."""
        return "\n".join(
            [sys.version, sys.prefix if self.over_ours else "", *self.without_dependencies, *self.requirements]
        )


ENVIRONMENTS = {
    "Orbax": Environment(
        "orbax",
        ("jax==0.10.2", "orbax-checkpoint==0.12.8", "xxhash"),
        "import orbax.checkpoint",
    ),
    # It declares torch <= 2.5, of which only CUDA builds are to be had; its own check of versions lets 2.13 pass.
    "ByteCheckpoint 0.0.2": Environment(
        "bytecheckpoint",
        (
            "mmh3>=4.1,<=4.2",
            "universal-pathlib>=0.2.2,<=1.0",
            "cachetools>=5.4,<=10",
            "grpcio==1.69.0",
            "protobuf==3.20.3",
        ),
        "import bytecheckpoint",
        over_ours=True,
        without_dependencies=("bytecheckpoint==0.0.2",),
    ),
    "DeepSpeed": Environment("deepspeed", ("deepspeed==0.19.8",), "import deepspeed", over_ours=True),
}


class Unavailable(Exception):
    """An environment that could not be made: the message is the reason."""


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "ckptfs-bench"


def python_of(peer: str, folder: Path, timeout_s: float = INSTALL_TIMEOUT_S) -> str:
    """The interpreter of a peer's environment, which is made if it is not there yet."""
    wanted = ENVIRONMENTS[peer]
    place = folder / wanted.name
    python, stamp = place / "bin" / "python", place / "recipe.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted.recipe:
        return str(python)
    print(f"  {peer}: making its environment in {place}", flush=True)
    end = time.monotonic() + timeout_s
    shutil.rmtree(place, ignore_errors=True)
    _step(end, [sys.executable, "-m", "venv", str(place)])
    if wanted.over_ours:
        library = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        (library / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if wanted.without_dependencies:
        _step(end, [*pip, "--no-deps", *wanted.without_dependencies])
    _step(end, [*pip, *wanted.requirements])
    _step(end, [str(python), "-c", wanted.check])
    stamp.write_text(wanted.recipe, encoding="utf-8")
    return str(python)


def _step(end: float, command: list[str]) -> None:
    shown = "installing " + " ".join(a for a in command if "==" in a or ">=" in a) if "pip" in command else command[-1]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=max(1.0, end - time.monotonic())
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{shown} took too long") from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise Unavailable(f"{shown}: {lines[-1] if lines else f'ended with {done.returncode}'}")
