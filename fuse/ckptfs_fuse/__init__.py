"""The FUSE face of ckptfs: a thin layer over `ckptfs.views`; all file system logic lives there, tested without FUSE."""
