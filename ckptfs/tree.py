"""State trees as JSON without pickle: what is not an array becomes a node, every array becomes a named leaf.

Rules: exact or refused (types, key order, int 1 against True against 1.0 all come back as they were); pure (no files,
no torch import: torch's types are recognised only if torch is loaded); reading runs no code that a checkpoint names,
except what the caller has registered or allowed by `allow_pickle`. `docs/tree.md` is the normative description.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import functools
import json
import keyword
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ckptfs import tags
from ckptfs.errors import ExistsError, FormatError, MismatchError, NotFoundError
from ckptfs.tags import Node, Unsupported

MAX_DEPTH = 96  # nested containers; far above real state, far below what would exhaust Python's stack

# numpy dtypes that are Zarr arrays of their own; every other dtype goes inline into the JSON
ARRAY_DTYPES = frozenset(
    {
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
        *("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)
_FACTORIES = ("list", "dict", "set", "int", "float", "str", "bool", "tuple")
_PAIRED = {
    "dict": dict,
    "odict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "counter": collections.Counter,
    "namespace": argparse.Namespace,
    "simple_namespace": types.SimpleNamespace,
}
_LISTED = {
    "tuple": tuple,
    "namedtuple": None,
    "deque": collections.deque,
    "slice": slice,
    "set": set,
    "frozenset": frozenset,
}
_UNORDERED = ("set", "frozenset")
_HASHABLE_CONTAINERS = ("tuple", "namedtuple", "frozenset")
# required and optional keys besides "$"
_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "dict": (frozenset({"items"}), frozenset()),
    "odict": (frozenset({"items"}), frozenset({"metadata"})),
    "defaultdict": (frozenset({"items", "factory"}), frozenset()),
    "counter": (frozenset({"items"}), frozenset()),
    "namespace": (frozenset({"items"}), frozenset()),
    "simple_namespace": (frozenset({"items"}), frozenset()),
    "tuple": (frozenset({"items"}), frozenset()),
    "namedtuple": (frozenset({"items", "type", "fields"}), frozenset()),
    "deque": (frozenset({"items", "maxlen"}), frozenset()),
    "slice": (frozenset({"items"}), frozenset()),
    "set": (frozenset({"items"}), frozenset()),
    "frozenset": (frozenset({"items"}), frozenset()),
    "array": (frozenset({"name", "as"}), frozenset({"byteorder"})),
    "per_rank": (frozenset({"ranks"}), frozenset()),
    "pickle": (frozenset({"b64"}), frozenset()),
}
_USER = "user:"  # prefix of the tags of registered classes


@dataclass(frozen=True)
class PerRank:
    """Marks a value that differs by rank: every rank's own is stored and comes back to the same rank."""

    value: object


class PerRankValues(dict[int, object]):
    """Every rank's value of one `PerRank`, by rank: what a reader without a rank of its own gets."""


class Attr(str):
    """A step of a path that is an attribute (`.lr`) and not a key (`["lr"]`)."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Leaf:
    """An array found in a tree: its name in the checkpoint, itself, and the keys that lead to it."""

    name: str
    value: object
    path: tuple[object, ...]


class Filled(NamedTuple):
    """What `fill` did: the tree, and the paths that kept target and checkpoint apart."""

    tree: object
    missing: list[str]  # in the target, not stored
    unexpected: list[str]  # stored, not in the target
    mismatched: list[str]  # on both sides, but not the same kind of thing


@dataclass(frozen=True)
class _Registered:
    kind: type
    name: str
    to_json: Callable[[Any], object]
    from_json: Callable[[Any], object]


_registered_kinds: dict[type, _Registered] = {}
_registered_names: dict[str, _Registered] = {}


def register(cls: type, to_json: Callable[[Any], object], from_json: Callable[[Any], object], *, name: str) -> None:
    """Store instances of exactly `cls` as the tree `to_json(value)` under the tag "user:<name>".

    `from_json` gets that tree back, arrays included. A checkpoint remembers the name: keep it when the class moves.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name):
        raise MismatchError(f"register: {name!r} is no usable name; use letters, digits, '_', '.' and '-'")
    known = _registered_names.get(name)
    if known is not None and tags.class_name(known.kind) != tags.class_name(cls):
        raise ExistsError(f"register: the name {name!r} belongs to {tags.class_name(known.kind)}; choose another")
    entry = _Registered(cls, name, to_json, from_json)
    _registered_kinds[cls] = _registered_names[name] = entry


# ---- names and paths ------------------------------------------------------------------------------------------------


def encode_component(key: object) -> str:
    """One component of a name. Escapes keep "/" the only separator and "@rank0", "~2" the only suffixes."""
    text = key if isinstance(key, str) else str(key) if type(key) is int else _stable_repr(key)
    if text == "":
        return "%00"
    text = text.replace("%", "%25").replace("/", "%2F")
    if not tags.is_plain_text(text):
        text = re.sub("[\ud800-\udfff]", lambda half: _percent(half[0]), text)
    return re.sub(r"[@~](?=(rank)?\d+\Z)", lambda mark: _percent(mark[0]), text)


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


def _stable_repr(key: object) -> str:
    """repr, but with the members of frozensets in an order that does not change from process to process."""
    if type(key) is frozenset:
        return "frozenset({" + ", ".join(sorted(_stable_repr(member) for member in key)) + "})"
    if type(key) is tuple:
        return "(" + ", ".join(_stable_repr(member) for member in key) + (",)" if len(key) == 1 else ")")
    return repr(key)


def encode_name(path: tuple[object, ...]) -> str:
    """The name of the leaf at this path, before collisions are resolved and ranks are marked."""
    return "/".join(encode_component(key) for key in path) or "value"


def _components(keys: list[object]) -> list[str]:
    """Components of all keys of one container; the second key with the same text becomes "text~2", and so on."""
    seen: dict[str, int] = {}
    components = []
    for key in keys:
        text = encode_component(key)
        seen[text] = count = seen.get(text, 0) + 1
        components.append(text if count == 1 else f"{text}~{count}")
    return components


def show_path(path: tuple[object, ...] | list[object]) -> str:
    """A path as Python would write it: `optim["state"][3].foo`."""
    text = ""
    for step in path:
        if isinstance(step, Attr) or (not text and isinstance(step, str) and step.isidentifier()):
            text += f".{step}" if text else str(step)
        else:
            text += f"[{json.dumps(step) if isinstance(step, str) else repr(step)}]"
    return text if text and not text.startswith("[") else "tree" + text


# ---- flatten --------------------------------------------------------------------------------------------------------


def flatten(
    tree: object, *, rank: int = 0, allow_pickle: bool = False, to_fill: bool = False
) -> tuple[Node, list[Leaf]]:
    """The tree as JSON data, and its arrays; MismatchError names the path of anything that cannot be stored exactly.

    `to_fill`: the arrays are the tree's own, big-endian ones too, not native copies.
    """
    writer = _Writer(rank, allow_pickle, to_fill=to_fill)
    return writer.node(tree), writer.leaves


class _Writer:
    """One walk over a tree. `path` is what messages show, `parts` what names are made of."""

    def __init__(self, rank: int, allow_pickle: bool, *, to_fill: bool = False) -> None:
        self.rank, self.allow_pickle, self.to_fill = rank, allow_pickle, to_fill
        self.leaves: list[Leaf] = []
        self.path: list[object] = []
        self.parts: list[str] = []
        self.open: set[int] = set()  # containers between the root and here, to notice cycles
        self.in_key = False  # inside a dict key or a set: values only, no arrays
        self.in_rank = False

    def node(self, value: object) -> Node:
        kind = type(value)
        if kind is bool or value is None:
            return value
        if kind is str:
            return tags.encode_str(value)  # type: ignore[arg-type]
        if kind is int:
            return tags.encode_int(value)  # type: ignore[arg-type]
        if kind is float:
            return tags.encode_float(value)  # type: ignore[arg-type]
        container = _registered_kinds.get(kind) or _CONTAINERS.get(kind) or self._namedtuple(value)
        if container is not None:
            return self._container(container, value)
        return self._single(value)

    def _namedtuple(self, value: object) -> Callable[[_Writer, Any], Node] | None:
        fields = getattr(type(value), "_fields", None)
        is_one = isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)
        return _Writer.on_named if is_one else None

    def _container(self, container: Any, value: object) -> Node:
        if id(value) in self.open:
            self.refuse("this container contains itself; break the cycle before saving")
        if len(self.open) >= MAX_DEPTH:
            self.refuse(f"more than {MAX_DEPTH} containers inside each other; store a flatter structure")
        self.open.add(id(value))
        node = self.on_user(container, value) if isinstance(container, _Registered) else container(self, value)
        self.open.discard(id(value))
        return node

    def refuse(self, why: str) -> NoReturn:
        raise MismatchError(f"{show_path(self.path)}: {why}")

    def child(self, step: object, part: str, value: object) -> Node:
        self.path.append(step)
        self.parts.append(part)
        node = self.node(value)
        self.path.pop()
        self.parts.pop()
        return node

    # -- containers

    def pairs(self, keys: list[object], values: list[object]) -> list[Node]:
        """Key and value nodes of a mapping."""
        parts = _components(keys)
        nodes = [
            [self.key(key), self.child(key, part, value)] for key, part, value in zip(keys, parts, values, strict=True)
        ]
        if len({dumps(key) for key, _ in nodes}) < len(nodes):
            self.refuse("two keys of this dict cannot be told apart once stored (several NaN keys?); rename them")
        return nodes

    def key(self, key: object) -> Node:
        if type(key) is int and tags.INT_MIN <= key <= tags.INT_MAX:
            return key
        before, self.in_key = self.in_key, True
        self.path.append(key)
        node = self.node(str(key) if type(key) is Attr else key)
        self.path.pop()
        self.in_key = before
        return node

    def sequence(self, values: Any) -> list[Node]:
        return [self.child(index, str(index), value) for index, value in enumerate(values)]

    def on_dict(self, value: dict[object, object]) -> Node:
        keys = list(value)
        if all(type(key) is str and not key.startswith("$") and tags.is_plain_text(key) for key in keys):
            parts = _components(keys)
            return {key: self.child(key, part, value[key]) for key, part in zip(keys, parts, strict=True)}
        return {"$": "dict", "items": self.pairs(keys, list(value.values()))}

    def on_odict(self, value: collections.OrderedDict[object, object]) -> Node:
        extra = dict(vars(value))
        metadata = extra.pop("_metadata", None)  # torch's state_dict() keeps the versions of its modules there
        if extra:
            self.refuse(f"an OrderedDict with attributes ({', '.join(extra)}); use OrderedDict(value.items()) instead")
        node = {"$": "odict", "items": self.pairs(list(value), list(value.values()))}
        if metadata is not None:
            before, self.in_key = self.in_key, True  # no arrays in there
            self.path.append(Attr("_metadata"))
            node["metadata"] = self.node(metadata)
            self.path.pop()
            self.in_key = before
        return node

    def on_defaultdict(self, value: collections.defaultdict[object, object]) -> Node:
        factory = value.default_factory
        name = getattr(factory, "__name__", None)
        if factory is not None and (name not in _FACTORIES or getattr(builtins, name) is not factory):
            allowed = ", ".join(_FACTORIES)
            self.refuse(f"a defaultdict with the factory {factory!r}; only {allowed} are stored: use dict(...) instead")
        return {"$": "defaultdict", "factory": name, "items": self.pairs(list(value), list(value.values()))}

    def on_counter(self, value: collections.Counter[object]) -> Node:
        self._plain_instance(value)
        return {"$": "counter", "items": self.pairs(list(value), list(value.values()))}

    def on_namespace(self, value: argparse.Namespace | types.SimpleNamespace) -> Node:
        tag = "namespace" if type(value) is argparse.Namespace else "simple_namespace"
        return {"$": tag, "items": self.pairs([Attr(key) for key in vars(value)], list(vars(value).values()))}

    def on_list(self, value: list[object]) -> Node:
        return self.sequence(value)

    def on_tuple(self, value: tuple[object, ...]) -> Node:
        return {"$": "tuple", "items": self.sequence(value)}

    def on_named(self, value: Any) -> Node:
        self._plain_instance(value)
        fields = list(type(value)._fields)
        parts = _components(fields)
        items = [self.child(Attr(field), part, item) for field, part, item in zip(fields, parts, value, strict=True)]
        return {"$": "namedtuple", "type": tags.class_name(type(value)), "fields": fields, "items": items}

    def on_deque(self, value: collections.deque[object]) -> Node:
        return {"$": "deque", "maxlen": value.maxlen, "items": self.sequence(value)}

    def on_slice(self, value: slice) -> Node:
        steps = (Attr("start"), Attr("stop"), Attr("step"))
        return {"$": "slice", "items": [self.child(step, step, getattr(value, step)) for step in steps]}

    def on_set(self, value: set[object] | frozenset[object]) -> Node:
        tag = "set" if type(value) is set else "frozenset"
        nodes = [self.key(member) for member in value]
        if len({dumps(node) for node in nodes}) < len(nodes):
            self.refuse("two members of this set cannot be told apart once stored (several NaN?); remove one")
        return {"$": tag, "items": sorted(nodes, key=dumps)}  # sorted: hash order differs between processes

    def on_per_rank(self, value: PerRank) -> Node:
        if self.in_key or self.in_rank:
            self.refuse("a PerRank inside a dict key, a set or another PerRank; wrap the outermost value once")
        self.in_rank = True
        node = self.node(value.value)
        self.in_rank = False
        return {"$": "per_rank", "ranks": {str(self.rank): node}}

    def on_user(self, entry: _Registered, value: object) -> Node:
        if self.in_key:
            self.refuse(f"a {tags.class_name(entry.kind)} as a dict key or in a set; only plain values can stand there")
        try:
            tree = entry.to_json(value)
        except Exception as problem:
            self.refuse(
                f"to_json of the class registered as {entry.name!r} failed: {type(problem).__name__}: {problem}"
            )
        return {"$": _USER + entry.name, "value": self.node(tree)}

    def _plain_instance(self, value: object) -> None:
        if getattr(value, "__dict__", None):
            self.refuse(f"a {type(value).__qualname__} with attributes of its own; store them beside it")

    # -- single values and arrays

    def _single(self, value: object) -> Node:
        torch = tags.loaded_torch()
        if torch is not None and isinstance(value, torch.Tensor):
            is_parameter = isinstance(value, torch.nn.Parameter) if hasattr(torch, "nn") else False
            return self._leaf(value, "parameter" if is_parameter else "torch")
        if getattr(type(value), "is_ckptfs_array", False):  # FlatShard and its like: arrays above this layer
            return self._leaf(value, "numpy" if isinstance(_data_of(value), np.ndarray) else "torch")
        try:
            if type(value) in (np.ndarray, np.memmap):
                return self._array(value)  # type: ignore[arg-type]
            node = tags.encode(value)
        except Unsupported as problem:
            return self._unknown(value, f"{problem} cannot be stored without pickle")
        return self._unknown(value, "an object of this type cannot be stored without pickle") if node is None else node

    def _array(self, value: np.ndarray[Any, Any]) -> Node:
        dtype = value.dtype
        if dtype.name not in ARRAY_DTYPES or dtype.names is not None:
            if self.in_key:
                return self._leaf(value, "numpy")
            return tags.encode_inline_array(value)
        if dtype.isnative:
            return self._leaf(value, "numpy")
        native = value if self.to_fill else value.astype(dtype.newbyteorder("="))
        return self._leaf(native, "numpy", {"byteorder": "big"})

    def _leaf(self, value: object, kind: str, extra: Mapping[str, str] = types.MappingProxyType({})) -> Node:
        if self.in_key:
            self.refuse("an array as a dict key, in a set or in an OrderedDict's metadata; only plain values fit there")
        name = "/".join(self.parts) or "value"
        if self.in_rank:
            name += f"@rank{self.rank}"
        self.leaves.append(Leaf(name, value, tuple(self.path)))
        return {"$": "array", "name": name, "as": kind, **extra}

    def _unknown(self, value: object, why: str) -> Node:
        kind = tags.class_name(type(value)).replace(":", ".")
        if not self.allow_pickle or self.in_key:
            self.refuse(f"{why} (type {kind}). {_advice(value)}")
        import pickle  # only ever with the caller's explicit allow_pickle

        try:
            return {"$": "pickle", "b64": tags.to_b64(pickle.dumps(value))}
        except Exception as problem:
            raise MismatchError(f"{show_path(self.path)}: pickle refused this {kind}: {problem}") from problem


def _data_of(value: Any) -> object:
    data = value.data
    return data[0] if isinstance(data, list) and data else data


def _advice(value: object) -> str:
    if hasattr(value, "state_dict"):
        return "Store its state_dict()."
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return (
            "Register the dataclass with ckptfs.register(cls, to_json, from_json, name=...), "
            "or store dataclasses.asdict(it)."
        )
    if callable(value) or isinstance(value, types.ModuleType):
        return "Code is not state: store a name or the arguments it was made from."
    return (
        "Convert it to plain data, register its class with ckptfs.register(cls, to_json, from_json, name=...), "
        "or pass allow_pickle=True at save and at load."
    )


_CONTAINERS: dict[type, Callable[[_Writer, Any], Node]] = {
    dict: _Writer.on_dict,
    collections.OrderedDict: _Writer.on_odict,
    collections.defaultdict: _Writer.on_defaultdict,
    collections.Counter: _Writer.on_counter,
    argparse.Namespace: _Writer.on_namespace,
    types.SimpleNamespace: _Writer.on_namespace,
    list: _Writer.on_list,
    tuple: _Writer.on_tuple,
    collections.deque: _Writer.on_deque,
    slice: _Writer.on_slice,
    set: _Writer.on_set,
    frozenset: _Writer.on_set,
    PerRank: _Writer.on_per_rank,
}


# ---- JSON text and strict reading -----------------------------------------------------------------------------------


def dumps(node: Node) -> bytes:
    """The node as compact JSON text; the same node always gives the same bytes."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(text: bytes | str) -> Node:
    """The node in this JSON text; FormatError for anything that `dumps` of a flattened tree could not have written."""
    try:
        node = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as problem:
        raise FormatError(f"the state tree is not valid JSON: {problem}") from problem
    check(node)
    return node


def _object(pairs: list[tuple[str, Node]]) -> dict[str, Node]:
    node = dict(pairs)
    if len(node) < len(pairs):
        raise FormatError("the state tree has an object with a key twice")
    return node


def _refuse_constant(text: str) -> NoReturn:
    raise FormatError(f"the state tree holds {text}, which is not JSON")


def _parse_int(text: str) -> int:
    value = int(text) if len(text) <= 20 else tags.INT_MAX + 1
    if not tags.INT_MIN <= value <= tags.INT_MAX or text == "-0":
        raise FormatError(f"the state tree holds the bare integer {text[:40]}, which 64 bits cannot")
    return value


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FormatError(f"the state tree holds the number {text[:40]}, which a float cannot")
    return value


def check(node: Node) -> None:
    """FormatError unless the node is one that `flatten` and `merge` can make."""
    _Checker().node(node, depth=0)


class _Checker:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.in_key = False
        self.in_rank = False

    def node(self, node: Node, depth: int) -> None:
        if depth > MAX_DEPTH + 1:
            raise FormatError(f"the state tree nests more than {MAX_DEPTH} containers")
        kind = type(node)
        if kind is dict:
            self._tag(node, depth) if "$" in node else self._object(node, depth)
        elif kind is list:
            self._mutable()
            for item in node:
                self.node(item, depth + 1)
        elif kind is str:
            self._text(node)
        elif not (kind is bool or node is None or _is_plain_number(node)):
            raise FormatError(f"the state tree holds {node!r}, which is not plain JSON")

    def _text(self, text: object) -> None:
        if type(text) is not str or not tags.is_plain_text(text):
            raise FormatError(f"the state tree holds {text!r} where a string is due")

    def _mutable(self) -> None:
        if self.in_key:
            raise FormatError("the state tree has a dict key or set member that cannot be one")

    def _object(self, node: dict[str, Node], depth: int) -> None:
        self._mutable()
        for key, value in node.items():
            self._text(key)
            if key.startswith("$"):
                raise FormatError(f"the state tree has the key {key!r} in a plain object; it belongs in an item list")
            self.node(value, depth + 1)

    def _tag(self, node: dict[str, Node], depth: int) -> None:
        tag = node["$"]
        if type(tag) is not str:
            raise FormatError(f"the state tree has the tag {tag!r}, which is no string")
        if tag in tags.TAGS:
            if self.in_key and not tags.TAGS[tag].hashable:
                self._mutable()
            tags.check(node)
            return
        if self.in_key and tag not in _HASHABLE_CONTAINERS:
            self._mutable()
        if tag.startswith(_USER):
            self._fields(node, frozenset({"value"}), frozenset())
            self.node(node["value"], depth + 1)
            return
        if tag not in _FIELDS:
            raise FormatError(f"the state tree has the unknown tag {tag!r}; a newer ckptfs may read it")
        self._fields(node, *_FIELDS[tag])
        if tag in _PAIRED:
            self._pairs(node, depth)
        elif tag in _LISTED:
            self._listed(node, depth)
        elif tag == "array":
            self._array(node)
        elif tag == "per_rank":
            self._per_rank(node, depth)
        else:
            self._pickle(node)

    def _fields(self, node: dict[str, Node], required: frozenset[str], optional: frozenset[str]) -> None:
        keys = node.keys() - {"$"}
        if not required <= keys <= required | optional:
            raise FormatError(f"the tag {node['$']!r} has the keys {sorted(keys)}, expected {sorted(required)}")

    def _list(self, node: dict[str, Node], field: str) -> list[Node]:
        items = node[field]
        if type(items) is not list:
            raise FormatError(f"{field!r} of the tag {node['$']!r} is not a list")
        return items

    def key(self, node: Node, depth: int) -> None:
        before, self.in_key = self.in_key, True
        self.node(node, depth + 1)
        self.in_key = before

    def _pairs(self, node: dict[str, Node], depth: int) -> None:
        texts = set()
        for pair in self._list(node, "items"):
            if type(pair) is not list or len(pair) != 2:
                raise FormatError(f"an item of the tag {node['$']!r} is not a pair of key and value")
            self.key(pair[0], depth)
            self.node(pair[1], depth + 1)
            texts.add(dumps(pair[0]))
            if node["$"] in ("namespace", "simple_namespace") and _merge_kind(pair[0]) != "str":
                self._text(pair[0])
        if len(texts) < len(node["items"]):
            raise FormatError(f"the tag {node['$']!r} has a key twice")
        if node["$"] == "defaultdict" and node["factory"] is not None and node["factory"] not in _FACTORIES:
            raise FormatError(f"a defaultdict has the unknown factory {node['factory']!r}")
        if "metadata" in node:
            self.node(node["metadata"], depth + 1)

    def _listed(self, node: dict[str, Node], depth: int) -> None:
        tag, items = node["$"], self._list(node, "items")
        for item in items:
            self.key(item, depth) if tag in _UNORDERED else self.node(item, depth + 1)
        if tag in _UNORDERED and len({dumps(item) for item in items}) < len(items):
            raise FormatError("a set has a member twice")
        if tag == "slice" and len(items) != 3:
            raise FormatError("a slice has other than three parts")
        if tag == "deque" and not (node["maxlen"] is None or _is_size(node["maxlen"])):
            raise FormatError("a deque has a maxlen that is no size")
        if tag == "deque" and node["maxlen"] is not None and len(items) > node["maxlen"]:
            raise FormatError("a deque is longer than its maxlen")
        if tag == "namedtuple":
            self._named(node)

    def _named(self, node: dict[str, Node]) -> None:
        fields = self._list(node, "fields")
        fine = all(type(field) is str and field.isidentifier() and not keyword.iskeyword(field) for field in fields)
        if not fine or len(set(fields)) < len(fields) or len(fields) != len(node["items"]):
            raise FormatError("a namedtuple has field names that do not fit")
        if type(node["type"]) is not str or not re.fullmatch(r"[^\s:]+:[^\s:]+", node["type"]):
            raise FormatError(f"a namedtuple has the class name {node['type']!r}, expected module:name")

    def _array(self, node: dict[str, Node]) -> None:
        name = node["name"]
        self._text(name)
        if not all(name.split("/")):
            raise FormatError(f"an array has the name {name!r}, with an empty component")
        if name in self.names:
            raise FormatError(f"two arrays have the name {name!r}")
        self.names.add(name)
        if node["as"] not in ("torch", "parameter", "numpy"):
            raise FormatError(f"the array {name!r} is of the unknown kind {node['as']!r}")
        if "byteorder" in node and (node["byteorder"] != "big" or node["as"] != "numpy"):
            raise FormatError(f"the array {name!r} has the byte order {node['byteorder']!r}, expected big, of numpy")

    def _per_rank(self, node: dict[str, Node], depth: int) -> None:
        ranks = node["ranks"]
        if self.in_rank or type(ranks) is not dict or not ranks:
            raise FormatError("a per_rank is empty, no object, or inside another")
        self.in_rank = True
        for rank, value in ranks.items():
            if not re.fullmatch(r"0|[1-9][0-9]{0,8}", rank):
                raise FormatError(f"a per_rank has the rank {rank!r}")
            self.node(value, depth + 1)
        self.in_rank = False

    def _pickle(self, node: dict[str, Node]) -> None:
        try:
            tags.from_b64(node["b64"])
        except (ValueError, TypeError) as problem:
            raise FormatError(f"a pickle is not base64: {problem}") from problem


def _is_plain_number(node: Node) -> bool:
    if type(node) is int:
        return tags.INT_MIN <= node <= tags.INT_MAX
    return type(node) is float and math.isfinite(node)


def _is_size(node: Node) -> bool:
    return type(node) is int and 0 <= node < 2**63


def names(node: Node) -> list[str]:
    """The names of all arrays in the node, in the order of the tree."""
    return [tag["name"] for tag in arrays(node)]


def arrays(node: Node) -> Iterator[dict[str, Any]]:
    """The array tags of the node, in the order of the tree."""
    if type(node) is list:
        for item in node:
            yield from arrays(item)
    elif type(node) is dict:
        tag = node.get("$")
        if tag == "array":
            yield node
        elif tag is None or tag == "per_rank":
            for item in (node if tag is None else node["ranks"]).values():
                yield from arrays(item)
        elif tag not in tags.TAGS and tag != "pickle":
            yield from arrays(node["items"] if "items" in node else node["value"])


# ---- unflatten ------------------------------------------------------------------------------------------------------

ArrayOf = Callable[[str, dict[str, Any]], object]


def unflatten(
    node: Node,
    array: ArrayOf,
    *,
    rank: int | None = None,
    allow_pickle: bool = False,
    read: Callable[[], None] | None = None,
) -> object:
    """The tree of this node, with `array(name, tag)` for its arrays and this rank's share of every PerRank.

    `read` is called once all arrays were asked for, and before anything is made of what is in them.
    """
    check(node)
    if read is None:
        return _Reader(array, rank, allow_pickle).value(node)
    made: dict[str, object] = {}

    def note(name: str, tag: dict[str, Any]) -> None:
        made[name] = array(name, tag)

    _Reader(note, rank, allow_pickle, looking=True).value(node)
    read()
    return _Reader(lambda name, _: made[name], rank, allow_pickle).value(node)


class _Reader:
    """One walk over a checked node. `looking`: only to ask for its arrays, and to refuse what cannot be read."""

    def __init__(self, array: ArrayOf, rank: int | None, allow_pickle: bool, *, looking: bool = False) -> None:
        self.array, self.rank, self.allow_pickle, self.looking = array, rank, allow_pickle, looking
        self.path: list[object] = []

    def value(self, node: Node) -> Any:
        if type(node) is list:
            return self.items(node)
        if type(node) is not dict:
            return node
        tag = node.get("$")
        if tag is None:
            return {key: self.child(key, value) for key, value in node.items()}
        if tag in tags.TAGS:
            return self._single(node)
        if tag.startswith(_USER):
            return self._user(node)
        if tag in _PAIRED:
            return self._paired(tag, node)
        if tag in _LISTED:
            return self._listed(tag, node)
        if tag == "array":
            return _with_byteorder(self.array(node["name"], node), node)
        return self._per_rank(node) if tag == "per_rank" else self._unpickle(node)

    def child(self, step: object, node: Node) -> Any:
        self.path.append(step)
        value = self.value(node)
        self.path.pop()
        return value

    def items(self, nodes: list[Node]) -> list[Any]:
        return [self.child(index, node) for index, node in enumerate(nodes)]

    def _single(self, node: dict[str, Any]) -> object:
        try:
            return tags.TAGS[node["$"]].decode(node)
        except MismatchError as problem:
            raise MismatchError(f"{show_path(self.path)}: {problem}") from problem

    def pairs(self, node: dict[str, Any]) -> dict[object, object]:
        result: dict[object, object] = {}
        for key_node, value_node in node["items"]:
            key = self.value(key_node)
            result[key] = self.child(key, value_node)
        self._all_distinct(result, len(node["items"]))
        return result

    def _all_distinct(self, result: Any, count: int) -> None:
        if len(result) != count:
            raise FormatError(f"{show_path(self.path)}: two keys of the stored tree are equal")

    def _paired(self, tag: str, node: dict[str, Any]) -> object:
        result = self.pairs(node)
        if tag == "dict":
            return result
        if tag in ("namespace", "simple_namespace"):
            space = _PAIRED[tag]()
            vars(space).update(result)
            return space
        if tag == "defaultdict":
            factory = node["factory"] and getattr(builtins, node["factory"])
            return collections.defaultdict(factory, result)
        ordered: Any = _PAIRED[tag](result)
        if "metadata" in node:
            vars(ordered)["_metadata"] = self.child(Attr("_metadata"), node["metadata"])
        return ordered

    def _listed(self, tag: str, node: dict[str, Any]) -> object:
        items = self.items(node["items"])
        if tag == "namedtuple":
            return tuple.__new__(_namedtuple_class(node["type"], tuple(node["fields"])), items)
        if tag == "deque":
            return collections.deque(items, node["maxlen"])
        if tag == "slice":
            return slice(*items)
        made: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](items)
        if tag in _UNORDERED:
            self._all_distinct(made, len(items))
        return made

    def _user(self, node: dict[str, Any]) -> object:
        name = node["$"].removeprefix(_USER)
        entry = _registered_names.get(name)
        if entry is None:
            raise MismatchError(
                f"{show_path(self.path)}: stored by a class registered as {name!r}, which is not registered here; "
                f"call ckptfs.register(cls, to_json, from_json, name={name!r}) before loading"
            )
        value = self.value(node["value"])
        if self.looking:
            return None
        try:
            return entry.from_json(value)
        except Exception as problem:
            raise MismatchError(
                f"{show_path(self.path)}: from_json of the class registered as {name!r} refused what is stored: "
                f"{type(problem).__name__}: {problem}"
            ) from problem

    def _per_rank(self, node: dict[str, Any]) -> object:
        if self.rank is None:
            return PerRankValues({int(rank): self.value(value) for rank, value in node["ranks"].items()})
        return self.value(_share(node, self.rank, self.path))

    def _unpickle(self, node: dict[str, Any]) -> object:
        if not self.allow_pickle:
            raise MismatchError(
                f"{show_path(self.path)}: stored with pickle, which can run any code; "
                "pass allow_pickle=True at load if you trust who wrote it"
            )
        if self.looking:
            return None
        import pickle  # only ever with the caller's explicit allow_pickle

        return pickle.loads(tags.from_b64(node["b64"]))


def _share(node: dict[str, Any], rank: int, path: list[object]) -> Node:
    ranks = node["ranks"]
    if str(rank) not in ranks:
        raise NotFoundError(
            f"{show_path(path)}: no value stored for rank {rank}; it was saved per rank by {len(ranks)} ranks "
            f"({', '.join(sorted(ranks, key=int)[:8])}{', ...' if len(ranks) > 8 else ''}). "
            "Load it with one of those ranks, or leave it out and make it anew"
        )
    return ranks[str(rank)]


def _with_byteorder(value: object, node: dict[str, Any]) -> object:
    if "byteorder" in node and isinstance(value, np.ndarray):  # nothing while only looked at
        return value.astype(value.dtype.newbyteorder(">"))
    return value


def _namedtuple_class(name: str, fields: tuple[str, ...]) -> Any:
    """The class itself if its module is imported and still has these fields, else an equivalent of the same name."""
    kind = tags.find_class(name)
    if kind is not None and issubclass(kind, tuple) and getattr(kind, "_fields", None) == fields:
        return kind
    return _equivalent_namedtuple(name, fields)


_make_namedtuple: Any = collections.namedtuple  # noqa: PYI024 - the fields are known only at run time


@functools.lru_cache(maxsize=256)
def _equivalent_namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    short = name.rpartition(":")[2].rpartition(".")[2]
    usable = short.isidentifier() and not keyword.iskeyword(short) and not short.startswith("_")
    module = name.partition(":")[0]
    kind: Any = _make_namedtuple(short if usable else "Namedtuple", fields, rename=True, module=module)
    kind.__qualname__ = name.partition(":")[2]  # so that saving it again writes the same node
    return kind


# ---- merge ----------------------------------------------------------------------------------------------------------


def merge(nodes: Mapping[int, Node]) -> Node:
    """The trees of several ranks as one: keys united, equal values kept, PerRank united; anything else is an error."""
    if not nodes:
        raise MismatchError("merge: no rank has a tree; pass at least one")
    distinct: dict[bytes, tuple[int, Node]] = {}
    for rank in sorted(nodes):
        distinct.setdefault(dumps(nodes[rank]), (rank, nodes[rank]))
    merged = _merge(list(distinct.values()), [])
    _refuse_shared_names(merged)
    return merged


def _refuse_shared_names(node: Node) -> None:
    seen: set[str] = set()
    for name in names(node):
        if name in seen:
            raise MismatchError(f"two arrays of different ranks would both be named {name!r}; rename one of their keys")
        seen.add(name)


Ranked = list[tuple[int, Node]]


def _merge(ranked: Ranked, path: list[object]) -> Node:
    first_rank, first = ranked[0]
    if len(ranked) == 1:
        return first
    kinds = {_merge_kind(node) for _, node in ranked}
    kind = _merge_kind(first)
    if len(kinds) == 1 and kind == "per_rank":
        return _merge_ranks(ranked, path)
    if len(kinds) == 1 and kind in ("list", *_LISTED) and kind not in _UNORDERED:
        return _merge_items(ranked, path)
    if len(kinds) == 1 and kind in _PAIRED:
        return _merge_pairs(ranked, path)
    if len(kinds) == 1 and kind.startswith(_USER):
        return {"$": kind, "value": _merge([(rank, node["value"]) for rank, node in ranked], path)}
    text = dumps(first)
    for rank, node in ranked[1:]:
        if dumps(node) != text:
            _disagree(path, (first_rank, first), (rank, node))
    return first


def _merge_kind(node: Node) -> str:
    if type(node) is dict:
        return str(node.get("$", "dict"))
    return "list" if type(node) is list else ""


def _disagree(path: list[object], one: tuple[int, Node], other: tuple[int, Node]) -> NoReturn:
    raise MismatchError(
        f"{show_path(path)} is {_brief(one[1])} on rank {one[0]} and {_brief(other[1])} on rank {other[0]}; "
        "if it may differ by rank, wrap it in ckptfs.PerRank(...)"
    )


def _brief(node: Node) -> str:
    if type(node) is dict and node.get("$") == "array":
        return f"an array ({node['as']}, named {node['name']!r})"
    text = dumps(node).decode()
    return text if len(text) <= 120 else text[:117] + "..."


def _step(key: Node) -> object:
    """A key node as messages show it."""
    return key if type(key) is not dict else Attr(f"<{_brief(key)}>")


def _merge_ranks(ranked: Ranked, path: list[object]) -> Node:
    by_rank: dict[str, Ranked] = {}
    for rank, node in ranked:
        for name, value in node["ranks"].items():
            by_rank.setdefault(name, []).append((rank, value))
    return {"$": "per_rank", "ranks": {name: _merge(by_rank[name], path) for name in sorted(by_rank, key=int)}}


def _merge_items(ranked: Ranked, path: list[object]) -> Node:
    lists = [node if type(node) is list else node["items"] for _, node in ranked]
    first_rank, first = ranked[0]
    for (rank, node), items in zip(ranked, lists, strict=True):
        if len(items) != len(lists[0]):
            raise MismatchError(
                f"{show_path(path)} has {len(lists[0])} items on rank {first_rank} and {len(items)} on rank {rank}; "
                "if it may differ by rank, wrap it in ckptfs.PerRank(...)"
            )
        if _rest(node) != _rest(first):
            _disagree(path, ranked[0], (rank, node))
    merged = [
        _merge([(rank, items[index]) for (rank, _), items in zip(ranked, lists, strict=True)], [*path, index])
        for index in range(len(lists[0]))
    ]
    return merged if type(first) is list else {**first, "items": merged}


def _rest(node: Node) -> Node:
    """What a container's tag says besides its items."""
    if type(node) is list:
        return []
    return [[key, node[key]] for key in ("type", "fields", "maxlen", "factory") if key in node]


def _pairs_of(node: dict[str, Node]) -> list[list[Node]]:
    return node["items"] if "$" in node else [[key, value] for key, value in node.items()]


def _merge_pairs(ranked: Ranked, path: list[object]) -> Node:
    first = ranked[0][1]
    by_key: dict[bytes, tuple[Node, Ranked]] = {}
    for rank, node in ranked:
        if "$" in first and "$" in node and _rest(node) != _rest(first):
            _disagree(path, ranked[0], (rank, node))
        for key, value in _pairs_of(node):
            by_key.setdefault(dumps(key), (key, []))[1].append((rank, value))
    pairs = [[key, _merge(values, [*path, _step(key)])] for key, values in by_key.values()]
    if all("$" not in node for _, node in ranked):
        return dict(pairs)
    merged = {**next(node for _, node in ranked if "$" in node), "items": pairs}
    metadata = [(rank, node["metadata"]) for rank, node in ranked if "metadata" in node]
    if metadata:
        merged["metadata"] = _merge(metadata, [*path, Attr("_metadata")])
    return merged


# ---- fill -----------------------------------------------------------------------------------------------------------

FillArray = Callable[[str, dict[str, Any], object], object]


def fill(
    target: object,
    node: Node,
    array: FillArray,
    *,
    strict: bool = True,
    rank: int | None = None,
    allow_pickle: bool = False,
) -> Filled:
    """Bring what is stored into the user's own tree, in place.

    Arrays of the target go through `array(name, tag, target_leaf)`, which fills the leaf and returns what shall stand
    there (the leaf itself, or None for "the leaf itself"); `target_leaf` is None where the target has no array to fill.
    Dicts, lists and namespaces keep their identity, tuples are rebuilt, other values are replaced. An empty dict or
    list, None and any single value of the target take whatever is stored.
    With `strict`, nothing is touched unless both sides fit; without it, what fits is filled.
    """
    found = rehearse(target, node, rank=rank, allow_pickle=allow_pickle)
    if strict and any((found.missing, found.unexpected, found.mismatched)):
        return found
    return found._replace(tree=put(target, node, array, rank=rank, allow_pickle=allow_pickle))


def put(target: object, node: Node, array: FillArray, *, rank: int | None = None, allow_pickle: bool = False) -> object:
    """`fill` for who has rehearsed and goes on: what fits is filled. What shall stand in the target's place."""
    return _Filler(array, rank, allow_pickle, dry=False).visit(target, node, [])


def look(target: object, node: Node, array: FillArray, *, rank: int | None = None, allow_pickle: bool = False) -> None:
    """Ask for the arrays that `put` will ask for, and touch nothing: what is made of arrays needs them read before."""
    _Filler(array, rank, allow_pickle, dry=True, looking=True).visit(target, node, [])


def is_array(value: object) -> bool:
    """Whether `flatten` would make this value a leaf (torch tensors of any kind, numpy arrays with a Zarr dtype)."""
    torch = tags.loaded_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return True
    if getattr(type(value), "is_ckptfs_array", False):
        return True
    return type(value) in (np.ndarray, np.memmap) and value.dtype.name in ARRAY_DTYPES  # type: ignore[attr-defined]


class _Filler:
    """One walk over target and node together: dry to find out what does not fit, or for which arrays, then for real."""

    def __init__(
        self, array: FillArray, rank: int | None, allow_pickle: bool, *, dry: bool, looking: bool = False
    ) -> None:
        self.array, self.rank, self.allow_pickle, self.dry, self.looking = array, rank, allow_pickle, dry, looking
        self.asks = looking or not dry
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []

    def visit(self, target: object, node: Node, path: list[object]) -> object:
        """What shall stand in the target's place."""
        if type(target) is PerRank:
            return PerRank(self.visit(target.value, node, path))
        if _merge_kind(node) == "per_rank" and self.rank is not None:
            return self.visit(target, _share(node, self.rank, path), path)
        if is_array(target):
            return self._leaf(target, node, path)
        if isinstance(target, (dict, argparse.Namespace, types.SimpleNamespace)) and self._keyed(target):
            return self._mapping(target, node, path)
        if type(target) in (list, tuple) or hasattr(type(target), "_fields"):
            return self._sequence(target, node, path)
        return self._replace(node, path)

    def _keyed(self, target: object) -> bool:
        return not isinstance(target, collections.Counter)  # its keys are data, not structure

    def _replace(self, node: Node, path: list[object]) -> object:
        if not self.asks:
            return None
        reader = _Reader(
            lambda name, tag: self.array(name, tag, None), self.rank, self.allow_pickle, looking=self.looking
        )
        reader.path = path
        return reader.value(node)

    def _mismatch(self, target: object, node: Node, path: list[object], what: str) -> object:
        self.mismatched.append(f"{show_path(path)}: {what} here, {_brief(node)} stored")
        return target

    def _other_kind(self, target: object, node: Node, path: list[object]) -> object:
        """The target is a container of another kind: data is replaced, but not a structure that holds arrays."""
        if _held(target):
            return self._mismatch(target, node, path, f"a {type(target).__name__}")
        return self._replace(node, path)

    def _leaf(self, target: object, node: Node, path: list[object]) -> object:
        if _merge_kind(node) != "array":
            return self._mismatch(target, node, path, "an array")
        value = self.array(node["name"], node, target) if self.asks else None
        return target if value is None else value

    def _mapping(self, target: Any, node: Node, path: list[object]) -> object:
        if _merge_kind(node) not in _PAIRED:
            return self._other_kind(target, node, path)
        own = target if isinstance(target, dict) else vars(target)
        step = Attr if own is not target else _same
        reader = _Reader(_no_array, self.rank, False)
        stored = {reader.value(key): value for key, value in _pairs_of(node)}
        take_all = not own
        self.missing += [show_path([*path, step(key)]) for key in own if key not in stored]
        if not take_all:
            self.unexpected += [show_path([*path, step(key)]) for key in stored if key not in own]
        for key, value in stored.items():
            if key in own or take_all:
                filled = self.visit(own.get(key), value, [*path, step(key)])
                if not self.dry:
                    own[key] = filled
        return target

    def _sequence(self, target: Any, node: Node, path: list[object]) -> object:
        if _merge_kind(node) not in ("list", "tuple", "namedtuple", "torch.Size"):
            return self._other_kind(target, node, path)
        nodes = node if type(node) is list else node["value"] if "value" in node else node["items"]
        if len(nodes) != len(target) and _held(target):
            return self._mismatch(target, node, path, f"{len(target)} items, {len(nodes)} stored")
        if len(nodes) != len(target):
            filled = [self._replace(new, [*path, index]) for index, new in enumerate(nodes)] if self.asks else []
        else:
            filled = [
                self.visit(old, new, [*path, index]) for index, (old, new) in enumerate(zip(target, nodes, strict=True))
            ]
        if self.dry:
            return target
        if isinstance(target, list):
            target[:] = filled
            return target
        return tuple.__new__(type(target), filled)  # past a namedtuple's own __new__, as its _make does


def _same(key: object) -> object:
    return key


def _no_array(name: str, _tag: dict[str, Any]) -> NoReturn:
    raise FormatError(f"the array {name!r} is a dict key")  # pragma: no cover - check() has refused such trees before


def _held(target: object) -> bool:
    """Whether there is an array somewhere in the target: then its structure matters, else it is data to be replaced."""
    if isinstance(target, dict):
        return any(_held(value) for value in target.values())
    if isinstance(target, (list, tuple)):
        return any(_held(value) for value in target)
    if isinstance(target, (argparse.Namespace, types.SimpleNamespace)):
        return _held(vars(target))
    return _held(target.value) if type(target) is PerRank else is_array(target)


def rehearse(target: object, node: Node, *, rank: int | None = None, allow_pickle: bool = False) -> Filled:
    """What `fill` would find missing, unexpected and mismatched; touches nothing."""
    check(node)
    rehearsal = _Filler(lambda name, tag, _: _no_array(name, tag), rank, allow_pickle, dry=True)
    rehearsal.visit(target, node, [])
    return Filled(target, rehearsal.missing, rehearsal.unexpected, rehearsal.mismatched)
