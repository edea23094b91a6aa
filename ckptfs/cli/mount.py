"""`ckptfs mount`, `umount` and `mounts`: thin words for ckptfs_fuse."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pwd
import sys
import time
from dataclasses import asdict, fields
from typing import Any

from ckptfs.cli import text
from ckptfs.errors import MismatchError, StorageError

_BUILDER = "ckptfs.views:build"
_BACKENDS = ("auto", "native", "fusepy")


def add(commands: Any) -> None:
    made = text.command(
        commands,
        "mount",
        "show a run or a step as files",
        "Read-only. The mount is served by a process of its own until `ckptfs umount`.",
        "  ckptfs mount run7 /mnt/run7\n  ckptfs mount run7@1000 /mnt/step --foreground\n",
    )
    text.add_url(made)
    made.add_argument("mountpoint", metavar="FOLDER", help="an empty folder")
    made.add_argument(
        "--backend", choices=_BACKENDS, default="auto", help="who talks to the kernel (default: the fastest that works)"
    )
    made.add_argument("--foreground", action="store_true", help="serve in this process until interrupted")
    made.add_argument("--allow-other", action="store_true", help="let other users read too")
    made.add_argument("--subtree", default="", metavar="PATH", help="show only this part, such as hf")
    made.add_argument("--verify", action="store_true", help="check every byte before it is handed out")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of MountOptions or ViewConfig, such as linger_s=60; may be repeated",
    )
    made.add_argument("--nonempty", action="store_true", help="mount over a folder that has something in it")
    text.add_options(made)
    made.set_defaults(run=run_mount)

    made = text.command(
        commands, "umount", "take mounts away", "", "  ckptfs umount /mnt/run7\n  ckptfs umount /mnt/run7 --lazy\n"
    )
    made.add_argument("mountpoint", metavar="FOLDER")
    made.add_argument("--lazy", action="store_true", help="hide it now, end when nobody uses it any more")
    made.set_defaults(run=run_umount)

    made = text.command(commands, "mounts", "list what is mounted here", "", "  ckptfs mounts --json\n")
    made.add_argument("--json", action="store_true", help="print one JSON value")
    made.set_defaults(run=run_mounts)


def _server() -> Any:
    try:
        return importlib.import_module("ckptfs_fuse.server")
    except ModuleNotFoundError as error:
        raise StorageError(
            f"mounting is not possible here: {error}; install ckptfs with its ckptfs_fuse package"
        ) from None


def _settings(items: list[str]) -> dict[str, Any]:
    out = {}
    for item in items:
        name, separator, value = item.partition("=")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
        if not separator:
            raise MismatchError(f"--set {item}: write NAME=VALUE")
    return out


def _tree(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What makes the tree in the server's process, and what it is told."""
    from ckptfs.views.config import ViewConfig

    settings = settings | {"url": _absolute(args.url), "subtree": args.subtree, "verify": args.verify}
    return _BUILDER, ViewConfig.from_dict(settings | {"storage": text.options(args)}).to_dict()


def _absolute(url: str) -> str:
    """Paths are the caller's; the server runs elsewhere."""
    return url if "://" in url else os.path.abspath(url)


def run_mount(args: argparse.Namespace) -> int:
    server = _server()
    from ckptfs_fuse.options import MountOptions

    text.open_any(args.url, args)  # an error now is one line here, not a log of another process
    settings = _settings(args.set)
    known = {one.name for one in fields(MountOptions)}
    builder, arguments = _tree(args, {name: settings.pop(name) for name in list(settings) if name not in known})
    options = MountOptions(allow_other=args.allow_other, nonempty=args.nonempty, **settings)
    if args.foreground:
        root = server.build_root(builder, arguments)
        # The server writes one JSON line when the mount is usable, and closes what it wrote to.
        server.serve(root, args.mountpoint, args.backend, options, os.dup(sys.stdout.fileno()))
        return 0
    mounted = server.mount(builder, arguments, args.mountpoint, what=args.url, backend=args.backend, options=options)
    if args.json:
        text.say_json(_as_json(mounted))
    else:
        text.say(f"{args.url} at {mounted.mountpoint} ({mounted.backend}, process {mounted.pid})")
    return 0


def run_umount(args: argparse.Namespace) -> int:
    _server().umount(args.mountpoint, lazy=args.lazy)
    return 0


def run_mounts(args: argparse.Namespace) -> int:
    found = _server().mounts()
    if args.json:
        text.say_json([_as_json(one) for one in found])
    elif found:
        rows = (
            (one.mountpoint, one.what, one.backend, str(one.pid), _user(one.user), _time(one.since), one.state)
            for one in found
        )
        text.table(rows, ("folder", "what", "backend", "process", "user", "since", "state"), right=(3,))
    return 0


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):  # unknown here, or a mount that nobody has a record of
        return "?" if number < 0 else str(number)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "?"


def _as_json(mounted: Any) -> dict[str, Any]:
    return asdict(mounted)
