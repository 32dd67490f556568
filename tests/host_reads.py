"""Counts what makes the host wait for the device, as it would on an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
#: What reads a number, or a size that depends on numbers; the last three look at their results.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.allclose.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten._linalg_eigh.default,
    _aten._linalg_svd.default,
    _aten.linalg_matrix_exp.default,
}
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


class HostReads(TorchDispatchMode):
    """While it is active, `found` lists the operators that read; inside our own kernels too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_mask = func in _INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in _READS or by_mask:
            self.found.append(func.name())
        if func.namespace == "stiefel":  # torch would run its body with this mode switched off
            with self:
                return OPDEFS[func.name()]._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
