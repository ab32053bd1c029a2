"""The stored extra state of a checkpoint, and which rank gets what. Layer: checkpoint. See `extra.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp2.checkpoint.formats.native import NativeCatalog
from fsdp2.checkpoint.io.catalog import Catalog
from fsdp2.checkpoint.io.reading import Request, read_all
from fsdp2.checkpoint.ranks.world import World
from fsdp2.checkpoint.schema.dtypes import DTYPES
from fsdp2.checkpoint.schema.tree import decode
from fsdp2.checkpoint.state.extra import RandomState, Reshardable, Stateful
from fsdp2.placement.box import whole

__all__ = ["StoredExtra"]


class StoredExtra:
    """The values saved as `extra`, seen from one rank. Catalogs of other formats have none."""

    def __init__(self, catalog: Catalog, world: World):
        self._catalog = catalog
        self._world = world
        manifest = catalog.manifest if isinstance(catalog, NativeCatalog) else None
        self._saved_world = manifest.extra_world if manifest is not None else 0
        self._shares: Mapping[str, Sequence[Mapping[str, Any]]] = manifest.extra if manifest is not None else {}
        self._is_resharded = self._saved_world != world.size

    def check(self, targets: Mapping[str, Any], missing: list[str], mismatches: list[str]) -> None:
        """Before anything is read: note keys that are not stored, and those whose states cannot be redistributed."""
        for key, target in targets.items():
            if key not in self._shares:
                missing.append(f"extra '{key}'")
            elif self._mine(key) is not None or (isinstance(target, Reshardable) and self._is_resharded):
                continue
            elif not self._is_resharded:
                missing.append(f"extra '{key}' of rank {self._world.rank}, which gave none")
            else:
                mismatches.append(
                    f"extra '{key}': its state differed between the {self._saved_world} ranks that saved it, and now "
                    f"there are {self._world.size}: give it a method load_resharded(states, rank, world_size), or "
                    "leave it out"
                )

    def give(self, targets: Mapping[str, Any], verify: bool) -> dict[str, Any]:
        """Load the states into the targets.

        Returns:
            by key, the value for this rank; without values that cannot be redistributed.
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
        """The value of a share, with its tensors; None from a rank that gave nothing."""
        catalog, requests = self._catalog, list[Request]()
        assert isinstance(catalog, NativeCatalog)
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
