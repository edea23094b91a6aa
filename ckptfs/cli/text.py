"""How results look: tables, sizes, shapes, JSON; and the arguments that several commands have."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptfs.errors import MismatchError, NotFoundError, StorageError
from ckptfs.progress import Bar, size_text

if TYPE_CHECKING:
    from ckptfs.checkpoint import Checkpoint
    from ckptfs.run import Run
    from ckptfs.storage import Store

Command = argparse.ArgumentParser


def command(commands: Any, name: str, summary: str, details: str, examples: str) -> Command:
    """A subcommand with its help."""
    made: Command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}".rstrip(),
        epilog=f"examples:\n{examples}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return made


def add_url(
    to: Command, name: str = "url", what: str = "a run, a step of it (RUN@1000, RUN@latest) or its folder"
) -> None:
    to.add_argument(name, metavar=name.upper(), help=what)


def add_options(to: Command, *, as_json: bool = True, bar: bool = False) -> None:
    """What (nearly) every command takes."""
    if as_json:
        to.add_argument("--json", action="store_true", help="print one JSON value")
    if bar:
        to.add_argument(
            "--progress",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="progress on stderr (default: on a terminal)",
        )
    to.add_argument(
        "-o",
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the store, such as endpoint_url=http://…; may be repeated",
    )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The store's options: values are JSON where they can be, else text."""
    out: dict[str, Any] = {}
    for item in args.option:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise MismatchError(f"--option {item}: write KEY=VALUE")
        try:
            out[key] = json.loads(value)
        except ValueError:
            out[key] = value
    return out


def bar(args: argparse.Namespace, label: str) -> Bar:
    return Bar(label, forced=args.progress)


# --- URLs ------------------------------------------------------------------------------------------------


def open_any(url: str, args: argparse.Namespace) -> Run | Checkpoint:
    """A run or a step; NotFoundError when there is nothing at all."""
    from ckptfs.run import Run, open_url

    found = open_url(url, **options(args))
    if isinstance(found, Run):
        require_run(found.store)
    return found


def open_step(url: str, args: argparse.Namespace) -> Checkpoint:
    """A step; a run stands for its latest."""
    from ckptfs.run import Run

    found = open_any(url, args)
    return found.latest if isinstance(found, Run) else found


@contextmanager
def pinned(url: str, args: argparse.Namespace) -> Iterator[Checkpoint]:
    """As `open_step`, and retention leaves the step alone until the end of the block."""
    with open_step(url, args) as found, held(found.store, args):
        yield found


@contextmanager
def held(step: Store, args: argparse.Namespace) -> Iterator[None]:
    """A lease on a step given by its own store; none where leases cannot be written."""
    from ckptfs import lease
    from ckptfs.storage import open_store

    above, _, name = step.url.rpartition("/")
    taken: lease.Lease | None = None
    if not above.endswith(("/", ":")):
        try:
            taken = lease.take(open_store(above, **options(args)), name)
        except (NotFoundError, StorageError):
            pass  # gone already, or read-only: what follows says so, or does not mind
    try:
        yield
    finally:
        if taken is not None:
            taken.release()


def open_run(url: str, args: argparse.Namespace, *, create: bool = False) -> Run:
    from ckptfs.run import Run, open_url, split_url

    if split_url(url)[1] is not None:
        raise MismatchError(f"{url} names a step; this command wants the run: leave the @… away")
    found = Run(url, **options(args)) if create else open_url(url, **options(args))
    if not isinstance(found, Run):
        raise MismatchError(f"{url} is a step; this command wants the run, the folder above it")
    return found


def require_run(store: Store) -> None:
    folders, files = store.children()
    if not folders and not files:
        raise NotFoundError(f"{store.url}: there is nothing here, neither a run nor a step")


# --- output ----------------------------------------------------------------------------------------------


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != ord("\n")}
_IN_A_LINE = _CONTROLS | {ord("\n"): "\\n"}


def say(text: str = "") -> None:
    """A line, or several. Control characters, which a name in a checkpoint may hold, never reach the terminal."""
    line = text.translate(_CONTROLS) + "\n"
    try:
        sys.stdout.write(line)
    except UnicodeEncodeError:  # a terminal that is not UTF-8, or a path that is none
        encoding = sys.stdout.encoding
        sys.stdout.write(line.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding))


_PLAIN = str.maketrans({"×": "x", "…": "...", "→": "->"})


def say_json(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        sys.stdout.write(text + "\n")
    except UnicodeEncodeError:
        sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def table(rows: Iterable[Sequence[str]], heads: Sequence[str], *, right: Iterable[int] = ()) -> None:
    """Columns as wide as their widest cell; those in `right` flush right."""
    lines = [[cell.translate(_IN_A_LINE) for cell in line] for line in [*([heads] if any(heads) else []), *rows]]
    if not lines:
        return
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    flush = set(right)
    for line in lines:
        cells = (c.rjust(w) if at in flush else c.ljust(w) for at, (c, w) in enumerate(zip(line, widths, strict=True)))
        say("  ".join(cells).rstrip())


def facts(pairs: Mapping[str, str]) -> None:
    """One `name  value` line each."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        say(f"{name.ljust(width)}  {value}")


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"


def count_text(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


__all__ = [
    "add_options",
    "add_url",
    "bar",
    "command",
    "count_text",
    "facts",
    "held",
    "open_any",
    "open_run",
    "open_step",
    "options",
    "pinned",
    "require_run",
    "say",
    "say_json",
    "shape_text",
    "size_text",
    "table",
]
