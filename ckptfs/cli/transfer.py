"""`ckptfs export` and `ckptfs import`: safetensors files and Hugging Face directories."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ckptfs.cli import text
from ckptfs.errors import CorruptError, MismatchError

_NOTES = 8  # as many are said one by one
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "export",
        "write a step as a safetensors file or a Hugging Face directory",
        "A TARGET that ends in .safetensors is one file; anything else a new directory with the step's assets. Every\n"
        "byte is checked on the way; nothing incomplete appears under the target's name. Of a training checkpoint\n"
        "only what lies under model/ is exported, without that prefix; a map renames and rearranges.",
        "  ckptfs export run7@1000 ./llama-step1000\n  ckptfs export run7 weights.safetensors\n"
        "  ckptfs export run7 state.safetensors --prefix ''\n"
        "  ckptfs export run7@1000 ./llama-hf --map llama-torchtitan\n",
    )
    text.add_url(made)
    made.add_argument("target", metavar="TARGET", help="a directory, or FILE.safetensors")
    made.add_argument("--prefix", help="export names that begin so, and cut that off (default: model/ if there is one)")
    made.add_argument("--map", help="names and layouts by a map: a built-in one's name or a file (see docs/rules.md)")
    made.add_argument("--shard-size", default="5G", metavar="SIZE", help="bytes of a file in a directory, such as 5G")
    made.add_argument("--overwrite", action="store_true", help="replace FILE.safetensors if it is there")
    text.add_options(made, as_json=True, bar=True)
    made.set_defaults(run=run_export)

    made = text.command(
        commands,
        "import",
        "save a safetensors file or a Hugging Face directory as a step",
        "Streams: the files may be larger than memory. Other files of the directory become assets. The new step is\n"
        "read back and checked.",
        "  ckptfs import ./llama run7@0\n  ckptfs import weights.safetensors run7@1 --compression zstd\n"
        "  ckptfs import ./llama run7@2 --split '*o_proj.weight=1,8' --split '*down_proj.weight=1,8'\n",
    )
    made.add_argument("source", metavar="SOURCE", help="a directory, or FILE.safetensors")
    text.add_url(made, "target", "the run and the new step: RUN@STEP")
    made.add_argument("--prefix", default="model", help="the level of the tree that takes the names (default: model)")
    made.add_argument("--compression", choices=["zstd", "blosc"], help="compress the arrays")
    made.add_argument(
        "--split",
        metavar="PATTERN=PARTS",
        action="append",
        default=[],
        help="store arrays in the parts they will be read in: '*o_proj.weight=1,8' for eight readers of columns",
    )
    made.add_argument("--overwrite", action="store_true", help="replace the step if it is there")
    made.add_argument("--no-verify", action="store_true", help="do not read the new step back")
    text.add_options(made, as_json=True, bar=True)
    made.set_defaults(run=run_import)


def run_export(args: argparse.Namespace) -> int:
    from ckptfs.convert.safetensors import export_file, export_folder

    with text.pinned(args.url, args) as found, text.bar(args, "export") as bar:
        how: dict[str, Any] = {"prefix": args.prefix, "mapping": args.map, "progress": bar}
        if args.target.endswith(".safetensors"):
            written = export_file(found, args.target, overwrite=args.overwrite, **how)
        else:
            written = export_folder(found, args.target, shard_bytes=size_of(args.shard_size), **how)
        url = found.url
    if args.json:
        text.say_json({"url": url, "target": args.target, "bytes": written})
    else:
        text.say(f"{args.target}: {text.size_text(written)} from {url}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    from ckptfs.convert.safetensors import import_path
    from ckptfs.run import split_url
    from ckptfs.verify import verify

    base, step = split_url(args.target)
    if step is None or step == "latest":
        raise MismatchError(f"{args.target}: name the new step, as in {base}@0")
    with text.open_run(base, args, create=True) as run:
        how: dict[str, Any] = {
            "overwrite": args.overwrite,
            "compression": args.compression,
            "split": splits(args.split),
        }
        result = import_path(args.source, run, int(step), prefix=args.prefix.strip("/"), **how)
        with run[int(step)] as made, text.bar(args, "verify") as bar:
            problems = [] if args.no_verify else verify(made, progress=bar)
            url, nbytes, arrays = made.url, made.manifest.nbytes, len(made.manifest.params)
    if problems:
        raise CorruptError(f"{url} is not what was imported: {problems[0]}; check the disk and import again")
    if args.json:
        text.say_json({"url": url, "step": int(step), "bytes": nbytes, "arrays": arrays, "notes": result.notes})
    else:
        checked = "" if args.no_verify else ", verified"
        text.say(f"{url}: {text.count_text(arrays, 'array')}, {text.size_text(nbytes)}{checked}")
        for note in result.notes[:_NOTES]:
            text.say(note)
        if len(result.notes) > _NOTES:
            text.say(f"and {len(result.notes) - _NOTES} more; --json has all")
    return 0


def splits(words: list[str]) -> dict[str, tuple[int, ...]]:
    """`["*.wo.weight=1,8"]` as {"*.wo.weight": (1, 8)}."""
    out = {}
    for word in words:
        pattern, _, parts = word.rpartition("=")
        if not pattern or not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", parts):
            raise MismatchError(f"--split {word}: write PATTERN=PARTS, the parts of each dimension, as in '*.wo=1,8'")
        out[pattern] = tuple(map(int, parts.split(",")))
    return out


def size_of(word: str) -> int:
    """`5G`, `500MB` or `1000` in bytes (decimal units, as Hugging Face counts)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", word.strip().upper())
    nbytes = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if nbytes < 1:
        raise MismatchError(f"--shard-size {word}: write a number with K, M, G or T, such as 5G")
    return nbytes
