"""`ckptfs verify`: checks every stored byte, names what is bad."""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import TYPE_CHECKING, Any

from ckptfs.cli import text
from ckptfs.errors import NotFoundError

if TYPE_CHECKING:
    from ckptfs.storage import Store
    from ckptfs.verify import Problem


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "verify",
        "check every stored byte of a step, or of all steps",
        "Checksums of all data and padding, sizes, shard indexes, metadata, assets. Goes on after the first problem.\n"
        "A run stands for its latest step. Files that the step does not name are warnings. Status 1: something is bad.",
        "  ckptfs verify run7@1000\n  ckptfs verify run7 --all\n  ckptfs verify s3://bucket/run7 --json\n",
    )
    text.add_url(made)
    made.add_argument("--all", action="store_true", help="every step of the run")
    made.add_argument("--strict", action="store_true", help="warnings count as problems")
    made.add_argument("--threads", type=int, metavar="N", help="how many reads at once (default: 4)")
    text.add_options(made, bar=True)
    made.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ckptfs import retention
    from ckptfs.errors import CkptError
    from ckptfs.verify import verify

    results: list[dict[str, Any]] = []
    bad = 0
    for store, run_store, step in stores(args):
        began = time.perf_counter()
        with text.held(store, args), text.bar(args, store.url.rpartition("/")[2]) as bar:
            checked = 0

            def progress(done: int, total: int) -> None:
                nonlocal checked
                checked = done
                bar(done, total)

            mark = None
            if run_store is not None and step is not None:
                with contextlib.suppress(CkptError):  # verify says what is wrong with it
                    mark = retention.mark_of(run_store, step)
            problems = verify(store, progress=progress, threads=args.threads)
        seconds = time.perf_counter() - began
        wrong = [p for p in problems if args.strict or not p.warning]
        bad += bool(wrong)
        if run_store is not None and step is not None:
            with contextlib.suppress(CkptError):  # somebody else's run, which we may only read
                retention.note_verified(run_store, step, mark if all(p.warning for p in problems) else None)
        if not args.json:
            _report(store.url, problems, wrong, checked, seconds)
        results.append(
            {
                "url": store.url,
                "ok": not wrong,
                "checked_bytes": checked,
                "seconds": round(seconds, 3),
                "problems": [p.to_json() | {"warning": p.warning} for p in problems],
            }
        )
    if args.json:
        text.say_json({"ok": not bad, "steps": results})
    elif len(results) > 1:
        text.say(f"{text.count_text(len(results), 'step')} checked, {bad} bad")
    return 1 if bad else 0


def stores(args: argparse.Namespace) -> list[tuple[Store, Store | None, int | None]]:
    """The steps' stores, with their run's and number. None is opened: a damaged manifest is a result, not an error."""
    from ckptfs import commit
    from ckptfs.manifest import NAME
    from ckptfs.run import Run, split_url
    from ckptfs.storage import open_store

    base, step = split_url(args.url)
    store = open_store(base, **text.options(args))
    if step is None and store.exists(NAME):
        return [(store, None, None)]
    found = Run(store)
    steps = found.steps()
    if step is None or step == "latest":
        if not steps:
            text.require_run(store)
            raise NotFoundError(f"{store.url} has no committed step")
        picked = steps if args.all else steps[-1:]
    elif int(step) in steps:
        picked = [int(step)]
    else:
        found[int(step)]  # raises, and says which steps there are
        picked = []
    return [(store.sub(commit.step_name(number)), store, number) for number in picked]


def _report(url: str, problems: list[Problem], wrong: list[Problem], checked: int, seconds: float) -> None:
    for problem in problems:
        label = "warning" if problem not in wrong else problem.kind
        text.say(f"{label}: {problem}")
    rate = f"{text.size_text(checked)} in {seconds:.1f} s, {text.size_text(checked / seconds if seconds else 0)}/s"
    if wrong:
        text.say(f"{url}: BAD, {text.count_text(len(wrong), 'problem')} ({rate})")
    else:
        text.say(f"{url}: ok ({rate})")
