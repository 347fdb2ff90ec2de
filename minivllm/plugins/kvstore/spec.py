"""Specs of the built-in KV stores, which keep KV blocks outside of the device's memory: CPU memory, disk."""

from minivllm.registration.spec import Spec

HERE = "minivllm.plugins.kvstore"

CPU = Spec(
    impl=f"{HERE}.cpu:CpuStore",
    api=(1, 1),
    summary="CPU memory (pinned for a GPU), for blocks that the device evicts",
    options=f"{HERE}.options:CpuStoreOptions",
)
DISK = Spec(
    impl=f"{HERE}.disk:DiskStore",
    api=(1, 1),
    summary="files with checksums, which survive the process and are shared by engines",
    options=f"{HERE}.options:DiskStoreOptions",
    features=frozenset({"durable"}),
)
