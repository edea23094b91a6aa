"""A committed step, open for reading: a mapping from names to lazy arrays, and the way back into a tree.

Opening reads the manifest only. Reading to numpy never imports torch.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from heapq import nlargest
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ckptfs import dtypes, tree
from ckptfs.array import Data, LazyArray, Part, select
from ckptfs.box import Box, strides_of
from ckptfs.errors import FormatError, MismatchError, NotFoundError, StaleError
from ckptfs.loadplan import GAP_BYTES
from ckptfs.manifest import NAME, Manifest, Param
from ckptfs.read import Job, Piece, Reader, Run, Target, check_verify, run_of
from ckptfs.saveplan import matches
from ckptfs.settings import Settings
from ckptfs.shards import Held, as_numpy, hold, is_expanded
from ckptfs.storage import open_store
from ckptfs.stream import BUDGET_BYTES, in_order, read_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ckptfs.storage import Store
    from ckptfs.storage.directio import BufferPool
    from ckptfs.storage.pagecache import Window
    from ckptfs.view import View


LOOK_AGAIN_S = 0.05
_FIRST = 8  # arrays that a load begins with while it is planned
AT_HAND_BYTES = 8 << 20  # more is copied faster by several threads


class Array(LazyArray):
    """One stored array: its shape and type now, its bytes when asked for."""

    def __init__(self, checkpoint: Checkpoint, param: Param, name: str, verify: str | None = None) -> None:
        self._checkpoint = checkpoint
        self._verify = verify or checkpoint.verify
        self.param = param
        self.name = name
        self.shape = param.shape
        self.element = param.dtype
        self._window: Window | None = None
        self._look_at = 0.0
        # What is as large may hold a whole extent, or (verify="full") must be checked anyway: not to be had at hand.
        self._unchecked_bytes = {"none": sys.maxsize, "extents": param.shortest_extent, "full": 0}[self._verify]

    def forget(self) -> None:
        """Let go of the window, and so of the mapped file."""
        self._window = None

    def at_hand(self, index: Any) -> Data | None:
        window = self._window
        if (window is None or not window.file.whole()) and (window := self._look()) is None:
            return None
        part = self._part(window, index)
        if part is None or (part.nbytes >= self._unchecked_bytes and not self._checked(window.data, part)):
            return None
        window.count(part.nbytes)
        return part

    def run_of(self, index: Any, out: Data, known: dict[Any, Run | None]) -> Run | None:
        """What an index selects, if it is one run that fills the destination in its order; None: look closer.

        known: those of other arrays, for layers are alike: planning each anew takes longer than checking it.
        """
        key = _plain_index(index) if out.flags.c_contiguous else None
        if key is None:
            return None
        alike = self.param.layout, self.param.runs, key  # a layout says whether it is compressed, too
        run = known.get(alike)
        if run is None and alike not in known:
            found = select(index, self.shape, self.name)
            rising = all(item is None or isinstance(item, int) or item.step == 1 for item in found.items)
            run = run_of(self.param, found.box, found.shape, self._verify != "none") if rising else None
            known[alike] = run
        return None if run is None or run.shape != out.shape else run

    def hand_over(self, index: Any, out: Data) -> Job | None:
        """What copies a part that is at hand, and checks it, as a job of several; None: it is to be read.

        out: a destination as `plain` gives it.
        """
        window = self._window
        if (window is None or not window.file.whole()) and (window := self._look()) is None:
            return None
        part = self._part(window, index)
        if part is None or part.shape != out.shape or part.dtype != out.dtype:
            return None
        if part.nbytes < self._unchecked_bytes:
            check = None
        elif self._checkable(part):
            check = self._start_of(window.data, part)
        else:
            return None
        otherwise = partial(self._fill_again, index, out)
        return Job(part.nbytes, partial(self._copy, window, part, out, check, otherwise), held=True)

    def _fill_again(self, index: Any, out: Data) -> None:
        self._into(select(index, self.shape, self.name), out.view(self.element.carrier))

    def _copy(self, window: Window, part: Data, out: Data, start: int | None, otherwise: Callable[[], None]) -> None:
        if not window.file.intact():  # closed meanwhile, because many others were opened; or cut
            otherwise()
            return
        if start is not None and out.flags.c_contiguous:
            self._checkpoint.copy_window(self.param, start, part, out)
        else:
            np.copyto(out, part)
            if start is not None:
                self._checkpoint.check_window(self.param, start, part)
        window.count(part.nbytes)

    def _part(self, window: Window, index: Any) -> Data | None:
        for item in index if type(index) is tuple else (index,):
            if type(item) is not slice and type(item) is not int and item is not Ellipsis and item is not None:
                return None
        try:
            part: Data = window.data[index]
            if type(part) is not np.ndarray:  # a single element, which a view can be as well
                part = window.data[(*index, ...) if type(index) is tuple else (index, ...)]
        except (IndexError, TypeError, ValueError):
            return None  # the long way says what is wrong
        return part if part.nbytes <= AT_HAND_BYTES else None  # more is to be copied by more than one thread

    def _look(self) -> Window | None:
        """A window, if the array is in the page cache; what is not there is not asked for again at once."""
        now = time.monotonic()
        if now < self._look_at or not self._unchecked_bytes:
            return None
        self._window = self._checkpoint.window(self.param)
        if self._window is None:
            self._look_at = now + LOOK_AGAIN_S
        return self._window

    def _checked(self, whole: Data, part: Data) -> bool:
        """Check the whole extents in a part; False where that is not simple."""
        if not self._checkable(part):
            return False
        start = self._start_of(whole, part)
        if start is not None:
            self._checkpoint.check_window(self.param, start, part)
        return True

    def _checkable(self, part: Data) -> bool:
        """Whether it is simple to say which extents lie whole in a part."""
        layout = self.param.layout
        if part.flags.c_contiguous:
            # Of all with padding not: the padding belongs to the last extent, which is to be checked too.
            return not part.nbytes == layout.nbytes != layout.logical_bytes
        return part.ndim == 2 and min(part.strides) > 0 and part.shape[1] * part.itemsize < self._unchecked_bytes

    def _start_of(self, whole: Data, part: Data) -> int | None:
        """Where a part that is one run begins; None: its runs are shorter than any extent."""
        if not part.flags.c_contiguous:
            return None
        start: int = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        return start

    def fill(self, parts: Sequence[Part]) -> None:
        work = [(self.param, [Target(box, out)]) for box, out in parts]
        self._checkpoint.read_boxes(work, verify=self._verify)

    def skips(self, dim: int, step: int) -> bool:
        if self.param.codec is not None:
            return False
        stride_bytes = strides_of(self.param.layout.block)[dim] * self.element.itemsize
        return (step - 1) * stride_bytes > GAP_BYTES

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._checkpoint, self.name)


def _plain_index(index: Any) -> tuple[Any, ...] | None:
    """An index of Python's own integers and slices as something to look up; None for others, which might only seem so.

    (True is 1, and 1.0 too.)
    """
    key: list[Any] = []
    for item in index if type(index) is tuple else (index,):
        if type(item) is slice:
            parts = item.start, item.stop, item.step
            if not _WHOLE.issuperset(map(type, parts)):
                return None
            key.append(parts)
        elif item is None or item is Ellipsis or type(item) is int:
            key.append(item)
        else:
            return None
    return tuple(key)


_WHOLE = frozenset({int, type(None)})


class Checkpoint(Mapping[str, Array]):
    """A committed step as a mapping of lazy arrays."""

    def __init__(
        self,
        url: Any,
        *,
        settings: Settings | None = None,
        verify: str = "extents",
        maps: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._maps = dict(maps or {})
        self.verify = check_verify(verify)
        self.store: Store = url if hasattr(url, "read_into") else open_store(url, **options)
        self.settings = settings or Settings()
        where = f"{self.store.url}/{NAME}"
        try:
            raw = self.store.read(NAME)
        except NotFoundError:
            msg = f"{self.store.url} is not a committed checkpoint: it has no {NAME}"
            raise NotFoundError(msg) from None
        self.manifest = Manifest.parse(raw, where)
        self._reader = Reader(self.store, self.settings)
        self._arrays: dict[str, Array] = {}

    def __repr__(self) -> str:
        return f"<ckptfs.Checkpoint {self.url} step {self.step}, {len(self)} arrays, {self.manifest.nbytes} bytes>"

    @property
    def url(self) -> str:
        return self.store.url

    @property
    def step(self) -> int | None:
        return self.manifest.step

    def borrow(self, pool: BufferPool) -> None:
        """Read through these buffers until `close`."""
        self._reader.borrow(pool)

    def close(self) -> None:
        """Close files and give buffers back; what is read afterwards opens them again."""
        for array in list(self._arrays.values()):  # other threads may look at new ones
            array.forget()
        self._reader.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the step itself: it gets files, buffers and locks of its own.
        if self.url.startswith("memory://"):
            raise MismatchError(f"{self.url} is in the memory of this process: another one cannot open it")
        return _reopen, (self.store, self.settings, self.verify, self._maps, self.manifest.save_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- mapping ---------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Array:
        found = self._arrays.get(name)
        if found is None:
            found = self._arrays[name] = Array(self, self.param(name), name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.params or name in self.manifest.aliases

    @cached_property
    def _names(self) -> list[str]:
        return sorted([*self.manifest.params, *self.manifest.aliases])

    def param(self, name: str) -> Param:
        """The manifest's entry behind a name; tied names share one."""
        target = self.manifest.aliases.get(name, name)
        found = self.manifest.params.get(target)
        if found is None:
            from difflib import get_close_matches

            close = get_close_matches(str(name), self._names, 3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise NotFoundError(f"{self.url} has no array {name!r}{hint}")
        return found

    def match(self, pattern: str) -> list[str]:
        """Names that fit a shell-style pattern."""
        return [name for name in self._names if matches(name, pattern)]

    def read(self, pieces: Iterable[tuple[str, Any, Any]]) -> None:
        """Many slices at once, (name, index, destination) each: as `Array.read`, all requests under way together."""
        asked = list(pieces)
        for name, _, _ in asked:
            self.param(name)  # says at once which does not exist
        if self.verify == "full":
            self._read_planned([(self[name], index, out) for name, index, out in asked])
            return
        # Before other threads run: a call of torch that lets them run in between takes 20 µs longer.
        plain = {at: self[name].plain(out) for at, (name, _, out) in enumerate(asked) if type(out) is not np.ndarray}
        known: dict[Any, Run | None] = {}
        after: list[Callable[[], None]] = []

        def found() -> Iterator[Job | Piece | tuple[Param, list[Target]]]:
            for at, (name, index, out) in enumerate(asked):
                array = self[name]
                data = plain[at] if at in plain else array.plain(out)
                if data is not None:
                    if (job := array.hand_over(index, data)) is not None:
                        yield job
                        continue
                    if (run := array.run_of(index, data, known)) is not None:
                        yield Piece(array.param, run, data)
                        continue
                parts, finish = array.parts(index, out)
                for box, target in parts:
                    yield array.param, [Target(box, target)]
                after.append(finish)

        nbytes = sum(out.nbytes for _, _, out in asked if hasattr(out, "nbytes"))
        self._reader.read_slices(found(), nbytes, verify=self.verify)
        for finish in after:
            finish()

    def _read_planned(self, wanted: Sequence[tuple[Array, Any, Any]]) -> None:
        work: list[tuple[Param, list[Target]]] = []
        after: list[Callable[[], None]] = []
        for array, index, out in wanted:
            parts, finish = array.parts(index, out)
            work += [(array.param, [Target(box, data)]) for box, data in parts]
            after.append(finish)
        self.read_boxes(work, verify=self.verify)
        for finish in after:
            finish()

    def read_boxes(self, wanted: Iterable[tuple[Param, Sequence[Target]]], **how: Any) -> None:
        """Fill targets from several arrays at once."""
        self._reader.read(wanted, **how)

    def window(self, param: Param) -> Window | None:
        """A stored array in the page cache, see `Reader.window`."""
        return self._reader.window(param)

    def check_window(self, param: Param, start: int, part: Data) -> None:
        """Check the extents in a part of a window, see `Reader.check_window`."""
        self._reader.check_window(param, start, part)

    def copy_window(self, param: Param, start: int, part: Data, out: Data) -> None:
        """The same, and a copy of it in contiguous memory, see `Reader.copy_window`."""
        self._reader.copy_window(param, start, part, out)

    @property
    def bytes_read(self) -> int:
        """Bytes of arrays that came into this process's memory from the store; the page cache may have got more."""
        return self._reader.bytes_read

    def stream(
        self,
        pattern: str = "*",
        *,
        device: Any = "cpu",
        order: str = "storage",
        budget_bytes: int = BUDGET_BYTES,
        numpy: bool = False,
    ) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of all arrays that fit the pattern, read ahead within the budget, every byte checked.

        With `numpy`, arrays are numpy's and torch is not needed.
        """
        names = in_order(self, self.match(pattern), order)
        read = (lambda name: self._whole(name, None)) if numpy else (lambda name: self._whole(name, device))
        return read_ahead(names, read, lambda name: self.param(name).nbytes, budget_bytes)

    def _whole(self, name: str, device: Any) -> Any:
        array = Array(self, self.param(name), name, verify="full")
        if device is None:
            return array.numpy()
        import torch

        return array.read(out=torch.empty(array.shape, dtype=array.element.torch, device=device))

    def view(self, name: str = "hf", *, map: Any = None, variables: Mapping[str, Any] | None = None) -> View:  # noqa: A002
        """The arrays under other names and in other layouts, still lazy; see docs/rules.md.

        `map`: a document, a file, or the name of a built-in map; else the map that was saved under this name, or for
        "hf" the built-in one that knows the names. `variables` are added to those of assets/config.json.
        """
        from ckptfs.view import view_of

        return view_of(self, name, self._maps.get(name) if map is None else map, variables)

    # --- trees -----------------------------------------------------------------------------------------

    def tree(self, *, rank: int | None = None, numpy: bool = False, allow_pickle: bool = False) -> Any:
        """The saved tree as a new one, all arrays read. With `numpy`, arrays are numpy's and torch is not needed."""
        work: dict[str, tuple[Param, list[Target]]] = {}
        return tree.unflatten(
            self.manifest.tree,
            lambda name, tag: self._new(name, tag, work, numpy=numpy),
            rank=rank,
            allow_pickle=allow_pickle,
            read=lambda: self.read_boxes(work.values(), verify="full"),
        )

    def _new(self, name: str, tag: dict[str, Any], work: dict[str, tuple[Param, list[Target]]], *, numpy: bool) -> Any:
        param = self.param(name)
        if numpy or tag.get("as") == "numpy":
            value: Any = np.empty(param.shape, dtype=param.dtype.numpy)
        else:
            import torch

            value = torch.empty(param.shape, dtype=param.dtype.torch, device="cpu")
        _add(work, param, [Target(Box.whole(param.shape), as_numpy(value))])
        if tag.get("as") == "parameter" and not numpy:
            import torch

            value = torch.nn.Parameter(value, requires_grad=param.dtype.name.startswith(("float", "bfloat", "complex")))
        return value

    def load(
        self,
        value: Any,
        *,
        rank: int = 0,
        strict: bool = True,
        only: str | Sequence[str] | None = None,
        cast: bool = False,
        allow_pickle: bool = False,
        prefix: str | None = None,
        shared_reads: Any = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> Any:
        """Fill a tree or a torch module in place, whatever its layout. Nothing is touched unless everything fits.

        `only`: patterns; then just the arrays with such names are filled. `cast` converts stored types. `prefix`: where
        a module's names begin in the checkpoint, found by itself if there is one such place. `shared_reads`: True or a
        torch process group, all of whose ranks call this; bytes that several of them need are read once and exchanged.
        """
        if shared_reads is False or shared_reads is None:
            peers = None
        else:
            from ckptfs.shared_reads import Peers

            peers = Peers(None if shared_reads is True else shared_reads)
        how: dict[str, Any] = {"strict": strict, "only": only, "cast": cast, "early": peers is None}
        try:
            if _is_module(value):
                filler, want, put = self._into_module(value, rank, prefix, **how)
            else:
                filler, want, put = self._into_tree(value, rank, allow_pickle=allow_pickle, **how)
            want()
            if peers is None:
                self.read_boxes(filler.work.values(), verify="full", progress=progress)
        except Exception as error:
            if peers is not None:
                from ckptfs.shared_reads import fail_together, known

                fail_together(peers, known(error))
            raise
        finally:
            self._reader.end()
        if peers is not None:
            from ckptfs.shared_reads import fail_together, read_shared

            fail_together(peers, None)
            read_shared(self._reader, self.manifest, filler.work.values(), peers, progress)
        filler.finish()
        return put()

    def _into_tree(
        self,
        value: Any,
        rank: int,
        *,
        strict: bool,
        only: str | Sequence[str] | None,
        cast: bool,
        allow_pickle: bool,
        early: bool,
    ) -> tuple[_Filler, Callable[[], None], Callable[[], Any]]:
        if self.manifest.tree is None:
            raise FormatError(f"{self.url} was saved without a tree")
        _, leaves = tree.flatten(value, rank=rank, allow_pickle=True, to_fill=True)
        patterns = [only] if isinstance(only, str) else only
        held = self._hold(
            {
                leaf.name: leaf.value
                for leaf in leaves
                if patterns is None or any(matches(leaf.name, p) for p in patterns)
            },
            rank,
            early=early,
        )
        report = self._misfits(held, cast=cast)
        if patterns is None:
            rehearsal = tree.rehearse(value, self.manifest.tree, rank=rank, allow_pickle=allow_pickle)
            if strict:
                report = [f"missing in the checkpoint: {p}" for p in rehearsal.missing] + report
                report += [f"unexpected in the checkpoint: {p}" for p in rehearsal.unexpected]
            report += [f"different: {p}" for p in rehearsal.mismatched]
        elif strict:
            report = [f"missing in the checkpoint: {name}" for name in held if name not in self] + report
            report += self._idle(patterns, held)
        self._refuse(report)
        filler = _Filler(self, held, cast=cast)

        how: dict[str, Any] = {"rank": rank, "allow_pickle": allow_pickle}
        if patterns is None:
            return (
                filler,
                lambda: tree.look(value, self.manifest.tree, filler.array, **how),
                lambda: tree.put(value, self.manifest.tree, filler.array, **how),
            )
        return filler, filler.want_all, lambda: value

    def _into_module(
        self,
        module: Any,
        rank: int,
        prefix: str | None,
        *,
        strict: bool,
        only: str | Sequence[str] | None,
        cast: bool,
        early: bool,
    ) -> tuple[_Filler, Callable[[], None], Callable[[], Any]]:
        """A module's parameters and buffers, as its state_dict names them."""
        state = module.state_dict()
        other = [name for name, value in state.items() if not hasattr(value, "data_ptr")]
        if other:
            raise MismatchError(
                f"{other[0]!r} of the module is not a tensor: load a tree with its state_dict() instead"
            )
        stored = {name: tree.encode_component(name) for name in state}  # a "/" in a name of a module is no separator
        prefix = self._prefix(list(stored.values())) if prefix is None else prefix
        patterns = [only] if isinstance(only, str) else only
        held = self._hold(
            {
                prefix + stored[name]: value
                for name, value in state.items()
                if patterns is None or any(matches(name, p) or matches(prefix + stored[name], p) for p in patterns)
            },
            rank,
            early=early,
        )
        report = self._misfits(held, cast=cast)
        if strict:
            report = [f"missing in the checkpoint: {name}" for name in held if name not in self] + report
            if patterns is None:
                known = {prefix + name for name in stored.values()}
                more = [name for name in self if name.startswith(prefix) and name not in known]
                report += [f"unexpected in the checkpoint: {name}" for name in more if prefix]
            else:
                report += self._idle(patterns, [*held, *state], prefix)
        self._refuse(report)
        filler = _Filler(self, held, cast=cast)

        return filler, filler.want_all, lambda: module

    def _hold(self, values: dict[str, Any], rank: int, *, early: bool) -> dict[str, Held]:
        """What this rank holds of each array. The disk begins with the largest before the others are looked at."""
        params, aliases = self.manifest.params, self.manifest.aliases
        stored = {name: param for name in values if (param := params.get(aliases.get(name, name))) is not None}
        largest = nlargest(_FIRST, stored, key=lambda name: stored[name].layout.nbytes) if early else []
        held = {name: hold(name, values[name], rank) for name in largest}
        fitting = (name for name in largest if stored[name].shape == held[name].desc.shape)
        self._reader.begin((stored[name], [box for box, _ in held[name].pieces]) for name in fitting)
        return {name: held.get(name) or hold(name, value, rank) for name, value in values.items()}

    def _prefix(self, names: Sequence[str]) -> str:
        """Where a module's names begin: the one prefix under which most of them are; "model/" and "" win a tie."""
        counts: dict[str, int] = {}
        short = set(names)
        for full in self:
            parts = full.split("/")
            for at in range(len(parts)):
                if "/".join(parts[at:]) in short:
                    start = "/".join(parts[:at])
                    counts[f"{start}/" if start else ""] = counts.get(f"{start}/" if start else "", 0) + 1
        best = max(counts.values(), default=0)
        found = [prefix for prefix, count in counts.items() if count == best]
        usual = [prefix for prefix in ("model/", "") if prefix in found]
        if not found:
            raise MismatchError(f"{self.url} has none of the module's names, such as {names[0] if names else '-'!r}")
        if len(found) > 1 and not usual:
            listed = ", ".join(map(repr, sorted(found)))
            raise MismatchError(f"{self.url} has the module's names under {listed}: say which with prefix=")
        return (usual or found)[0]

    def _refuse(self, report: list[str]) -> None:
        if report:
            shown = report[:200]
            more = [f"… and {len(report) - len(shown)} more"] if len(report) > len(shown) else []
            raise MismatchError("\n  ".join([f"{self.url} does not fit what it is loaded into:", *shown, *more]))

    def _idle(self, patterns: Sequence[str], here: Iterable[str], prefix: str = "") -> list[str]:
        """Patterns that nothing fits. One that only the checkpoint has arrays for is fine: other ranks hold those."""
        known = {*here, *self._names}
        return [
            f"{pattern!r} fits no array, neither here nor in the checkpoint"
            for pattern in patterns
            if not any(matches(name, pattern) or matches(name.removeprefix(prefix), pattern) for name in known)
        ]

    def _misfits(self, held: dict[str, Held], *, cast: bool) -> list[str]:
        out = []
        for name, one in held.items():
            if name not in self:
                continue
            param = self.param(name)
            if any(isinstance(data, np.ndarray) and not data.flags.writeable for _, data in one.pieces):
                out.append(f"{name} is read-only here")
            if any(is_expanded(data) for _, data in one.pieces):
                out.append(f"{name} is expanded here, elements share memory: load into a clone() of it")
            if param.shape != one.desc.shape:
                out.append(f"shape of {name}: {list(one.desc.shape)} here, {list(param.shape)} stored")
            elif param.dtype.name != one.desc.dtype and not cast:
                out.append(f"type of {name}: {one.desc.dtype} here, {param.dtype.name} stored (cast=True converts)")
        return out


class _Filler:
    """Collects what to read for a load; values that need a conversion or another device go through a copy."""

    def __init__(self, checkpoint: Checkpoint, held: dict[str, Held], *, cast: bool) -> None:
        self._checkpoint, self._held, self._cast = checkpoint, held, cast
        self.work: dict[str, tuple[Param, list[Target]]] = {}
        self._after: list[Callable[[], None]] = []
        self._ids = {id(one.value): name for name, one in held.items()}
        self._wanted: set[str] = set()
        self._made: dict[str, Any] = {}

    def array(self, name: str, tag: dict[str, Any], target: Any) -> Any:
        """For `tree.look`, which has it read, and for `tree.put`, which gets what was read."""
        if target is None:
            if name not in self._made:
                self._made[name] = self._checkpoint._new(name, tag, self.work, numpy=False)  # noqa: SLF001
            return self._made[name]
        self.want(self._ids.get(id(target), name), name)
        return None

    def want_all(self) -> None:
        for name in self._held:
            if name in self._checkpoint:
                self.want(name)

    def want(self, held_name: str, stored_name: str | None = None) -> None:
        """Read into the leaf that the target tree has under `held_name`."""
        if held_name in self._wanted:
            return
        self._wanted.add(held_name)
        param = self._checkpoint.param(stored_name or held_name)
        _add(self.work, param, [self._target(param, box, data) for box, data in self._held[held_name].pieces])

    def _target(self, param: Param, box: Box, data: Any) -> Target:
        own = dtypes.of(data.dtype)
        direct = own is param.dtype and not getattr(data, "is_cuda", False)
        if direct and isinstance(data, np.ndarray):
            direct = data.dtype.isnative
        elif direct:
            direct = not data.is_conj() and not data.is_neg()
        if direct:
            return Target(box, as_numpy(data))
        staging = np.empty(box.shape, dtype=param.dtype.carrier)
        self._after.append(lambda: _convert(staging, param, data))
        return Target(box, staging)

    def finish(self) -> None:
        for step in self._after:
            step()


def _convert(staging: np.ndarray[Any, Any], param: Param, data: Any) -> None:
    if isinstance(data, np.ndarray):
        data[...] = staging.view(param.dtype.numpy)
        return
    torch = sys.modules["torch"]
    source = torch.empty(staging.shape, dtype=param.dtype.torch, device="cpu")
    as_numpy(source)[...] = staging
    with torch.no_grad():
        data.copy_(source)


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _reopen(store: Store, settings: Settings, verify: str, maps: dict[str, Any], save_id: str) -> Checkpoint:
    found = Checkpoint(store, settings=settings, verify=verify, maps=maps)
    if found.manifest.save_id != save_id:
        raise StaleError(f"{found.url} was replaced since it was opened elsewhere: open it again")
    return found


def _add(work: dict[str, tuple[Param, list[Target]]], param: Param, targets: list[Target]) -> None:
    """One entry an array, however many places it goes to: its bytes are read once."""
    work.setdefault(param.name, (param, []))[1].extend(t for t in targets if t.out.size)
