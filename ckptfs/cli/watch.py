"""`ckptfs watch`: runs a command for every new step."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ckptfs.cli import text
from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    from ckptfs.watch import Leased


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "watch",
        "run a command for every new step of a run",
        "Steps come in order, each once, and are not deleted while their command runs. In the command's words, {path}\n"
        "is the step's folder (or URL), {step} its number, {run} the run; the same is in CKPTFS_PATH, CKPTFS_STEP and\n"
        "CKPTFS_RUN. Without a command the paths are printed. Status 1: a command failed.",
        "  ckptfs watch run7 -- python evaluate.py --checkpoint {path}\n"
        "  ckptfs watch run7 --after 1000 --every -- rsync -a {path} backup:/ckpts/\n"
        "  ckptfs watch run7 --newest\n",
    )
    text.add_url(made, "run_url", "a run")
    made.add_argument(
        "--after",
        default="latest",
        metavar="N",
        help="begin after step N; 'none': with all there are (default: new ones only)",
    )
    made.add_argument("--every", action="store_true", help="no step may be deleted before it was handled")
    made.add_argument("--newest", action="store_true", help="skip to the newest when several are new")
    made.add_argument("--count", type=int, metavar="N", help="end after N steps")
    made.add_argument("--timeout", type=float, metavar="SECONDS", help="end when no step came for so long")
    made.add_argument("--stop-on-error", action="store_true", help="end when a command fails")
    text.add_options(made, as_json=False)
    made.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    after: Any = {"latest": "latest", "none": None}.get(args.after, args.after)
    if after is not None and after != "latest":
        try:
            after = int(after)
        except ValueError:
            raise MismatchError(f"--after {args.after}: a step's number, 'latest' or 'none'") from None
    if args.count is not None and args.count < 1:
        raise MismatchError(f"--count {args.count}: at least 1")
    if args.timeout is not None and not args.timeout >= 0:  # nor NaN
        raise MismatchError(f"--timeout {args.timeout}: seconds, from 0 on")
    run_ = text.open_run(args.run_url, args)
    found = run_.watch(
        after,
        every=args.every,
        newest=args.newest,
        idle_timeout_s=args.timeout,
        on_skipped=lambda step: print(f"ckptfs: step {step} was deleted before it was seen", file=sys.stderr),
    )
    failed = seen = 0
    try:
        for checkpoint in found:
            status = _handle(checkpoint, run_.url, args.rest)
            failed += status != 0
            seen += 1
            if seen == args.count or (status and args.stop_on_error):
                break
    finally:
        found.close()  # type: ignore[attr-defined]
    return 1 if failed else 0


def _handle(checkpoint: Leased, run_url: str, words: list[str] | None) -> int:
    names = {"path": checkpoint.url, "step": str(checkpoint.number), "run": run_url}
    if not words:
        text.say(names["path"])
        sys.stdout.flush()
        return 0
    command = [_filled(word, names) for word in words]
    env = os.environ | {f"CKPTFS_{name.upper()}": value for name, value in names.items()}
    sys.stdout.flush()
    try:
        status = subprocess.run(command, env=env, check=False).returncode
    except OSError as error:
        raise MismatchError(f"the command {command[0]!r} cannot be run: {error.strerror}") from error
    if status:
        print(f"ckptfs: step {names['step']}: the command ended with status {status}", file=sys.stderr)
    return status


def _filled(word: str, names: dict[str, str]) -> str:
    # Not str.format: other braces belong to the command. All at once: a path may hold such words itself.
    return re.sub(r"\{(path|step|run)\}", lambda found: names[found[1]], word)
