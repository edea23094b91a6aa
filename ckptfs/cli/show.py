"""`ckptfs show`: what a step holds, or the values of one array."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ckptfs.cli import text
from ckptfs.cli.ls import describe, layout_text
from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    import numpy as np

    from ckptfs.checkpoint import Checkpoint
    from ckptfs.stats import Stats

_BLOCKS = " ▁▂▃▄▅▆▇█"
_BINS = 40
_JSON_VALUES = 10_000  # more are left out of the JSON
_CORNER = 8  # elements of each dimension that are shown of a whole array
_VALUE_CELLS = 100


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "show",
        "show what a step holds, or values and statistics of one array",
        "Without NAME: the step's facts and its plain values. NAME may end in an index by numpy's rules; without one,\n"
        "the statistics are of the whole array and its first elements are shown.",
        "  ckptfs show run7@latest\n  ckptfs show run7@1000 model/embed.weight\n"
        "  ckptfs show run7@1000 'model/embed.weight[0:4,:8]'\n  ckptfs show run7 optim/lr --json\n",
    )
    text.add_url(made)
    made.add_argument("name", metavar="NAME[INDEX]", nargs="?", help="an array, or a part of one")
    text.add_options(made)
    made.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with text.open_step(args.url, args) as found:
        if args.name is None:
            _show_step(found, as_json=args.json)
        else:
            _show_array(found, args.name, as_json=args.json)
    return 0


# --- a step ----------------------------------------------------------------------------------------------


def _show_step(found: Checkpoint, *, as_json: bool) -> None:
    from ckptfs.diff import plain_values

    manifest = found.manifest
    values = dict(plain_values(manifest.tree))
    if as_json:
        text.say_json(
            {
                "url": found.url,
                "step": found.step,
                "created": manifest.created,
                "save_id": manifest.save_id,
                "world": manifest.world,
                "arrays": len(manifest.params),
                "aliases": manifest.aliases,
                "bytes": manifest.nbytes,
                "stored_bytes": manifest.stored_bytes,
                "assets": {path: size for path, (size, _) in manifest.assets.items()},
                "maps": sorted(manifest.maps),
                "values": values,
            }
        )
        return
    stored = manifest.stored_bytes
    packed = f", {text.size_text(stored)} stored" if stored < 0.99 * manifest.nbytes else ""
    assets = (f"{path} ({text.size_text(size)})" for path, (size, _) in manifest.assets.items())
    lines = {
        "step": str(found.step) if found.step is not None else "(none)",
        "url": found.url,
        "saved": f"{manifest.created} by {text.count_text(manifest.world, 'rank')}",
        "arrays": f"{text.count_text(len(manifest.params), 'array')}, {text.size_text(manifest.nbytes)}{packed}",
        "types": _types(found),
        "tied": ", ".join(f"{a} = {b}" for a, b in sorted(manifest.aliases.items())),
        "assets": ", ".join(assets),
        "maps": ", ".join(sorted(manifest.maps)),
    }
    text.facts({name: value for name, value in lines.items() if value})
    if values:
        text.say("\nvalues")
        text.facts({f"  {path or '(all)'}": _short(value) for path, value in values.items()})


def _types(found: Checkpoint) -> str:
    counts: dict[str, int] = {}
    for param in found.manifest.params.values():
        counts[param.dtype.name] = counts.get(param.dtype.name, 0) + param.nbytes
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {text.size_text(nbytes)}" for name, nbytes in ordered)


def _short(value: str) -> str:
    return value if len(value) <= _VALUE_CELLS else f"{value[: _VALUE_CELLS - 1]}… ({len(value):,} characters)"


# --- an array --------------------------------------------------------------------------------------------


def parse_index(words: str) -> tuple[Any, ...]:
    """`0:4,:8,-1,...` as an index; MismatchError for anything else."""
    out: list[Any] = []
    for word in words.split(","):
        part = word.strip()
        if part == "...":
            out.append(Ellipsis)
        elif re.fullmatch(r"[+-]?\d{1,19}", part):
            out.append(int(part))
        elif re.fullmatch(r"([+-]?\d{1,19})?\s*:\s*([+-]?\d{1,19})?\s*(:\s*([+-]?\d{1,19})?)?", part):
            numbers = [int(n) if n.strip() else None for n in part.split(":")]
            if numbers[2:] == [0]:
                raise MismatchError(f"[{words}]: a slice's step cannot be 0")
            out.append(slice(*numbers))
        elif part or words.strip():
            raise MismatchError(f"[{words}] is not an index: write integers, a:b:c and ... separated by commas")
    return tuple(out)


def _split_name(found: Checkpoint, word: str) -> tuple[str, tuple[Any, ...] | None]:
    """Names may hold brackets themselves: an array of exactly that name comes first."""
    if word in found or not word.endswith("]") or "[" not in word:
        return word, None
    name, _, index = word[:-1].rpartition("[")
    return name, parse_index(index)


def _show_array(found: Checkpoint, word: str, *, as_json: bool) -> None:
    import numpy as np

    from ckptfs.stats import Stats, as_float, histogram

    name, index = _split_name(found, word)
    array = found[name]
    param = array.param
    try:
        picked = array.numpy(index) if index is not None else None
    except IndexError as error:
        raise MismatchError(str(error)) from None
    stats = Stats()
    for piece in _pieces(found, name, picked):
        stats.add(as_float(param, piece))
    bins = min(_BINS, max(1, stats.finite))
    drawn = stats.finite > 1 and stats.min < stats.max
    floats = (as_float(param, piece) for piece in _pieces(found, name, picked)) if drawn else iter(())
    counts = histogram(floats, stats.min, stats.max, bins) if drawn else None
    corner = tuple(slice(0, _CORNER) for _ in param.shape)
    values = array.numpy(corner) if picked is None else picked
    values = np.asarray(values)
    if as_json:
        _say_array_json(
            found, name, index, stats, counts, values if picked is not None or values.size == stats.count else None
        )
        return
    text.facts(
        {
            "array": name if param.name == name else f"{name} = {param.name}",
            "type": f"{text.shape_text(param.shape)} {param.dtype.name}, {text.size_text(param.nbytes)}",
            "stored": f"{layout_text(param)}, {text.count_text(param.extent_count, 'extent')}, in {param.path}",
        }
        | (
            {"part": f"{text.shape_text(values.shape)}, {text.count_text(values.size, 'element')}"}
            if index is not None
            else {}
        )
        | _stat_lines(stats)
    )
    if counts is not None:
        _draw(counts, stats)
    text.say()
    text.say(_values_text(values, param.dtype.name))
    if values.size < stats.count:
        text.say(f"(the first of {stats.count:,} elements; add an index such as [0:4] to see others)")


def _pieces(found: Checkpoint, name: str, picked: np.ndarray[Any, Any] | None) -> Iterator[np.ndarray[Any, Any]]:
    import numpy as np

    from ckptfs.stats import bands

    param = found.param(name)
    if picked is None:
        yield from bands(found, param)
    else:
        yield np.ascontiguousarray(picked).reshape(-1).view(param.dtype.carrier)


def _stat_lines(stats: Stats) -> dict[str, str]:
    if not stats.count:
        return {"values": "none"}
    lines = {"not finite": f"{stats.nan:,} NaN, {stats.inf:,} Inf of {stats.count:,}"}
    if stats.finite:
        lines["range"] = f"{stats.min:.6g} … {stats.max:.6g}"
        lines["mean"] = f"{stats.mean:.6g}, deviation {stats.std:.6g}, {stats.zero / stats.count:.1%} zeros"
    return lines


def _draw(counts: np.ndarray[Any, Any], stats: Stats) -> None:
    top = int(counts.max())
    blocks = _BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else " .:-=+*#@"
    line = "".join(blocks[math.ceil(int(n) * (len(blocks) - 1) / top)] for n in counts)
    text.say(f"\n{stats.min:.3g} |{line}| {stats.max:.3g}   (top: {text.count_text(top, 'element')})")


def _values_text(values: np.ndarray[Any, Any], dtype: str) -> str:
    import numpy as np

    if dtype.startswith(("bfloat", "float8")):
        values = values.astype(np.float32)
    digits = 5 if dtype.startswith(("float", "bfloat", "complex")) else None
    return np.array2string(values, max_line_width=120, threshold=2000, precision=digits)


def _say_array_json(
    found: Checkpoint,
    name: str,
    index: tuple[Any, ...] | None,
    stats: Stats,
    counts: np.ndarray[Any, Any] | None,
    values: np.ndarray[Any, Any] | None,
) -> None:
    data: dict[str, Any] = describe(found, name) | {"url": found.url, "stats": stats.to_json()}
    if index is not None:
        data["index"] = ["..." if part is Ellipsis else _slice_json(part) for part in index]
        data["part_shape"] = list(values.shape) if values is not None else None
    if counts is not None:
        data["histogram"] = {"low": stats.min, "high": stats.max, "counts": counts.tolist()}
    if values is not None and values.size <= _JSON_VALUES:
        data["values"] = _plain(values, found.param(name).dtype.name)
    text.say_json(data)


def _slice_json(part: Any) -> Any:
    return [part.start, part.stop, part.step] if isinstance(part, slice) else part


def _plain(values: np.ndarray[Any, Any], dtype: str) -> Any:
    """Nested lists; what JSON lacks as text."""
    if dtype.startswith(("bfloat", "float8")):
        values = values.astype("f8")
    return _json_safe(values.tolist())


def _json_safe(value: Any) -> Any:
    if isinstance(value, list):
        return [_json_safe(item) for item in value]
    if isinstance(value, complex):
        return [_json_safe(value.real), _json_safe(value.imag)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
