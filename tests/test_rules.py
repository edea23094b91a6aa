"""Maps against slow, obvious twins: every operation, the built-in maps, and a real transformers model."""

from __future__ import annotations

import copy
import json
import os
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs import expr, maps, rules
from ckptfs.box import Box
from ckptfs.errors import CkptError, FormatError, MismatchError, NotFoundError
from ckptfs.expr import Source

# --- helpers: a dictionary of arrays as the store --------------------------------------------------------------


class Store:
    """Arrays by name, and which of their elements were asked for."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.elements = 0
        self.names = set()

    def fetch(self, name, box):
        self.elements += box.size
        self.names.add(name)
        return self.arrays[name][box.slices]

    @property
    def described(self):
        return {name: (a.shape, a.dtype.name) for name, a in self.arrays.items()}

    def source(self, name):
        return Source(name, *self.described[name])


def numbered(*shape, start=0, dtype="int64"):
    return (np.arange(int(np.prod(shape)), dtype=dtype) + start).reshape(shape)


def a_map(*rule_list, **more):
    return rules.parse({"ckptfs_map": 1, "name": "test", "rules": list(rule_list), **more})


def mapped(arrays, *rule_list, variables=None, **more):
    store = Store(arrays)
    return rules.compile_map(a_map(*rule_list, **more), store.described, variables), store


def apply_all(map_, arrays, variables=None):
    store = Store(arrays)
    view = rules.compile_map(map_, store.described, variables)
    return {name: e.read(None, store.fetch) for name, e in view.items()}


@st.composite
def boxes(draw, shape):
    start, stop = [], []
    for n in shape:
        a = draw(st.integers(0, n))
        start.append(a)
        stop.append(draw(st.integers(a, n)))
    return Box(tuple(start), tuple(stop))


def check(expression, expected, box, store, bound=1):
    """The box has numpy's values, `sources` tells what is read, and no more than `bound` times the box is read."""
    assert expression.shape == expected.shape
    assert expression.dtype == expected.dtype.name
    store.elements = 0
    got = expression.read(box, store.fetch)
    np.testing.assert_array_equal(got, expected[box.slices])
    assert sum(b.size for _, b in expression.sources(box)) == store.elements
    assert store.elements <= bound * box.size
    # The same into a strided destination.
    out = np.zeros((*box.shape, 2), expected.dtype)[..., 0]
    plan = expression.plan(box, out)
    for piece in reversed(plan.pieces):  # any order
        piece.into[...] = store.fetch(piece.source, piece.box)
    plan.finish()
    np.testing.assert_array_equal(out, expected[box.slices])


# --- every operation, random boxes ------------------------------------------------------------------------------

dims = st.integers(0, 5)
shapes = st.lists(dims, min_size=1, max_size=4).map(tuple)


@settings(deadline=None)
@given(st.data(), shapes)
def test_a_source_reads_the_box(data, shape):
    store = Store({"a": numbered(*shape)})
    check(store.source("a"), store.arrays["a"], data.draw(boxes(shape)), store)


@settings(deadline=None)
@given(st.data(), shapes)
def test_split_reads_exactly_its_part(data, shape):
    store = Store({"a": numbered(*shape)})
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    edge = data.draw(st.integers(0, shape[dim]))
    parts = expr.split(store.source("a"), dim, [edge, shape[dim] - edge])
    for part, expected in zip(parts, np.split(store.arrays["a"], [edge], axis=dim), strict=True):
        check(part, expected, data.draw(boxes(expected.shape)), store)


@settings(deadline=None)
@given(st.data(), shapes, st.integers(1, 4))
def test_concat_reads_exactly_the_parts_touched(data, shape, count):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    arrays = {}
    for i in range(count):
        own = list(shape)
        own[dim] = data.draw(dims)
        arrays[str(i)] = numbered(*own, start=1000 * i)
    store = Store(arrays)
    expected = np.concatenate(list(arrays.values()), axis=dim)
    check(expr.concat([store.source(n) for n in arrays], dim), expected, data.draw(boxes(expected.shape)), store)


@settings(deadline=None)
@given(st.data(), st.lists(dims, max_size=3).map(tuple), st.integers(1, 4))
def test_stack_and_pick(data, shape, count):
    dim = data.draw(st.integers(-len(shape) - 1, len(shape)))
    store = Store({str(i): numbered(*shape, start=1000 * i) for i in range(count)})
    stacked = expr.stack([store.source(n) for n in store.arrays], dim)
    expected = np.stack(list(store.arrays.values()), axis=dim)
    check(stacked, expected, data.draw(boxes(expected.shape)), store)
    index = data.draw(st.integers(0, count - 1))
    check(expr.pick(stacked, dim, index), store.arrays[str(index)], data.draw(boxes(shape)), store)


@settings(deadline=None)
@given(st.data(), shapes)
def test_transpose_reads_exactly_the_box(data, shape):
    store = Store({"a": numbered(*shape)})
    axes = data.draw(st.permutations(range(len(shape))))
    expected = store.arrays["a"].transpose(axes)
    check(expr.transpose(store.source("a"), axes), expected, data.draw(boxes(expected.shape)), store)


@settings(deadline=None)
@given(st.data(), st.lists(st.sampled_from([1, 2, 2, 3, 4]), max_size=5))
def test_reshape_of_anything_to_anything(data, factors):
    def regroup():
        order = data.draw(st.permutations(factors))
        shape, at = [], 0
        while at < len(order):
            step = data.draw(st.integers(1, 3))
            shape.append(int(np.prod(order[at : at + step])))
            at += step
        return tuple(shape)

    before, after = regroup(), regroup()
    store = Store({"a": numbered(*before)})
    expected = store.arrays["a"].reshape(after)
    # 2: strided single elements may be read as the range that covers them
    check(expr.reshape(store.source("a"), after), expected, data.draw(boxes(after)), store, bound=2)


@settings(deadline=None)
@given(st.data(), shapes)
def test_slice_off_padding_and_pad(data, shape):
    store = Store({"a": numbered(*shape, start=1)})
    dim = data.draw(st.integers(0, len(shape) - 1))
    start, behind = data.draw(dims), data.draw(dims)
    wide = expr.pad(store.source("a"), dim, start, start + shape[dim] + behind)
    expected = np.pad(store.arrays["a"], [(start, behind) if d == dim else (0, 0) for d in range(len(shape))])
    check(wide, expected, data.draw(boxes(expected.shape)), store)
    check(expr.cut(wide, dim, start, start + shape[dim]), store.arrays["a"], data.draw(boxes(shape)), store)


@settings(deadline=None)
@given(st.data(), shapes, st.sampled_from(["float32", "bfloat16", "float16", "int32", "float8_e4m3fn"]))
def test_cast(data, shape, dtype):
    from ckptfs import dtypes

    store = Store({"a": numbered(*shape, dtype="float64") / 8})
    expected = store.arrays["a"].astype(dtypes.of(dtype).numpy)
    box = data.draw(boxes(shape))
    check(expr.cast(store.source("a"), dtype), expected, box, store)


OPS = ["transpose", "reshape", "cut", "pad", "concat", "stack", "pick", "cast"]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_operations_on_top_of_each_other(data):
    """A random tower of operations equals the same tower on numpy arrays."""
    store = Store({"a": numbered(4, 6), "b": numbered(4, 6, start=100)})
    pairs = [(store.source(n), array) for n, array in store.arrays.items()]
    for _ in range(data.draw(st.integers(1, 6))):
        op = data.draw(st.sampled_from(OPS))
        e, a = pairs[0]
        dim = data.draw(st.integers(0, max(0, a.ndim - 1)))
        if op == "stack":
            pairs = [(expr.stack([x for x, _ in pairs], dim), np.stack([x for _, x in pairs], dim))]
        elif a.ndim == 0:
            continue
        elif op == "concat":
            pairs = [(expr.concat([x for x, _ in pairs], dim), np.concatenate([x for _, x in pairs], dim))]
        elif op == "transpose":
            axes = data.draw(st.permutations(range(a.ndim)))
            pairs = [(expr.transpose(x, axes), y.transpose(axes)) for x, y in pairs]
        elif op == "reshape":
            n = a.shape[dim]
            f = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0] or [1]))
            new = (*a.shape[:dim], f, n // f, *a.shape[dim + 1 :]) if data.draw(st.booleans()) else (a.size,)
            pairs = [(expr.reshape(x, new), y.reshape(new)) for x, y in pairs]
        elif op == "cut" and a.shape[dim]:
            at = data.draw(st.integers(0, a.shape[dim] - 1))
            end = data.draw(st.integers(at + 1, a.shape[dim]))
            pairs = [(expr.cut(x, dim, at, end), y.take(range(at, end), axis=dim)) for x, y in pairs]
        elif op == "pad":
            width = [(1, 2) if d == dim else (0, 0) for d in range(a.ndim)]
            pairs = [(expr.pad(x, dim, 1, y.shape[dim] + 3), np.pad(y, width)) for x, y in pairs]
        elif op == "pick" and a.shape[dim]:
            at = data.draw(st.integers(0, a.shape[dim] - 1))
            pairs = [(expr.pick(x, dim, at), y.take(at, axis=dim)) for x, y in pairs]
        elif op == "cast":
            dtype = data.draw(st.sampled_from(["int64", "int32", "float64"]))
            pairs = [(expr.cast(x, dtype), y.astype(dtype)) for x, y in pairs]
    e, a = pairs[0]
    check(e, a, data.draw(boxes(a.shape)), store, bound=10**9)


# --- how much is read ---------------------------------------------------------------------------------------------


def rearranged(e, pattern, **sizes):
    from ckptfs.layout_ops import Variables, parse_op

    return parse_op({"op": "rearrange", "pattern": pattern, "sizes": sizes}, "op").apply(e, Variables({}, {}))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_a_rotary_permutation_reads_at_most_twice_the_box(data, heads, half, columns):
    rows = heads * 2 * half
    store = Store({"w": numbered(rows, columns)})
    permuted = rearranged(store.source("w"), "(head pair two) ... -> (head two pair) ...", head=heads, two=2)
    expected = np.stack([store.arrays["w"][titan_row(r, 2 * half)] for r in range(rows)])
    check(permuted, expected, data.draw(boxes((rows, columns))), store, bound=2)


def test_a_rotary_permutation_of_whole_heads_or_columns_is_one_exact_read():
    store = Store({"w": numbered(64, 10)})
    permuted = rearranged(store.source("w"), "(head pair two) ... -> (head two pair) ...", head=8, two=2)
    assert permuted.sources(Box((16, 0), (32, 10))) == [("w", Box((16, 0), (32, 10)))]
    assert permuted.sources(Box((0, 5), (64, 10))) == [("w", Box((0, 5), (64, 10)))]


def test_half_a_head_is_one_covering_read():
    store = Store({"w": numbered(64, 10)})
    permuted = rearranged(store.source("w"), "(head pair two) ... -> (head two pair) ...", head=8, two=2)
    assert permuted.sources(Box((16, 0), (20, 10))) == [("w", Box((16, 0), (23, 10)))]


def test_elements_at_long_strides_are_read_one_by_one():
    store = Store({"w": numbered(12, 5)})
    third = expr.pick(rearranged(store.source("w"), "(row three) ... -> row three ...", three=3), 1, 1)
    assert third.sources() == [("w", Box((row, 0), (row + 1, 5))) for row in (1, 4, 7, 10)]


def test_a_tensor_parallel_part_of_fused_qkv_reads_only_its_groups():
    kv_heads, size, hidden = 4, 2, 3
    per_group = 2 + 2  # two query heads, a key and a value head
    store = Store({"decoder.layers.0.self_attention.linear_qkv.weight": numbered(kv_heads * per_group * size, hidden)})
    config = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": size}
    view = rules.compile_map(maps.load("llama-megatron"), store.described, config)
    q = view["model.layers.0.self_attn.q_proj.weight"]
    part = Box((0, 0), (q.shape[0] // 4, hidden))
    assert q.sources(part) == [("decoder.layers.0.self_attention.linear_qkv.weight", Box((0, 0), (4, hidden)))]
    assert sum(b.size for _, b in q.sources()) == 16 * hidden


def test_padding_reads_nothing():
    store = Store({"w": numbered(3, 2)})
    wide = expr.pad(store.source("w"), 0, 0, 8)
    assert wide.sources(Box((3, 0), (8, 2))) == []
    assert wide.read(Box((3, 0), (8, 2)), store.fetch).tolist() == [[0, 0]] * 5


def test_a_plan_writes_straight_into_the_destination():
    store = Store({"a": numbered(4, 6), "b": numbered(4, 6)})
    joined = expr.transpose(expr.concat([store.source("a"), store.source("b")], 0), [1, 0])
    out = np.zeros((6, 8), np.int64)
    plan = joined.plan(Box.whole((6, 8)), out)
    assert not plan.steps
    assert all(np.shares_memory(piece.into, out) for piece in plan.pieces)


def test_looking_at_the_sources_of_a_huge_array_allocates_nothing():
    huge = Source("w", (1 << 20, 1 << 20), "float32")
    permuted = rearranged(huge, "(head pair two) ... -> (head two pair) ...", head=1 << 13, two=2)
    assert expr.cast(permuted, "bfloat16").sources() == [("w", Box.whole(huge.shape))]


def test_a_permutation_needs_one_temporary():
    source = Source("w", (1024, 1024), "float32")
    permuted = rearranged(source, "(head pair two) ... -> (head two pair) ...", head=8, two=2)
    out = np.empty(source.shape, np.float32)
    tracemalloc.start()
    try:
        plan = permuted.plan(Box.whole(source.shape), out)
        assert len(plan.pieces) == 1
        assert tracemalloc.get_traced_memory()[1] < 1.1 * out.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("box", [Box((0,), (1,)), Box((0, 0), (5, 1)), Box((-1, 0), (1, 1))])
def test_a_box_outside_is_refused(box):
    with pytest.raises(MismatchError, match="does not lie"):
        Source("w", (4, 4), "int8").sources(box)


def test_a_destination_of_another_shape_is_refused():
    with pytest.raises(MismatchError, match="destination"):
        Source("w", (4, 4), "int8").plan(Box((0, 0), (2, 2)), np.zeros((2, 3)))


# --- a Llama three times: as Hugging Face, as torchtitan, as Megatron; slowly and with loops ------------------------


def titan_row(hf_row, head_dim):
    """Where torchtitan's interleaved layout keeps a row of Hugging Face's q_proj or k_proj."""
    head, at = divmod(hf_row, head_dim)
    pair, second = (at, 0) if at < head_dim // 2 else (at - head_dim // 2, 1)
    return head * head_dim + 2 * pair + second


def to_interleaved(weight, head_dim):
    out = np.empty_like(weight)
    for row in range(len(weight)):
        out[titan_row(row, head_dim)] = weight[row]
    return out


TITAN_NAMES = {
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_titan(hf, c):
    out = {
        "tok_embeddings.weight": hf["model.embed_tokens.weight"],
        "norm.weight": hf["model.norm.weight"],
        "output.weight": hf.get("lm_head.weight", hf["model.embed_tokens.weight"]),
    }
    for i in range(c["num_hidden_layers"]):
        for theirs, ours in TITAN_NAMES.items():
            out[f"layers.{i}.{ours}.weight"] = hf[f"model.layers.{i}.{theirs}.weight"]
        for p in "qk":
            weight = hf[f"model.layers.{i}.self_attn.{p}_proj.weight"]
            out[f"layers.{i}.attention.w{p}.weight"] = to_interleaved(weight, c["head_dim"])
    return out


def as_newer_titan(hf, c):
    """The attention inputs fused in groups, in a submodule, and an output layer named as Hugging Face's."""
    out = as_titan(hf, c)
    out["lm_head.weight"] = out.pop("output.weight")
    size, per_group = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]
    for i in range(c["num_hidden_layers"]):
        q, k, v = (out.pop(f"layers.{i}.attention.w{p}.weight") for p in "qkv")
        fused = []
        for g in range(c["num_key_value_heads"]):
            fused.append(q[g * per_group * size : (g + 1) * per_group * size])
            fused += [k[g * size : (g + 1) * size], v[g * size : (g + 1) * size]]
        out[f"layers.{i}.attention.qkv_linear.wqkv.weight"] = np.concatenate(fused)
    return out


def padded_rows(weight, rows):
    out = np.zeros((rows, weight.shape[1]), weight.dtype)
    out[: len(weight)] = weight
    return out


def as_megatron(hf, c):
    rows = c["padded_vocab_size"]
    out = {
        "embedding.word_embeddings.weight": padded_rows(hf["model.embed_tokens.weight"], rows),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "lm_head.weight" in hf:
        out["output_layer.weight"] = padded_rows(hf["lm_head.weight"], rows)
    size, kv_heads = c["head_dim"], c["num_key_value_heads"]
    heads_per_group = c["num_attention_heads"] // kv_heads
    for i in range(c["num_hidden_layers"]):
        layer, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        q, k, v = (hf[f"{theirs}self_attn.{p}_proj.weight"] for p in "qkv")
        fused = []
        for group in range(kv_heads):
            for head in range(group * heads_per_group, (group + 1) * heads_per_group):
                fused.append(q[head * size : (head + 1) * size])
            fused.append(k[group * size : (group + 1) * size])
            fused.append(v[group * size : (group + 1) * size])
        out[layer + "self_attention.linear_qkv.weight"] = np.concatenate(fused)
        out[layer + "self_attention.linear_qkv.layer_norm_weight"] = hf[theirs + "input_layernorm.weight"]
        out[layer + "self_attention.linear_proj.weight"] = hf[theirs + "self_attn.o_proj.weight"]
        gate, up = hf[theirs + "mlp.gate_proj.weight"], hf[theirs + "mlp.up_proj.weight"]
        out[layer + "mlp.linear_fc1.weight"] = np.concatenate([gate, up])
        out[layer + "mlp.linear_fc1.layer_norm_weight"] = hf[theirs + "post_attention_layernorm.weight"]
        out[layer + "mlp.linear_fc2.weight"] = hf[theirs + "mlp.down_proj.weight"]
    return out


def as_megatron_stacked(hf, c):
    out = as_megatron(hf, c)
    layers = {}
    for name in [n for n in out if n.startswith("decoder.layers.")]:
        _, _, index, rest = name.split(".", 3)
        layers.setdefault(f"decoder.layers.{rest}", {})[int(index)] = out.pop(name)
    return out | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in layers.items()}


LAYOUTS = {
    "llama-torchtitan": as_titan,
    "llama-megatron": as_megatron,
    "llama-megatron-stacked": as_megatron_stacked,
}


@st.composite
def llamas(draw):
    kv_heads, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, hidden = 2 * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    vocab = draw(st.integers(1, 9))
    return {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * per_group,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 5)),
        "vocab_size": vocab,
        "padded_vocab_size": vocab + draw(st.integers(0, 5)),
        "tie_word_embeddings": draw(st.booleans()),
    }


def hf_llama(c):
    """Random weights under Hugging Face's names."""
    random_ = np.random.default_rng(0)
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    h, f = c["hidden_size"], c["intermediate_size"]
    shapes = {"model.embed_tokens": (c["vocab_size"], h), "model.norm": (h,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}self_attn.{p}_proj": s for p, s in zip("qkvo", [(q, h), (kv, h), (kv, h), (h, q)], strict=True)
        }
        shapes |= {
            f"{layer}mlp.{p}_proj": s for p, s in zip(["gate", "up", "down"], [(f, h), (f, h), (h, f)], strict=True)
        }
        shapes |= {layer + "input_layernorm": (h,), layer + "post_attention_layernorm": (h,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head"] = (c["vocab_size"], h)
    return {f"{name}.weight": random_.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def same(one, other):
    assert sorted(one) == sorted(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(config=llamas())
def test_built_in_maps_against_loops_and_back(name, config):
    hf = hf_llama(config)
    theirs = LAYOUTS[name](hf, config)
    same(apply_all(maps.load(name), theirs, config), hf)
    back = rules.loads(rules.dumps(rules.invert(maps.load(name))))
    if name == "llama-torchtitan" or not config["tie_word_embeddings"]:
        same(apply_all(back, hf, config), theirs)
    else:  # the tied output layer that Megatron may leave out comes back as an alias
        same(apply_all(back, hf, config), {**theirs, "output_layer.weight": theirs["embedding.word_embeddings.weight"]})


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(config=llamas(), data=st.data())
def test_random_slices_of_the_built_in_maps(name, config, data):
    hf = hf_llama(config)
    store = Store(LAYOUTS[name](hf, config))
    view = rules.compile_map(maps.load(name), store.described, config)
    target = data.draw(st.sampled_from(sorted(view)))
    check(view[target], hf[target], data.draw(boxes(hf[target].shape)), store, bound=2)


@settings(max_examples=25, deadline=None)
@given(config=llamas())
def test_newer_names_of_torchtitan(config):
    hf = hf_llama(config)
    newer = as_newer_titan(hf, config)
    assert maps.detect(newer) == "llama-torchtitan"
    same(apply_all(maps.load("llama-torchtitan"), newer, config), hf)
    nested = {name.replace("attention.w", "attention.qkv_linear.w"): a for name, a in as_titan(hf, config).items()}
    nested = {name.replace("qkv_linear.wo", "wo"): a for name, a in nested.items()}
    same(apply_all(maps.load("llama-torchtitan"), nested, config), hf)


# --- and with the real thing ----------------------------------------------------------------------------------------


def slow_llama(weights, c, tokens):
    """Logits in float64 from torchtitan's weights, rotary as complex numbers over interleaved pairs."""
    heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    n = len(tokens)
    turn = np.exp(1j * np.outer(np.arange(n), 10000.0 ** (-np.arange(0, size, 2) / size)))

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def rotated(x):  # (n, heads, size)
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn[:, None]
        out = np.empty_like(x)
        out[..., 0::2], out[..., 1::2] = pairs.real, pairs.imag
        return out

    x = w["tok_embeddings.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}."
        y = norm(x, w[layer + "attention_norm.weight"])
        q = rotated((y @ w[layer + "attention.wq.weight"].T).reshape(n, heads, size))
        k = rotated((y @ w[layer + "attention.wk.weight"].T).reshape(n, kv_heads, size))
        v = (y @ w[layer + "attention.wv.weight"].T).reshape(n, kv_heads, size)
        k, v = (np.repeat(z, heads // kv_heads, axis=1) for z in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + np.triu(np.full((n, n), -np.inf), 1)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + attended @ w[layer + "attention.wo.weight"].T
        y = norm(x, w[layer + "ffn_norm.weight"])
        gate = y @ w[layer + "feed_forward.w1.weight"].T
        up = y @ w[layer + "feed_forward.w3.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[layer + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def real_llama(request):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=20,
        vocab_size=30,
        rms_norm_eps=1e-6,
        initializer_range=0.5,
        tie_word_embeddings=request.param,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    hf = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
    if request.param:
        del hf["lm_head.weight"]
    return config, model, hf


def logits_of(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("name", LAYOUTS)
def test_transformers_computes_the_same_logits(name, real_llama):
    import torch
    from transformers import LlamaForCausalLM

    config, model, hf = real_llama
    variables = rules.variables_of(config.to_dict()) | {"padded_vocab_size": 32}
    values = {**config.to_dict(), "padded_vocab_size": 32}
    loaded = apply_all(maps.load(name), LAYOUTS[name](hf, values), variables)
    state = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in loaded.items()}
    again = LlamaForCausalLM.from_pretrained(None, config=copy.deepcopy(config), state_dict=state).eval()
    tokens = [1, 5, 29, 3, 3, 7, 0]
    np.testing.assert_array_equal(logits_of(again, tokens), logits_of(model, tokens))


def test_weights_of_a_torchtitan_model_give_its_logits_in_transformers(real_llama):
    """The interleaved weights are used as torchtitan does, in a forward pass that knows nothing of the map."""
    import torch
    from transformers import LlamaForCausalLM

    config, _, hf = real_llama
    random_ = np.random.default_rng(1)
    c = config.to_dict()
    titan = {n: (a + random_.normal(0, 0.1, a.shape)).astype(np.float32) for n, a in as_titan(hf, c).items()}
    if config.tie_word_embeddings:
        titan["output.weight"] = titan["tok_embeddings.weight"]
    loaded = apply_all(maps.load("llama-torchtitan"), titan, rules.variables_of(c))
    state = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in loaded.items()}
    model = LlamaForCausalLM.from_pretrained(None, config=copy.deepcopy(config), state_dict=state).eval()
    tokens = [1, 5, 29, 3, 3, 7, 0]
    expected = slow_llama(titan, c, tokens)
    np.testing.assert_allclose(logits_of(model, tokens), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


# --- the map language -------------------------------------------------------------------------------------------------


def test_experts_are_stacked_and_unstacked():
    arrays = {
        f"layers.{i}.experts.{e}.w{k}": numbered(2, 3, start=100 * i + 10 * e + 1000 * k)
        for i in range(2)
        for e in range(11)  # 10 comes before 2 as text
        for k in (1, 3)
    }
    rule = {
        "from": ["layers.{i:int}.experts.{e:int}.w1", "layers.{i:int}.experts.{e:int}.w3"],
        "stack": {"over": "e", "count": "experts"},
        "concat": {"dim": 1},
        "to": "model.layers.{i}.experts.gate_up",
    }
    fused = apply_all(a_map(rule), arrays, {"experts": 11})
    expected = {
        f"model.layers.{i}.experts.gate_up": np.stack(
            [
                np.concatenate([arrays[f"layers.{i}.experts.{e}.w1"], arrays[f"layers.{i}.experts.{e}.w3"]])
                for e in range(11)
            ]
        )
        for i in range(2)
    }
    same(fused, expected)
    same(apply_all(rules.invert(a_map(rule)), fused, {"experts": 11}), arrays)


def test_one_expert_of_a_stack_reads_one_source():
    arrays = {f"experts.{e}.w": numbered(4, 3) for e in range(5)}
    view, _ = mapped(arrays, {"from": "experts.{e:int}.w", "stack": {"over": "e"}, "to": "experts.w"})
    assert view["experts.w"].sources(Box((2, 1, 0), (3, 3, 3))) == [("experts.2.w", Box((1, 0), (3, 3)))]


@pytest.mark.parametrize(
    "op",
    [
        {"op": "transpose", "axes": [2, 0, 1]},
        {"op": "reshape", "shape": ["a * b", "c"], "was": ["a", "b", "c"]},
        {"op": "slice", "dim": 1, "start": 0, "size": "b", "of": "b"},
        {"op": "pad", "dim": -1, "start": 2, "size": "c", "of": 9},
        {"op": "cast", "to": "float64", "was": "int64"},
        {"op": "rearrange", "pattern": "(x y) b c -> y (c x) b", "sizes": {"x": 2, "c": "c"}},
        {"op": "rearrange", "pattern": "a ... -> ... a"},
        {"op": "rearrange", "pattern": "a b c -> (a b c)", "sizes": {"a": "a", "b": "b"}},
        {"op": "rearrange", "pattern": "a ... () -> ... a", "sizes": {}},
    ],
    ids=lambda op: f"{op['op']} {op.get('pattern', '')}",
)
def test_every_operation_undoes_its_inverse(op):
    array = numbered(4, 3, 1 if "()" in op.get("pattern", "") else 5, start=1)
    variables = {"a": 4, "b": 3, "c": 5}
    map_ = a_map({"from": "x", "to": "y", "ops": [op]})
    assert rules.loads(rules.dumps(map_)) == map_
    there = apply_all(map_, {"x": array}, variables)
    same(apply_all(rules.invert(map_), there, variables), {"x": array})


def test_the_inverse_of_several_operations_is_in_reverse_order():
    turn, narrow = {"op": "transpose", "axes": [1, 0]}, {"op": "slice", "dim": 0, "size": 3, "of": 3}
    flat = {"op": "rearrange", "pattern": "a b -> (a b)", "sizes": {"a": 3}}
    for step in ("each", "ops", "then"):
        map_ = a_map({"from": "x", "to": "y", step: [turn, narrow, flat]})
        there = apply_all(map_, {"x": numbered(4, 3)})
        assert there["y"].tolist() == numbered(4, 3).T.reshape(-1).tolist()
        same(apply_all(rules.invert(map_), there), {"x": numbered(4, 3)})


def test_rearrange_equals_the_loops():
    array = numbered(6, 5)
    got = apply_all(
        a_map(
            {"from": "x", "to": "y", "ops": [{"op": "rearrange", "pattern": "(p q) r -> r (q p)", "sizes": {"p": 2}}]}
        ),
        {"x": array},
    )["y"]
    for p in range(2):
        for q in range(3):
            for r in range(5):
                assert got[r, q * 2 + p] == array[p * 3 + q, r]


def test_an_operation_on_some_of_the_parts():
    turn = {"op": "transpose", "axes": [1, 0], "parts": [1]}
    map_ = a_map({"from": "w", "to": ["a", "b"], "split": {}, "then": [turn]})
    assert rules.loads(rules.dumps(map_)) == map_
    parts = apply_all(map_, {"w": numbered(4, 3)})
    same(parts, {"a": numbered(2, 3), "b": numbered(2, 3, start=6).T})
    same(apply_all(rules.invert(map_), parts), {"w": numbered(4, 3)})


def test_parts_of_uneven_sizes_split_and_join_again():
    rule = {"from": "qkv.{kind}", "to": ["q.{kind}", "k.{kind}", "v.{kind}"], "split": {"sizes": ["4 * n", "n", "n"]}}
    arrays = {"qkv.weight": numbered(12, 3), "qkv.bias": numbered(12)}
    parts = apply_all(a_map(rule), arrays, {"n": 2})
    assert [parts[f"{p}.weight"].shape for p in "qkv"] == [(8, 3), (2, 3), (2, 3)]
    same(apply_all(rules.invert(a_map(rule)), parts, {"n": 2}), arrays)


def test_names_under_the_root_are_seen_and_others_are_not():
    arrays = {"model/module._orig_mod.w": numbered(2), "optim/exp_avg/w": numbered(2), "step": numbered(1)}
    view, _ = mapped(arrays, {"from": "w", "to": "w"}, roots=["model/", ""], strip=["module."], remove=["_orig_mod."])
    assert list(view) == ["w"]
    assert view["w"].sources() == [("model/module._orig_mod.w", Box((0,), (2,)))]


def test_the_identity_map_strips_wrappers():
    names = {"module.model.embed_tokens.weight": ((2,), "int8"), "module._orig_mod.lm_head.weight": ((2,), "int8")}
    assert list(rules.compile_map(maps.load("identity"), names)) == ["model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_detect_finds_the_map_of_a_layout(name):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2}
    config |= {"hidden_size": 8, "intermediate_size": 4, "vocab_size": 6, "padded_vocab_size": 8}
    hf = hf_llama(config | {"tie_word_embeddings": False})
    assert maps.detect(hf) == "identity"
    names = LAYOUTS[name](hf, config)
    assert maps.detect(names) == name
    assert maps.detect(["model/" + n for n in names] + ["optim/exp_avg/x"]) == name
    assert maps.detect([*names, "something.else"]) is None


def test_detect_knows_what_it_does_not_know():
    assert maps.detect([]) is None
    assert maps.detect(["weight", "bias"]) is None


def test_there_is_no_such_built_in_map():
    with pytest.raises(NotFoundError, match="llama-torchtitan"):
        maps.load("lama")


def test_variables_come_from_the_config_and_from_each_other():
    config = {"num_attention_heads": 4, "hidden_size": 12, "head_dim": None, "rope": 0.5, "text_config": {"extra": 7}}
    assert rules.variables_of(config) == {"num_attention_heads": 4, "hidden_size": 12, "extra": 7}
    shape = [{"op": "reshape", "shape": ["heads", "size", -1 + 2]}]
    view, _ = mapped(
        {"x": numbered(12)},
        {"from": "x", "to": "y", "ops": shape},
        variables=rules.variables_of(config),
        vars={"heads": "num_attention_heads", "size": "head_dim or hidden_size // heads"},
    )
    assert view["y"].shape == (4, 3, 1)


def test_the_example_in_the_documentation():
    with open(os.path.join(os.path.dirname(__file__), "..", "docs", "rules.md"), encoding="utf-8") as file:
        page = file.read()
    document, example = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("json", "python"))
    exec(compile(example, "docs/rules.md", "exec"), {"text": document})


def test_hostile_variables_end_soon():
    ask = {"from": "x", "to": "y", "ops": [{"op": "slice", "size": "v0"}]}
    chain = {f"v{i}": f"v{i + 1}" for i in range(5000)}
    with pytest.raises(MismatchError, match="too many others"):
        mapped({"x": numbered(2)}, ask, vars=chain)
    twice = {f"v{i}": f"v{i + 1} or v{i + 1}" for i in range(14)}
    with pytest.raises(MismatchError, match="'v14'"):
        mapped({"x": numbered(2)}, ask, vars=twice)
    sums = {f"v{i}": f"v{i + 1} + v{i + 1} - v{i + 1}" for i in range(14)} | {"v14": 2}
    view, _ = mapped({"x": numbered(2)}, ask, vars=sums)
    assert view["y"].shape == (2,)


# --- tied weights -----------------------------------------------------------------------------------------------------

DROP = {"from": "output", "drop_if_equal": "embed"}
KEEP = {"from": "embed", "to": "embed_tokens"}


def test_a_tied_weight_is_dropped_and_comes_back_as_an_alias():
    arrays = {"embed": numbered(3, 2), "output": numbered(3, 2)}
    there = apply_all(a_map(KEEP, DROP), arrays)
    assert list(there) == ["embed_tokens"]
    back = rules.invert(a_map(KEEP, {"from": "output", "to": "head", "when": 0}, DROP))
    same(apply_all(rules.invert(a_map(KEEP, DROP)), there), {"embed": arrays["embed"]} | {"output": arrays["output"]})
    assert rules.loads(rules.dumps(back)) == back


def test_dropped_weights_are_compared():
    arrays = {"embed": numbered(3, 2), "output": numbered(3, 2)}
    view, store = mapped(arrays, KEEP, DROP)
    assert view.dropped == {"output": "embed"}
    rules.check_dropped(view, store.described, store.fetch)
    arrays["output"][2, 1] += 1
    with pytest.raises(MismatchError, match="'output' was to be dropped as equal to 'embed'"):
        rules.check_dropped(view, store.described, store.fetch)


def test_a_drop_asks_the_caller_whether_the_two_are_equal():
    store = Store({"embed": numbered(3), "output": numbered(3)})
    with pytest.raises(MismatchError, match="values differ"):
        rules.compile_map(a_map(KEEP, DROP), store.described, equal=lambda a, b: (a, b) != ("output", "embed"))


# --- one test for every way a map does not fit the sources ---------------------------------------------------------------

W = {"from": "w", "to": "w"}
FITTING = {
    "a source that no rule matches": ({"v": [2]}, [W], "no rule matches source 'v'"),
    "a source whose rule is off": ({"w": [2]}, [W | {"when": 0}], "no rule matches source 'w'.*condition"),
    "a source that two rules match": ({"w": [2]}, [W, {"from": "{x}", "to": "v"}], "more than one rule: 0, 1"),
    "a source that a rule maps and one ignores": ({"w": [2]}, [W, {"from": "{x}", "ignore": True}], "more than one"),
    "a source that two patterns of a rule match": (
        {"w": [2]},
        [{"from": ["w", "w"], "to": "v", "concat": {}}],
        "more than one rule",
    ),
    "a target made twice": ({"w": [2], "v": [2]}, [W, {"from": "v", "to": "w"}], "target 'w' is made twice.*rule 0"),
    "a target that is also an alias": (
        {"w": [2], "v": [2]},
        [W, {"from": "v", "to": "v"}, {"alias": "v", "of": "w"}],
        "twice",
    ),
    "a name without its number": ({"w": [2]}, [{"from": "w{i:int}", "to": "w"}], "no rule matches"),
    "a number with a leading zero": ({"w.01": [2]}, [{"from": "w.{i:int}", "to": "w{i}"}], "no rule matches"),
    "a part of a concat missing": (
        {"0.q": [2], "0.k": [2], "1.q": [2]},
        [{"from": ["{i:int}.q", "{i:int}.k"], "to": "{i}.qk", "concat": {}}],
        "missing sources: 1.k",
    ),
    "a member of a stack missing": (
        {"e.0": [2], "e.2": [2], "e.4": [2]},
        [{"from": "e.{e:int}", "to": "e", "stack": {"over": "e"}}],
        "missing sources: e.1, e.3",
    ),
    "the end of a stack missing": (
        {"e.0": [2]},
        [{"from": "e.{e:int}", "to": "e", "stack": {"over": "e", "count": 3}}],
        "missing sources: e.1, e.2",
    ),
    "too many members of a stack": (
        {"e.0": [2], "e.1": [2]},
        [{"from": "e.{e:int}", "to": "e", "stack": {"over": "e", "count": 1}}],
        "only 1 are expected",
    ),
    "a stray number in a stack": (
        {"e.0": [2], "e.99999999999": [2]},
        [{"from": "e.{e:int}", "to": "e", "stack": {"over": "e"}}],
        "members are expected",
    ),
    "members of different shapes": (
        {"e.0": [2], "e.1": [3]},
        [{"from": "e.{e:int}", "to": "e", "stack": {"over": "e"}}],
        "do not fit together",
    ),
    "parts of different shapes": (
        {"a": [2, 3], "b": [2, 4]},
        [{"from": ["a", "b"], "to": "c", "concat": {}}],
        "do not fit together",
    ),
    "unequal parts without sizes": (
        {"a": [2], "b": [3]},
        [{"from": ["a", "b"], "to": "c", "concat": {}}],
        "are not equal: give `sizes`",
    ),
    "parts of other sizes": (
        {"a": [2], "b": [3]},
        [{"from": ["a", "b"], "to": "c", "concat": {"sizes": [3, 2]}}],
        "expects sizes",
    ),
    "a split that does not cover": (
        {"w": [5]},
        [{"from": "w", "to": ["a", "b"], "split": {"sizes": [2, 2]}}],
        "cover",
    ),
    "a split with a negative part": (
        {"w": [5]},
        [{"from": "w", "to": ["a", "b"], "split": {"sizes": [6, -1]}}],
        "cover",
    ),
    "a split that is not even": ({"w": [5]}, [{"from": "w", "to": ["a", "b"], "split": {}}], "does not split into 2"),
    "an unstack of another length": (
        {"w": [5]},
        [{"from": "w", "to": "w{i}", "unstack": {"over": "i", "count": 4}}],
        "expects 4 members, found 5",
    ),
    "an unstack of nothing": ({"w": []}, [{"from": "w", "to": "w{i}", "unstack": {"over": "i"}}], "no dimension 0"),
    "a dimension that is not there": (
        {"w": [2]},
        [{"from": "w", "to": ["a", "b"], "split": {"dim": 1}}],
        "no dimension 1",
    ),
    "a transpose of another rank": ({"w": [2]}, [W | {"ops": [{"op": "transpose", "axes": [1, 0]}]}], "axes"),
    "a reshape to another size": ({"w": [2]}, [W | {"ops": [{"op": "reshape", "shape": [3]}]}], "cannot be reshaped"),
    "a reshape to a negative size": ({"w": [2]}, [W | {"ops": [{"op": "reshape", "shape": [-1, -2]}]}], "reshaped"),
    "a reshape of another shape": (
        {"w": [2]},
        [W | {"ops": [{"op": "reshape", "shape": [2], "was": [1, 2]}]}],
        "expects an array of shape",
    ),
    "a slice beyond the end": ({"w": [2]}, [W | {"ops": [{"op": "slice", "size": 3}]}], "does not lie"),
    "a slice of another length": (
        {"w": [2]},
        [W | {"ops": [{"op": "slice", "size": 1, "of": 3}]}],
        "expects 3 indices",
    ),
    "a slice of a scalar": ({"w": []}, [W | {"ops": [{"op": "slice", "size": 1}]}], "no dimension 0"),
    "a pad that is too short": ({"w": [2]}, [W | {"ops": [{"op": "pad", "of": 1}]}], "does not fit"),
    "a cast of another type": (
        {"w": [2]},
        [W | {"ops": [{"op": "cast", "to": "int8", "was": "bool"}]}],
        "expects bool",
    ),
    "a rearrange of another rank": (
        {"w": [2]},
        [W | {"ops": [{"op": "rearrange", "pattern": "a b -> b a"}]}],
        "does not fit an array",
    ),
    "a rearrange that does not divide": (
        {"w": [5]},
        [W | {"ops": [{"op": "rearrange", "pattern": "(a b) -> (b a)", "sizes": {"a": 2}}]}],
        "length 5 is not",
    ),
    "a rearrange by zero": (
        {"w": [5]},
        [W | {"ops": [{"op": "rearrange", "pattern": "(a b) -> (b a)", "sizes": {"a": 0}}]}],
        "length 5 is not",
    ),
    "a size beyond all bounds": (
        {"w": [2]},
        [W | {"ops": [{"op": "slice", "size": "9" * 15 + " * 9000"}]}],
        "too large",
    ),
    "an unknown variable": ({"w": [2]}, [W | {"ops": [{"op": "slice", "size": "vocab"}]}], "variable 'vocab'"),
    "a variable that defines itself": ({"w": [2]}, [W | {"ops": [{"op": "slice", "size": "loop"}]}], "by itself"),
    "a division with a remainder": ({"w": [2]}, [W | {"ops": [{"op": "slice", "size": "5 // 2"}]}], "not a multiple"),
    "a division by zero": ({"w": [2]}, [W | {"ops": [{"op": "slice", "size": "5 // 0"}]}], "not a multiple"),
    "a drop without the other": ({"output": [2]}, [DROP], "'embed', which is not among the sources"),
    "a drop of another shape": ({"output": [2], "embed": [3]}, [KEEP, DROP], "shapes or dtypes differ"),
    "a drop of itself": ({"w": [2]}, [{"from": "w", "drop_if_equal": "w"}], "not among the sources"),
}


@pytest.mark.parametrize("case", FITTING)
def test_a_map_that_does_not_fit(case):
    sources, rule_list, message = FITTING[case]
    described = {name: (tuple(shape), "int64") for name, shape in sources.items()}
    with pytest.raises(MismatchError, match=message) as e:
        rules.compile_map(a_map(*rule_list, vars={"loop": "loop + 1"}), described)
    assert "map 'test'" in str(e.value)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(MismatchError, match="complex17"):
        rules.compile_map(a_map(W), {"w": ((2,), "complex17")})


def test_two_sources_with_one_bare_name_are_refused():
    with pytest.raises(MismatchError, match="both count as 'w'"):
        mapped({"w": numbered(1), "module.w": numbered(1)}, W, strip=["module."])


# --- one test for every way a map can be malformed ------------------------------------------------------------------------


def one_rule(**changes):
    rule = W | changes
    return {"ckptfs_map": 1, "name": "n", "rules": [{k: v for k, v in rule.items() if v is not ...}]}


def one_op(**op):
    return one_rule(ops=[op])


MALFORMED = {
    "not an object": ([], "expected an object"),
    "no version": ({"name": "n", "rules": []}, "'ckptfs_map' is missing"),
    "a version of the future": ({"ckptfs_map": 2, "name": "n", "rules": []}, "version 2"),
    "a version that is true": ({"ckptfs_map": True, "name": "n", "rules": []}, "expected int"),
    "no name": ({"ckptfs_map": 1, "rules": []}, "'name' is missing"),
    "no rules": ({"ckptfs_map": 1, "name": "n"}, "'rules' is missing"),
    "an unknown key": ({"ckptfs_map": 1, "name": "n", "rules": [], "extra": 1}, "unknown 'extra'"),
    "an unknown key in a rule": (one_rule(extra=1), "unknown 'extra'"),
    "an unknown key in an operation": (one_op(op="transpose", axes=[0], extra=1), "unknown 'extra'"),
    "a rule that is a text": ({"ckptfs_map": 1, "name": "n", "rules": ["w"]}, "expected an object"),
    "a rule without to": (one_rule(to=...), "'to' is missing"),
    "a rule without from": (one_rule(**{"from": ...}), "'from' is missing"),
    "an empty list of names": (one_rule(**{"from": []}), "name pattern"),
    "a number as a name": (one_rule(to=[1]), "name pattern"),
    "an empty name": (one_rule(to=""), "no name pattern"),
    "a placeholder not closed": (one_rule(to="w{i"), "no name pattern"),
    "a placeholder of unknown kind": (one_rule(**{"from": "w{i:float}"}), "no name pattern"),
    "a placeholder twice": (one_rule(**{"from": "{i}.{i}"}), "twice"),
    "placeholders side by side": (one_rule(**{"from": "{a}{b}"}), "ambiguous"),
    "too many placeholders": (one_rule(**{"from": "{a}x{b}x{c}x{d}x{e}"}), "ambiguous"),
    "a placeholder that from lacks": (one_rule(to="w{i}"), "placeholder that `from` does not have"),
    "several sources without concat": (one_rule(**{"from": ["a", "b"]}), "need `concat`"),
    "a concat of one": (one_rule(concat={}), "concat needs several"),
    "several targets without split": (one_rule(to=["a", "b"]), "need `split`"),
    "a split into one": (one_rule(split={}), "split needs several"),
    "sources with other placeholders": (one_rule(**{"from": ["{i}.a", "b"]}, concat={}), "same placeholders"),
    "too few sizes": (one_rule(to=["a", "b"], split={"sizes": [1]}), "1 sizes for 2 names"),
    "a stack over nothing": (one_rule(stack={"over": "e"}), "needs that placeholder"),
    "a stack over a text": (one_rule(**{"from": "{e}"}, stack={"over": "e"}), "as int"),
    "a stacked number in the target": (
        one_rule(**{"from": "{e:int}", "to": "{e}"}, stack={"over": "e"}),
        "`from` does not have",
    ),
    "an unstack over a bound name": (
        one_rule(**{"from": "{e:int}", "to": "{e}"}, unstack={"over": "e"}),
        "already has",
    ),
    "an unstack that the target does not say": (one_rule(unstack={"over": "e"}), "which index"),
    "a dimension that is no number": (one_rule(to=["a", "b"], split={"dim": "0"}), "expected int"),
    "a dimension out of all bounds": (one_rule(to=["a", "b"], split={"dim": 1 << 70}), "no dimension"),
    "an unknown operation": (one_op(op="rotate"), "unknown operation 'rotate'"),
    "an operation without a name": (one_op(axes=[0]), "'op' is missing"),
    "axes that are no order": (one_op(op="transpose", axes=[0, 2]), "order of dimensions"),
    "axes that are no numbers": (one_op(op="transpose", axes=["0", None]), "order of dimensions"),
    "parts where there is one": (one_op(op="transpose", axes=[0], parts=[0]), "unknown 'parts'"),
    "parts that are not there": (
        one_rule(to=["a", "b"], split={}, then=[{"op": "transpose", "axes": [0], "parts": [2]}]),
        "no choice of the parts",
    ),
    "parts that are none": (
        one_rule(to=["a", "b"], split={}, then=[{"op": "transpose", "axes": [0], "parts": []}]),
        "no choice of the parts",
    ),
    "an unknown element type": (one_op(op="cast", to="float12"), "unknown element type"),
    "a slice without a size": (one_op(op="slice"), "'size' is missing"),
    "a pad without a length": (one_op(op="pad", size=1), "'of' is missing"),
    "a pattern without an arrow": (one_op(op="rearrange", pattern="a b"), "axes -> axes"),
    "a pattern with two arrows": (one_op(op="rearrange", pattern="a -> a -> a"), "axes -> axes"),
    "a pattern that loses an axis": (one_op(op="rearrange", pattern="a b -> a"), "same axes"),
    "a pattern that names an axis twice": (one_op(op="rearrange", pattern="a a -> a a"), "each once"),
    "a pattern with a parenthesis too few": (one_op(op="rearrange", pattern="(a b -> a b"), "not closed"),
    "a pattern with a parenthesis too many": (one_op(op="rearrange", pattern="a) b -> a b"), "do not pair"),
    "a pattern with dots in a parenthesis": (one_op(op="rearrange", pattern="(a ...) -> a ..."), "do not pair"),
    "a pattern with other signs": (one_op(op="rearrange", pattern="a, b -> b, a"), "no axis"),
    "a pattern with two unknown sizes": (one_op(op="rearrange", pattern="(a b) -> a b"), "all but one"),
    "a size for no axis": (one_op(op="rearrange", pattern="a b -> b a", sizes={"c": 1}), "unknown 'c'"),
    "a formula that calls": (one_op(op="slice", size="f(1)"), "no formula"),
    "a formula that is a power": (one_op(op="slice", size="9 ** 9"), "no formula"),
    "a formula with an attribute": (one_op(op="slice", size="a.b"), "no formula"),
    "a formula that is no expression": (one_op(op="slice", size="1 +"), "no formula"),
    "a formula with a NUL": (one_op(op="slice", size="1\0"), "no formula"),
    "a formula with a fraction": (one_op(op="slice", size="1.5"), "no formula"),
    "a formula that is true": (one_op(op="slice", size=True), "expected"),
    "a formula that is empty": (one_op(op="slice", size=""), "expected an integer or a formula"),
    "a formula that is endless": (one_op(op="slice", size="1+" * 500 + "1"), "expected an integer or a formula"),
    "a literal that is too large": (one_op(op="slice", size=f"{1 << 60}"), "no formula"),
    "a number that is too large": (one_op(op="slice", size=1 << 60), "too large"),
    "when and unless": (one_rule(when=1, unless=1), "either when or unless"),
    "an ignore that is false": (
        {"ckptfs_map": 1, "name": "n", "rules": [{"from": "w", "ignore": False}]},
        "only be true",
    ),
    "an ignore with a target": (one_rule(ignore=True), "unknown 'to'"),
    "a drop with a free placeholder": (
        {"ckptfs_map": 1, "name": "n", "rules": [{"from": "w", "drop_if_equal": "{x}"}]},
        "placeholder that `from`",
    ),
    "an alias of nothing": ({"ckptfs_map": 1, "name": "n", "rules": [{"alias": "w"}]}, "'of' is missing"),
    "roots that are a text": ({"ckptfs_map": 1, "name": "n", "rules": [], "roots": "model/"}, "expected list"),
    "roots that are numbers": ({"ckptfs_map": 1, "name": "n", "rules": [], "roots": [1]}, "list of texts"),
    "an empty prefix": ({"ckptfs_map": 1, "name": "n", "rules": [], "strip": [""]}, "empty text"),
    "a variable with a bad name": (
        {"ckptfs_map": 1, "name": "n", "rules": [], "vars": {"a b": 1}},
        "no name of a variable",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_map(case):
    data, message = MALFORMED[case]
    with pytest.raises(FormatError, match=message):
        rules.loads(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff\xfe\xff", "not JSON"),
        ('{"name": "a", "name": "b"}', "'name' twice"),
        ('{"ckptfs_map": NaN}', "NaN"),
        ('{"ckptfs_map": -Infinity}', "Infinity"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
    ],
    ids=["empty", "cut off", "not text", "a key twice", "NaN", "Infinity", "too deep", "too long a number"],
)
def test_text_that_is_no_map(text, message):
    with pytest.raises(FormatError, match=message):
        rules.loads(text)


# --- one test for every rule that has no inverse ---------------------------------------------------------------------------

NO_INVERSE = {
    "a placeholder that the target loses": ({"from": "{x}.w", "to": "w"}, "does not say {x}"),
    "a reshape without was": (W | {"ops": [{"op": "reshape", "shape": [1]}]}, "without `was`"),
    "a slice without of": (W | {"ops": [{"op": "slice", "size": 1}]}, "without `of`"),
    "a pad without size": (W | {"ops": [{"op": "pad", "of": 4}]}, "without `size`"),
    "a cast without was": (W | {"ops": [{"op": "cast", "to": "int8"}]}, "without `was`"),
    "a rearrange that merges unknown sizes": (
        W | {"ops": [{"op": "rearrange", "pattern": "a b -> (a b)"}]},
        "give the size of one of a, b",
    ),
    "a drop with placeholders": ({"from": "{i}.w", "drop_if_equal": "{i}.v"}, "drop with placeholders"),
}


@pytest.mark.parametrize("case", NO_INVERSE)
def test_a_rule_without_an_inverse(case):
    rule, message = NO_INVERSE[case]
    with pytest.raises(MismatchError, match=f"rule 0: .*{message}"):
        rules.invert(a_map(rule))
    if "to" in rule:
        assert rules.invert(a_map(rule | {"one_way": True})).rules == ()


# --- fuzz: any JSON is a map or a FormatError, and any map meets any sources with a CkptError at worst ----------------------

KEYS = [
    "ckptfs_map",
    "name",
    "rules",
    "vars",
    "from",
    "to",
    "ops",
    "op",
    "split",
    "sizes",
    "stack",
    "over",
    "dim",
    "when",
]
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), st.sampled_from(["w", "{i:int}"])
)
any_json = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(any_json)
def test_any_json_is_a_map_or_a_format_error(data):
    try:
        rules.loads(json.dumps(data))
    except FormatError:
        pass


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_map_or_a_format_error(text):
    try:
        rules.loads(text)
    except FormatError:
        pass


def places_in(data, path=()):
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places_in(value, (*path, key))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(maps.NAMES), st.randoms(use_true_random=False), any_json, st.booleans())
def test_a_damaged_built_in_map_is_a_map_or_an_error(name, chance: random.Random, value, remove):
    data = maps.load(name).to_json()
    path = chance.choice([p for p in places_in(data) if p])
    at = data
    for key in path[:-1]:
        at = at[key]
    if remove:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    config |= {"hidden_size": 2, "intermediate_size": 2, "vocab_size": 2, "padded_vocab_size": 3}
    hf = hf_llama(config | {"tie_word_embeddings": False})
    arrays = LAYOUTS.get(name, lambda weights, _: weights)(hf, config)
    try:
        damaged = rules.loads(json.dumps(data))
    except FormatError:
        return
    try:
        apply_all(damaged, arrays, config)
    except CkptError:
        pass
