"""A checkpoint behind the interface of `safetensors.safe_open`, for code written for that.

    with ckptfs.safe_open("run7@latest", framework="pt", device="cpu") as f:
        for name in f.keys():
            rows = f.get_slice(name)[:128]

Names are the checkpoint's own, or with `view="hf"` Hugging Face's. What is read is what is indexed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.run import open_checkpoint
from ckptfs.stream import in_order

if TYPE_CHECKING:
    from ckptfs.array import LazyArray
    from ckptfs.checkpoint import Checkpoint
    from ckptfs.view import View

_TORCH = ("pt", "torch", "pytorch")
_NUMPY = ("np", "numpy")


class Slice:
    """One array: its shape and type, and parts of it when indexed."""

    def __init__(self, array: LazyArray, device: Any) -> None:
        self._array, self._device = array, device

    def get_shape(self) -> list[int]:
        return self._array.get_shape()

    def get_dtype(self) -> str:
        return self._array.get_dtype()

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        if self._device is None:
            return self._array.numpy(index)
        if str(self._device) == "cpu":
            return self._array.torch(index)
        return self._array.torch(index).to(self._device)


class safe_open:  # noqa: N801 - the name that callers know
    """Lists and reads the arrays of a checkpoint (a run: of its latest step)."""

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: Any = "cpu",
        *,
        view: str | None = None,
        **options: Any,
    ) -> None:
        if framework not in _TORCH + _NUMPY:
            raise MismatchError(f"framework is 'pt' or 'np', not {framework!r}")
        if isinstance(device, int):
            device = f"cuda:{device}"
        if framework in _NUMPY and str(device) != "cpu":
            raise MismatchError(f"numpy arrays are on the cpu, not on {device!r}")
        self._device = None if framework in _NUMPY else device
        self._checkpoint: Checkpoint | None = open_checkpoint(filename, **options)
        self._arrays: Checkpoint | View = self._checkpoint if view is None else self._checkpoint.view(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            raise MismatchError("this checkpoint was closed at the end of its `with`: open it again")
        return self._checkpoint

    def keys(self) -> list[str]:
        self._open()
        return sorted(self._arrays)

    def offset_keys(self) -> list[str]:
        """The names in the order in which they are stored."""
        checkpoint = self._open()
        return in_order(checkpoint, list(self._arrays), "storage") if self._arrays is checkpoint else list(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def get_slice(self, name: str) -> Slice:
        self._open()
        if name not in self._arrays:
            raise NotFoundError(f"{self._open().url} has no array {name!r}")
        return Slice(self._arrays[name], self._device)

    def get_tensor(self, name: str) -> Any:
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def metadata(self) -> dict[str, str]:
        """What a safetensors file would say: its format, and here also the step."""
        step = self._open().step
        return {"format": "pt"} | ({} if step is None else {"step": str(step)})
