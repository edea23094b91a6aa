"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks import results
from benchmarks.environments import default_folder
from benchmarks.jobs import ROOT, SCENARIOS, Options
from benchmarks.model import size_of

# The record: sizes at which fixed costs no longer decide.
RECORD = {
    "import": ("1M", 5),
    "small": ("32M", 3),
    "save": ("2G", 9),  # single readings differ by half
    "reshard": ("2G", 9),
    "slice": ("2G", 3),
    "async": ("2G", 2),
    "mount": ("512M", 5),
    "coldstart": ("512M", 3),
    "relayout": ("512M", 2),
    "big": ("8G", 1),
}

# A quick look takes a part of the size where the work is a multiple of it, and leaves out peers that need an
# environment of their own: making one takes minutes, starting one longer than what it then does.
QUICK_PARTS = {"save": 2, "reshard": 2, "async": 4, "relayout": 4, "mount": 4, "coldstart": 4, "slice": 4, "big": 4}
_WITH_OURS = ["ckptfs", "DCP + ckptfs", "DCP", "torch.save", "safetensors", "TensorStore zarr3", "zarr-python"]
QUICK_SYSTEMS = dict.fromkeys(["save", "reshard", "big"], _WITH_OURS) | {
    "small": ["ckptfs", "DCP", "safetensors"],  # thousands of files an array each take the others long
    "slice": ["ckptfs", "safetensors", "zarr-python"],  # each cold read waits until the disk has been idle
    "relayout": ["ckptfs"],  # three starts of torch, with others for each of them
    "async": ["ckptfs save_async(before_update)", "DCP async_save"],
    "mount": ["ckptfs mount, native", "ckptfs mount, fusepy"],  # each mount is a process more
    "coldstart": ["ckptfs mount, native"],  # each is a start of transformers
}


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    if args.command == "report":
        from benchmarks.report import write_report

        own = args.out == ROOT / "docs" / "benchmarks.md"
        sources = args.results or sorted((ROOT / "docs" / "results").glob("*.jsonl"))
        write_report(sources, args.out, ROOT / "README.md" if own and not args.results else None)
        return 0
    out = args.results or _default_results(args)
    out.parent.mkdir(parents=True, exist_ok=True)
    quick = args.scenarios == ["all"]
    whole = RECORD if args.scenarios == ["record"] else _quick(args) if quick else None
    wanted = {n: whole[n] for n in whole if not args.only or n in args.only} if whole else _chosen(args)
    shown = " ".join(["tools/bench", *map(shlex.quote, argv if argv is not None else sys.argv[1:])])
    run = results.begin(
        out,
        list(wanted),
        "/".join(dict.fromkeys(size for size, _ in wanted.values())),
        max(r for _, r in wanted.values()),
        shown,
    )
    options = Options(
        run, "", 0, args.folder, out, args.systems, args.drop_caches, args.timeout, environments=args.environments
    )
    failed, started = [], time.monotonic()
    for name, (size, repetitions) in wanted.items():
        begin = time.monotonic()
        systems = args.systems or (QUICK_SYSTEMS.get(name, []) if quick else [])
        only = f", only {', '.join(systems)}" if systems else ""
        print(f"{name}: {size}, {repetitions} repetition{'s' * (repetitions > 1)}{only}", flush=True)
        try:
            SCENARIOS[name](replace(options, size=size, repetitions=repetitions, systems=systems))
        except Exception as error:  # the other scenarios are still worth measuring
            failed.append(name)
            results.append(out, results.Skip(run, name, "all", f"failed: {type(error).__name__}: {error}"))
            print(f"{name} failed: {error}", file=sys.stderr)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    page = "" if out.parent == ROOT / "docs" / "results" else f" {out} --out {out.with_suffix('.md')}"
    print(f"{time.monotonic() - started:.0f} s in all; results: {out}; as a page: tools/bench report{page}")
    return 1 if failed else 0


def _quick(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """Every scenario, once."""
    nbytes = size_of(args.size)
    parts = {name: nbytes // QUICK_PARTS.get(name, 1) for name in RECORD}
    return {
        name: (f"{part >> 20}M" if part >> 20 else str(part), args.repetitions or 1) for name, part in parts.items()
    }


def _chosen(args: argparse.Namespace) -> dict[str, tuple[str, int]]:
    unknown = [name for name in args.scenarios if name not in SCENARIOS]
    if unknown:
        raise SystemExit(f"no scenario {', '.join(unknown)}: there are all, record, report, {', '.join(SCENARIOS)}")
    size_of(args.size)
    names = list(dict.fromkeys("save" if name == "load" else name for name in args.scenarios))
    return dict.fromkeys(names, (args.size, args.repetitions or 3))


def _default_results(args: argparse.Namespace) -> Path:
    folder = ROOT / "docs" / "results" if args.scenarios == ["record"] else ROOT / "build"
    return folder / f"{time.strftime('%Y-%m-%d', time.gmtime())}.jsonl"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    if argv is None:
        argv = sys.argv[1:]
    if argv and argv[0] == "report":
        parser = argparse.ArgumentParser(
            prog="tools/bench report", description="Render docs/benchmarks.md and the README's table from results."
        )
        parser.add_argument("results", nargs="*", type=Path, help="JSON-lines files (default: docs/results/*.jsonl)")
        parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
        args = parser.parse_args(argv[1:])
        args.command = "report"
        return args
    parser = argparse.ArgumentParser(
        prog="tools/bench",
        description="Measure ckptfs beside its peers. Scenarios: "
        + ", ".join(SCENARIOS)
        + "; `all` is a quick look at "
        "every one (once, some with a part of the size), `record` measures all of them at sizes that count; "
        "`report` renders docs/benchmarks.md. A line is appended to the results after each "
        "measurement, so an interrupted run is usable.",
    )
    parser.add_argument("scenarios", nargs="+")
    parser.add_argument("--size", default="256M", help="bytes of the model: 256M (a quick look), 1G, 2G")
    parser.add_argument("--repetitions", type=int, help="counted ones (3; with all: 1); a warm-up comes before them")
    parser.add_argument("--systems", nargs="*", default=[], help="only these; raw is always measured")
    parser.add_argument("--folder", type=Path, default=ROOT.parent, help="where on the measured disk to work")
    parser.add_argument(
        "--environments", type=Path, default=default_folder(), help="where peers that need their own environment get it"
    )
    parser.add_argument("--results", type=Path, help="JSON-lines file to append to")
    parser.add_argument(
        "--drop-caches", action="store_true", help="also drop the whole page cache before cold reads (root)"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], choices=list(RECORD), help="with record or all: only these scenarios"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds a scenario's job may take")
    args = parser.parse_args(argv)
    args.command = "measure"
    return args
