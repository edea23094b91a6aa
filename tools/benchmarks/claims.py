"""What is claimed: goals with the figure measured for each, met or missed, and the README's table of them.

No claim without a figure: every line follows from a file in docs/results, and names the command that makes it again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.asyncwork import PRODUCTS, beside_name
from benchmarks.systems import EXTENTS, LIMITS, PAGES, SPLIT, UNCHECKED

if TYPE_CHECKING:
    from benchmarks.report import Results, Row

BEGIN, END = "<!-- claims: rendered by tools/bench report -->", "<!-- end of claims -->"
NOT_PEERS = (*LIMITS, "ckptfs", UNCHECKED, SPLIT, "DCP + ckptfs")
LIKE_PEERS = "within 10 % of the fastest peer where ckptfs, like the peers, checks nothing"
KEYS = {
    "save and load": "save",
    "big tensors": "big",
    "reshard": "reshard",
    "layouts": "relayout",
    "small tensors": "small",
    "training": "async",
    "slices": "slice",
    "mount": "mount",
    "cold start": "coldstart",
    "imports": "import",
}


@dataclass(frozen=True)
class Goal:
    """What was aimed for, what was measured, and whether that meets it; None where it was not measured."""

    text: str
    shown: str
    met: bool | None
    scenario: str
    limit: float | None = None  # what the disk or memory allows at most

    @property
    def verdict(self) -> str:
        return {True: "met", False: "**missed**", None: "–"}[self.met]


def _goal(text: str, scenario: str, value: float | None, met: Callable[[float], bool], shown: str = "{:.2f}") -> Goal:
    if value is None:
        return Goal(text, "not measured", None, scenario)
    if shown == "{:.2f}" and met(round(value, 2)) != met(value):  # a rounded figure that says otherwise
        shown = "{:.3f}"
    return Goal(text, shown.format(value), met(value), scenario)


def _ratio(rows: dict[str, Row], other: str, own: str) -> float | None:
    return rows[other].seconds / rows[own].seconds if other in rows and own in rows else None


def _over_best(rows: dict[str, Row], own: str = "ckptfs") -> float | None:
    """How many times the fastest peer's time ours is."""
    peers = [row.seconds for system, row in rows.items() if system not in NOT_PEERS]
    return rows[own].seconds / min(peers) if peers and own in rows else None


def goals(results: Results) -> list[Goal]:
    return [
        *_save_goals(results),
        *_layout_goals(results),
        *_small_goals(results),
        *_async_goals(results),
        *_slice_goals(results),
        *_face_goals(results),
    ]


def _save_goals(results: Results) -> Iterable[Goal]:
    for scenario, prefix in (("save and load", ""), ("big tensors", "large tensors, ")):
        if scenario != "save and load" and scenario not in results.newest:
            continue
        for operation, what in (("save", "durable save"), ("load", "cold load with checksums")):
            rows = results.rows(scenario, operation)
            over = _over_best(rows)
            text = prefix + what
            yield _goal(f"{text} at least 0.85 of raw", scenario, _ratio(rows, "raw", "ckptfs"), lambda v: v >= 0.85)
            faster = f"{text}: times faster than the fastest peer (1.05 and more; less is a tie)"
            yield _goal(faster, scenario, 1 / over if over else None, lambda v: v >= 1.05)
            for peer in ("DCP", "Orbax", "ByteCheckpoint 0.0.2"):
                if peer == "DCP" or peer in rows:
                    ratio = _ratio(rows, peer, "ckptfs")
                    yield _goal(f"{text}: times faster than {peer}", scenario, ratio, lambda v: v >= 1.05)


def _layout_goals(results: Results) -> Iterable[Goal]:
    two, four = results.rows("reshard", "load 2→2"), results.rows("reshard", "load 2→4")
    value = four["ckptfs"].seconds / two["ckptfs"].seconds if "ckptfs" in two and "ckptfs" in four else None
    yield _goal("loading 2→4 takes at most 1.10 of 2→2", "reshard", value, lambda v: v <= 1.10)
    for count in (1, 4):
        rows = results.rows("layouts", f"2 to {count}, end to end")
        peers = [row.seconds for system, row in rows.items() if "DeepSpeed" in system]
        value = min(peers) / rows["ckptfs"].seconds if peers and "ckptfs" in rows else None
        text = f"saved by 2, resumed by {count}: times faster than DeepSpeed's fastest stage with its conversion"
        yield _goal(text, "layouts", value, lambda v: v > 1)


def _small_goals(results: Results) -> Iterable[Goal]:
    small = results.rows("small tensors", "save small").get("ckptfs")
    text = "3,000 tensors of 4 KiB saved durably in under 1.5 s"
    yield _goal(text, "small tensors", small.seconds if small else None, lambda v: v < 1.5, "{:.2f} s")
    saved = results.rows("save and load", "save").get("ckptfs")
    memory = saved.median(lambda m: m.peak_memory_bytes) if saved else None
    text = "peak extra memory of a save at most 256 MiB a rank"
    yield _goal(text, "save and load", memory and memory / 2**20, lambda v: v <= 256, "{:.0f} MiB")


def _async_goals(results: Results) -> Iterable[Goal]:
    alone = results.rows("training", "save alone")
    blocked = {system: row.median(lambda m: m.blocked_s) for system, row in alone.items()}
    lazy, snapshot, dcp = (
        blocked.get(s) for s in ("ckptfs save_async(before_update)", "ckptfs save_async", "DCP async_save")
    )

    def goal(text: str, value: float | None, met: Callable[[float], bool], shown: str = "{:.2f}") -> Goal:
        return _goal(text, "training", value, met, shown)

    share = lazy / dcp if lazy and dcp else None
    yield goal("lazy save blocks at most 1/10 of DCP async", share, lambda v: v <= 0.1, "{:.3f}")
    yield goal("lazy save blocks under 20 ms", lazy and lazy * 1e3, lambda v: v < 20, "{:.1f} ms")
    share = snapshot / dcp if snapshot and dcp else None
    yield goal("snapshot blocks no longer than DCP async", share, lambda v: v <= 1)
    rate = _ratio(alone, "ckptfs save", "ckptfs save_async")
    yield goal("background save rate at least 0.8 of a sync save", rate, lambda v: v >= 0.8)
    rows = results.rows("training", "iteration")
    peers = [row.seconds for system, row in rows.items() if system.startswith("DCP")]
    ours = [row.seconds for system, row in rows.items() if system.startswith("ckptfs")]
    value = min(peers) / min(ours) if peers and ours else None
    slower = [
        row.median(lambda m: m.detail.get("slower"))
        for system, row in results.rows("training", beside_name(PRODUCTS[0])).items()
        if system.startswith("ckptfs")
    ]
    if any(value is not None for value in slower):
        worst = max(value for value in slower if value is not None)
        text = "a computing loop with a core to spare slows by at most 5 % beside saves"
        yield goal(text, worst, lambda v: v <= 0.05, "{:.1%}")
    yield goal("a checkpoint every iteration: times faster than DCP's faster way", value, lambda v: v > 1)


def _slice_goals(results: Results) -> Iterable[Goal]:
    for operation, cache in results.operations("slices"):
        rows = results.rows("slices", operation, cache)
        over = _over_best(rows)
        if over is None:
            continue
        where = f"{operation}, {cache}"
        yield _goal(f"{where}: within 10 % of the fastest peer", "slices", over, lambda v: v <= 1.10)
        unchecked = _over_best(rows, UNCHECKED)
        if unchecked is not None:
            yield _goal(f"{where}: {LIKE_PEERS}", "slices", unchecked, lambda v: v <= 1.10)
        ratio = _ratio(rows, "zarr-python", "ckptfs")
        text = f"{where}: times faster than zarr-python (5)"
        yield _limited(_goal(text, "slices", ratio, lambda v: v >= 5), rows, "zarr-python")
        if SPLIT in rows:
            yield from _split_goals(rows, f"{operation}, saved with split, {cache}")
    saved_by_ranks = results.rows("slices", "1/8 shard, saved by 8 ranks", "cold")
    if saved_by_ranks:
        ratio = _ratio(saved_by_ranks, "raw", "ckptfs")
        yield _goal("1/8 shard, saved by 8 ranks, cold, at least 0.85 of raw", "slices", ratio, lambda v: v >= 0.85)
    shard = results.rows("slices", "1/8 shard of the model", "cold")
    ratio = _ratio(shard, "raw", "ckptfs")
    goal = _goal("1/8 shard, cold, at least 0.85 of raw", "slices", ratio, lambda v: v >= 0.85)
    yield _limited(goal, shard, "raw")
    if SPLIT in shard:
        text = "1/8 shard, saved with split, cold, at least 0.85 of raw"
        yield _goal(text, "slices", _ratio(shard, "raw", SPLIT), lambda v: v >= 0.85)


def _split_goals(rows: dict[str, Row], where: str) -> Iterable[Goal]:
    """The pages and extents that the same bytes lie on row by row are no limit of these."""
    yield _goal(f"{where}: within 10 % of the fastest peer", "slices", _over_best(rows, SPLIT), lambda v: v <= 1.10)
    ratio = _ratio(rows, "zarr-python", SPLIT)
    goal = _goal(f"{where}: times faster than zarr-python (5)", "slices", ratio, lambda v: v >= 5)
    yield _limited(goal, {s: row for s, row in rows.items() if s not in (PAGES, EXTENTS)}, "zarr-python")


def _limited(goal: Goal, rows: dict[str, Row], other: str) -> Goal:
    """A goal over another's time, with what the machine allows.

    Of the disk the raw rate for the pages or for the extents that the bytes lie on, whichever was sooner there; of
    memory a copy of the bytes.
    """
    for whose, systems in (("the disk", (PAGES, EXTENTS)), ("memory", ("memcpy",))):
        found = [ratio for system in systems if (ratio := _ratio(rows, other, system)) is not None]
        if found and goal.met is not None:
            return replace(goal, shown=f"{goal.shown} ({whose}'s limit: {max(found):.2f})", limit=max(found))
    return goal


HF = "hf/*.safetensors"
PLAIN_CLASS = "fusepy, a plain class over the same tree"
MOUNT_GOALS = (  # (what is read, state of the caches, backend, rate over that of plain files, in words)
    (f"{HF}, sequential", "cold", "fusepy", 0.80, "cold, sequential"),
    (f"{HF}, sequential", "cold", "native", 0.90, "cold, sequential"),
    (f"{HF}, sequential", "warm:", "fusepy", 0.15, "backing files cached, sequential"),
    (f"{HF}, sequential", "warm:", "native", 0.30, "backing files cached, sequential"),
    ("one file of zarr/, sequential", "warm:", "native", 0.95, "a file that the kernel passes on, cached"),
    (f"{HF}, mmap", "again:", "fusepy", 0.5, "mapped, second read"),
    (f"{HF}, mmap", "again:", "native", 0.5, "mapped, second read"),
)


def _face_goals(results: Results) -> Iterable[Goal]:
    for operation, cache, backend, least, words in MOUNT_GOALS:
        rows = results.rows("mount", operation, cache)
        value = _ratio(rows, "plain files", f"ckptfs mount, {backend}")
        text = f"mount, {backend}, {words}: at least {least} of plain files"
        yield _goal(text, "mount", value, lambda v, least=least: v >= least)
    rows = results.rows("mount", f"{HF}, sequential", "warm:")
    for backend in ("fusepy", "native"):
        value = _ratio(rows, PLAIN_CLASS, f"ckptfs mount, {backend}")
        text = f"mount, {backend}, backing files cached: at least 3 times as fast as a plain class of fusepy"
        yield _goal(text, "mount", value, lambda v: v >= 3)
    rows = results.rows("cold start", "from_pretrained to the first token")
    for system, row in rows.items():
        if system != "plain folder" and "plain folder" in rows:
            value = row.seconds / rows["plain folder"].seconds
            text = f"cold `from_pretrained`, {system}: at most 1.2 of a plain folder's time"
            yield _goal(text, "cold start", value, lambda v: v <= 1.2)


def goals_section(found: Sequence[Goal]) -> str:
    lines = [[goal.text, goal.shown, goal.verdict] for goal in found]
    return "## Goals\n\nWhat was aimed for, and what this machine measured.\n\n" + _table(
        ["goal", "measured", ""], lines
    )


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


# --- the README ------------------------------------------------------------------------------------------------------


def with_claims(readme: str, results: Results, sources: Sequence[Path]) -> str:
    """The README with what stands between its two marks rendered anew."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the README lacks its marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{claims_table(results, sources)}\n{END}{after}"


def claims_table(results: Results, sources: Sequence[Path]) -> str:
    lines = [
        [goal.text, goal.shown, goal.verdict, f"`{command_of(results, goal.scenario)}`"]
        for goal in _for_readme(goals(results))
        if goal.met is not None
    ]
    by_name = {path.name: path for path in sources}
    if "crash.jsonl" in by_name:
        lines.append(_crash_line(_rows_of(by_name["crash.jsonl"])))
    if "simulate.jsonl" in by_name:
        lines += _simulation_lines(_rows_of(by_name["simulate.jsonl"]))
    return _table(["aimed for", "measured", "", "again with"], lines)


def _for_readme(found: Sequence[Goal]) -> Iterable[Goal]:
    """Slices are many: one line for the peers, one for zarr-python, by the worst of them."""
    slices = [goal for goal in found if goal.scenario == "slices" and goal.met is not None]
    yield from (goal for goal in found if goal.scenario != "slices")
    for ending, text, worst, least in (
        ("within 10 % of the fastest peer", "slices within 10 % of the fastest peer's time", max, 0),
        (LIKE_PEERS, "slices without checksums, as the peers have none, within 10 % of the fastest's time", max, 0),
        ("times faster than zarr-python (5)", "slices at least 5 times faster than zarr-python", min, 5),
        ("at least 0.85 of raw", "1/8 shard of a model, cold, at least 0.85 of raw", min, 0.85),
    ):
        chosen = [goal for goal in slices if goal.text.endswith(ending)]
        if len(chosen) == 1:
            yield Goal(text, chosen[0].shown, chosen[0].met, "slices")
        elif chosen:
            number, value = sum(bool(goal.met) for goal in chosen), worst(float(g.shown.split()[0]) for g in chosen)
            beyond = sum(goal.limit is not None and goal.limit < least for goal in chosen)
            shown = f"{number} of {len(chosen)} kinds; the worst {value:.2f}"
            shown += f" ({beyond} beyond what disk or memory give)" if beyond else ""
            yield Goal(text, shown, number == len(chosen), "slices")


def command_of(results: Results, scenario: str) -> str:
    """What makes the figures of a scenario again: without the paths that were chosen for this run."""
    facts = results.facts(scenario)
    words = shlex.split(facts.command) if facts else ["tools/bench", "record"]
    for option in ("--results", "--folder", "--environments"):
        while option in words:
            at = words.index(option)
            del words[at : at + 2]
    if words[:2] == ["tools/bench", "record"]:
        words = ["tools/bench", "record", "--only", KEYS[scenario]]
    return shlex.join(words)


def _rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _crash_line(rows: Sequence[dict[str, Any]]) -> list[str]:
    tried, survived = (sum(sum(row[key].values()) for row in rows) for key in ("tried", "survived"))
    minutes = sum(row["minutes"] for row in rows)
    seeds = " ".join(str(row["seed"]) for row in rows)
    again = f"tools/dev run python tools/crash.py --minutes {rows[0]['minutes']:.4g} --seed {rows[0]['seed']}"
    return [
        "every fault survived: old or new is latest, all verifies, the next save succeeds, nothing is left over",
        f"{survived} of {tried} in {minutes:.0f} minutes",
        "met" if survived == tried else "**missed**",
        f"`{again}`" + (f", and with each of the seeds {seeds}" if len(rows) > 1 else ""),
    ]


def _simulation_lines(rows: Sequence[dict[str, Any]]) -> Iterable[list[str]]:
    largest = max((row["ranks"] for row in rows), default=0)
    for key, text, limit, shown in (
        ("plan_max_s", "a rank plans in under 1 s", 1.0, "{:.2f} s"),
        ("exchanged_mb", "under 10 MB exchanged by all ranks", 10.0, "{:.2f} MB"),
        ("small_files_per_rank", "a rank opens at most 256 files for less than 8 MiB each", 257.0, "{:.0f}"),
        ("merge_s", "the leader merges in under 10 s", 10.0, "{:.1f} s"),
        ("replica_imbalance", "replicated bytes balanced within 5 %", 0.05, "{:.1%}"),
    ):
        found = [row for row in rows if row["ranks"] == largest and key in row]
        if not found:
            continue
        worst = max(found, key=lambda row: row[key])
        yield [
            f"{largest:,} simulated ranks: {text}",
            f"{shown.format(worst[key])} at worst ({worst['model']}, {worst['layout']})",
            "met" if worst[key] < limit else "**missed**",
            "`tools/dev run python tools/simulate.py" + (" --merge`" if key == "merge_s" else "`"),
        ]
