"""Sends state from a live replica to one that heals: rank s to rank s, over a socket. Layer: replicas.

Given a round's number, a `Server` sends the state of its replica in that round, directly from the shards' memory::

    request   number                                    8 bytes
    answer    length | header | bytes of each tensor    the header is JSON: the tree, dtypes and shapes

It answers while forward and backward run, which do not change shards. `Server.close` must come before the optimizer's
step. No received data is executed.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from fsdp2.disk.direct import memory_at
from fsdp2.errors import CollectiveError, UnsupportedError

_LENGTH = struct.Struct("!q")


class Local(NamedTuple):
    """The local tensor of a DTensor with this global shape."""

    tensor: torch.Tensor
    shape: tuple[int, ...]


def pack(tree: Any) -> tuple[str, list[torch.Tensor]]:
    """A tree of dicts, lists, tuples, tensors, `Local` and JSON values, as text and tensors."""
    tensors: list[torch.Tensor] = []

    def node(value: Any, path: str) -> Any:
        if isinstance(value, (torch.Tensor, Local)):
            local, shape = value if isinstance(value, Local) else (value, None)
            tensors.append(local.detach())
            return {"tensor": len(tensors) - 1, "device": local.device.type, "of": shape}
        if isinstance(value, dict):
            return {"dict": [[key, node(each, f"{path}.{key}")] for key, each in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [node(each, f"{path}.{index}") for index, each in enumerate(value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UnsupportedError(
            f"Replicas: '{path}' is of {type(value)}; other replicas can be sent tensors, numbers, strings, None, and "
            "lists, tuples and dicts of these"
        )

    return json.dumps(node(tree, "state")), tensors


def unpack(text: str, tensors: list[torch.Tensor]) -> Any:
    """The tree, with tensors on the devices from which they came."""

    def tree(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            tensor = tensors[node["tensor"]].to(node["device"])
            return tensor if node["of"] is None else Local(tensor, tuple(node["of"]))
        if "dict" in node:
            return {key: tree(each) for key, each in node["dict"]}
        kind, values = next(iter(node.items()))
        return [*map(tree, values)] if kind == "list" else tuple(map(tree, values))

    return tree(json.loads(text))


class Server:
    """Answers other replicas.

    Args:
        host: the address to listen on.
        timeout_s: how long a transfer may take.

    Attributes:
        address: ``host:port``.
    """

    def __init__(self, host: str, timeout_s: float):
        self._socket = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._number, self._num_due = 0, 0
        self._state: Callable[[], Any] | None = None
        self._active: set[socket.socket] = set()
        threading.Thread(target=self._listen, name="fsdp2-replica-server", daemon=True).start()

    def open(self, number: int, state: Callable[[], Any], num_due: int) -> None:
        """From now on answer requests for round `number`; `num_due` replicas will ask."""
        with self._changed:
            self._number, self._state, self._num_due = number, state, num_due
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all requests are answered, or end the transfers, because the shards will change."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active and self._num_due <= 0, self._timeout_s)
            self._state = None
            for connection in self._active:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._active)

    def end(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _listen(self) -> None:
        with suppress(OSError):  # the socket was closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the other replica died, or is too slow
            connection.settimeout(self._timeout_s)
            (number,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
            with self._changed:
                self._changed.wait_for(lambda: self._number >= number, self._timeout_s)
                if self._number != number or self._state is None:
                    return
                state = self._state
                self._active.add(connection)
            try:
                _send(connection, state())
            finally:
                with self._changed:
                    self._active.discard(connection)
                    self._num_due -= 1
                    self._changed.notify_all()


def _send(connection: socket.socket, tree: Any) -> None:
    text, tensors = pack(tree)
    about = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    header = json.dumps([text, about]).encode()
    connection.sendall(_LENGTH.pack(len(header)) + header)
    for tensor in tensors:
        on_host = tensor.cpu().contiguous()
        if on_host.numel():
            connection.sendall(memory_at(on_host.data_ptr(), on_host.nbytes))


def fetch(address: str, number: int, timeout_s: float) -> tuple[str, list[torch.Tensor]]:
    """The state of the server at `address` in round `number`, for `unpack`."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(_LENGTH.pack(number))
        (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
        text, about = json.loads(_received(connection, length))
        tensors = []
        for name, shape in about:
            dtype = getattr(torch, name)
            assert isinstance(dtype, torch.dtype)
            tensors.append(tensor := torch.empty(shape, dtype=dtype))
            if tensor.numel():
                _receive(connection, memory_at(tensor.data_ptr(), tensor.nbytes))
    return text, tensors


def _received(connection: socket.socket, nbytes: int) -> bytearray:
    into = bytearray(nbytes)
    _receive(connection, memoryview(into))
    return into


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        count = connection.recv_into(into)
        if not count:
            raise CollectiveError("replicas: the replica that sends its state has ended, or is in another step")
        into = into[count:]
