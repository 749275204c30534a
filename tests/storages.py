"""Memory as it is: the storages that torch makes inside a block, and which of them something still holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Remembers the storage of every result, by a reference that does not keep it; what an operator makes and frees
    inside itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.most = 0
        """The most bytes alive after any operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, Tensor):
                self.sizes[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
        self.most = max(self.most, self.alive)
        return results

    @property
    def alive(self) -> int:
        """Bytes that tensors or a graph still hold."""
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        return sum(self.sizes.values())
