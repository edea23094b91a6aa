"""`ckptfs prune`: deletes old steps by a rule."""

from __future__ import annotations

import argparse
from typing import Any

from ckptfs.cli import text
from ckptfs.errors import MismatchError


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "prune",
        "delete old steps of a run",
        "What any rule keeps is kept; the newest step, the newest that verify found sound and pinned ones always\n"
        "stay. Steps in use (mounted, watched) stay and are named: run it again later. A crash on the way leaves\n"
        "whole steps only.",
        "  ckptfs prune run7 --keep-last 3 --dry-run\n  ckptfs prune run7 --keep-last 3 --keep-every 1000\n",
    )
    text.add_url(made, "run_url", "a run")
    made.add_argument("--keep-last", type=int, metavar="N", help="keep the N newest steps")
    made.add_argument("--keep-every", type=int, metavar="K", help="keep steps that K divides")
    made.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    text.add_options(made)
    made.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ckptfs import commit, lease, retention

    if args.keep_last is None and args.keep_every is None:
        raise MismatchError("nothing says what to keep: give --keep-last N, --keep-every K or both")
    policy = retention.Policy(args.keep_last, args.keep_every)
    found = text.open_run(args.run_url, args)
    steps = found.steps()
    if not steps:
        text.require_run(found.store)
    gone: list[int] = []
    held: list[int] = []
    for step in retention.doomed(steps, policy, retention.protected(found.store, steps)):
        name = commit.step_name(step)
        free = not lease.held(found.store, name) if args.dry_run else lease.discard(found.store, name)
        (gone if free else held).append(step)
        if not args.json and free:
            text.say(f"{'would delete' if args.dry_run else 'deleted'} step {step}")
        elif not args.json:
            text.say(f"step {step} is in use and stays")
    kept = [step for step in steps if step not in gone]
    if args.json:
        text.say_json({"deleted": gone, "in_use": held, "kept": kept, "dry_run": args.dry_run})
    else:
        text.say(f"{text.count_text(len(kept), 'step')} kept")
    return 0
