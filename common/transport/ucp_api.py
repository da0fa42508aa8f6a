"""The few calls of UCP's C interface that ucxx's Python layer does not offer.

ucxx provides the library, the context, the worker, its progress and its address. But its Python requests cannot be
cancelled one by one, do not have the number of bytes that arrived, and spin when awaited; so transfers are posted here,
on the raw handles that ucxx exposes. Called by `ucx_link` alone, from the event loop's thread. Every function below is
part of UCP's stable interface (libucp.so.0).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

OK, IN_PROGRESS = 0, 1
ERR_TRUNCATED, ERR_CANCELED = -9, -16

_ERR_LAST = -100
_NO_IMMEDIATE_COMPLETION = 1 << 16  # UCP_OP_ATTR_FLAG_NO_IMM_CMPL: always a request, so there is one way to wait
_REMOTE_ADDRESS, _ERROR_HANDLER = 1 << 0, 1 << 2  # UCP_EP_PARAM_FIELD_…
_ANY_BIT = (1 << 64) - 1


class _TagInfo(ctypes.Structure):
    _fields_ = (("sender_tag", ctypes.c_uint64), ("length", ctypes.c_size_t))


class _Lane(ctypes.Structure):
    """`ucp_transport_entry_t`."""

    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t` as far as its transports."""

    _fields_ = (
        ("mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("addresses", ctypes.c_char * 256),  # two sockaddr_storage
        ("lanes", ctypes.POINTER(_Lane)),
        ("num_lanes", ctypes.c_uint),
        ("lane_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_TRANSPORTS = 1 << 3  # UCP_EP_ATTR_FIELD_TRANSPORTS
_MOST_LANES = 16

_ErrorHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int8)


class UcpError(Exception):
    """A call was refused at once; `status` is UCS's code."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class UcpApi:
    """Bound functions. Raises `OSError` or `AttributeError` where the library lacks one. `endpoint_failed(endpoint,
    status)` is called, while the worker progresses, when a transport reports a dead peer."""

    def __init__(self, endpoint_failed: Callable[[int, int], None]) -> None:
        # ucxx has loaded it already; the loader finds it again by its soname.
        ucp, ucs = ctypes.CDLL("libucp.so.0"), ctypes.CDLL("libucs.so.0")
        pointer, size, u64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
        self._send = _bind(ucp.ucp_tag_send_nbx, pointer, pointer, pointer, size, u64, pointer)
        self._receive = _bind(ucp.ucp_tag_recv_nbx, pointer, pointer, pointer, size, u64, u64, pointer)
        self._status = _bind(ucp.ucp_request_check_status, ctypes.c_int8, pointer)
        self._test_receive = _bind(ucp.ucp_tag_recv_request_test, ctypes.c_int8, pointer, pointer)
        self._cancel = _bind(ucp.ucp_request_cancel, None, pointer, pointer)
        self._free = _bind(ucp.ucp_request_free, None, pointer)
        self._create_endpoint = _bind(ucp.ucp_ep_create, ctypes.c_int8, pointer, pointer, pointer)
        self._close_endpoint = _bind(ucp.ucp_ep_close_nbx, pointer, pointer, pointer)
        self._query = _bind(ucp.ucp_ep_query, ctypes.c_int8, pointer, pointer)
        self._describe = _bind(ucs.ucs_status_string, ctypes.c_char_p, ctypes.c_int8)
        # Parameter structures: a mask first, and no field that the mask does not name is read.
        self._flags = (u64 * 32)(_NO_IMMEDIATE_COMPLETION)
        self._no_flags = (u64 * 32)()
        self._info = _TagInfo()
        self._error_handler = _ErrorHandler(lambda _, endpoint, status: endpoint_failed(endpoint, status))

    def endpoint(self, worker: int, address: bytes) -> int:
        """Create an endpoint in UCX's error mode "none": in mode "peer" UCX gives up shared memory. It gets an error
        handler all the same: without one UCX aborts this process when a peer dies while its memory is being read."""
        held = ctypes.create_string_buffer(address, len(address))
        handler = ctypes.cast(self._error_handler, ctypes.c_void_p).value
        # field_mask, address, err_mode, err_handler.cb, err_handler.arg
        fields = (_REMOTE_ADDRESS | _ERROR_HANDLER, ctypes.addressof(held), 0, handler or 0, 0)
        params = (ctypes.c_uint64 * 64)(*fields)
        handle = ctypes.c_void_p()
        status = self._create_endpoint(worker, ctypes.addressof(params), ctypes.addressof(handle))
        if status != OK or handle.value is None:
            raise UcpError(status, self.text(status))
        return handle.value

    def transports(self, endpoint: int) -> list[str]:
        """Return "transport/device" of all that an endpoint uses, in UCX's order; empty where UCX does not know."""
        lanes = (_Lane * _MOST_LANES)()
        found = _EndpointAttributes(mask=_TRANSPORTS, num_lanes=_MOST_LANES, lane_bytes=ctypes.sizeof(_Lane))
        found.lanes = ctypes.cast(lanes, ctypes.POINTER(_Lane))
        if self._query(endpoint, ctypes.addressof(found)) != OK:
            return []
        named = [lanes[index] for index in range(min(found.num_lanes, _MOST_LANES))]
        return list(dict.fromkeys(f"{lane.transport.decode()}/{lane.device.decode()}" for lane in named))

    def close_endpoint(self, endpoint: int) -> int | None:
        """Start a flushing close. Return its request, None if it is done at once."""
        return self._started(self._close_endpoint(endpoint, ctypes.addressof(self._no_flags)))

    def send(self, endpoint: int, pointer: int, nbytes: int, tag: int) -> int:
        request = self._started(self._send(endpoint, pointer, nbytes, tag, ctypes.addressof(self._flags)))
        assert request is not None
        return request

    def receive(self, worker: int, pointer: int, nbytes: int, tag: int) -> int:
        request = self._started(self._receive(worker, pointer, nbytes, tag, _ANY_BIT, ctypes.addressof(self._flags)))
        assert request is not None
        return request

    def status(self, request: int) -> int:
        return int(self._status(request))

    def received(self, request: int) -> int:
        """Return the number of bytes that arrived, once the status is final."""
        self._test_receive(request, ctypes.addressof(self._info))
        return int(self._info.length)

    def cancel(self, worker: int, request: int) -> None:
        """Cancel a receive that nothing has matched yet; for any other request it does nothing."""
        self._cancel(worker, request)

    def free(self, request: int) -> None:
        self._free(request)

    def text(self, status: int) -> str:
        return bytes(self._describe(status)).decode()

    def _started(self, result: int | None) -> int | None:
        """Return the request of a UCS pointer: none = done, the last hundred addresses = an error."""
        if result is not None and result > _ANY_BIT + _ERR_LAST:
            status = result - _ANY_BIT - 1
            raise UcpError(status, self.text(status))
        return result


def _bind(function: ctypes._NamedFuncPointer, result: object, *arguments: object) -> ctypes._NamedFuncPointer:
    function.restype = result  # type: ignore[assignment]
    function.argtypes = arguments  # type: ignore[assignment]
    return function
