"""The command line: arguments in, text or JSON out, one exit status.

Rules: results go to stdout, everything else to stderr; `--json` prints one JSON value; an error is one line and a
status, never a traceback (CKPTFS_DEBUG=1 shows it). Commands import what they need when they run, so that looking at a
checkpoint is quick and needs no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from ckptfs.cli import diff, ls, mount, prune, show, transfer, verify, watch
from ckptfs.errors import CkptError, CorruptError, ExistsError, FormatError, MismatchError, NotFoundError, StaleError
from ckptfs.version import __version__

OK, PROBLEM, USAGE, NOT_FOUND, CORRUPT, STORAGE, EXISTS = range(7)
_STATUS = (
    (NotFoundError, NOT_FOUND),
    (StaleError, NOT_FOUND),
    (ExistsError, EXISTS),
    (MismatchError, USAGE),
    (FormatError, CORRUPT),
    (CorruptError, CORRUPT),
    (CkptError, STORAGE),
)
_EPILOG = """\
URLs: a folder or URL of a run (/ckpts/run7, s3://bucket/run7), a step of it (run7@1000, run7@latest), or a step's own
folder. A run stands for its latest step where a command needs one.

exit status: 0 fine; 1 a problem was found; 2 wrong usage; 3 not found; 4 damaged, or not a checkpoint; 5 the store
failed; 6 exists already; 130 interrupted; 141 the reader of the output went away

examples:
  ckptfs ls run7                                    the steps of a run
  ckptfs ls run7@latest 'model/layers.0.*'          arrays of a step
  ckptfs show run7@1000 'model/embed.weight[0:4,:8]'
  ckptfs verify run7 --all
  ckptfs diff run7@900 run7@1000
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="ckptfs",
        description="Look at, check, compare, move and mount checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ckptfs {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (ls, show, verify, diff, watch, transfer, prune, mount):
        module.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    words, rest = _split_command(words)
    try:
        args = parser().parse_args(words)
    except SystemExit as stop:  # argparse has printed what is wrong, or the help
        return stop.code if isinstance(stop.code, int) else USAGE
    args.rest = rest
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        _let_go_of_stdout()
        return 128 + signal.SIGPIPE
    except CkptError as error:
        if os.environ.get("CKPTFS_DEBUG"):
            raise
        print(f"ckptfs: {error}", file=sys.stderr)
        return status_of(error)
    except OSError as error:  # of stdout: those of a store are errors of ckptfs
        if os.environ.get("CKPTFS_DEBUG"):
            raise
        _let_go_of_stdout()
        print(f"ckptfs: {error}", file=sys.stderr)
        return STORAGE
    return status


def status_of(error: CkptError) -> int:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def _split_command(words: list[str]) -> tuple[list[str], list[str] | None]:
    """What follows a bare `--` of `watch` belongs to somebody else's command."""
    if words[:1] != ["watch"] or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _let_go_of_stdout() -> None:
    # Python flushes stdout once more at exit, which would complain: let it flush into nothing.
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass
