"""`ckptfs ls`: the steps of a run, or the arrays of a step."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ckptfs.cli import text
from ckptfs.errors import CkptError, MismatchError, NotFoundError

if TYPE_CHECKING:
    from ckptfs.checkpoint import Checkpoint
    from ckptfs.manifest import Param
    from ckptfs.run import Run


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "ls",
        "list the steps of a run, or the arrays of a step",
        "With a step, PATTERN selects arrays by name: * and ? match within and across levels.",
        "  ckptfs ls run7\n  ckptfs ls run7@latest\n  ckptfs ls run7@1000 'model/layers.*.attn.*' --json\n",
    )
    text.add_url(made)
    made.add_argument("pattern", metavar="PATTERN", nargs="?", help="names of arrays to list")
    text.add_options(made)
    made.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ckptfs.run import Run

    found = text.open_any(args.url, args)
    if isinstance(found, Run):
        if args.pattern is not None:
            raise MismatchError(f"{args.url} is a run and has steps, not arrays: write {args.url}@latest")
        return _list_run(found, args)
    with found:
        return _list_step(found, args)


def _list_run(found: Run, args: argparse.Namespace) -> int:
    rows, damaged = [], 0
    for step in found.steps():
        try:
            with found[step] as checkpoint:
                rows.append(_step_row(step, checkpoint))
        except NotFoundError:  # deleted since the steps were listed
            continue
        except CkptError as error:  # one bad step does not hide the others
            rows.append({"step": step, "damaged": str(error)})
            damaged += 1
    if args.json:
        text.say_json({"url": found.url, "steps": rows})
        return 1 if damaged else 0
    if not rows:
        text.say(f"{found.url} has no committed step")
        return 0
    heads = ("step", "size", "saved", "ranks", "arrays", "")
    text.table((_cells(row) for row in rows), heads, right=(0, 1, 3, 4))
    return 1 if damaged else 0


def _step_row(step: int, checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "step": step,
        "bytes": manifest.nbytes,
        "stored_bytes": manifest.stored_bytes,
        "created": manifest.created,
        "world": manifest.world,
        "arrays": len(manifest.params),
        "assets": len(manifest.assets),
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "damaged" in row:
        return (str(row["step"]), "", "", "", "", f"damaged: {row['damaged']}")
    note = "" if row["stored_bytes"] >= 0.99 * row["bytes"] else f"{text.size_text(row['stored_bytes'])} stored"
    date = row["created"].replace("T", " ").replace("Z", " UTC")
    return str(row["step"]), text.size_text(row["bytes"]), date, str(row["world"]), str(row["arrays"]), note


def _list_step(found: Checkpoint, args: argparse.Namespace) -> int:
    names = list(found) if args.pattern is None else found.match(args.pattern)
    if args.json:
        text.say_json({"url": found.url, "step": found.step, "arrays": [describe(found, name) for name in names]})
        return 0
    rows = []
    for name in names:
        param = found.param(name)
        layout = f"= {param.name}" if param.name != name else layout_text(param)
        rows.append((name, text.shape_text(param.shape), param.dtype.name, text.size_text(param.nbytes), layout))
    if rows:
        text.table(rows, ("array", "shape", "type", "size", "layout"), right=(3,))
    total = sum({found.param(n).name: found.param(n).nbytes for n in names}.values())
    text.say(f"{text.count_text(len(names), 'array')}, {text.size_text(total)}")
    return 0


def describe(found: Checkpoint, name: str) -> dict[str, Any]:
    """An array as JSON."""
    param = found.param(name)
    layout = param.layout
    data: dict[str, Any] = {
        "name": name,
        "shape": list(param.shape),
        "dtype": param.dtype.name,
        "bytes": param.nbytes,
        "stored_bytes": param.stored_bytes,
        "path": param.path,
        "files": layout.files,
        "block": list(layout.block),
        "chunk": list(layout.chunk),
        "extents": param.extent_count,
        "codec": param.codec.to_json() if param.codec else None,
    }
    return data | ({"same_as": param.name} if param.name != name else {})


def layout_text(param: Param) -> str:
    """How an array is stored, in words."""
    layout = param.layout
    if layout.nbytes == 0:
        return "empty"
    parts = []
    if layout.many:
        parts.append(text.count_text(layout.files, "file"))
    elif layout.blocks > 1:
        parts.append(text.count_text(layout.blocks, "panel"))
    if layout.chunks_per_block > 1:
        parts.append(f"chunks of {text.shape_text(layout.chunk)}")
    if param.codec is not None:
        parts.append(f"{param.codec.name} {param.stored_bytes / param.nbytes:.2f}")
    return ", ".join(parts) or "plain"
