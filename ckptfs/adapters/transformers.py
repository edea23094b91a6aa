"""A checkpoint as a transformers model: its own loader, reading from the checkpoint what each rank needs.

    model = ckptfs.adapters.transformers.from_pretrained("run7@latest")

is what `LlamaForCausalLM.from_pretrained(None, config=config, state_dict=ck.view("hf"))` is, with the configuration
taken from the checkpoint's assets and the class from the configuration. (The Auto classes of transformers 5.23 fail
on a name of None before they look at `state_dict`; concrete classes take it.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptfs.errors import NotFoundError
from ckptfs.manifest import strict_json
from ckptfs.run import open_checkpoint

if TYPE_CHECKING:
    from ckptfs.checkpoint import Checkpoint


def config_of(checkpoint: Checkpoint) -> Any:
    """The transformers configuration in the checkpoint's assets/config.json."""
    from transformers import AutoConfig

    if "config.json" not in checkpoint.manifest.assets:
        raise NotFoundError(f"{checkpoint.url} has no assets/config.json: pass config=")
    data = strict_json(checkpoint.store.read("assets/config.json"))
    return AutoConfig.for_model(**data)


def from_pretrained(
    source: Any,
    auto_class: Any = None,
    *,
    config: Any = None,
    view: str = "hf",
    map: Any = None,  # noqa: A002
    **options: Any,
) -> Any:
    """A model with the weights of a checkpoint (or its URL; a run: its latest step).

    `auto_class`: an Auto class (default: AutoModelForCausalLM) or a model class. `map` is for Checkpoint.view,
    `options` are for transformers' from_pretrained (dtype, device_map, distributed_config, ...).
    """
    import transformers

    checkpoint = source if hasattr(source, "manifest") else open_checkpoint(source)
    config = config_of(checkpoint) if config is None else config
    kind: Any = auto_class or transformers.AutoModelForCausalLM
    mapping = getattr(kind, "_model_mapping", None)
    if mapping is not None:
        if type(config) not in mapping:
            raise NotFoundError(f"{kind.__name__} has no model for a {type(config).__name__}: pass another auto_class")
        found = mapping[type(config)]
        kind = found[0] if isinstance(found, (list, tuple)) else found
    return kind.from_pretrained(None, config=config, state_dict=checkpoint.view(view, map=map), **options)
