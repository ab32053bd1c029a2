"""State of a run other than model and optimizer tensors: data position, scheduler, random state. Layer: checkpoint.

Every rank saves its own state, and gets it back on the same number of ranks. State that is equal on all ranks is stored
once. On a different number of ranks, state that was equal everywhere goes to every rank. Per-rank state cannot be
mapped to the new ranks; implement `Reshardable` to redistribute it.
"""

import hashlib
import json
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.memory import blocks_of
from fsdp2.checkpoint.io.planned_files import Piece
from fsdp2.checkpoint.io.reading import Request, read_all
from fsdp2.checkpoint.ranks.agreement import Agreement
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.schema.dtypes import DTYPES, name_of
from fsdp2.checkpoint.schema.tree import decode, encode
from fsdp2.checkpoint.state.model import check_name
from fsdp2.errors import ArgumentError
from fsdp2.placement.box import whole

__all__ = ["ExtraShare", "RandomState", "Reshardable", "Stateful", "StoredExtra", "claimed", "extra_shares"]


@runtime_checkable
class Stateful(Protocol):
    """An object that keeps its own state: a scheduler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """Its state, as plain data and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore such a state."""


@runtime_checkable
class Reshardable(Stateful, Protocol):
    """A `Stateful` that can load the states of a different number of ranks."""

    def load_resharded(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        """Load the part for `rank` from the states of all ranks.

        Args:
            states: what each rank saved, by rank.
            rank: the current rank of this process.
            world_size: the current number of ranks.
        """


class RandomState:
    """The random number generators of this process: torch's on the CPU and on the current device of the accelerator,
    Python's, and NumPy's if it is loaded. Pass one to `save` and `load` under any name in `extra`.

    Every rank has its own state. On a different number of ranks the saved states cannot be assigned to ranks: each rank
    is reseeded from the saved states and its rank, with a warning.

    Example::

        extra = {"random": fsdp2.checkpoint.RandomState()}
        fsdp2.checkpoint.save(folder, model=model, extra=extra)
    """

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        }
        if torch.accelerator.is_available():
            state["device"] = torch.get_device_module().get_rng_state()
        if numpy := sys.modules.get("numpy"):
            kind, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = [kind, torch.tensor(keys.tolist(), dtype=torch.int64), position, has_gauss, float(cached)]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore every generator."""
        torch.set_rng_state(state_dict["torch"])
        version, words, gauss = state_dict["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        if "device" in state_dict and torch.accelerator.is_available():
            torch.get_device_module().set_rng_state(state_dict["device"])
        if "numpy" in state_dict and (numpy := sys.modules.get("numpy")):
            kind, keys, position, has_gauss, cached = state_dict["numpy"]
            numpy.random.set_state((kind, keys.to(torch.uint32).numpy(), position, has_gauss, cached))

    def load_resharded(self, states: Sequence[Any], rank: int, world_size: int) -> None:
        """Seed all generators from the states and this rank."""
        message = f"random state of {len(states)} ranks, and now there are {world_size}"
        given = (state for state in states if state is not None)  # some ranks may have saved none
        material = b"".join(bytes(state["torch"].tolist()) for state in given) + rank.to_bytes(8, "little")
        # 63 bits: with 32, two of 16,384 ranks would share a seed with a probability of 3 %.
        seed = int.from_bytes(hashlib.sha256(material).digest()[:8], "little") >> 1
        warnings.warn(f"{message}: rank {rank} reseeds its generators, with {seed}", stacklevel=2)
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed([seed & 0xFFFFFFFF, seed >> 32])


@dataclass(frozen=True)
class ExtraShare:
    """This rank's value for one key.

    Attributes:
        form: the value as JSON, with its tensors by name.
        pieces: its tensors.
        digest: equal for equal content; "" before it is `claimed`.
        mine: whether this rank writes it.
    """

    key: str
    form: Any
    pieces: list[Piece]
    digest: str = ""
    mine: bool = False


def extra_shares(extra: Mapping[str, Any]) -> list[ExtraShare]:
    """The shares of this rank.

    Raises:
        ArgumentError: something in it cannot be stored; the message names the key and the place.
    """
    shares = []
    names: set[str] = set()
    for key, value in extra.items():
        if not isinstance(key, str):
            raise ArgumentError(f"extra: expected keys that are strings, got {key!r} ({type(key).__name__})")
        check_name(key)
        pieces: list[Piece] = []

        def leaf(path: str, tensor: torch.Tensor, key: str = key, pieces: list[Piece] = pieces) -> dict[str, Any]:
            dtype, is_plain = name_of(tensor.dtype), type(tensor) in (torch.Tensor, torch.nn.Parameter)
            is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
            if not is_plain or not is_dense or dtype is None:
                raise ArgumentError(
                    f"extra '{key}' at '{path}': expected plain, dense tensors with values of a dtype of safetensors, "
                    f"got a {'nested ' * tensor.is_nested}{type(tensor).__name__} of {tensor.dtype} with layout "
                    f"{tensor.layout} on {tensor.device}; sharded tensors belong to model= or optimizer="
                )
            name = f"{key}/{path}"
            check_name(name, names)
            names.add(name)
            pieces.append(Piece(name, dtype, whole(tensor.shape), tensor.detach(), tuple(tensor.shape)))
            return {}

        content = value.state_dict() if isinstance(value, Stateful) else value
        shares.append(ExtraShare(key, encode(content, leaf, f"extra '{key}'"), pieces))
    return shares


def claimed(shares: Sequence[ExtraShare], agreement: Agreement) -> list[ExtraShare]:
    """The shares, with `mine` set on the first rank that has each content. Takes as long as hashing them."""
    hashed = [replace(share, digest=_digest(share.form, share.pieces)) for share in shares]
    return [replace(each, mine=agreement.is_first(f"extra/{each.key}/{each.digest}")) for each in hashed]


def _digest(form: Any, pieces: Sequence[Piece]) -> str:
    digest = hashlib.sha256(json.dumps(form).encode())
    for piece in pieces:
        digest.update(f"{piece.name} {piece.dtype} {piece.shape}".encode())
        for block, _ in blocks_of(piece.values, 0, piece.nbytes, 1 << 20):
            digest.update(block)
    return digest.hexdigest()


class StoredExtra:
    """The values saved as `extra`, from the view of one rank. Catalogs of other formats have none."""

    def __init__(self, catalog: Catalog, world: World):
        self._catalog = catalog
        self._world = world
        self._saved_world, self._shares = catalog.world, catalog.extra
        self._is_resharded = self._saved_world != world.size

    def check(self, targets: Mapping[str, Any], missing: list[str], mismatches: list[str]) -> None:
        """Before anything is read: record keys that are not stored, and keys whose states cannot be redistributed."""
        for key, target in targets.items():
            if key not in self._shares:
                missing.append(f"extra '{key}'")
            elif self._mine(key) is not None or (isinstance(target, Reshardable) and self._is_resharded):
                continue
            elif not self._is_resharded:
                missing.append(f"extra '{key}' of rank {self._world.rank}, which saved none")
            else:
                mismatches.append(
                    f"extra '{key}': its state differed between the {self._saved_world} ranks that saved it, and now "
                    f"there are {self._world.size}: give it a method load_resharded(states, rank, world_size), or "
                    "leave it out"
                )

    def give(self, targets: Mapping[str, Any], verify: bool) -> dict[str, Any]:
        """Load the states into the targets.

        Returns:
            The values for this rank, by key, without those that cannot be redistributed.
        """
        values = {}
        # Generators last: another object may draw random numbers while it loads its state.
        for key in sorted(self._shares, key=lambda key: isinstance(targets.get(key), RandomState)):
            share, target = self._mine(key), targets.get(key)
            if share is not None:
                values[key] = self._read(share, verify)
            if isinstance(target, Reshardable) and self._is_resharded:
                states = [self._read(self._of_rank(key, rank), verify) for rank in range(self._saved_world)]
                target.load_resharded(states, self._world.rank, self._world.size)
            elif share is not None and isinstance(target, Stateful):
                target.load_state_dict(values[key])
        return values

    def _mine(self, key: str) -> Mapping[str, Any] | None:
        """The state for this rank: its own on the same number of ranks, otherwise the state that was equal on all."""
        shares = self._shares[key]
        if len(shares) == 1 and len(shares[0]["ranks"]) == self._saved_world:
            return shares[0]
        return None if self._is_resharded else self._of_rank(key, self._world.rank)

    def _of_rank(self, key: str, rank: int) -> Mapping[str, Any] | None:
        return next((share for share in self._shares[key] if rank in share["ranks"]), None)

    def _read(self, share: Mapping[str, Any] | None, verify: bool) -> Any:
        """The value of a share, with its tensors; None for a rank that saved nothing."""
        catalog, requests = self._catalog, list[Request]()
        if share is None:
            return None

        def tensor(note: dict[str, Any]) -> torch.Tensor:
            piece = catalog.extra_piece(share["file"], f"{share['key']}/{note['$tensor']}")
            empty = torch.empty(piece.box.shape, dtype=DTYPES[piece.dtype])
            requests.append(Request(note["$tensor"], empty, whole(empty.shape), piece))
            return empty

        value = decode(share["json"], tensor, catalog.path)
        read_all(catalog.opened, requests, verify)
        return value
