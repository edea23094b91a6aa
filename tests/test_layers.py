"""Imports point down only, the pure layers do no I/O, and `import ckptfs` is quick and brings nothing heavy."""

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Top to bottom. A module may import from its own row (without cycles) and from the rows below. Names are relative to
# ckptfs; a package's name stands for everything in it. "ckptfs" is the package's own __init__, the public names.
ROWS = [
    "__main__ cli ckptfs_fuse serve adapters convert",
    "ckptfs",
    "views",
    "run signals training watch diff verify stats safe_open",
    "checkpoint save asyncsave takeover retention load view stream shared_reads",
    "write commit read lease meet handover",
    "stage pace ranks storage zarr_dtypes zarr_plugin maps progress",
    "array",
    "shards",
    "tree tags report saveplan loadplan parties mesh ranges",  # from here on: pure
    "grid codec zarr3 manifest rules layout_ops expr",
    "box dtypes settings trace errors version",
]
PURE = set(" ".join(ROWS[9:]).split())
NOT_PURE = {
    "os",
    "io",
    "shutil",
    "tempfile",
    "mmap",
    "threading",
    "concurrent",
    "multiprocessing",
    "subprocess",
    "socket",
    "asyncio",
    "http",
    "urllib.request",
    "zarr",
    "fsspec",
    "aiohttp",
}
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names.split()}
FILES = sorted([*(ROOT / "ckptfs").rglob("*.py"), *(ROOT / "fuse" / "ckptfs_fuse").rglob("*.py")])


def module_name(path):
    parts = (
        path.relative_to(ROOT / "fuse" if "fuse" in path.relative_to(ROOT).parts[:1] else ROOT).with_suffix("").parts
    )
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imports(path, *, when_imported=False):
    """Every absolute name a file imports, with its line; with `when_imported`, not those in functions and ifs."""
    tree = ast.parse(path.read_text(), str(path))
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    for node in tree.body if when_imported else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # `from ckptfs import box` names a module, `from ckptfs.box import Box` does not
                full = f"{base}.{alias.name}"
                yield (full if full in MODULES or base not in MODULES else base), node.lineno


def row_name(module):
    """The name that stands for a module in ROWS."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ckptfs" and len(parts) > 1 else parts[0]


def is_ours(name):
    return name.split(".")[0] in {"ckptfs", "ckptfs_fuse"}


def complaint(path, target, line):
    source, wanted = row_name(module_name(path)), row_name(target)
    if ROW_OF[wanted] < ROW_OF[source]:
        return f"{path.relative_to(ROOT)}:{line}: {source} imports {wanted}, which is above it in tests/test_layers.py"
    return None


def test_every_module_has_a_row():
    unknown = {row_name(module) for module in MODULES} - ROW_OF.keys()
    assert not unknown, f"give each of these a row in tests/test_layers.py, as low as it can be: {sorted(unknown)}"


def test_every_folder_is_a_package():
    folders = {path.parent for path in FILES}
    missing = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not missing, f"without __init__.py these would be left out of the wheel: {missing}"
    assert not (ROOT / "fuse" / "__init__.py").exists(), "fuse/__init__.py would hide fusepy's module `fuse`"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    known = [(name, line) for name, line in imports(path) if is_ours(name) and row_name(name) in ROW_OF]
    complaints = [
        text for name, line in known if row_name(module_name(path)) in ROW_OF and (text := complaint(path, name, line))
    ]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_do_no_io(path):
    if row_name(module_name(path)) not in PURE:
        return
    impure = [
        f"{path.relative_to(ROOT)}:{line}: a pure module imports {name}; do the I/O in a layer above"
        for name, line in imports(path)
        if any(name == word or name.startswith(word + ".") for word in NOT_PURE)
    ]  # torch is not in that list: asked for by name in a function, its types are only words (see the last tests)
    assert not impure, "\n" + "\n".join(impure)


def test_no_cycles():
    graph = {}
    for path in FILES:
        source = module_name(path)
        graph[source] = {name for name, _ in imports(path, when_imported=True) if name in MODULES and name != source}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("modules import each other in a circle: " + " → ".join(reversed(error.args[1])), pytrace=False)


# --- what `import ckptfs` costs --------------------------------------------------------------------------------------


def fresh_python(program):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "COVERAGE_"))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_nothing_heavy():
    program = "import sys, ckptfs; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    heavy = {"torch", "zarr", "fsspec", "numcodecs", "ml_dtypes", "aiohttp", "fuse"} & set(
        fresh_python(program).split()
    )
    assert not heavy, f"import ckptfs imports {sorted(heavy)}: move these imports into the functions that need them"


@pytest.mark.serial
def test_import_is_quick():
    # numpy is most of it and not ours: what ckptfs adds is measured against it, in processes that take turns.
    program = "import numpy, time; start = time.perf_counter(); import ckptfs; print(time.perf_counter() - start)"
    fresh_python(program)
    added_ms = min(float(fresh_python(program)) for _ in range(5)) * 1e3
    assert added_ms < 60, f"import ckptfs takes {added_ms:.0f} ms on top of numpy"
    total = "import time; start = time.perf_counter(); import ckptfs; print(time.perf_counter() - start)"
    total_ms = min(float(fresh_python(total)) for _ in range(5)) * 1e3
    assert total_ms < 150, f"import ckptfs takes {total_ms:.0f} ms"
