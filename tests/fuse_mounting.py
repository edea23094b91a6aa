"""Whether mounts can be tested here: outside CI a missing /dev/fuse skips them, in CI they must run."""

import os

import pytest

needs_fuse = pytest.mark.skipif(
    not os.environ.get("CI") and not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse here"
)
