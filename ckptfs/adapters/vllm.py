"""vLLM reads checkpoints of a training run: `--load-format ckptfs`.

    vllm serve run7/step-00001000/assets --load-format ckptfs
    vllm serve MODEL --load-format ckptfs --model-loader-extra-config '{"url": "s3://bucket/run7@latest", "view": "hf"}'

The model's folder holds config.json and the tokenizer: a step's `assets` folder does, and then the step is the one
around it. Every weight is handed to vLLM's own weight loaders as a tensor that is not read yet, so that a rank reads
its parts only. vLLM is not a dependency; it finds `register` through the entry point `vllm.general_plugins`.

Unchecked: this has not run inside vLLM. The lazy tensor is tested against what vLLM's weight loaders do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfs.errors import MismatchError, NotFoundError
from ckptfs.manifest import NAME
from ckptfs.run import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptfs.adapters.lazy_tensor import LazyTensor
    from ckptfs.checkpoint import Checkpoint

LOAD_FORMAT = "ckptfs"


def open_for(model: str, extra: dict[str, Any] | None = None) -> tuple[Checkpoint, str | None]:
    """The checkpoint and the view that a model's path and the loader's extra configuration mean."""
    extra = dict(extra or {})
    url, view = extra.pop("url", None), extra.pop("view", "hf")
    if extra:
        raise MismatchError(f"model_loader_extra_config knows url and view, not {', '.join(sorted(extra))}")
    if url is None:
        url = model
        folder = Path(os.path.abspath(model))
        if folder.name == "assets" and (folder.parent / NAME).is_file():
            url = str(folder.parent)
    try:
        return open_checkpoint(url), view
    except NotFoundError as error:
        raise NotFoundError(
            f"{error}; give the checkpoint's URL as url in --model-loader-extra-config, "
            "or a step's assets folder as the model"
        ) from None


def lazy_weights(checkpoint: Checkpoint, view: str | None = "hf") -> Iterator[tuple[str, LazyTensor]]:
    """(name, tensor that is not read yet) of every weight."""
    from ckptfs.adapters.lazy_tensor import LazyTensor

    arrays = checkpoint if view is None else checkpoint.view(view)
    for name in arrays:
        yield name, LazyTensor(arrays[name])


def register() -> None:
    """Make `ckptfs` a load format of vLLM; called by vLLM in each of its processes."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class CkptfsModelLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            """Nothing to fetch: weights are read where they are."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            checkpoint, view = open_for(model_config.model, self.load_config.model_loader_extra_config)
            with checkpoint:
                model.load_weights(lazy_weights(checkpoint, view))

    register_model_loader(LOAD_FORMAT)(CkptfsModelLoader)
