"""Makes plain zarr-python know ckptfs's data types as soon as it is about to read anything.

zarr (3.0 to 3.1.6) collects the entry points of the group `zarr.data_type` and never loads them. It does load those
of the group `zarr.buffer`, before the first byte of metadata is read. So an entry point of that group names
`Buffer` here: importing this module registers the types, and what zarr gets is its own buffer class, unchanged.
A zarr that loads `zarr.data_type` itself registers the same classes once more, which changes nothing.
"""

from __future__ import annotations

from zarr.core.buffer.cpu import Buffer
from zarr.dtype import data_type_registry

from ckptfs import zarr_dtypes

__all__ = ["Buffer"]

for _kind in (
    zarr_dtypes.BFloat16,
    zarr_dtypes.Float8E4M3FN,
    zarr_dtypes.Float8E4M3FNUZ,
    zarr_dtypes.Float8E5M2,
    zarr_dtypes.Float8E5M2FNUZ,
):
    data_type_registry.register(_kind._zarr_v3_name, _kind)  # noqa: SLF001 - zarr's own name for it
