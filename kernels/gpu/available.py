"""Whether Triton serves a tensor. Decided once per process, at first use of a tensor on a GPU.

Called by the dispatching modules after `native` has said no. Importing this loads no Triton.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import structlog
from torch import Tensor

_log = structlog.get_logger(__name__)
_decided = False
_operators: Any = None
_deciding = threading.Lock()


def ops_for(tensor: Tensor) -> Any:
    """Return the Triton operators (`kernels.gpu.operators`) when they serve this tensor's device, else None."""
    if not tensor.is_cuda:
        return None
    if not _decided:
        _decide()
    return _operators


def _decide() -> None:
    global _decided, _operators
    with _deciding:
        if _decided:
            return
        if os.environ.get("COHORT_KERNELS") == "reference":
            _log.info("kernels", device="cuda", implementation="reference", reason="COHORT_KERNELS=reference")
        else:
            try:
                from cohort.kernels.gpu import operators
            except ImportError as error:
                _log.warning("kernels", device="cuda", implementation="reference", reason=str(error))
            else:
                _operators = operators
        _decided = True
