"""The FUSE face of ckptfs: a thin layer over `ckptfs.views`; all file system logic lives there, tested without FUSE."""

from ckptfs_fuse.options import MountOptions
from ckptfs_fuse.server import Mount, Mounted, mount, mounts, serve, umount

__all__ = ["Mount", "MountOptions", "Mounted", "mount", "mounts", "serve", "umount"]
