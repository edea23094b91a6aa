"""Files of a step: the size is known at once, the content is put together when somebody opens one.

A reader of such a file is a lease on the step, reports what was read, says errors in the step's own names, and has
windows that take work made ahead of a sequential reader.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from ckptfs.errors import CkptError, CorruptError
from ckptfs.views.nodes import BackingFile, File, Reader, SegmentsFile
from ckptfs.views.windows import Produced

if TYPE_CHECKING:
    from ckptfs.manifest import Param
    from ckptfs.views.nodes import Segment, Stretch
    from ckptfs.views.source import Source

AHEAD_BYTES = 32 << 20
Given = TypeVar("Given")
_NONE: Mapping[str, bytes] = {}


class StepFile(File):
    """A file made of segments: `segments()` is called when it is opened, and kept while it is open."""

    def __init__(
        self,
        source: Source,
        path: str,
        size: int,
        segments: Callable[[], list[Segment]],
        *,
        blocking: bool,
        param: Param | None = None,
    ) -> None:
        """`path`: where it is shown in the step."""
        self.source, self.path, self.size = source, path, size
        self._segments = segments
        self.blocking = blocking
        self._param = param
        self._made: weakref.ref[File] | None = None

    @property
    def version(self) -> str:  # type: ignore[override]
        return f"{self.source.version}/{self.path}"

    @property
    def mtime_ns(self) -> int:  # type: ignore[override]
        return self.source.mtime_ns

    @property
    def xattrs(self) -> Mapping[str, bytes]:  # type: ignore[override]
        return _NONE if self._param is None else xattrs_of(self._param, self.source)

    def open(self) -> Reader:
        self.source.enter()
        try:
            made = self._content()
            reader = _StepReader(self, made, made.open())
        except CkptError as error:
            self.source.leave()
            told = self.source.explain(error)
            self.source.activity.failed(self.path, told)
            raise told from error
        except BaseException:
            self.source.leave()
            raise
        return reader

    def _content(self) -> File:
        made = self._made() if self._made is not None else None
        if made is None:
            made = self._make()
            self._made = weakref.ref(made)
        return made

    def _make(self) -> File:
        made = SegmentsFile(self._segments(), version=self.version, blocking=self.blocking)
        if made.size != self.size:
            raise CorruptError(f"{self.path}: {made.size} bytes were made where {self.size} were announced")
        return made


class WholeFile(StepFile):
    """A file whose bytes are exactly those of one stored file, which the kernel may then read by itself."""

    def __init__(self, source: Source, path: str, size: int, stored: str, *, param: Param | None = None) -> None:
        """`stored`: the file's path in the step's folder."""
        super().__init__(source, path, size, list, blocking=False, param=param)
        self._stored = stored

    @property
    def backing(self) -> str:  # type: ignore[override]
        return self.source.path(self._stored)

    def _make(self) -> File:
        made = BackingFile(self.source.path(self._stored))
        if made.size != self.size:
            raise CorruptError(
                f"{self.source.url}/{self._stored} has {made.size} bytes where {self.size} were saved: "
                "restore the step from a copy, or use an older one"
            )
        return made

    def _content(self) -> File:
        return self._make()  # looks at the file, each time it is opened


class _StepReader(Reader):
    def __init__(self, file: StepFile, made: File, inner: Reader) -> None:
        super().__init__(file)
        self._source, self._path = file.source, file.path
        self._made = made
        self._inner = inner
        self.backing_fd = inner.backing_fd
        self._began_s = time.monotonic()
        self._reads = self._bytes = 0
        self._expected = self._ahead_to = 0
        self._open = True
        self._is_led = False  # somebody else says what to prefetch
        self._source.activity.opened(self._path)

    def read_into(self, offset: int, view: memoryview) -> int:
        self._look_ahead(offset, len(view))
        try:
            count = self._inner.read_into(offset, view)
        except CkptError as error:
            raise self._failed(error) from error
        self._reads += 1
        self._bytes += count
        return count

    def lend(self, offset: int, length: int) -> list[memoryview] | None:
        return self._given(self._inner.lend, offset, length)

    def cached(self, offset: int, length: int) -> list[Stretch] | None:
        return self._given(self._inner.cached, offset, length)

    def _given(self, give: Callable[[int, int], Given | None], offset: int, length: int) -> Given | None:
        try:
            given = give(offset, length)
        except CkptError as error:
            raise self._failed(error) from error
        if given is not None:
            self._look_ahead(offset, length)
            self._reads += 1
            self._bytes += length
        return given

    def _failed(self, error: CkptError) -> CkptError:
        told = self._source.explain(error)
        self._source.activity.failed(self._path, told)
        return told

    def prefetch(self, offset: int, length: int) -> None:
        self._is_led = True
        self._inner.prefetch(offset, length)

    def is_near(self, offset: int, length: int) -> bool:
        return self._inner.is_near(offset, length)

    def _look_ahead(self, offset: int, length: int) -> None:
        """A reader that goes on where it was has what follows made or read from the disk, also the next tensor's."""
        is_sequential = offset and abs(offset - self._expected) <= 1 << 20
        self._expected = offset + length
        if not is_sequential:
            self._ahead_to = 0
            return
        end = min(self._expected + AHEAD_BYTES, self.file.size)
        if end - self._ahead_to < AHEAD_BYTES // 4:
            return
        start, self._ahead_to = max(self._ahead_to, self._expected), end
        if start >= end:
            return
        if not self._is_led:
            self._inner.prefetch(start, end - start)
        if self.file.blocking and isinstance(self._made, SegmentsFile):
            for segment, within, count in self._made.pieces(start, end - start):
                if isinstance(segment, Produced):
                    segment.ahead(within, count)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._inner.close()
        self.backing_fd = None
        seconds = time.monotonic() - self._began_s
        self._source.activity.closed(self._path, self._reads, self._bytes, seconds)
        self._source.leave()


def xattrs_of(param: Param, source: Source) -> Mapping[str, bytes]:
    from ckptfs.views.source import hash_of

    step = "" if source.manifest.step is None else str(source.manifest.step)
    told = {
        "name": param.name,
        "dtype": param.dtype.name,
        "shape": ",".join(map(str, param.shape)),
        "step": step,
        "hash": hash_of(param),
    }
    return {f"user.ckptfs.{key}": value.encode(errors="surrogateescape") for key, value in told.items()}
