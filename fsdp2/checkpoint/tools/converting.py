"""Convert a checkpoint: another number of ranks, another layout, another format. Layer: checkpoint.

One process does it, without a GPU and in bounded memory. The new folder gets its name when all of it is durable.
"""

import uuid
from contextlib import suppress

import torch

from fsdp2.checkpoint.formats.native import id_of
from fsdp2.checkpoint.opening import open_catalog
from fsdp2.checkpoint.run.folders import delete, free_name, is_complete, own_folder, sweep, work_folder
from fsdp2.checkpoint.storage.base import Folder, Storage, storage_of
from fsdp2.checkpoint.tools.rewriting import Conversion, Rewriting
from fsdp2.checkpoint.tools.streaming import Progress

__all__ = ["convert"]


def convert(
    source: Folder,
    target: Folder,
    *,
    to: str = "ranks",
    world: int = 1,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    model_only: bool = False,
    max_file_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    verify: bool = True,
) -> str:
    """Rewrite a checkpoint in another form. One process calls this; no process group is needed.

    The values stay bitwise the same (except with `dtype`). Optimizer state, tied names, the step and the extra state
    are kept; the extra state keeps its number of ranks. Like every checkpoint, the result can be loaded on any number
    of ranks: `world` only determines the files.

    Args:
        source: any checkpoint that `load` supports.
        target: a folder that does not exist yet.
        to: "ranks": the files of `world` ranks, each tensor cut by rows. "consolidated": whole tensors, with Hugging
            Face's index, in files of up to ``max_file_bytes``.
        dtype: convert the model's floating point tensors to this.
        progress: is called with the number of bytes done and the total.
        model_only: without optimizer and extra state.
        max_file_bytes: as for `save`.
        overwrite: as for `save`.
        verify: check the source's checksums.

    Returns:
        The new folder.

    Raises:
        ArgumentError: an option is invalid.
        CheckpointError: there is no checkpoint at `source`, or something exists at `target`.
        CorruptError: the source is damaged. The new folder is removed then.
        UnsupportedError: the source has something that cannot be read. `describe` lists it.

    Warns:
        UserWarning: the source has something that is neither model nor optimizer, which is left out.

    Example::

        fsdp2.checkpoint.convert("runs/a/step-00001000", "export", to="consolidated", model_only=True)
    """
    chosen = Conversion(to, world, dtype, max_file_bytes, model_only, overwrite, verify)
    storage, path = storage_of(target)
    free_name(storage, path, chosen.overwrite)
    catalog = open_catalog(*storage_of(source))
    nonce = uuid.uuid4().hex[:12]
    work = work_folder(storage, path, nonce)
    files: list[str] = []
    try:
        storage.make_folder(work)
        with own_folder(storage, work, path):
            Rewriting(catalog, storage, chosen, nonce, files).run(work, path, progress)
        gone = sweep(storage, path, files)
    except BaseException:
        if storage.renames:
            with suppress(OSError):
                storage.remove(work)
        else:
            delete(storage, _own_files(storage, path, files, nonce))
        raise
    finally:
        catalog.close()
    delete(storage, gone)
    return path


def _own_files(storage: Storage, path: str, names: list[str], nonce: str) -> list[str]:
    """Files of a failed conversion, in a folder that others may write to. None if the conversion was committed and only
    the answer to that request was lost. Files without its id are excluded if the folder is another checkpoint."""
    with suppress(OSError):
        if id_of(storage, path) != nonce:
            taken = is_complete(storage, path)
            return [storage.join(path, name) for name in names if nonce in name or not taken]
    return []
