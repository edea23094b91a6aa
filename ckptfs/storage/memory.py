"""Objects in the memory of this process, shared by everyone who opens the same name.

Rules: the semantics of an object store (no empty folders, no byte-range writes, create-only is atomic); for tests,
notebooks and checkpoints that need not outlive the process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from ckptfs.errors import ExistsError, NotFoundError
from ckptfs.storage.base import Names, Store, check_path, check_range, join, truncated


class _Space:
    """The objects of one name, and the lock that makes each operation one step."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


class MemoryStore(Store):
    """Everything under `memory://name/prefix`. Values are kept as immutable bytes, so readers need no lock for them."""

    def __init__(self, name: str = "", prefix: str = "") -> None:
        self.name = name
        self.prefix = check_path(prefix, empty_ok=True)
        self.url = f"memory://{join(name, prefix)}"
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space())

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    def _key(self, path: str) -> str:
        return join(self.prefix, check_path(path))

    def _object(self, path: str) -> bytes:
        found = self._space.objects.get(self._key(path))
        if found is None:
            raise NotFoundError(f"{self.url}/{path} does not exist")
        return found

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        check_range(path, start, stop)
        return self._object(path)[start:stop]

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        check_range(path, offset, None)
        view = memoryview(into).cast("B")
        data = self._object(path)
        if offset + len(view) > len(data):
            raise truncated(f"{self.url}/{path}", offset, len(view), max(0, len(data) - offset))
        view[:] = memoryview(data)[offset : offset + len(view)]

    def write(self, path: str, data: bytes | bytearray | memoryview) -> None:
        key, value = self._key(path), bytes(data)
        with self._space.lock:
            self._space.objects[key] = value

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        key, value = self._key(path), bytes(data)
        with self._space.lock:
            if key in self._space.objects:
                raise ExistsError(f"{self.url}/{path} exists already and is not replaced")
            self._space.objects[key] = value

    def size(self, path: str) -> int:
        return len(self._object(path))

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        base = join(self.prefix, prefix)
        start = f"{base}/" if base else ""
        cut = len(self.prefix) + 1 if self.prefix else 0
        with self._space.lock:
            found = [(key[cut:], len(value)) for key, value in self._space.objects.items() if key.startswith(start)]
        return iter(sorted(found))

    def children(self, prefix: str = "") -> tuple[Names, Names]:
        cut = len(prefix) + 1 if prefix else 0
        names = [path[cut:].split("/", 1) for path, _ in self.list(prefix)]
        dirs = {name[0] for name in names if len(name) > 1}
        return sorted(dirs), sorted(name[0] for name in names if len(name) == 1)

    def remove(self, path: str) -> None:
        key = self._key(path)
        with self._space.lock:
            self._space.objects.pop(key, None)

    def remove_tree(self, prefix: str) -> None:
        start = f"{self._key(prefix)}/"
        with self._space.lock:
            for key in [key for key in self._space.objects if key.startswith(start)]:
                del self._space.objects[key]

    def sub(self, prefix: str) -> MemoryStore:
        return MemoryStore(self.name, self._key(prefix))
