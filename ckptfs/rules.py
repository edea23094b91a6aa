"""Name-and-layout maps: training names and layouts seen as others, usually Hugging Face's, without moving a byte.

A *map* is data: a list of rules. A rule takes the sources whose names fit `from`, and makes targets named `to`:

    each → stack → concat → ops → split → unstack → then      (every part is optional)

`compile_map` applies a map to the names, shapes and dtypes of a checkpoint and gives a `Mapped`: target name →
`Expr`, whose boxes read only the source bytes that they need. Nothing is guessed: a source that no rule matches, or
two match, a target made twice, a group with a member missing are errors that name what is wrong. `invert` gives the
map for the other direction; the seven parts mirror each other.

Pure: no I/O, no threads, no torch. docs/rules.md describes the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import numpy as np

from ckptfs import dtypes, expr
from ckptfs.box import boxes_of_range
from ckptfs.errors import FormatError, MismatchError
from ckptfs.expr import Expr, Fetch, Source
from ckptfs.layout_ops import Fields, Formula, Json, OnParts, Op, Variables, parse_op, without_none

VERSION = 1
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(:int|\.\.\.)?\}")
_KINDS = {":int": "(0|[1-9][0-9]{0,17})", "...": "(.+)", None: "([^./]+)"}
_FREE = 4  # more placeholders for text would make matching slow, for names chosen to be so
Bindings = dict[str, str]
Key = tuple[tuple[str, str], ...]
T = TypeVar("T")


# --- patterns of names ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A name with placeholders: `{i:int}` a number, `{name}` a part without `.` and `/`, `{rest...}` anything."""

    text: str

    def __post_init__(self) -> None:
        bare = _PLACEHOLDER.sub("", self.text)
        if not self.text or "{" in bare or "}" in bare:
            kinds = "{i:int}, {name}, {rest...}"
            raise FormatError(f"{self.text[:80]!r} is no name pattern; placeholders are {kinds}")
        if len(set(self.names)) != len(self.names):
            raise FormatError(f"{self.text[:80]!r} uses a placeholder twice")
        if "}{" in self.text or sum(kind != ":int" for kind in self.kinds.values()) > _FREE:
            raise FormatError(
                f"{self.text[:80]!r} is ambiguous: placeholders side by side, or more than {_FREE} of text"
            )

    @cached_property
    def _prefix(self) -> str:
        return self.text.split("{", 1)[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        """Made for the first name that it may fit: most patterns of the built-in maps never meet one."""
        parts, at = [], 0
        for found in _PLACEHOLDER.finditer(self.text):
            parts += [re.escape(self.text[at : found.start()]), _KINDS[found[2]]]
            at = found.end()
        return re.compile("".join([*parts, re.escape(self.text[at:])]), re.DOTALL | re.ASCII)

    @property
    def names(self) -> list[str]:
        return [found[1] for found in _PLACEHOLDER.finditer(self.text)]

    @property
    def kinds(self) -> dict[str, str]:
        return {found[1]: found[2] or "" for found in _PLACEHOLDER.finditer(self.text)}

    def match(self, name: str) -> Bindings | None:
        if not name.startswith(self._prefix):
            return None
        found = self._regex.fullmatch(name)
        return None if found is None else dict(zip(self.names, found.groups(), strict=True))

    def fill(self, bindings: Mapping[str, str]) -> str:
        """The name; a placeholder without a value stays as it is."""
        return _PLACEHOLDER.sub(lambda found: bindings.get(found[1], "{" + found[1] + "}"), self.text)

    def typed(self, kinds: Mapping[str, str]) -> Pattern:
        """The same pattern with these kinds of placeholders."""
        return Pattern(_PLACEHOLDER.sub(lambda found: "{" + found[1] + kinds[found[1]] + "}", self.text))


# --- the parts of a rule -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pile:
    """`stack` or `unstack`: members numbered 0, 1, … by a placeholder, against one array with one more dimension."""

    over: str
    dim: int
    count: Formula | None

    def to_json(self) -> Json:
        return without_none(over=self.over, dim=self.dim, count=self.count and self.count.text)

    @classmethod
    def parse(cls, data: object, where: str) -> Pile:
        fields = Fields(data, where)
        pile = cls(fields.take("over", str), fields.small("dim", 0), fields.formula("count", None))
        fields.end()
        return pile


@dataclass(frozen=True)
class Parts:
    """`concat` or `split`: several patterns against one array, of these sizes (None: all equal) in a dimension."""

    dim: int
    sizes: tuple[Formula, ...] | None

    def to_json(self) -> Json:
        return without_none(dim=self.dim, sizes=[f.text for f in self.sizes] if self.sizes is not None else None)

    @classmethod
    def parse(cls, data: object, where: str, parts: int) -> Parts:
        fields = Fields(data, where)
        sizes = fields.formulas("sizes", None)
        if sizes is not None and len(sizes) != parts:
            raise FormatError(f"{where}: {len(sizes)} sizes for {parts} names")
        found = cls(fields.small("dim", 0), sizes)
        fields.end()
        return found


@dataclass(frozen=True)
class Condition:
    """`when` or `unless`: the rule exists only if the formula is not zero (or is)."""

    formula: Formula
    wanted: bool

    def holds(self, variables: Variables) -> bool:
        return bool(self.formula.value(variables)) == self.wanted

    def to_json(self) -> Json:
        return {"when" if self.wanted else "unless": self.formula.text}


@dataclass(frozen=True)
class Rule:
    """Sources that fit `origin` (`from` in JSON) become targets named `to`."""

    origin: tuple[Pattern, ...]
    to: tuple[Pattern, ...]
    each: tuple[Op, ...] = ()
    stack: Pile | None = None
    concat: Parts | None = None
    ops: tuple[Op, ...] = ()
    split: Parts | None = None
    unstack: Pile | None = None
    then: tuple[Op, ...] = ()
    condition: Condition | None = None
    one_way: bool = False

    def to_json(self) -> Json:
        parts: Json = {"from": _one_or_all(self.origin), "to": _one_or_all(self.to)}
        for key in ("stack", "concat", "split", "unstack"):
            value = getattr(self, key)
            parts |= {key: value.to_json()} if value else {}
        for key in ("each", "ops", "then"):
            parts |= {key: [op.to_json() for op in getattr(self, key)]} if getattr(self, key) else {}
        parts |= self.condition.to_json() if self.condition else {}
        return parts | ({"one_way": True} if self.one_way else {})

    def inverse(self) -> Rule:
        kinds = {name: kind for pattern in self.origin for name, kind in pattern.kinds.items()}
        if self.unstack:
            kinds.setdefault(self.unstack.over, ":int")
        for pattern in self.to:
            lost = set(kinds) - set(pattern.names) - {self.stack.over if self.stack else ""}
            if lost:
                raise MismatchError(f"{pattern.text!r} does not say {{{min(lost)}}}: names cannot be mapped back")
        return Rule(
            origin=tuple(pattern.typed(kinds) for pattern in self.to),
            to=tuple(pattern.typed(dict.fromkeys(kinds, "")) for pattern in self.origin),
            each=_inverse_ops(self.then),
            stack=self.unstack,
            concat=self.split,
            ops=_inverse_ops(self.ops),
            split=self.concat,
            unstack=self.stack,
            then=_inverse_ops(self.each),
            condition=self.condition,
        )


@dataclass(frozen=True)
class Ignore:
    """Sources that no target needs."""

    origin: Pattern

    def to_json(self) -> Json:
        return {"from": self.origin.text, "ignore": True}


@dataclass(frozen=True)
class Drop:
    """A source that another one equals (tied weights): the target has only the other."""

    origin: Pattern
    equal: Pattern
    condition: Condition | None
    one_way: bool = False

    def to_json(self) -> Json:
        parts: Json = {"from": self.origin.text, "drop_if_equal": self.equal.text}
        parts |= self.condition.to_json() if self.condition else {}
        return parts | ({"one_way": True} if self.one_way else {})


@dataclass(frozen=True)
class Alias:
    """A target that is another target under a second name: the inverse of a drop."""

    name: str
    of: str
    condition: Condition | None

    def to_json(self) -> Json:
        return {"alias": self.name, "of": self.of} | (self.condition.to_json() if self.condition else {})


AnyRule = Rule | Ignore | Drop | Alias


def _one_or_all(patterns: tuple[Pattern, ...]) -> str | list[str]:
    return patterns[0].text if len(patterns) == 1 else [pattern.text for pattern in patterns]


def _inverse_ops(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    return tuple(op.inverse() for op in reversed(ops))


# --- the map: parsing is validation --------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A whole map. An instance that exists is well formed."""

    name: str
    rules: tuple[AnyRule, ...]
    about: str = ""
    roots: tuple[str, ...] = ("",)  # the first under which there are sources; only those are seen
    strip: tuple[str, ...] = ()  # prefixes that do not count
    remove: tuple[str, ...] = ()  # infixes that do not count, wherever they stand
    detect: tuple[Pattern, ...] = ()
    variables: Mapping[str, Formula] = field(default_factory=dict)

    def to_json(self) -> Json:
        head: Json = {"ckptfs_map": VERSION, "name": self.name}
        head |= {"about": self.about} if self.about else {}
        for key in ("roots", "strip", "remove"):
            head[key] = list(getattr(self, key))
        head["detect"] = [pattern.text for pattern in self.detect]
        head["vars"] = {name: formula.text for name, formula in self.variables.items()}
        return head | {"rules": [rule.to_json() for rule in self.rules]}

    def scope(self, names: Iterable[str]) -> dict[str, str]:
        """Name as the rules see it → name of the source."""
        names = list(names)
        root = next((r for r in self.roots if any(name.startswith(r) for name in names)), None)
        seen: dict[str, str] = {}
        for name in names:
            if root is None or not name.startswith(root):
                continue
            bare = self._bare(name.removeprefix(root))
            if bare in seen:
                raise MismatchError(f"map {self.name!r}: sources {seen[bare]!r} and {name!r} both count as {bare!r}")
            seen[bare] = name
        return seen

    def _bare(self, name: str) -> str:
        for infix in self.remove:
            name = name.replace(infix, "")
        while prefix := next((p for p in self.strip if name.startswith(p) and len(name) > len(p)), None):
            name = name.removeprefix(prefix)
        return name

    def fits(self, names: Iterable[str]) -> bool:
        """Whether a name has a sign of this map and every name in scope has a rule."""
        try:
            seen = self.scope(names)
        except MismatchError:
            return False
        signed = any(pattern.match(name) is not None for pattern in self.detect for name in seen)
        return signed and all(any(_matches(rule, name) for rule in self.rules) for name in seen)


def loads(text: str | bytes) -> Map:
    """A map from JSON text; anything else is a FormatError."""
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except FormatError:
        raise
    except (ValueError, RecursionError) as e:
        raise FormatError(f"the map is not JSON: {e}. A map is described in docs/rules.md.") from e
    return parse(data)


def dumps(rules: Map) -> str:
    return json.dumps(rules.to_json(), indent=1)


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise FormatError(f"the map has the key {twice[:80]!r} twice in one object")
    return data


def _no_constant(text: str) -> NoReturn:
    raise FormatError(f"the map holds {text}, which is not JSON")


def parse(data: object) -> Map:
    """A map from parsed JSON."""
    fields = Fields(data, "map")
    version = fields.take("ckptfs_map", int)
    if version != VERSION:
        raise FormatError(f"the map has version {str(version)[:40]}; this ckptfs reads version {VERSION}: upgrade it")
    variables = Fields(fields.take("vars", dict, {}), "map.vars")
    derived = {name: formula for name in variables if (formula := variables.formula(name)) is not None}
    for name in derived:
        if not name.isidentifier():
            raise FormatError(f"map.vars: {name[:80]!r} is no name of a variable")
    rules = Map(
        name=fields.take("name", str),
        about=fields.take("about", str, ""),
        roots=_strings(fields, "roots", [""]) or ("",),
        strip=_strings(fields, "strip", []),
        remove=_strings(fields, "remove", []),
        detect=tuple(Pattern(text) for text in _strings(fields, "detect", [])),
        variables=derived,
        rules=tuple(_parse_rule(rule, f"rules[{i}]") for i, rule in enumerate(fields.take("rules", list))),
    )
    fields.end()
    if "" in rules.strip or "" in rules.remove:
        raise FormatError("map: an empty text in strip or remove")
    return rules


def _strings(fields: Fields, key: str, default: list[str]) -> tuple[str, ...]:
    values = fields.take(key, list, default)
    if any(not isinstance(value, str) for value in values):
        raise FormatError(f"{fields.where}.{key}: expected a list of texts")
    return tuple(values)


def _parse_rule(data: object, where: str) -> AnyRule:
    fields = Fields(data, where)
    rule: AnyRule
    if "ignore" in fields:
        rule = Ignore(Pattern(fields.take("from", str)))
        if fields.take("ignore", bool) is not True:
            raise FormatError(f"{where}.ignore can only be true")
    elif "drop_if_equal" in fields:
        rule = _parse_drop(fields)
    elif "alias" in fields:
        rule = Alias(fields.take("alias", str), fields.take("of", str), _condition(fields))
    else:
        rule = _parse_mapping(fields)
    fields.end()
    return rule


def _parse_drop(fields: Fields) -> Drop:
    origin, equal = Pattern(fields.take("from", str)), Pattern(fields.take("drop_if_equal", str))
    rule = Drop(origin, equal, _condition(fields), fields.take("one_way", bool, False))
    if not set(rule.equal.names) <= set(rule.origin.names):
        raise FormatError(f"{fields.where}.drop_if_equal uses a placeholder that `from` does not have")
    return rule


def _condition(fields: Fields) -> Condition | None:
    if "when" in fields and "unless" in fields:
        raise FormatError(f"{fields.where}: either when or unless")
    for key, wanted in (("when", True), ("unless", False)):
        formula = fields.formula(key, None)
        if formula is not None:
            return Condition(formula, wanted)
    return None


def _patterns(fields: Fields, key: str) -> tuple[Pattern, ...]:
    value = fields.take(key, (str, list))
    texts = [value] if isinstance(value, str) else value
    if not texts or any(not isinstance(text, str) for text in texts):
        raise FormatError(f"{fields.where}.{key}: expected a name pattern or a list of them")
    return tuple(Pattern(text) for text in texts)


def _ops(fields: Fields, key: str, parts: int = 1) -> tuple[Op, ...]:
    ops = enumerate(fields.take(key, list, []))
    return tuple(parse_op(op, f"{fields.where}.{key}[{i}]", parts) for i, op in ops)


def _optional(fields: Fields, key: str, make: Callable[[object, str], T]) -> T | None:
    return make(fields.take(key, dict), f"{fields.where}.{key}") if key in fields else None


def _parse_mapping(fields: Fields) -> Rule:
    origin, to = _patterns(fields, "from"), _patterns(fields, "to")
    rule = Rule(
        origin=origin,
        to=to,
        each=_ops(fields, "each", len(origin)),
        stack=_optional(fields, "stack", Pile.parse),
        concat=_optional(fields, "concat", lambda data, where: Parts.parse(data, where, len(origin))),
        ops=_ops(fields, "ops"),
        split=_optional(fields, "split", lambda data, where: Parts.parse(data, where, len(to))),
        unstack=_optional(fields, "unstack", Pile.parse),
        then=_ops(fields, "then", len(to)),
        condition=_condition(fields),
        one_way=fields.take("one_way", bool, False),
    )
    _check_rule(rule, fields.where)
    return rule


def _check_rule(rule: Rule, where: str) -> None:
    """The placeholders and the number of names agree with what joins and parts them."""
    if (len(rule.origin) > 1) != (rule.concat is not None):
        raise FormatError(f"{where}: several names in `from` need `concat`, and concat needs several")
    if (len(rule.to) > 1) != (rule.split is not None):
        raise FormatError(f"{where}: several names in `to` need `split`, and split needs several")
    bound = set(rule.origin[0].names)
    if any(pattern.kinds != rule.origin[0].kinds for pattern in rule.origin):
        raise FormatError(f"{where}: all names in `from` must have the same placeholders")
    if rule.stack is not None:
        if rule.origin[0].kinds.get(rule.stack.over) != ":int":
            raise FormatError(f"{where}: stack over {rule.stack.over[:40]!r} needs that placeholder as int in `from`")
        bound -= {rule.stack.over}
    if rule.unstack is not None:
        if rule.unstack.over in bound:
            raise FormatError(f"{where}: unstack over {rule.unstack.over[:40]!r}, which `from` already has")
        bound |= {rule.unstack.over}
    for pattern in rule.to:
        if not set(pattern.names) <= bound:
            raise FormatError(f"{where}: {pattern.text[:80]!r} uses a placeholder that `from` does not have")
        if rule.unstack is not None and rule.unstack.over not in pattern.names:
            raise FormatError(f"{where}: {pattern.text[:80]!r} does not say which index of the stack it is")


# --- compiling: a map and the names of a checkpoint ----------------------------------------------------------


class Mapped(Mapping[str, Expr]):
    """Target name → expression over the sources."""

    def __init__(self, targets: dict[str, Expr], ignored: list[str], dropped: dict[str, str]) -> None:
        self._targets = targets
        self.ignored = ignored
        self.dropped = dropped  # source left out → the source it must equal

    def __getitem__(self, name: str) -> Expr:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __repr__(self) -> str:
        return f"<Mapped: {len(self)} targets>"


@dataclass
class _Match:
    rule: AnyRule
    number: int
    pattern: int
    bindings: Bindings


def compile_map(
    rules: Map,
    sources: Mapping[str, tuple[Sequence[int], str]],
    variables: Mapping[str, Any] | None = None,
    *,
    equal: Callable[[str, str], bool] | None = None,
) -> Mapped:
    """The targets of a map over sources (name → shape, dtype).

    `variables`: what config.json says (`variables_of`) and what the caller adds. `equal(a, b)` says whether two
    sources hold the same values; without it the pairs stay in `Mapped.dropped` for `check_dropped`.
    """
    return _Compiler(rules, sources, Variables(variables or {}, rules.variables), equal).run()


class _Compiler:
    def __init__(
        self,
        rules: Map,
        sources: Mapping[str, tuple[Sequence[int], str]],
        variables: Variables,
        equal: Callable[[str, str], bool] | None,
    ) -> None:
        self.map, self.sources, self.variables, self.equal = rules, sources, variables, equal
        self.seen = rules.scope(sources)
        self.targets: dict[str, Expr] = {}
        self.made_by: dict[str, int] = {}
        self.mapped = Mapped(self.targets, [], {})

    def run(self) -> Mapped:
        groups: dict[tuple[int, Key], list[tuple[int, Bindings, str]]] = {}
        for name in self.seen:
            match = self._match(name)
            if isinstance(match.rule, Ignore):
                self.mapped.ignored.append(self.seen[name])
            elif isinstance(match.rule, Drop):
                self._drop(name, match.rule.equal.fill(match.bindings), match.number)
            else:
                assert isinstance(match.rule, Rule)  # an alias has no pattern that a source could match
                over = match.rule.stack.over if match.rule.stack else None
                key = tuple((k, v) for k, v in match.bindings.items() if k != over)
                groups.setdefault((match.number, tuple(sorted(key))), []).append((match.pattern, match.bindings, name))
        for (number, key), members in groups.items():
            rule = self.map.rules[number]
            assert isinstance(rule, Rule)
            self._make(rule, number, dict(key), members)
        self._aliases()
        return self.mapped

    def _where(self, number: int) -> str:
        return f"map {self.map.name!r}, rule {number}"

    def _match(self, name: str) -> _Match:
        possible = [
            _Match(rule, number, at, bindings)
            for number, rule in enumerate(self.map.rules)
            for at, pattern in enumerate(_origins(rule))
            if (bindings := pattern.match(name)) is not None
        ]
        found = [match for match in possible if self._holds(match.rule)]
        if len(found) == 1:
            return found[0]
        source = self.seen[name]
        if found:
            numbers = ", ".join(str(match.number) for match in found)
            raise MismatchError(f"map {self.map.name!r}: source {source!r} matches more than one rule: {numbers}")
        off = "".join(f" (rule {m.number} would, but its condition does not hold)" for m in possible)
        hint = "add a rule, or one with `ignore`"
        raise MismatchError(f"map {self.map.name!r}: no rule matches source {source!r}{off}: {hint}")

    def _holds(self, rule: AnyRule) -> bool:
        condition = None if isinstance(rule, Ignore) else rule.condition
        return condition is None or condition.holds(self.variables)

    def _drop(self, name: str, other: str, number: int) -> None:
        source = self.seen[name]
        where = f"{self._where(number)}: {source!r} is to be dropped as equal to {other!r}"
        if other not in self.seen or other == name:
            raise MismatchError(f"{where}, which is not among the sources: map it by a rule of its own")
        kept = self.seen[other]
        if _described(self.sources[source]) != _described(self.sources[kept]):
            found = f"{self.sources[source]} and {self.sources[kept]}"
            raise MismatchError(f"{where}, but their shapes or dtypes differ: {found}")
        if self.equal is not None and not self.equal(source, kept):
            raise MismatchError(f"{where}, but their values differ: the weights are not tied, map both")
        self.mapped.dropped[source] = kept

    def _make(self, rule: Rule, number: int, key: Bindings, members: list[tuple[int, Bindings, str]]) -> None:
        try:
            made = list(self._targets_of(rule, key, members))
        except MismatchError as e:
            listed = ", ".join(repr(self.seen[name]) for _, _, name in members[:3])
            raise type(e)(f"{self._where(number)}, from {listed}: {e}") from e
        for name, array in made:
            self._add(name, array, number)

    def _add(self, name: str, made: Expr, number: int) -> None:
        if name in self.targets:
            other = self.made_by[name]
            raise MismatchError(f"{self._where(number)}: target {name!r} is made twice, also by rule {other}")
        self.targets[name] = made
        self.made_by[name] = number

    def _targets_of(
        self, rule: Rule, key: Bindings, members: list[tuple[int, Bindings, str]]
    ) -> Iterator[tuple[str, Expr]]:
        columns = [self._column(rule, at, key, members) for at in range(len(rule.origin))]
        array = self._concat(rule, columns) if rule.concat else columns[0]
        array = self._apply(rule.ops, array)
        parts = self._split(array, rule.split, len(rule.to)) if rule.split else [array]
        for at, (pattern, part) in enumerate(zip(rule.to, parts, strict=True)):
            if rule.unstack is None:
                yield pattern.fill(key), self._apply(rule.then, part, at)
                continue
            for index in range(self._count(rule.unstack, part)):
                one = expr.pick(part, rule.unstack.dim, index)
                yield pattern.fill(key | {rule.unstack.over: str(index)}), self._apply(rule.then, one, at)

    def _column(self, rule: Rule, at: int, key: Bindings, members: list[tuple[int, Bindings, str]]) -> Expr:
        """The sources of one `from` pattern as one array."""
        pattern = rule.origin[at]
        if rule.stack is None:
            names = [name for i, _, name in members if i == at]
            self._missing([] if names else [pattern.fill(key)])
            return self._source(rule, at, names[0])
        over = rule.stack.over
        numbered = {int(bindings[over]): name for i, bindings, name in members if i == at}
        count = rule.stack.count
        last = max(int(bindings[over]) for _, bindings, _ in members)
        wanted = last + 1 if count is None else count.value(self.variables)
        if last >= wanted:
            raise MismatchError(f"{pattern.fill(key)}: there is a number {last}, but only {wanted} are expected")
        if wanted > 2 * len(self.seen) + 1:  # a stray number must not make a list of billions
            raise MismatchError(f"{pattern.fill(key)}: {wanted} members are expected, {len(numbered)} are there")
        self._missing([pattern.fill(key | {over: str(i)}) for i in range(wanted) if i not in numbered])
        return expr.stack([self._source(rule, at, numbered[i]) for i in range(wanted)], rule.stack.dim)

    def _missing(self, names: list[str]) -> None:
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise MismatchError(f"missing sources: {', '.join(names[:8])}{more}")

    def _source(self, rule: Rule, at: int, name: str) -> Expr:
        shape, dtype = _described(self.sources[self.seen[name]])
        return self._apply(rule.each, Source(self.seen[name], shape, dtype), at)

    def _apply(self, ops: tuple[Op, ...], array: Expr, part: int = 0) -> Expr:
        for op in ops:
            if not isinstance(op, OnParts) or part in op.parts:
                array = op.apply(array, self.variables)
        return array

    def _concat(self, rule: Rule, columns: list[Expr]) -> Expr:
        assert rule.concat is not None
        dim, sizes = rule.concat.dim, rule.concat.sizes
        joined = expr.concat(columns, dim)
        lengths = [column.shape[dim] for column in columns]
        if sizes is None and len(set(lengths)) > 1:
            raise MismatchError(f"parts of sizes {lengths} are not equal: give `sizes` in concat")
        if sizes is not None and [size.value(self.variables) for size in sizes] != lengths:
            raise MismatchError(f"concat expects sizes {[size.text for size in sizes]}, found {lengths}")
        return joined

    def _split(self, array: Expr, parts: Parts, count: int) -> list[Expr]:
        if parts.sizes is None:
            return expr.split_equally(array, parts.dim, count)
        return expr.split(array, parts.dim, [size.value(self.variables) for size in parts.sizes])

    def _count(self, pile: Pile, array: Expr) -> int:
        if not -len(array.shape) <= pile.dim < len(array.shape):
            raise MismatchError(f"there is no dimension {pile.dim} to unstack in an array of shape {array.shape}")
        found = array.shape[pile.dim]
        if pile.count is not None and pile.count.value(self.variables) != found:
            raise MismatchError(f"unstack expects {pile.count.text} members, found {found}")
        return found

    def _aliases(self) -> None:
        for number, rule in enumerate(self.map.rules):
            if isinstance(rule, Alias) and rule.of in self.targets and self._holds(rule):
                self._add(rule.name, self.targets[rule.of], number)


def _described(source: tuple[Sequence[int], str]) -> tuple[tuple[int, ...], str]:
    shape, dtype = source
    return tuple(shape), dtypes.of(dtype).name


def _origins(rule: AnyRule) -> tuple[Pattern, ...]:
    if isinstance(rule, Alias):
        return ()
    return rule.origin if isinstance(rule, Rule) else (rule.origin,)


def _matches(rule: AnyRule, name: str) -> bool:
    return any(pattern.match(name) is not None for pattern in _origins(rule))


def check_dropped(mapped: Mapped, sources: Mapping[str, tuple[Sequence[int], str]], fetch: Fetch) -> None:
    """Read what was dropped and what it must equal, 1 Mi elements at a time; a difference is a MismatchError."""
    for name, kept in mapped.dropped.items():
        shape, dtype = _described(sources[name])
        carrier = dtypes.of(dtype).carrier
        total = int(np.prod(shape, dtype=object))
        for start in range(0, total, 1 << 20):
            for box in boxes_of_range(start, min(start + (1 << 20), total), shape):
                one, other = (np.ascontiguousarray(fetch(n, box)).view(carrier) for n in (name, kept))
                if one.tobytes() != other.tobytes():
                    where = f"box {box.start}..{box.stop}"
                    raise MismatchError(f"{name!r} was to be dropped as equal to {kept!r}, but they differ in {where}")


def variables_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The variables that a Hugging Face config.json gives: its integers and truth values, those of text_config too."""
    text = config.get("text_config")
    merged = {**config, **(text if isinstance(text, Mapping) else {})}
    return {key: int(value) for key, value in merged.items() if isinstance(value, int)}


# --- the other direction -------------------------------------------------------------------------------------


def invert(rules: Map) -> Map:
    """The map from targets back to (bare) source names; a MismatchError names the rule that has no inverse.

    Rules marked `one_way` and `ignore` rules are left out; `roots`, `strip` and `remove` are not put back.
    """
    inverted: list[AnyRule] = []
    for number, rule in enumerate(rules.rules):
        if isinstance(rule, Ignore) or (isinstance(rule, Rule | Drop) and rule.one_way):
            continue
        try:
            inverted.append(_inverse_rule(rule))
        except MismatchError as e:
            raise MismatchError(f"map {rules.name!r}, rule {number}: {e}, or mark the rule one_way") from e
    return replace(
        rules, name=f"{rules.name}, inverted", rules=tuple(inverted), roots=("",), strip=(), remove=(), detect=()
    )


def _inverse_rule(rule: Rule | Drop | Alias) -> Rule | Drop | Alias:
    if isinstance(rule, Rule):
        return rule.inverse()
    if isinstance(rule, Alias):
        return Drop(Pattern(rule.name), Pattern(rule.of), rule.condition)
    if rule.origin.names:
        raise MismatchError("a drop with placeholders has no inverse")
    return Alias(rule.origin.text, rule.equal.text, rule.condition)
