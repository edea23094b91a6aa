"""docs/benchmarks.md from result files: tables of medians with their spread, plots, goals met and missed.

Every figure in it comes from a "measure" line; of several runs of one scenario the newest counts. A system without
measures has its reason printed instead.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.asyncwork import PRODUCTS, Idle, beside_name
from benchmarks.claims import goals, goals_section, with_claims
from benchmarks.results import Measure, RunFacts, Skip, read
from benchmarks.systems import EXTENTS, LIMITS

HEAD = """# Benchmarks

Rendered by `tools/bench report` from {sources}; do not edit. Make your own with `tools/bench record`, or
`tools/bench all --size 256M` for a quick look.

How it is measured:

- The state is a transformer's fp32 parameters, 300 tensors in memory that has been touched before. Ranks stay alive
  over all repetitions. In a repetition every system has its turn, in an order of its own, after memory was put
  together again (compacted: huge pages run out otherwise, with most of the memory free) and the disk has had nothing
  to do for 0.3 s; the first repetition is a warm-up, in which what was loaded is compared with what was saved,
  and is not counted.
- Tables give the median, and in brackets the smallest and largest repetition. *of raw* is the time of the raw limit
  divided by the system's time, medians of the same run. The raw limit is the same number of bytes through O_DIRECT
  by four threads in each rank, in requests of 8 MiB, with nothing done to them; raw writes have their space reserved
  and end with fsync. *of memcpy* is the same with one thread in each rank that copies the bytes within warm memory.
- Orbax (over jax.distributed), ByteCheckpoint and DeepSpeed have environments of their own, made by the tool, and
  processes of their own beside the ranks, measured from outside. ByteCheckpoint 0.0.2 declares torch up to 2.5 and
  runs here with the torch of everything else, which its own check lets pass.
- *blocked* is how long a save in the background kept its caller.
- Every save is durable when the clock stops: what a library leaves in the page cache is synced inside the
  measured time.
- *cold*: the files' pages are dropped before (posix_fadvise after fsync, or /proc/sys/vm/drop_caches where it says so).
- torch.save and safetensors write one file for each rank, which no other number of ranks can load: their best case.
- Memory is the peak of resident memory above what it was before, of the rank that needed most. What a system keeps for
  the next time (buffers, copies) is taken in its first use and counts. Pages of files that are mapped count.
"""


@dataclass(frozen=True)
class Row:
    """All repetitions of one operation of one system."""

    measures: tuple[Measure, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(m.seconds for m in self.measures)

    @property
    def rate(self) -> float:
        return self.measures[0].bytes / self.seconds / 1e9

    def median(self, pick: Callable[[Measure], float | None]) -> float | None:
        found = [value for value in map(pick, self.measures) if value is not None]
        return statistics.median(found) if found else None


class Results:
    """The newest run of every scenario."""

    def __init__(self, records: Iterable[Measure | Skip | RunFacts]) -> None:
        self.runs: dict[str, RunFacts] = {}
        measures: list[Measure] = []
        self._skips: list[Skip] = []
        for record in records:
            if isinstance(record, RunFacts):
                self.runs[record.run] = record
            elif isinstance(record, Measure):
                measures.append(record)
            else:
                self._skips.append(record)
        self.newest: dict[str, str] = {}
        for m in sorted(measures, key=lambda m: self.runs[m.run].at if m.run in self.runs else ""):
            self.newest[m.scenario] = m.run
        self._table: dict[tuple[str, str, str, str], list[Measure]] = defaultdict(list)
        for m in measures:
            if self.newest[m.scenario] == m.run:
                self._table[m.scenario, m.operation, m.cache.partition(" ")[0], m.system].append(m)

    def rows(self, scenario: str, operation: str, cache: str | None = None) -> dict[str, Row]:
        """By system, the fastest first."""
        found = {
            system: Row(tuple(measures))
            for (a, b, c, system), measures in self._table.items()
            if (a, b) == (scenario, operation) and cache in (None, c)
        }
        return dict(sorted(found.items(), key=lambda item: item[1].seconds))

    def operations(self, scenario: str) -> list[tuple[str, str]]:
        return list(dict.fromkeys((b, c) for a, b, c, _ in self._table if a == scenario and b != "memcpy"))

    def counted(self, scenario: str) -> list[list[Measure]]:
        """The repetitions of everything that was measured in turn."""
        return [ms for (a, b, _, _), ms in self._table.items() if a == scenario and b != "memcpy"]

    def skips(self, scenario: str) -> list[Skip]:
        return [s for s in self._skips if s.scenario == scenario and s.run == self.newest.get(scenario)]

    def facts(self, scenario: str) -> RunFacts | None:
        return self.runs.get(self.newest.get(scenario, ""))


# --- pieces of text --------------------------------------------------------------------------------------------------


def seconds_text(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"


def spread_text(row: Row) -> str:
    values = [m.seconds for m in row.measures]
    return f"{seconds_text(row.seconds)} ({seconds_text(min(values))} – {seconds_text(max(values))})"


def mib(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f} MiB"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def rate_table(rows: dict[str, Row], *, memory: bool = True, limit: str = "raw") -> str:
    raw, copied = rows.get(limit), rows.get("memcpy")
    blocked = any(m.blocked_s is not None for row in rows.values() for m in row.measures)
    head = [
        "system",
        "time",
        *(["blocked"] if blocked else []),
        "GB/s",
        f"of {limit}",
        *(["of memcpy"] if copied else []),
        *(["peak memory a rank", "files", "disk read", "disk written"] if memory else []),
    ]
    lines = []
    for system, row in rows.items():
        line = [f"**{system}**" if system.startswith("ckptfs") else system, spread_text(row)]
        if blocked:
            blocked_s = row.median(lambda m: m.blocked_s)
            line.append("" if blocked_s is None else seconds_text(blocked_s))
        line += [f"{row.rate:.2f}", f"{raw.seconds / row.seconds:.2f}" if raw else ""]
        if copied:
            line.append(f"{copied.seconds / row.seconds:.2f}")
        if memory:
            files = row.median(lambda m: m.files)
            line += [mib(row.median(lambda m: m.peak_memory_bytes)), "" if files is None else f"{files:.0f}"]
            line += [mib(row.median(lambda m: m.bytes_read)), mib(row.median(lambda m: m.bytes_written))]
        lines.append(line)
    return table(head, lines)


def skip_lines(results: Results, scenario: str) -> str:
    found = dict.fromkeys(f"- {s.system}: {s.reason}" for s in results.skips(scenario))
    return "\nNot measured:\n\n" + "\n".join(found) + "\n" if found else ""


def about(results: Results, scenario: str) -> str:
    facts, counted = results.facts(scenario), results.counted(scenario)
    sizes = {m.bytes for ms in counted for m in ms}
    shown = f"{max(sizes) / 1e9:.2f} GB, " if sizes and max(sizes) > 1e6 else ""
    counts = {len(ms) for ms in counted}
    number = "–".join(str(n) for n in sorted({min(counts), max(counts)})) if counts else "0"
    when = f"{facts.at}, machine load before: {facts.host['load_before']}" if facts else "unknown time"
    copied = results.rows(scenario, "memcpy").get("memcpy")
    memory = f" Beside it, memcpy: {copied.rate:.1f} GB/s." if copied else ""
    return f"{shown}{number} repetitions, {when}.{memory}\n"


# --- sections --------------------------------------------------------------------------------------------------------


def save_section(results: Results, scenario: str, title: str, *, plots: bool = False) -> str:
    if scenario not in results.newest:
        return ""
    out = [f"## {title}\n", about(results, scenario)]
    for operation, what in (("save", "Save, durable"), ("load", "Load, cold")):
        out += [f"### {what}\n", rate_table(results.rows(scenario, operation))]
        if plots:
            out.append(f"![{what}](benchmarks-{operation}.svg)\n")
    return "\n".join([*out, skip_lines(results, scenario)])


def layouts_section(results: Results) -> str:
    if "layouts" not in results.newest:
        return ""
    how = (
        "A model of 24 linear layers and its Adam state, in fp32. ckptfs and DCP: FSDP2 on several ranks, the plain "
        "model alone. DeepSpeed: `ds_to_universal` in between, with its default numbers of workers; starts of Python "
        "are not counted. The repetitions of one system follow each other.\n"
    )
    out = ["## Saved by 2 ranks, resumed by 1 and by 4, end to end\n", about(results, "layouts"), how]
    steps = {n: results.rows("layouts", n) for n in ("save", "convert", "load by 1", "load by 4")}
    ends = {n: results.rows("layouts", f"2 to {n}, end to end") for n in (1, 4)}
    lines = []
    for system, row in ends[4].items():
        cells = [spread_text(rows[system]) if system in rows else "none needed" for rows in steps.values()]
        cells += [spread_text(ends[1][system]) if system in ends[1] else "", spread_text(row)]
        written = sum((steps[n][system].median(lambda m: m.bytes_written) or 0) for n in steps if system in steps[n])
        memory = max((steps[n][system].median(lambda m: m.peak_memory_bytes) or 0) for n in steps if system in steps[n])
        lines.append([f"**{system}**" if system == "ckptfs" else system, *cells, mib(written), mib(memory)])
    head = ["system", "save", "convert", "load by 1", "load by 4", "2 to 1", "2 to 4", "written", "peak memory"]
    return "\n".join([*out, table(head, lines), skip_lines(results, "layouts")])


def reshard_section(results: Results) -> str:
    if "reshard" not in results.newest:
        return ""
    out = ["## What 2 ranks saved, loaded by 2 and by 4\n", about(results, "reshard")]
    two, four = (results.rows("reshard", f"load 2→{n}") for n in (2, 4))
    lines = [
        [s, spread_text(two[s]), spread_text(four[s]), f"{four[s].seconds / two[s].seconds:.2f}"]
        for s in two
        if s in four
    ]
    out.append(table(["system", "2→2", "2→4", "2→4 / 2→2"], lines))
    return "\n".join([*out, skip_lines(results, "reshard")])


def training_section(results: Results) -> str:
    if "training" not in results.newest:
        return ""
    out = ["## A checkpoint every iteration, 2 ranks\n", about(results, "training")]
    rows, alone = results.rows("training", "iteration"), results.rows("training", "save alone")
    bare = rows.get("no checkpoints")
    lines = []
    for system, row in rows.items():
        update = row.median(lambda m: m.detail.get("update_s")) or 0.0
        bare_update = bare.median(lambda m: m.detail.get("update_s")) or 0.0 if bare else 0.0
        waits = (row.median(lambda m: m.blocked_s) or 0.0) + max(0.0, update - bare_update)
        compute = row.median(lambda m: m.detail.get("compute_s")) or 0.0
        bare_compute = (bare.median(lambda m: m.detail.get("compute_s")) or 0.0) if bare else 0.0
        single = alone.get(system)
        lines.append(
            [
                system,
                spread_text(row),
                f"{row.seconds / bare.seconds:.2f}" if bare else "",
                seconds_text(waits) if system != "no checkpoints" else "",
                f"{compute / bare_compute:.2f}" if bare_compute else "",
                f"{seconds_text(single.median(lambda m: m.blocked_s) or 0)} / {seconds_text(single.seconds)}"
                if single
                else "",
                mib(row.median(lambda m: m.peak_memory_bytes)),
            ]
        )
    head = [
        "way",
        "iteration",
        "of none",
        "waited an iteration",
        "compute slower by",
        "alone: blocked / total",
        "peak memory a rank",
    ]
    out.append(table(head, lines))
    out.append(
        "*waited*: the call that begins a save (with its wait for the previous one), and what the optimizer's update "
        "took longer than without checkpoints. *alone*: one save with nothing beside it.\n"
    )
    out += beside_table(results)
    return "\n".join([*out, skip_lines(results, "training")])


def beside_table(results: Results) -> list[str]:
    """What a loop on one core loses while a save has another one."""
    lines = []
    for size in PRODUCTS:
        for system, row in results.rows("training", beside_name(size)).items():
            slower, processor, queue, save_s = (
                row.median(lambda m, key=key: m.detail.get(key)) or 0.0  # type: ignore[misc]
                for key in ("slower", "processor", "queue", "save_s")
            )
            shares = (slower, processor, queue, slower - processor - queue)
            lines.append([system, f"{size} × {size}", *(f"{share:.1%}" for share in shares), seconds_text(save_s)])
    if not lines:
        return []
    head = ["way", "products", "slower by", "memory and caches", "another thread on its core", "the interpreter"]
    idle = any(line[0] == Idle.name for line in lines)
    words = (
        "One rank, half of the bytes, a loop of matrix products on one core while a save runs on another: how much "
        f"longer the same work takes{' than before and after' * idle}. *Memory and caches*: more time on the processor "
        "for the same work. *The interpreter*: what remains, mostly waiting for Python's lock after each product. "
        f"{'Four' if idle else 'Two'} rows are no saves: they tell {'how it differs from itself, and ' * idle}what "
        "this machine takes from the loop when the other core is busy.\n"
    )
    return [words, table([*head, "save"], lines)]


SLICES = """\
*cold*: each read was done once before the pages were dropped, the raw ones too: a virtual disk gives what it gave
lately twice as fast. *raw, whole pages* and *raw, whole extents*: the pages that the bytes lie on, and what the
checksums of all that is read cover, as one file. *ckptfs, no checksums* checks as little as the peers do; **ckptfs**
checks every extent that is read whole. *ckptfs, saved with split*: saved by one process too, but told what would be
read.
"""


def slice_section(results: Results) -> str:
    if "slices" not in results.newest:
        return ""
    out = ["## Slices, one process\n", about(results, "slices")]
    if any(EXTENTS in results.rows("slices", *key) for key in results.operations("slices")):
        out.append(SLICES)
    for operation, cache in results.operations("slices"):
        rows = results.rows("slices", operation, cache)
        if set(rows) <= set(LIMITS):
            continue
        first = next(r for s, r in rows.items() if s not in LIMITS)
        raw = rows.get("raw")
        lines = [
            [
                f"**{system}**" if system == "ckptfs" else system,
                seconds_text(row.seconds),
                seconds_text(row.median(lambda m: m.detail.get("p99_s")) or row.seconds),
                f"{row.seconds / first.seconds:.2f}",
                f"{raw.seconds / row.seconds:.2f}" if raw else "",
            ]
            for system, row in rows.items()
        ]
        nbytes = first.measures[0].bytes
        size = f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes >> 10} KiB"
        out += [
            f"### {operation}, {size}, {cache}\n",
            table(["system", "median", "p99", "of the fastest", "of raw"], lines),
        ]
    return "\n".join([*out, skip_lines(results, "slices")])


def plain_section(results: Results, scenario: str, title: str, *, memory: bool, limit: str = "raw") -> str:
    if scenario not in results.newest:
        return ""
    out = [f"## {title}\n", about(results, scenario)]
    for operation, cache in results.operations(scenario):
        rows = results.rows(scenario, operation, cache)
        if not memory and all(row.measures[0].bytes == 0 for row in rows.values()):
            torch = {s: any(m.detail.get("imports_torch") for m in r.measures) for s, r in rows.items()}
            lines = [[s, spread_text(r), "yes" if torch[s] else "no"] for s, r in rows.items()]
            out.append(table(["program", "time", "imports torch"], lines))
        else:
            out += [f"### {operation}{', ' + cache if cache else ''}\n", rate_table(rows, memory=memory, limit=limit)]
    return "\n".join([*out, skip_lines(results, scenario)])


# --- the document ----------------------------------------------------------------------------------------------------


def render(results: Results, sources: Sequence[str]) -> str:
    parts = [
        HEAD.format(sources=", ".join(f"`{s}`" for s in sources)),
        machine_section(results),
        goals_section(goals(results)),
    ]
    parts.append(save_section(results, "save and load", "Save and load, 2 ranks", plots=True))
    parts.append(save_section(results, "big tensors", "Three large tensors, 2 ranks"))
    parts += [reshard_section(results), layouts_section(results), training_section(results), slice_section(results)]
    parts.append(plain_section(results, "mount", "The mount", memory=False, limit="plain files"))
    parts.append(
        plain_section(results, "cold start", "Cold start of `from_pretrained`", memory=False, limit="plain folder")
    )
    parts.append(plain_section(results, "small tensors", "3,000 tensors of 4 KiB, one process", memory=True))
    parts.append(plain_section(results, "imports", "Start of a program", memory=False))
    return "\n".join(part.strip() + "\n" for part in parts if part)


def machine_section(results: Results) -> str:
    used = sorted(set(results.newest.values()), key=lambda run: results.runs[run].at if run in results.runs else "")
    facts = [results.runs[run] for run in used if run in results.runs]
    if not facts:
        return ""
    host = facts[-1].host
    text = (
        f"{host['cpu']}, {host['cores']} cores, {host['memory_bytes'] / 2**30:.0f} GiB of memory, "
        f"{host['file_system']}, Linux {host['kernel']}. "
    )
    versions = ", ".join(f"{name} {number}" for name, number in facts[-1].versions.items())
    commands = "\n".join(f"    {line}" for line in dict.fromkeys(f.command for f in facts))
    return f"## Machine\n\n{text}{versions}.\n\n{commands}\n"


def plot(rows: dict[str, Row], title: str, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ckptfs"
    from matplotlib import pyplot as plt

    names = [name for name in reversed(list(rows)) if name != "memcpy"]  # its bar would dwarf the others
    figure, axes = plt.subplots(figsize=(7, 0.42 * len(names) + 1))
    colours = ["#888888" if n == "raw" else "#1f6f8b" if "ckptfs" in n else "#c9ccd1" for n in names]
    axes.barh(names, [rows[n].rate for n in names], color=colours)
    for at, name in enumerate(names):
        axes.text(rows[name].rate, at, f" {rows[name].rate:.2f}", va="center", fontsize=8)
    axes.set_xlabel("GB/s")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_report(sources: Sequence[Path], out: Path, readme: Path | None = None) -> None:
    """docs/benchmarks.md with its plots, and the README's table."""
    if not sources:
        raise SystemExit("no results: run tools/bench record first, or name a file")
    results = results_of(sources)
    if not results.newest:
        raise SystemExit(f"no measures in {', '.join(map(str, sources))}")
    out.parent.mkdir(parents=True, exist_ok=True)
    for operation, title in (("save", "Save, durable"), ("load", "Load, cold")):
        rows = results.rows("save and load", operation)
        if rows:
            plot(rows, title, out.parent / f"benchmarks-{operation}.svg")
    out.write_text(render(results, [path.name for path in sources if is_bench(path)]), encoding="utf-8")
    print(f"{out} written")
    if readme:
        readme.write_text(with_claims(readme.read_text(encoding="utf-8"), results, sources), encoding="utf-8")
        print(f"{readme} written")


def is_bench(path: Path) -> bool:
    """Campaigns and simulations have files of their own beside those of the benchmarks."""
    return path.name not in ("crash.jsonl", "simulate.jsonl")


def results_of(sources: Sequence[Path]) -> Results:
    return Results(record for path in sources if is_bench(path) for record in read(path))
