"""The real planner for thousands of ranks, without processes: plan time, bytes exchanged, files, extents, balance.

    tools/dev run python tools/simulate.py [--ranks 16384] [--model 405b] [--json]

Descriptions are made as `shards` would make them; planning, sharing and the sizes of reports are the real code. Ranks
are sampled (all of them would take one machine hours for what thousands do at once).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import zlib
from dataclasses import dataclass
from math import prod

from ckptfs import commit, manifest, mesh, parties, ranges, report, saveplan
from ckptfs.grid import Layout
from ckptfs.report import Written
from ckptfs.saveplan import Desc, Options, SavePlan
from ckptfs.stage import jobs_of

GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """A decoder of the Llama family; `experts` > 0 makes its feed-forward a mixture."""

    name: str
    layers: int
    width: int
    hidden: int
    kv: int
    vocab: int
    experts: int = 0


MODELS = {
    "70b": Model("Llama-70B", 80, 8192, 28672, 1024, 128256),
    "405b": Model("Llama-405B", 126, 16384, 53248, 1024, 128256),
    "moe1t": Model("MoE-1T", 61, 7168, 2048, 1024, 129280, experts=384),
}


def shapes(model: Model) -> list[tuple[str, tuple[int, ...], int | None]]:
    """(name, shape, the dimension that tensor parallelism cuts) of every parameter."""
    out: list[tuple[str, tuple[int, ...], int | None]] = [
        ("tok_embeddings.weight", (model.vocab, model.width), 0),
        ("output.weight", (model.vocab, model.width), 0),
        ("norm.weight", (model.width,), None),
    ]
    for i in range(model.layers):
        p = f"layers.{i}"
        out += [
            (f"{p}.attention.wq.weight", (model.width, model.width), 0),
            (f"{p}.attention.wk.weight", (model.kv, model.width), 0),
            (f"{p}.attention.wv.weight", (model.kv, model.width), 0),
            (f"{p}.attention.wo.weight", (model.width, model.width), 1),
            (f"{p}.attention_norm.weight", (model.width,), None),
            (f"{p}.ffn_norm.weight", (model.width,), None),
        ]
        if model.experts:
            out += [
                (f"{p}.experts.w1", (model.experts, model.hidden, model.width), 1),
                (f"{p}.experts.w2", (model.experts, model.width, model.hidden), 2),
                (f"{p}.experts.w3", (model.experts, model.hidden, model.width), 1),
                (f"{p}.router.weight", (model.experts, model.width), None),
            ]
        else:
            out += [
                (f"{p}.feed_forward.w1.weight", (model.hidden, model.width), 0),
                (f"{p}.feed_forward.w2.weight", (model.width, model.hidden), 1),
                (f"{p}.feed_forward.w3.weight", (model.hidden, model.width), 0),
            ]
    return out


def with_optimizer(name: str, shape: tuple[int, ...], spread: mesh.Spread) -> list[Desc]:
    parts = ("model", "optim/exp_avg", "optim/exp_avg_sq")
    return [Desc(f"{part}/{name}", "float32", shape, spread) for part in parts]


def mesh_ranks(first: int, count: int) -> list[int]:
    return [first, first + 1] if count == 2 else [first, count]  # see mesh.Mesh


def fsdp(model: Model, world: int) -> tuple[list[list[Desc]], list[int]]:
    """Every parameter cut over all ranks in dimension 0."""
    spread = ["mesh", [world], mesh_ranks(0, world), ["S0"]]
    descs = [d for name, shape, _ in shapes(model) for d in with_optimizer(name, shape, spread)]
    return [descs], [0] * world


def hsdp(model: Model, world: int, shard: int = 256) -> tuple[list[list[Desc]], list[int]]:
    """Cut over groups of `shard` ranks, replicated over the groups."""
    shard = min(shard, world)
    spread = ["mesh", [world // shard, shard], mesh_ranks(0, world), ["R", "S0"]]
    descs = [d for name, shape, _ in shapes(model) for d in with_optimizer(name, shape, spread)]
    return [descs], [0] * world


def tp_pp_dp(model: Model, world: int, tp: int = 8, pp: int = 16) -> tuple[list[list[Desc]], list[int]]:
    """Pipeline stages of consecutive ranks; in each a data x tensor mesh, everything replicated over data."""
    per_stage = world // pp
    dp = per_stage // tp
    stages: list[list[Desc]] = [[] for _ in range(pp)]
    for name, shape, cut in shapes(model):
        layer = int(name.split(".")[1]) if name.startswith("layers.") else (0 if "tok" in name else model.layers - 1)
        stage = layer * pp // model.layers
        place = "R" if cut is None else f"S{cut}"
        spread = ["mesh", [dp, tp], mesh_ranks(stage * per_stage, per_stage), ["R", place]]
        stages[stage] += with_optimizer(name, shape, spread)
    return stages, [r // per_stage for r in range(world)]


def ep(model: Model, world: int, experts: int = 64) -> tuple[list[list[Desc]], list[int]]:
    """Experts cut over `experts` ranks in dimension 0, then like everything else over the rest in dimension 0."""
    experts = min(experts, world, model.experts or world)
    dense = ["mesh", [world // experts, experts], mesh_ranks(0, world), ["R", "S0"]]
    moe = ["mesh", [world // experts, experts], mesh_ranks(0, world), ["S1", "S0"]]
    descs = []
    for name, shape, _ in shapes(model):
        descs += with_optimizer(name, shape, moe if "experts" in name else dense)
    return [descs], [0] * world


LAYOUTS = {"fsdp": fsdp, "hsdp": hsdp, "tp-pp-dp": tp_pp_dp, "ep": ep}


def simulate(model: Model, layout: str, world: int, samples: int) -> dict[str, object]:
    """One row of the table."""
    descriptions, of_rank = LAYOUTS[layout](model, world)
    begin = time.perf_counter()
    raws = [saveplan.describe(sorted(d, key=lambda x: x.name), {}) for d in descriptions]
    describe_s = (time.perf_counter() - begin) / len(descriptions)
    exchanged = sum(len(zlib.compress(raw, 1)) for raw in raws)
    parsed = [saveplan.parse(raw) for raw in raws]
    ranks = sorted({0, world - 1, *random.Random(1).sample(range(world), min(samples, world))})
    plans: list[SavePlan] = []
    times = []
    for rank in ranks:
        mesh.intervals.cache_clear()
        begin = time.perf_counter()
        plans.append(saveplan.plan(parsed, of_rank, rank, Options()))
        times.append(time.perf_counter() - begin)
    total = sum(prod(d.shape) * 4 for descs in descriptions for d in descs)
    extents = count_extents(parsed, of_rank)
    few = [sum(sum(b - a for a, b in r) < Options().large_bytes for r in p.pieces.values()) for p in plans]
    per_rank = sorted(p.nbytes for p in plans)
    mean = total / world
    return {
        "model": model.name,
        "layout": layout,
        "ranks": world,
        "state_gib": round(total / GIB),
        "arrays": len(plans[0].arrays),
        "describe_s": round(describe_s, 3),
        "plan_s": round(sorted(times)[len(times) // 2], 3),
        "plan_max_s": round(max(times), 3),
        "exchanged_mb": round(exchanged / 1e6, 2),
        "files_per_rank": max(len(p.pieces) for p in plans),
        "small_files_per_rank": max(few),  # of which the rank writes less than 8 MiB
        "handed_over": round(max(handed_bytes(p) / max(1, p.nbytes) for p in plans), 3),
        "jobs_per_rank": max(len(jobs_of(p, 8 << 20, 256 << 10)) for p in plans),
        "extents_total": extents,
        "manifest_mb": round(extents * 34 / 1e6, 1),
        "imbalance": round(per_rank[-1] / mean - 1, 3),
        "replica_imbalance": round(replica_imbalance(parsed, of_rank), 4),
    }


def handed_bytes(plan: SavePlan) -> int:
    """What this rank gets from others to write it."""
    return sum(b - a for handed in plan.pulls.values() for a, b, _ in handed)


def count_extents(descriptions: list[tuple[list[Desc], dict[str, str]]], of_rank: list[int]) -> int:
    """Of all ranks, exactly: dealing cuts between extents only, so each party's ranges say how many there are."""
    all_ranges = dealt_ranges(descriptions, of_rank)
    counts: dict[int, int] = {}  # arrays alike have one list
    for extent_bytes, found in all_ranges:
        if id(found) not in counts:
            counts[id(found)] = sum(len(ranges.cut(a, b, extent_bytes)) for a, b in found)
    return sum(counts[id(found)] for _, found in all_ranges)


def dealt_ranges(
    descriptions: list[tuple[list[Desc], dict[str, str]]], of_rank: list[int]
) -> list[tuple[int, list[ranges.Range]]]:
    """By array in order of the names, the length of its extents and what each of its parties holds."""
    options = Options()
    known = saveplan._gather(descriptions, of_rank)  # noqa: SLF001 - the planner's own parts, put together otherwise
    state_bytes = sum(prod(views[0][0].shape) * 4 for views in known.values())
    extent_bytes = saveplan.extent_size(state_bytes, options.extent_bytes)
    spans = saveplan._spans(known, options, extent_bytes)  # noqa: SLF001
    found: dict[str, tuple[int, list[ranges.Range]]] = {}
    keys = []
    for _, views in sorted(known.items()):
        desc = views[0][0]
        keys.append(f"{desc.shape} {desc.spread}")
        if keys[-1] not in found:
            layout = saveplan._layout(desc, saveplan._edges(desc.name, views), options, None, many=False)  # noqa: SLF001
            span = saveplan._span_of(desc, spans, options)  # noqa: SLF001
            of_parties = ranges_of_parties(layout, mesh.Mesh(desc.spread), span)
            found[keys[-1]] = layout.extent_bytes(extent_bytes), of_parties
    return [found[key] for key in keys]


def ranges_of_parties(layout: Layout, spread: mesh.Mesh, span: int) -> list[ranges.Range]:
    done: set[int] = set()
    found: list[ranges.Range] = []
    for at in spread.coordinates():
        rank = spread.replicas(at)[0]
        if rank not in done:
            ((members, portion),) = parties.of_mesh(layout, spread, rank, span)
            done.update(members)
            found += portion.ranges
    return sorted(found)


def replica_imbalance(
    descriptions: list[tuple[list[Desc], dict[str, str]]], of_rank: list[int], most: int = 64
) -> float:
    """By how much the busiest of the ranks that hold the same as rank 0 exceeds their mean."""
    spreads = [d.spread for d in descriptions[0][0]]
    groups = {mesh.Mesh(s).replicas(mesh.Mesh(s).coordinate(0) or ()) for s in spreads[:1]}
    group = max(groups, key=len)
    if len(group) == 1 or len(group) > most:
        group = group[:: max(1, len(group) // most)]
    sizes = [saveplan.plan(descriptions, of_rank, rank, Options()).nbytes for rank in group]
    return max(sizes) / (sum(sizes) / len(sizes)) - 1


def merge(model: Model, layout: str, world: int) -> dict[str, object]:
    """The leader's part of a commit: reports of all ranks read, checked against the plan, made one manifest."""
    descriptions, of_rank = LAYOUTS[layout](model, world)
    given: list[tuple[list[Desc], dict[str, str]]] = [(descs, {}) for descs in descriptions]
    plan = saveplan.plan(given, of_rank, 0, Options())
    written = []
    for number, (extent_bytes, found) in enumerate(dealt_ranges(given, of_rank)):
        for start, stop in found:
            for a, b in ranges.cut_evenly(start, stop, 8 << 20, extent_bytes):
                hashes = os.urandom(16 * len(ranges.cut(a, b, extent_bytes)))
                written.append(Written(number, a, b, None, hashes))
    reports = [report.pack_report(written[rank::world], {}) for rank in range(world)]
    begin = time.perf_counter()
    unpacked = [report.unpack_report(raw) for raw in reports]
    params = report.params_of(plan, (found for finished, _ in unpacked for found in finished))
    texts, zarr_hashes = commit.documents(params)
    built = commit.build(
        params,
        tree=None,
        save_id="",
        step=0,
        world=world,
        aliases={},
        assets={},
        maps={},
        root_hash=manifest.digest(texts["zarr.json"]).hex(),
        zarr_hashes=zarr_hashes,
    )
    raw = commit.dump(built)
    merge_s = time.perf_counter() - begin
    begin = time.perf_counter()
    manifest.Manifest.parse(raw)
    return {
        "model": model.name,
        "layout": layout,
        "ranks": world,
        "extents": sum(p.extent_count for p in params.values()),
        "reports_mb": round(sum(map(len, reports)) / 1e6, 1),
        "merge_s": round(merge_s, 2),
        "manifest_mb": round(len(raw) / 1e6, 1),
        "open_s": round(time.perf_counter() - begin, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 16384])
    parser.add_argument("--model", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    parser.add_argument("--samples", type=int, default=4, help="ranks whose plans are made")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--merge", action="store_true", help="the leader's merge of all reports instead of the plans")
    args = parser.parse_args()
    head = None
    for model in args.model:
        for layout in args.layout:
            if layout == "ep" and not MODELS[model].experts:
                continue
            for world in args.ranks:
                if args.merge:
                    row = merge(MODELS[model], layout, world)
                else:
                    row = simulate(MODELS[model], layout, world, args.samples)
                if args.json:
                    print(json.dumps(row), flush=True)
                    continue
                if head is None:
                    head = {key: max(len(key), 10) for key in row}
                    print("  ".join(f"{key:>{width}}" for key, width in head.items()))
                print("  ".join(f"{value!s:>{head[key]}}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
