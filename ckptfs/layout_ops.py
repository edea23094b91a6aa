"""The words of a map: formulas for sizes, and operations on one array. Each is data that knows its own inverse.

A formula is an integer, or a text over variables: `n_heads * head_dim`, `head_dim or hidden_size // n_heads`
(`or`: the first that is known). An operation is a JSON object with a key `op`:

    {"op": "rearrange", "pattern": "(head pair two) ... -> (head two pair) ...", "sizes": {"head": "n_heads", "two": 2}}
    {"op": "transpose", "axes": [1, 0]}
    {"op": "reshape", "shape": [...], "was": [...]}
    {"op": "slice" | "pad", "dim": 0, "start": 0, "size": SMALL, "of": LARGE}
    {"op": "cast", "to": "float32", "was": "bfloat16"}

Where a rule has several parts, `"parts": [0, 1]` says for which of them an operation is.
`was` and `of` say what the other side looks like; only the inverse needs them. Parsing is validation: what is not
exactly one of these is a FormatError. What does not fit the arrays at hand is a MismatchError.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptfs import dtypes, expr
from ckptfs.errors import FormatError, MismatchError
from ckptfs.expr import Expr

Json = dict[str, Any]
_FORMULA_LENGTH = 200
_DEEPEST = 16  # variables defined by variables
_LARGEST = 1 << 53  # beyond it, JSON numbers are not integers everywhere
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


class UnknownVariableError(MismatchError):
    """A formula needs a variable that nobody gave."""


class Variables:
    """The numbers that formulas speak of: given ones, and ones that the map derives from them."""

    def __init__(self, given: Mapping[str, Any], derived: Mapping[str, Formula]) -> None:
        self._given = {name: int(value) for name, value in given.items() if isinstance(value, int)}
        self._derived = derived
        self._found: dict[str, int | str] = {}  # values, or why there is none: hostile maps ask the same 2**n times
        self._open: list[str] = []

    def __getitem__(self, name: str) -> int:
        if name in self._given:
            return self._given[name]
        if name not in self._found:
            self._found[name] = self._derive(name)
        found = self._found[name]
        if isinstance(found, str):
            raise UnknownVariableError(found)
        return found

    def _derive(self, name: str) -> int | str:
        if name not in self._derived:
            return f"the map needs the variable {name!r}: pass it in `vars`, or store config.json with the step"
        if name in self._open or len(self._open) > _DEEPEST:
            chain = " -> ".join([*self._open[:8], name])
            raise MismatchError(f"the map defines {name!r} by itself, or through too many others: {chain}")
        self._open.append(name)
        try:
            return self._derived[name].value(self)
        except UnknownVariableError as e:
            return str(e)
        finally:
            self._open.pop()


@dataclass(frozen=True)
class Formula:
    """An integer, written as a number or as a text over variables."""

    text: str | int

    @classmethod
    def parse(cls, value: object, where: str) -> Formula:
        if isinstance(value, int) and not isinstance(value, bool):
            if abs(value) > _LARGEST:
                raise FormatError(f"{where}: {str(value)[:40]} is too large")
            return cls(value)
        if not isinstance(value, str) or not 0 < len(value) <= _FORMULA_LENGTH:
            raise FormatError(f"{where}: expected an integer or a formula over variables, found {_short(value)}")
        try:
            _check_formula(ast.parse(value.strip(), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
            known = "integers, variables, + - * // and `or`"
            raise FormatError(f"{where}: {_short(value)} is no formula of {known}") from e
        return cls(value)

    def value(self, variables: Variables) -> int:
        if isinstance(self.text, int):
            return self.text
        value = _evaluate(ast.parse(self.text.strip(), mode="eval").body, variables)
        if abs(value) > _LARGEST:
            raise MismatchError(f"{self.text!r} is too large: {value:.3g}")
        return value


def _check_formula(node: ast.expr) -> None:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= _LARGEST:
        return
    if isinstance(node, ast.Name):
        return
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        parts = [node.left, node.right]
    elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
        parts = node.values
    else:
        raise ValueError(type(node).__name__)
    for part in parts:
        _check_formula(part)


def _evaluate(node: ast.expr, variables: Variables) -> int:
    if isinstance(node, ast.Name):
        return variables[node.id]
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, variables), _evaluate(node.right, variables)
        if isinstance(node.op, ast.FloorDiv) and (right == 0 or left % right):
            raise MismatchError(f"{ast.unparse(node)}: {left} is not a multiple of {right}")
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.BoolOp):
        for value in node.values[:-1]:
            try:
                return _evaluate(value, variables)
            except UnknownVariableError:
                continue
        return _evaluate(node.values[-1], variables)
    assert isinstance(node, ast.Constant)  # parse() let nothing else in
    assert isinstance(node.value, int)
    return node.value


# --- strict reading of JSON objects --------------------------------------------------------------------------


def _short(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested or numeric beyond what repr shows
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


class Fields:
    """The keys of one JSON object, each read once; what nobody asked for is an error."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise FormatError(f"{where}: expected an object, found {_short(data)}")
        self._data: Json = dict(data)
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._data))

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        if key not in self._data:
            if default is ...:
                raise FormatError(f"{self.where}: {key!r} is missing")
            return default
        value = self._data.pop(key)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise FormatError(f"{self.where}.{key}: expected {names}, found {_short(value)}")
        return value

    def formula(self, key: str, default: Any = ...) -> Formula | None:
        if key not in self._data and default is None:
            return None
        return Formula.parse(self.take(key, (int, str), default), f"{self.where}.{key}")

    def formulas(self, key: str, default: Any = ...) -> tuple[Formula, ...] | None:
        values = self.take(key, list, default)
        if values is None:
            return None
        return tuple(Formula.parse(v, f"{self.where}.{key}[{i}]") for i, v in enumerate(values))

    def small(self, key: str, default: int) -> int:
        """A dimension: a small integer."""
        value: int = self.take(key, int, default)
        if not -64 <= value <= 64:
            raise FormatError(f"{self.where}.{key}: {_short(value)} is no dimension")
        return value

    def end(self) -> None:
        if self._data:
            raise FormatError(f"{self.where}: unknown {', '.join(_short(k) for k in self._data)}")


def without_none(**fields: Any) -> Json:
    return {key: value for key, value in fields.items() if value is not None}


def _texts(formulas: Sequence[Formula] | None) -> list[str | int] | None:
    return None if formulas is None else [formula.text for formula in formulas]


# --- operations ----------------------------------------------------------------------------------------------


class Op(ABC):
    """One array in, one array out."""

    @abstractmethod
    def apply(self, array: Expr, variables: Variables) -> Expr: ...

    @abstractmethod
    def inverse(self) -> Op:
        """The operation that undoes this one, or a MismatchError that says what the map must add."""

    @abstractmethod
    def to_json(self) -> Json: ...


@dataclass(frozen=True)
class Transpose(Op):
    axes: tuple[int, ...]

    def apply(self, array: Expr, variables: Variables) -> Expr:
        return expr.transpose(array, self.axes)

    def inverse(self) -> Op:
        return Transpose(tuple(self.axes.index(d) for d in range(len(self.axes))))

    def to_json(self) -> Json:
        return {"op": "transpose", "axes": list(self.axes)}

    @classmethod
    def parse(cls, fields: Fields) -> Transpose:
        axes = fields.take("axes", list)
        if any(type(a) is not int for a in axes) or sorted(axes) != list(range(len(axes))):
            raise FormatError(f"{fields.where}.axes: {_short(axes)} is not an order of dimensions")
        return cls(tuple(axes))


@dataclass(frozen=True)
class Reshape(Op):
    shape: tuple[Formula, ...]
    was: tuple[Formula, ...] | None

    def apply(self, array: Expr, variables: Variables) -> Expr:
        if self.was is not None and tuple(f.value(variables) for f in self.was) != array.shape:
            raise MismatchError(f"reshape expects an array of shape {_texts(self.was)}, found {array.shape}")
        return expr.reshape(array, [f.value(variables) for f in self.shape])

    def inverse(self) -> Op:
        if self.was is None:
            raise MismatchError("a reshape without `was` has no inverse: add the shape that it had")
        return Reshape(self.was, self.shape)

    def to_json(self) -> Json:
        return without_none(op="reshape", shape=_texts(self.shape), was=_texts(self.was))

    @classmethod
    def parse(cls, fields: Fields) -> Reshape:
        shape = fields.formulas("shape")
        assert shape is not None
        return cls(shape, fields.formulas("was", None))


@dataclass(frozen=True)
class Resize(Op):
    """`slice` keeps `size` indices from `start` of a dimension of length `of`; `pad` is its inverse, with zeros."""

    pads: bool
    dim: int
    start: Formula
    size: Formula | None
    of: Formula | None

    def apply(self, array: Expr, variables: Variables) -> Expr:
        if not -len(array.shape) <= self.dim < len(array.shape):
            raise MismatchError(f"there is no dimension {self.dim} in an array of shape {array.shape}")
        start = self.start.value(variables)
        if self.pads:
            assert self.of is not None
            self._check(array.shape[self.dim], self.size, variables)
            return expr.pad(array, self.dim, start, self.of.value(variables))
        assert self.size is not None
        self._check(array.shape[self.dim], self.of, variables)
        return expr.cut(array, self.dim, start, start + self.size.value(variables))

    def _check(self, length: int, expected: Formula | None, variables: Variables) -> None:
        """The length before: it is for the inverse, so here it is compared only when its variables are known."""
        try:
            known = length if expected is None else expected.value(variables)
        except UnknownVariableError:
            return
        if known != length:
            word = "pad" if self.pads else "slice"
            raise MismatchError(f"{word} expects {known} indices in dimension {self.dim}, found {length}")

    def inverse(self) -> Op:
        if self.size is None or self.of is None:
            word, key = ("pad", "size") if self.pads else ("slice", "of")
            raise MismatchError(f"a {word} without `{key}` has no inverse: add the length that the dimension had")
        return Resize(not self.pads, self.dim, self.start, self.size, self.of)

    def to_json(self) -> Json:
        size, of = self.size and self.size.text, self.of and self.of.text
        op = "pad" if self.pads else "slice"
        return without_none(op=op, dim=self.dim, start=self.start.text, size=size, of=of)

    @classmethod
    def parse(cls, pads: bool, fields: Fields) -> Resize:
        start = fields.formula("start", 0)
        assert start is not None
        size = fields.formula("size", None) if pads else fields.formula("size")
        of = fields.formula("of") if pads else fields.formula("of", None)
        return cls(pads, fields.small("dim", 0), start, size, of)


@dataclass(frozen=True)
class Cast(Op):
    to: str
    was: str | None

    def apply(self, array: Expr, variables: Variables) -> Expr:
        if self.was is not None and array.dtype != self.was:
            raise MismatchError(f"cast expects {self.was}, found {array.dtype}")
        return expr.cast(array, self.to)

    def inverse(self) -> Op:
        if self.was is None:
            raise MismatchError("a cast without `was` has no inverse: add the element type that it had")
        return Cast(self.was, self.to)

    def to_json(self) -> Json:
        return without_none(op="cast", to=self.to, was=self.was)

    @classmethod
    def parse(cls, fields: Fields) -> Cast:
        to, was = fields.take("to", str), fields.take("was", str, None)
        for name in (to, was):
            if name is not None and name not in dtypes.BY_NAME:
                raise FormatError(f"{fields.where}: unknown element type {_short(name)}")
        return cls(to, was)


_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([A-Za-z_][A-Za-z0-9_]*)|([()]))")
_REST = "..."
Side = tuple[tuple[str, ...], ...]  # one entry for each dimension: the axes merged in it; ("...",): all further ones


@dataclass(frozen=True)
class Rearrange(Op):
    """Dimensions split into named axes, reordered, and merged again."""

    left: Side
    right: Side
    sizes: tuple[tuple[str, Formula], ...]

    def apply(self, array: Expr, variables: Variables) -> Expr:
        rest = len(array.shape) - (len(self.left) - ((_REST,) in self.left))
        if rest < 0 or (rest and (_REST,) not in self.left):
            raise MismatchError(f"pattern {_side_text(self.left)!r} does not fit an array of shape {array.shape}")
        rest_names = tuple(f"...{i}" for i in range(rest))
        left, right = _with_rest(self.left, rest_names), _with_rest(self.right, rest_names)
        sizes = self._axis_sizes(left, array.shape, variables)
        before, after = [a for dim in left for a in dim], [a for dim in right for a in dim]
        split = expr.reshape(array, [sizes[a] for a in before])
        ordered = expr.transpose(split, [before.index(a) for a in after])
        return expr.reshape(ordered, [prod(sizes[a] for a in dim) for dim in right])

    def _axis_sizes(self, left: Side, shape: tuple[int, ...], variables: Variables) -> dict[str, int]:
        sizes = {name: formula.value(variables) for name, formula in self.sizes}
        for dim, length in zip(left, shape, strict=True):
            unknown = [axis for axis in dim if axis not in sizes]
            known = prod(sizes[axis] for axis in dim if axis in sizes)
            if len(unknown) == 1 and known > 0 and length % known == 0:
                sizes[unknown[0]] = length // known
            elif unknown or known != length:
                listed = ", ".join(f"{axis}={sizes.get(axis, '?')}" for axis in dim)
                raise MismatchError(f"length {length} is not ({listed}), in an array of shape {shape}")
        return sizes

    def inverse(self) -> Op:
        names = {name for name, _ in self.sizes}
        for dim in self.right:
            unknown = [axis for axis in dim if axis not in names]
            if len(unknown) > 1:
                raise MismatchError(f"{self.pattern!r} has no inverse: give the size of one of {', '.join(unknown)}")
        return Rearrange(self.right, self.left, self.sizes)

    @property
    def pattern(self) -> str:
        return f"{_side_text(self.left)} -> {_side_text(self.right)}"

    def to_json(self) -> Json:
        sizes = {name: formula.text for name, formula in self.sizes} or None
        return without_none(op="rearrange", pattern=self.pattern, sizes=sizes)

    @classmethod
    def parse(cls, fields: Fields) -> Rearrange:
        pattern, sizes = fields.take("pattern", str), Fields(fields.take("sizes", dict, {}), f"{fields.where}.sizes")
        where = f"{fields.where}.pattern"
        sides = pattern.split("->")
        if len(sides) != 2 or len(pattern) > _FORMULA_LENGTH:
            raise FormatError(f"{where}: expected 'axes -> axes', found {_short(pattern)}")
        left, right = (_parse_side(side, where) for side in sides)
        axes = sorted(axis for dim in left for axis in dim)
        if axes != sorted(axis for dim in right for axis in dim) or len(set(axes)) != len(axes):
            raise FormatError(f"{where}: both sides of {_short(pattern)} must name the same axes, each once")
        known = [(axis, sizes.formula(axis)) for axis in axes if axis in sizes]
        sizes.end()
        op = cls(left, right, tuple((axis, formula) for axis, formula in known if formula is not None))
        for dim in left:
            if len([axis for axis in dim if axis not in dict(op.sizes)]) > 1:
                raise FormatError(f"{where}: give all but one of the sizes of ({' '.join(dim)})")
        return op


def _parse_side(text: str, where: str) -> Side:
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    text = text.strip()
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise FormatError(f"{where}: {_short(text[at:])} is no axis, parenthesis or ...")
        at = token.end()
        rest, axis, parenthesis = token.groups()
        if parenthesis == "(" and group is None:
            group = []
        elif parenthesis == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif axis and group is not None:
            group.append(axis)
        elif (axis or rest) and group is None:
            dims.append((axis or rest,))
        else:
            raise FormatError(f"{where}: parentheses do not pair, or ... stands in one, in {_short(text)}")
    if group is not None:
        raise FormatError(f"{where}: a parenthesis is not closed in {_short(text)}")
    return tuple(dims)


def _side_text(side: Side) -> str:
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in side)


def _with_rest(side: Side, names: tuple[str, ...]) -> Side:
    return tuple(part for dim in side for part in ([(n,) for n in names] if dim == (_REST,) else [dim]))


@dataclass(frozen=True)
class OnParts(Op):
    """An operation on some of the parts that a rule joins or splits into; the others stay as they are."""

    op: Op
    parts: tuple[int, ...]

    def apply(self, array: Expr, variables: Variables) -> Expr:
        return self.op.apply(array, variables)

    def inverse(self) -> Op:
        return OnParts(self.op.inverse(), self.parts)

    def to_json(self) -> Json:
        return self.op.to_json() | {"parts": list(self.parts)}


def parse_op(data: object, where: str, parts: int = 1) -> Op:
    """An operation; where it stands for several parts, it may say for which of them it is."""
    fields = Fields(data, where)
    chosen = fields.take("parts", list, None) if parts > 1 else None
    if chosen is not None and not (
        all(type(at) is int and 0 <= at < parts for at in chosen) and 0 < len(set(chosen)) == len(chosen)
    ):
        raise FormatError(f"{where}.parts: {_short(chosen)} is no choice of the parts 0 to {parts - 1}")
    kind = fields.take("op", str)
    parsers: dict[str, Callable[[Fields], Op]] = {
        "rearrange": Rearrange.parse,
        "transpose": Transpose.parse,
        "reshape": Reshape.parse,
        "slice": lambda f: Resize.parse(False, f),
        "pad": lambda f: Resize.parse(True, f),
        "cast": Cast.parse,
    }
    if kind not in parsers:
        raise FormatError(f"{where}.op: unknown operation {_short(kind)}; known: {', '.join(parsers)}")
    op = parsers[kind](fields)
    fields.end()
    return op if chosen is None else OnParts(op, tuple(chosen))
