"""Who takes part: nobody trains alone while those who trained before still live."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import CollectiveError, UnsupportedError
from fsdp2.replicas.rounds import Beat, Member, Round, Rounds
from fsdp2.replicas.serving import Local, Server, fetch, pack, unpack

PATIENCE_S = 0.3


class Replica:
    def __init__(self, store: Any, name: str):
        self.name, self.count = name, 0
        self.beat = Beat(store.clone(), f"beat/{name}/0", PATIENCE_S / 10)
        self.rounds = Rounds(store.clone(), name, 1, PATIENCE_S, 10.0, 1)

    def joins(self, is_well: bool = True) -> Future[Round]:
        self.count += 1
        future, member = Future[Round](), Member(self.name, self.count - 1, 0, is_well, "")
        threading.Thread(target=lambda: future.set_result(self.rounds.join(self.count, member))).start()
        return future


@pytest.fixture
def replica() -> Callable[[str], Replica]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    return lambda name: Replica(store, name)


def test_a_new_replica_waits_for_those_in_a_long_step(replica: Callable[[str], Replica]) -> None:
    a, b = replica("a"), replica("b")
    assert a.joins().result(5).names == ["a"]
    waits = b.joins()
    time.sleep(3 * PATIENCE_S)
    assert not waits.done()
    both = a.joins().result(5)
    assert both == waits.result(5) and both.names == ["a", "b"]


def test_the_dead_and_those_who_leave_are_not_waited_for(replica: Callable[[str], Replica]) -> None:
    a, b, c = replica("a"), replica("b"), replica("c")
    for _ in range(2):  # then all are in
        found = [each.joins() for each in (a, b, c)]
        assert {each.result(5) for each in found} == {found[0].result()}
    assert found[0].result().names != [] and sorted(found[0].result().names) == ["a", "b", "c"]
    begun = time.monotonic()
    b.beat.end()
    found = [each.joins() for each in (a, c)]
    assert sorted(found[0].result(5).names) == ["a", "c"] and time.monotonic() - begun < PATIENCE_S
    a.beat._stop.set()  # it dies
    a.beat._thread.join()
    assert c.joins().result(5).names == ["c"]


def test_state_travels_as_it_is() -> None:
    half = torch.randn(6, 4).to(torch.bfloat16)
    tree = {"a": [1, 2.5, None, "x", True], 3: (torch.arange(5), Local(half[:, ::2], (12, 2))), "e": torch.empty(0, 3)}
    server = Server("127.0.0.1", 5.0)
    server.open(4, lambda: tree, 1)
    found = unpack(*fetch(server.address, 4, 5.0))
    server.close()
    assert found["a"] == tree["a"] and isinstance(found[3], tuple) and found[3][1].shape == (12, 2)
    assert torch.equal(found[3][0], torch.arange(5)) and torch.equal(found[3][1].tensor, half[:, ::2])
    assert found["e"].shape == (0, 3)
    with pytest.raises(CollectiveError, match="is in another step"):
        fetch(server.address, 4, 5.0)
    with pytest.raises(UnsupportedError, match=r"'state\.lock' is of <class 'object'>"):
        pack({"lock": object()})


def test_a_transfer_that_does_not_end_is_ended() -> None:
    server = Server("127.0.0.1", 0.3)
    server.open(1, lambda: {"large": torch.zeros(1 << 24)}, 1)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stuck:
        stuck.sendall(struct.pack("!q", 1))
        stuck.recv(1)
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 3
