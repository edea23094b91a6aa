"""`python -m ckptfs_fuse`: the server of one mount, started by `ckptfs_fuse.server.mount`."""

import sys

from ckptfs_fuse.server import main

sys.exit(main())
