"""docs/semantics.md is executed, in order, on a mount of either backend."""

import re
from pathlib import Path

import pytest

from ckptfs_fuse import Mount
from fuse_mounting import needs_fuse

pytestmark = [pytest.mark.fuse, needs_fuse]
PAGE = Path(__file__).resolve().parent.parent / "docs" / "semantics.md"


@pytest.mark.parametrize("backend", ["native", "fusepy"])
def test_the_examples_hold(backend, tmp_path):
    plain = tmp_path / "plain"
    (plain / "sub").mkdir(parents=True)
    (plain / "file").write_bytes(bytes(range(256)) * 300)
    (plain / "sub" / "small").write_bytes(b"small")
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) >= 8
    with Mount("ckptfs.views.nodes:LocalTree", {"folder": str(plain)}, backend=backend) as root:
        names = {"plain": str(plain), "root": root}
        for example in examples:
            exec(compile(example, str(PAGE), "exec"), names)
