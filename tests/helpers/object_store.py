"""An object store as S3 is one, on a local folder, for tests: `Bucket`, under the protocol "s3".

Keys are flat; an object appears when its upload has ended; listings are kept until told otherwise; nothing is renamed.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from fsdp2.checkpoint.storage import remote

__all__ = ["Bucket", "bucket"]


remote.WAITS_S = (0.01, 0.02)  # what fails here fails for good


def bucket(folder: Path) -> str:
    """The URL of a store in a folder."""
    return f"s3://{quote(str(folder), safe='')}"


class Bucket(AbstractFileSystem):
    """An object store on a local folder. The bucket's name is that folder, quoted; a key is the name of a file, quoted.

    Attributes:
        puts: keys in the order in which they appeared, in this process.
        before_put: is called with the key of an upload that is about to end.
    """

    protocol = "s3"
    puts: ClassVar[list[str]] = []
    before_put: ClassVar[list[Callable[[str], None]]] = []

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.kept: dict[str, list[dict[str, Any]]] = {}

    def place(self, path: str) -> Path:
        """Where an object is."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        if "forbidden" in key:
            raise RuntimeError("403")  # as some clients do, which know no OSError
        return Path(unquote(bucket)) / quote(key, safe="")

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.kept:
            bucket, _, key = path.partition("/")
            prefix = key + "/" if key else ""
            found = {}
            for file in Path(unquote(bucket)).iterdir():
                name = unquote(file.name)
                if name.startswith(prefix) and not file.name.startswith("."):
                    child, _, deeper = name[len(prefix) :].partition("/")
                    with suppress(FileNotFoundError):  # another process deletes it: a listing of S3 does not fail then
                        kind = {"type": "directory", "size": 0} if deeper else self.info_of(file)
                        found[child] = {"name": f"{bucket}/{prefix}{child}", **kind}
            if not found and self.place(path).exists():
                found[path] = {"name": path, **self.info_of(self.place(path))}
            if not found:
                raise FileNotFoundError(path)
            self.kept[path] = list(found.values())
        return self.kept[path] if detail else [entry["name"] for entry in self.kept[path]]

    def info_of(self, file: Path) -> dict[str, Any]:
        status = file.stat()
        return {"type": "file", "size": status.st_size}

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.place(path).stat().st_mtime, UTC)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        listing = self.kept.get(self._parent(path))
        if listing is not None:
            found = [entry for entry in listing if entry["name"] == path]
            if not found:
                raise FileNotFoundError(path)
            return found[0]
        if self.place(path).exists():
            return {"name": path, **self.info_of(self.place(path))}
        self.ls(path)
        return {"name": path, "type": "directory", "size": 0}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content = self.place(path).read_bytes()
        if start is not None and start >= len(content):
            raise ValueError("416 InvalidRange")
        return content[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with tempfile.NamedTemporaryFile(dir=self.place(path).parent, prefix=".upload-", delete=False) as upload:
            upload.write(value)
        self.put(upload.name, path, new=mode == "create")

    def put(self, upload: str, path: str, new: bool = False) -> None:
        """An upload has ended: the object appears; if `new`, on condition that there is none."""
        key = self._strip_protocol(path).partition("/")[2]
        for call in self.before_put:
            call(key)
        if new:
            os.link(upload, self.place(path))
            os.unlink(upload)
        else:
            os.replace(upload, self.place(path))
        self.puts.append(key)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        found = self.find(path)
        if not found:
            raise FileNotFoundError(path)
        for name in found:
            self.place(name).unlink()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.place(path)
        return Upload(self, path, mode, block_size=1 << 16)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("an object store has no folders; this could have made a bucket")

    mkdir = mv = cp_file = makedirs


class Upload(AbstractBufferedFile):
    """An upload in several parts."""

    def _initiate_upload(self) -> None:
        self.parts = tempfile.NamedTemporaryFile(  # noqa: SIM115
            dir=self.fs.place(self.path).parent, prefix=".upload-", delete=False
        )

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.write(self.buffer.getvalue())
        if final:
            self.parts.close()
            self.fs.put(self.parts.name, self.path)
        return True

    def discard(self) -> None:
        if self.offset is not None:
            self.parts.close()
            Path(self.parts.name).unlink()


fsspec.register_implementation("s3", Bucket, clobber=True)
