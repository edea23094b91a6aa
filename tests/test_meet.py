"""What ranks remember between saves: while nothing changes nothing is planned or told again; else all of it is."""

import numpy as np
import pytest

from ckptfs import LocalShard, Run, meet
from ckptfs.ranks import Group
from ckptfs.storage import MemoryStore
from spreads import on_ranks

FULL = np.repeat(np.arange(8, dtype="f4"), 3000).reshape(8, 3000)  # shrinks well


def halves(full, at=4):
    """Rows up to `at` on rank 0, the rest on rank 1."""
    cuts = [(0, at), (at, len(full))]
    boxes = [[[a, 0], [b, full.shape[1]]] for a, b in cuts]
    return [
        LocalShard([full[a:b].copy()], full.shape, ["boxes", [box]]) for (a, b), box in zip(cuts, boxes, strict=True)
    ]


def same_on_both(**more):
    return [{"w": part, "n": np.arange(4000) // 100, **more} for part in halves(FULL)]


CHANGES = {
    "nothing": (same_on_both(), {}),
    "other values": ([{"w": part, "n": np.arange(4000) // 100} for part in halves(FULL + 1)], {}),
    "a longer array": ([{"w": part, "n": np.arange(4000) // 100} for part in halves(np.vstack([FULL, FULL]), 8)], {}),
    "another type": ([{"w": part, "n": np.arange(4000) // 100} for part in halves(FULL.astype("f8"))], {}),
    "another cut": ([{"w": part, "n": np.arange(4000) // 100} for part in halves(FULL, 3)], {}),
    "one more array": (same_on_both(more=np.arange(5000) // 100), {}),
    "one more on one rank": ([same_on_both()[0], same_on_both(more=np.arange(5000) // 100)[1]], {}),
    "another name": ([{"v": part, "n": np.arange(4000) // 100} for part in halves(FULL)], {}),
    "a codec": (same_on_both(), {"compression": "zstd"}),
}


def whole(trees):
    """What the trees of both ranks hold together."""
    found = {}
    for name in {**trees[0], **trees[1]}:
        leaves = [tree[name] for tree in trees if name in tree]
        sharded = isinstance(leaves[0], LocalShard)
        found[name] = np.vstack([part for leaf in leaves for part in leaf.data]) if sharded else leaves[0]
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_used_again_only_if_it_is_still_the_plan(monkeypatch, change):
    store, groups, made = MemoryStore(f"meet {change}"), Group.threads(2), {"plans": 0, "descriptions": 0}

    def counted(what, function):
        def call(*args):
            made[what] += 1
            return function(*args)

        return call

    monkeypatch.setattr(meet.saveplan, "plan", counted("plans", meet.saveplan.plan))
    monkeypatch.setattr(meet.Description, "pack", counted("descriptions", meet.Description.pack))
    runs = [Run(store, group=group) for group in groups]

    def save(step, trees, **how):
        made.update(plans=0, descriptions=0)
        on_ranks(2, lambda rank, _: runs[rank].save(step, trees[rank], **how), groups=groups)
        back = runs[0][step].tree(numpy=True)
        wanted = whole(trees)
        assert back.keys() == wanted.keys()
        for name, want in wanted.items():
            assert back[name].dtype == want.dtype
            assert np.array_equal(back[name], want), name
        return made["plans"], made["descriptions"] > 0

    assert save(1, same_on_both()) == (2, True)
    trees, how = CHANGES[change]
    again = (0, False) if change in ("nothing", "other values") else (2, True)
    assert save(2, trees, **how) == again
    assert save(3, trees, **how) == (0, False)
    assert save(4, same_on_both()) == again


def test_a_save_says_how_far_and_how_fast_it_compressed():
    run = Run(MemoryStore("ratios"))
    tree = {"zeros": np.zeros(1 << 18, "f4"), "noise": np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, "u4")}
    raw, packed = run.save(1, tree), run.save(2, tree, compression="zstd")
    assert (raw.ratio, raw.stored_bytes) == (1.0, 2 << 20)
    assert 0.5 < packed.ratio < 0.52
    assert packed.codec_gbps > 0
    assert packed.stored_bytes <= raw.stored_bytes
    assert any("noise" in note and "does not pay" in note for note in packed.notes)
