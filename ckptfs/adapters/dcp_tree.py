"""DCP's flat names and ckptfs's trees, into each other. Pure.

DCP flattens a state dict to names joined by dots and remembers for each the path of keys (strings, and integers for
lists). It walks into mappings, and into lists that hold tensors or mappings; anything else is one value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptfs import tree
from ckptfs.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ckptfs.tags import Node

Path = tuple[str | int, ...]
_MAPPINGS = ("dict", "odict", "defaultdict", "counter")


def path_of(fqn: str, planner_data: object) -> Path:
    """Where a flat name stood in the nested state dict; the name itself if the planner did not say."""
    found = planner_data.get(fqn) if isinstance(planner_data, dict) else None
    if isinstance(found, tuple) and found and all(type(key) in (str, int) for key in found):
        return found
    return (fqn,)


def name_of(path: Path) -> str:
    """The stored name of an array at this path."""
    return tree.encode_name(path)


def nest(leaves: Iterable[tuple[Path, Node]]) -> Node:
    """One tree of dicts and lists from its leaves."""
    root: dict[str | int, Any] = {}
    for path, node in leaves:
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise MismatchError(f"{'.'.join(map(str, path))!r} stands inside a value: give one of them another key")
        if path[-1] in branch:
            raise MismatchError(
                f"{'.'.join(map(str, path))!r} is a value and a container: give one of them another key"
            )
        branch[path[-1]] = _Leaf(node)
    return _node(root)


class _Leaf:
    def __init__(self, node: Node) -> None:
        self.node = node


def _node(branch: dict[str | int, Any] | _Leaf) -> Node:
    if isinstance(branch, _Leaf):
        return branch.node
    places = [key for key in branch if isinstance(key, int)]
    if places and len(places) == len(branch):
        return [_node(branch[i]) if i in branch else None for i in range(max(places) + 1)]
    keys, _ = tree.flatten(dict.fromkeys(branch))  # how ckptfs writes a dict with these keys
    if "$" not in keys:
        return {str(key): _node(value) for key, value in branch.items()}
    pairs = [[key, _node(value)] for (key, _), value in zip(keys["items"], branch.values(), strict=True)]
    return {"$": "dict", "items": pairs}


def flat(node: Node, rank: int) -> dict[str, tuple[Path, Node]]:
    """What DCP calls the values of a stored tree: flat name → (path, node)."""
    out: dict[str, tuple[Path, Node]] = {}
    if not _is_mapping(node):
        raise MismatchError("this step was not saved from a dict, which DCP needs: load it with ckptfs.load")
    for path, leaf in _walk(node, (), rank):
        fqn = ".".join(map(str, path))
        if fqn in out:
            raise MismatchError(f"two values of this step have the DCP name {fqn!r}: load it with ckptfs.load")
        out[fqn] = (path, leaf)
    return out


def containers(node: Node) -> dict[str, Node]:
    """The values of the outermost dict that are containers themselves."""
    found = {str(key): value for key, value in _pairs(node)} if _is_mapping(node) else {}
    return {key: value for key, value in found.items() if _is_mapping(value) or type(value) is list}


def _walk(node: Node, path: Path, rank: int) -> Iterator[tuple[Path, Node]]:
    if type(node) is dict and node.get("$") == "per_rank":
        if str(rank) not in node["ranks"]:
            return
        node = node["ranks"][str(rank)]
    if _is_mapping(node):
        for key, value in _pairs(node):
            yield from _walk(value, (*path, str(key)), rank)
    elif type(node) is list and not _is_terminal(node):
        for index, value in enumerate(node):
            yield from _walk(value, (*path, index), rank)
    else:
        yield path, node


def _is_mapping(node: Node) -> bool:
    return type(node) is dict and node.get("$", "dict") in _MAPPINGS


def _pairs(node: Mapping[str, Any]) -> Iterator[tuple[object, Node]]:
    if "$" not in node:
        yield from node.items()
        return
    for key, value in node["items"]:
        yield tree.unflatten(key, _no_array), value


def _no_array(name: str, _tag: Mapping[str, Any]) -> object:
    raise MismatchError(f"the array {name!r} is a dict key")


def _is_terminal(items: list[Node]) -> bool:
    """Whether DCP takes a list as one value."""
    return not any(
        _is_mapping(item) or is_tensor(item) or (type(item) is list and not _is_terminal(item)) for item in items
    )


def is_tensor(node: Node) -> bool:
    """DCP stores torch's tensors as such; numpy arrays are values like any other."""
    return type(node) is dict and node.get("$") == "array" and node["as"] != "numpy"


def under(prefix: str, node: Node) -> Node:
    """The tree of one value, its arrays named as parts of `prefix`."""
    for tag in tree.arrays(node):
        tag["name"] = prefix if node is tag else f"{prefix}/{tag['name']}"
    return node
