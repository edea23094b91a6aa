"""A model and its optimizers as a tree keyed by parameter names, and back: for any parallelism, any optimizer.

torch's own get_state_dict does the naming (FSDP1, FSDP2, tensor parallel, DDP, plain), so optimizer state reshards
like parameters do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def state_of(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    **more: Any,
) -> dict[str, Any]:
    """`{"model": …, "optim": …}` plus whatever else is given, ready for `Run.save` and `Run.load`.

    Called by every rank. An optimizer that has not stepped yet gets its (zero) state, so that there is something to
    load into.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    clash = {"model", "optim"} & more.keys()
    if clash:
        raise MismatchError(f"{min(clash)!r} is the name of a part that state_of makes itself: use another one")
    tree: dict[str, Any] = {"model": get_model_state_dict(model)}
    given = _listed(optimizers)
    if given:
        tree["optim"] = get_optimizer_state_dict(model, given)
    return {**tree, **more}


def restore(
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    tree: dict[str, Any] | None = None,
) -> None:
    """Give a loaded tree back to the model and its optimizers."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    if tree is None or "model" not in tree:
        raise MismatchError("restore(model, optimizers, tree) takes the tree that state_of made and load filled")
    set_model_state_dict(model, tree["model"])
    given = _listed(optimizers)
    if given:
        set_optimizer_state_dict(model, given, optim_state_dict=tree["optim"])


def _listed(optimizers: Any) -> list[Any]:
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
