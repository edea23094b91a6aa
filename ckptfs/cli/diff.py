"""`ckptfs diff`: what changed from one step to another."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from ckptfs.cli import text
from ckptfs.errors import MismatchError, StorageError

if TYPE_CHECKING:
    from ckptfs.diff import Change, Diff

_VALUE_CELLS = 40


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "diff",
        "compare two steps: arrays added, removed and changed, plain values",
        "Changed arrays come with their relative change |new - old| / |old|, largest first. Arrays with equal\n"
        "checksums are not read.",
        "  ckptfs diff run7@900 run7@1000\n  ckptfs diff run7@900 run7@1000 'model/*' --json\n"
        "  ckptfs diff a@latest b@latest --plot change.svg\n",
    )
    text.add_url(made, "old")
    text.add_url(made, "new")
    made.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="names of arrays to compare")
    made.add_argument("--plot", metavar="FILE", help="draw the changes into a .png, .svg or .pdf (needs matplotlib)")
    made.add_argument(
        "--top", type=int, default=50, metavar="N", help="list at most N changed arrays (default: 50; 0: all)"
    )
    made.add_argument("--exit-code", action="store_true", help="status 1 if there is a difference")
    text.add_options(made, bar=True)
    made.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ckptfs.diff import diff

    if args.top < 0:
        raise MismatchError(f"--top {args.top}: a number of arrays, or 0 for all")
    if args.plot:
        _matplotlib(args.plot)  # before the work, not after it
    with text.pinned(args.old, args) as old, text.pinned(args.new, args) as new:
        with text.bar(args, "diff") as bar:
            found = diff(old, new, args.pattern, progress=bar)
        urls = old.url, new.url
    if args.plot:
        _plot(found, urls, args.plot)
    if args.json:
        text.say_json({"old": urls[0], "new": urls[1]} | found.to_json())
    else:
        _report(found, args.top)
    return 1 if found and args.exit_code else 0


def _report(found: Diff, top: int) -> None:
    for label, names in (("added", found.added), ("removed", found.removed)):
        for name in names:
            text.say(f"{label}  {name}")
    shown = found.changed[: top or None]
    if shown:
        if found.added or found.removed:
            text.say()
        heads = ("change", "largest", "elements", "array", "")
        text.table((_cells(change) for change in shown), heads, right=(0, 1, 2))
    if len(shown) < len(found.changed):
        text.say(f"… and {len(found.changed) - len(shown)} more changed arrays (--top 0 lists all)")
    if found.values:
        text.say("\nvalues")
        cells = ((f"  {v.path}", _short(v.old), "→", _short(v.new)) for v in found.values)
        text.table(cells, ("", "", "", ""))
    counts = (
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.changed)} changed, {len(found.same)} same"
    )
    text.say(f"{counts}; {text.count_text(len(found.values), 'value')} changed")


def _cells(change: Change) -> tuple[str, str, str, str, str]:
    notes = []
    if change.old_shape != change.new_shape:
        notes.append(f"{text.shape_text(change.old_shape)} → {text.shape_text(change.new_shape)}")
    if change.old_dtype != change.new_dtype:
        notes.append(f"{change.old_dtype} → {change.new_dtype}")
    if change.not_finite:
        notes.append(f"{change.not_finite:,} NaN or Inf")
    if change.relative is None or change.max_abs is None:
        return "", "", "", change.name, ", ".join(notes)
    part = change.changed / max(1, math.prod(change.new_shape))
    return f"{change.relative:.3e}", f"{change.max_abs:.4g}", f"{part:.1%}", change.name, ", ".join(notes)


def _short(value: str | None) -> str:
    if value is None:
        return "(none)"
    return value if len(value) <= _VALUE_CELLS else f"{value[: _VALUE_CELLS - 1]}…"


# --- the plot --------------------------------------------------------------------------------------------


def _matplotlib(path: str) -> Any:
    if not path.lower().endswith((".png", ".svg", ".pdf")):
        raise MismatchError(f"--plot {path}: the name ends in .png, .svg or .pdf")
    try:
        import matplotlib as mpl
    except ImportError:
        raise MismatchError("--plot needs matplotlib: pip install matplotlib") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _plot(found: Diff, urls: tuple[str, str], path: str) -> None:
    plt = _matplotlib(path)
    good = [c for c in found.changed if c.relative is not None and 0 < c.relative < math.inf]
    shown = good[:40][::-1]
    figure, (bars, spread) = plt.subplots(
        1, 2, figsize=(13, max(3.0, 0.22 * len(shown) + 1.5)), width_ratios=(3, 1), layout="constrained"
    )
    bars.barh([c.name for c in shown], [c.relative for c in shown])
    bars.set_xlabel("relative change |new − old| / |old|")
    if shown:
        bars.set_xscale("log")
        spread.hist([math.log10(c.relative) for c in good if c.relative], bins=30)
    bars.tick_params(axis="y", labelsize=7)
    spread.set_xlabel("log₁₀ of the change")
    spread.set_ylabel("arrays")
    figure.suptitle(f"{urls[0].rpartition('/')[2]} → {urls[1].rpartition('/')[2]}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise StorageError(f"writing {path}: {error.strerror or error}") from error
    finally:
        plt.close(figure)
