"""Trees that the mount tests have served, and the worker that reads a mount and a plain folder in the same way.

Imported by servers (as builders) and run as a script (as a worker), so it imports nothing of the test framework.
"""

import hashlib
import json
import mmap
import os
import stat
import sys

PIECE_BYTES = 70_001  # an odd size, so that pieces begin anywhere in a page


def segmented(folder, blocking=False, immutable=True, piece_bytes=PIECE_BYTES):
    """The folder, with each file as a concatenation of ranges of itself; `blocking`: every other piece is computed."""
    from ckptfs.views.nodes import Dir, Link

    children = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            children[name] = Link(os.readlink(path), mtime_ns=found.st_mtime_ns)
        elif stat.S_ISDIR(found.st_mode):
            children[name] = segmented(path, blocking, immutable, piece_bytes)
        else:
            children[name] = _in_pieces(path, found, blocking, piece_bytes)
    return Dir(children, immutable=immutable, mtime_ns=os.stat(folder).st_mtime_ns)


def _in_pieces(path, found, blocking, piece_bytes):
    from ckptfs.views.nodes import Computed, Range, SegmentsFile

    pieces = []
    for index, start in enumerate(range(0, found.st_size, piece_bytes)):
        length = min(piece_bytes, found.st_size - start)
        is_computed = blocking and index % 2
        pieces.append(Computed(length, _reader(path, start)) if is_computed else Range(path, start, length))
    return SegmentsFile(pieces, version=path, mtime_ns=found.st_mtime_ns)


def _reader(path, start):
    def read(offset, view):
        with open(path, "rb") as file:
            file.seek(start + offset)
            file.readinto(view)

    return read


def many(count):
    """A directory with that many small files."""
    from ckptfs.views.nodes import BytesFile, Dir

    files = {f"layer.{index:05d}.weight.npy": BytesFile(b"%d" % index) for index in range(count)}
    return Dir({"many": Dir(files)})


def troubled(pipe, data):
    """One file that waits until somebody writes to the pipe, one that is corrupt, one that fails, and good ones."""
    from ckptfs.errors import CorruptError
    from ckptfs.views.nodes import BackingFile, BytesFile, Computed, Dir, Range, SegmentsFile

    def wait(_offset, view):
        with open(pipe, "rb") as gate:
            gate.read(1)
        view[:] = b"s" * len(view)

    def refuse(offset, _length):
        if offset + _length > 1000:
            raise CorruptError(f"{data}: extent 7 differs from what was written")

    def fail(_offset, _view):
        raise ZeroDivisionError("a mistake in the source")

    size = os.path.getsize(data)
    files = {
        "slow": SegmentsFile([Computed(8192, wait)], version="slow"),
        "corrupt": SegmentsFile([Range(data, 0, size, refuse)], version="corrupt"),
        "failing": SegmentsFile([Computed(10, fail)], version="failing"),
        "gone": SegmentsFile([Range(data + ".gone", 0, 10)], version="gone"),
        "good": SegmentsFile([b"head", Range(data, 0, size)], version="good"),
        "computed": SegmentsFile([Computed(5, _reader(data, 0))], version="computed"),
        "whole": BackingFile(data, xattrs={"user.ckptfs.dtype": b"bfloat16", "user.ckptfs.shape": b"[2, 3]"}),
        "small": BytesFile(b"hello"),
    }
    return Dir(files)


# --- the worker: reads what it is told below a folder -----------------------------------------------------------


def act(root, action):
    """One action's outcome as plain data, errors included."""
    kind, name, *rest = action
    path = os.path.join(root, name)
    try:
        return _ACTIONS[kind](path, *rest)
    except OSError as error:
        return ["errno", error.errno]


def _digest(data):
    return [len(data), hashlib.blake2b(data, digest_size=12).hexdigest()]


def _pread(path, offset, length):
    fd = os.open(path, os.O_RDONLY)
    try:
        return _digest(os.pread(fd, length, offset))
    finally:
        os.close(fd)


def _seeks(path, steps):
    outcome = []
    with open(path, "rb", buffering=0) as file:
        for offset, whence, length in steps:
            try:
                outcome += [file.seek(offset, whence), _digest(file.read(length))]
            except OSError as error:
                outcome.append(["errno", error.errno])
    return outcome


def _map(path, shared, offset, length):
    fd = os.open(path, os.O_RDONLY)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            return "a directory, whose size means nothing"
        size = os.fstat(fd).st_size
        offset = min(offset, size) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = min(length, size - offset)
        if length <= 0:
            return "empty"
        flags = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        access = mmap.PROT_READ if shared else mmap.PROT_READ | mmap.PROT_WRITE
        with mmap.mmap(fd, length, flags, access, offset=offset) as mapped:
            before = _digest(mapped[:])
            if not shared:  # a private copy changes, the file does not
                mapped[length // 2] ^= 0xFF
                return [before, _digest(mapped[:]), _digest(os.pread(fd, length, offset))]
            return before
    finally:
        os.close(fd)


def _list(path):
    with os.scandir(path) as entries:
        return sorted([entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()] for entry in entries)


def _stat(path):
    found = os.lstat(path)
    is_dir = stat.S_ISDIR(found.st_mode)
    return [stat.S_IFMT(found.st_mode), 0 if is_dir else found.st_size, found.st_mtime_ns]


def _readlink(path):
    return os.readlink(path)


_ACTIONS = {"pread": _pread, "seeks": _seeks, "map": _map, "list": _list, "stat": _stat, "readlink": _readlink}


def main():
    for line in sys.stdin:
        root, actions = json.loads(line)
        print(json.dumps([act(root, action) for action in actions]), flush=True)


if __name__ == "__main__":
    main()
