"""An S3-compatible server on loopback, in a thread: as much of the protocol as s3fs uses. It may be slow, and fail.

    with S3Server(bytes_per_s=5e6, fail_every=50) as server:
        save("s3a://bucket/run", ...)     # in any process that has called `server.use()`, or `use(server.url)`

"s3a", since "s3" is `Bucket` in these tests (see `object_store.py`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import fsspec

__all__ = ["S3Server", "use"]

PIECE = 1 << 16


def use(url: str) -> None:
    """Let fsspec of this process find the server."""
    fsspec.config.conf["s3"] = {
        "endpoint_url": url,
        "key": "key",
        "secret": "secret",
        "client_kwargs": {"region_name": "us-east-1"},
    }


class S3Server(ThreadingHTTPServer):
    """The server.

    Args:
        bytes_per_s: of all connections together, in both directions.
        fail_every: so many requests are one that fails: by an error, without an answer, or (its effect is there) with
            an answer that is lost.

    Attributes:
        objects: by "bucket/key".
        created: how often each object was written.
        received: bytes of all bodies.
        failed: the number of requests that failed.
    """

    daemon_threads = True

    def __init__(self, bytes_per_s: float = float("inf"), fail_every: int = 0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.times: dict[str, datetime] = {}
        self.created: Counter[str] = Counter()
        self.received = self.failed = 0
        self._bytes_per_s, self._fail_every = bytes_per_s, fail_every
        self._requests = 0
        self._free_at = 0.0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> S3Server:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""

    def take(self, nbytes: int) -> None:
        """Wait until the line has carried so many bytes more."""
        with self.lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
            wait_s = self._free_at - now
        time.sleep(max(0.0, wait_s))

    def next_failure(self) -> int | None:
        """How this request fails (0, 1, 2); None if it does not."""
        with self.lock:
            self._requests += 1
            if not self._fail_every or self._requests % self._fail_every:
                return None
            self.failed += 1
            return self.failed % 3


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: S3Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_any(self) -> None:
        parts = urlsplit(self.path)
        self.key, self.query = unquote(parts.path[1:]), dict(parse_qsl(parts.query, keep_blank_values=True))
        self.lost = False
        body = b"".join(self._body())
        failure = self.server.next_failure()
        if failure == 0:
            return self.answer(503, b"<Error><Code>SlowDown</Code><Message>later</Message></Error>")
        if failure == 1:
            self.close_connection = True
            return None
        self.lost = failure == 2
        with self.server.lock:
            code, content, headers = getattr(self, f"on_{self.command.lower()}")(body)
        return self.answer(code, content, **headers)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any

    def _body(self) -> Iterator[bytes]:
        left = int(self.headers.get("Content-Length", 0))
        while left:
            data = self.rfile.read(min(PIECE, left))
            if not data:
                raise ConnectionError("the client has gone")
            left -= len(data)
            self.server.received += len(data)
            self.server.take(len(data))
            yield data

    def answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        if self.lost:
            self.close_connection = True
            return
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        for at in range(0, len(content) if self.command != "HEAD" else 0, PIECE):
            self.server.take(len(content[at : at + PIECE]))
            self.wfile.write(content[at : at + PIECE])

    # --- operations: (status, content, headers) -----------------------------------------------------------------------

    def on_put(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = b"".join(_unchunked(body))
        if "uploadId" in self.query:
            self.server.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = body
        elif self.headers.get("If-None-Match") == "*" and self.key in self.server.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code><Message>there</Message></Error>", {}
        else:
            self._create(body)
        return 200, b"", {"ETag": _etag(body)}

    def _create(self, body: bytes) -> None:
        self.server.objects[self.key] = body
        self.server.times[self.key] = datetime.now(UTC)
        self.server.created[self.key] += 1

    def on_head(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if "/" in self.key and self.key not in self.server.objects:
            return 404, b"", {}
        content = self.server.objects.get(self.key, b"")
        return 200, content, {"ETag": _etag(content), "Last_Modified": self._changed(self.key)}

    def _changed(self, key: str) -> str:
        return format_datetime(self.server.times.get(key, datetime.now(UTC)), usegmt=True)

    def on_get(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if "list-type" in self.query or "/" not in self.key.rstrip("/"):
            return 200, self._listing().encode(), {}
        if self.key not in self.server.objects:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>", {}
        content = self.server.objects[self.key]
        headers = {"ETag": _etag(content), "Last_Modified": self._changed(self.key)}
        if (wanted := self.headers.get("Range")) is None:
            return 200, content, headers
        first, last = wanted.removeprefix("bytes=").split("-")
        end = min(len(content), int(last or len(content)) + 1)
        headers["Content_Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        return 206, content[int(first) : end], headers

    def _listing(self) -> str:
        bucket, prefix = self.key.rstrip("/"), self.query.get("prefix", "")
        delimiter, limit = self.query.get("delimiter", ""), int(self.query.get("max-keys", 1000))
        found: dict[str, str] = {}
        for each, content in sorted(self.server.objects.items()):
            name = each.removeprefix(f"{bucket}/")
            if not name.startswith(prefix) or name <= self.query.get("continuation-token", ""):
                continue
            child, separator, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if separator:
                folder = f"{prefix}{child}{delimiter}"
                found[folder] = f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            else:
                found[name] = (
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size><ETag>{_etag(content)}</ETag>"
                    f"<LastModified>{self.server.times[each].isoformat()}</LastModified></Contents>"
                )
            if len(found) == limit:
                break
        return f"<ListBucketResult><KeyCount>{len(found)}</KeyCount>{''.join(found.values())}</ListBucketResult>"

    def on_post(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if "delete" in self.query:
            for entry in ElementTree.fromstring(body).iter():
                if entry.tag.endswith("Key"):
                    self.server.objects.pop(f"{self.key.rstrip('/')}/{entry.text}", None)
            return 200, b"<DeleteResult></DeleteResult>", {}
        if "uploads" in self.query:
            name = f"upload-{len(self.server.uploads)}"
            self.server.uploads[name] = {}
            return 200, f"<Result><UploadId>{name}</UploadId></Result>".encode(), {}
        parts = self.server.uploads.pop(self.query["uploadId"])
        self._create(b"".join(parts[number] for number in sorted(parts)))
        return 200, b"<Result><ETag>whole</ETag></Result>", {}

    def on_delete(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        self.server.objects.pop(self.key, None)
        self.server.uploads.pop(self.query.get("uploadId", ""), None)
        return 204, b"", {}


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _unchunked(body: bytes) -> Iterator[bytes]:
    """The content of a body in chunks, with checksums at its end."""
    while body:
        size, _, body = body.partition(b"\r\n")
        nbytes = int(size.partition(b";")[0], 16)
        if not nbytes:
            return
        yield body[:nbytes]
        body = body[nbytes + 2 :]
