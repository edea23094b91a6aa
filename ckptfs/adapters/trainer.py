"""A callback for Hugging Face's Trainer that saves in the background: weights, optimizer, schedule, RNG, progress.

Use it beside Trainer's own checkpoints, or instead of them with `save_strategy="no"` and `every_steps`.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback

from ckptfs.errors import NotFoundError
from ckptfs.run import Run
from ckptfs.training import restore, state_of
from ckptfs.tree import PerRank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CkptfsCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves asynchronously to a run: on Trainer's own saves, or every `every_steps` updates.

    `resume`: at the start, load the latest step if there is one: weights, optimizer, schedule, RNG and the number of
    updates. Trainer does not let a callback skip data: its order begins anew.
    """

    def __init__(
        self,
        run: str | Run,
        *,
        every_steps: int | None = None,
        resume: bool = False,
        compression: Any = None,
        split: Mapping[str, Sequence[int]] | None = None,
        **how: Any,
    ) -> None:
        self.run = run if isinstance(run, Run) else Run(run, **how)
        self.every_steps, self.resume, self.compression, self.split = every_steps, resume, compression, split
        self._last: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        if not self.resume:
            return
        try:
            step = self.run.latest.step
        except NotFoundError:
            return
        tree = _state(state, kwargs)
        tree = self.run.load(tree, step)
        _restore(tree, state, kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        if self.every_steps and state.global_step % self.every_steps == 0:
            self._save(state, kwargs)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        if not self.every_steps:
            self._save(state, kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing is lost: the last save is committed, or its error raised."""
        del args, state, control, kwargs
        if self._last is not None:
            self._last.wait()
            self._last = None

    def _save(self, state: Any, kwargs: dict[str, Any]) -> None:
        config: Any = getattr(kwargs["model"], "config", None)
        assets = {"config.json": config.to_json_string()} if hasattr(config, "to_json_string") else None
        self._last = self.run.save_async(
            state.global_step,
            _state(state, kwargs),
            assets=assets,
            compression=self.compression,
            split=self.split,
            overwrite=True,
        )


def _state(state: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    scheduler = kwargs.get("lr_scheduler")
    return state_of(
        kwargs["model"],
        _plain(kwargs.get("optimizer")),
        scheduler=scheduler.state_dict() if scheduler is not None else {},
        progress={"global_step": state.global_step, "epoch": state.epoch},
        rng=PerRank(
            {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": np.random.get_state(),  # noqa: NPY002 - what Trainer itself seeds
            }
        ),
    )


def _plain(optimizer: Any) -> Any:
    """Accelerate wraps optimizers; torch's own naming wants the one inside."""
    if optimizer is None:
        return ()
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else ()


def _restore(tree: dict[str, Any], state: Any, kwargs: dict[str, Any]) -> None:
    restore(kwargs["model"], _plain(kwargs.get("optimizer")), tree)
    scheduler = kwargs.get("lr_scheduler")
    if scheduler is not None:
        scheduler.load_state_dict(tree["scheduler"])
    state.global_step, state.epoch = tree["progress"]["global_step"], tree["progress"]["epoch"]
    rng: Any = tree["rng"].value if isinstance(tree["rng"], PerRank) else tree["rng"]
    torch.set_rng_state(rng["torch"])
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])  # noqa: NPY002
