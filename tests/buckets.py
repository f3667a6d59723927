"""Simulates Google Cloud Storage for programs that use the environment `Buckets.environment`."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Buckets:
    """Stores objects by ``bucket/name`` and serves them over HTTP.

    The only bucket is named ``bucket``.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[int, bytes]] = {}  # content and generation of each object
        self.generations = itertools.count(1)
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"store": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make a program use these buckets instead of Google's."""
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return {
            # TensorFlow's file system knows only Google's servers, so do not use TensorFlow for
            # paths.
            "EPATH_USE_TF": "false",
            "TENSORSTORE_GCS_HTTP_URL": address,
            "STORAGE_EMULATOR_HOST": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "NO_GCE_CHECK": "true",
            "FSSPEC_GCS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def put(self, name: str, data: bytes) -> None:
        """Stores an object."""
        with self.lock:
            self.objects[name] = next(self.generations), data

    def names(self, prefix: str = "") -> list[str]:
        """Returns the sorted names of all objects with a prefix."""
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def upload(self, directory: pathlib.Path, prefix: str) -> None:
        """Stores the files of a directory under a prefix, as ``gcloud storage cp`` does."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())


class _Handler(BaseHTTPRequestHandler):
    """Implements the part of Google's JSON API that gcsfs and TensorStore use."""

    protocol_version = "HTTP/1.1"
    store: Buckets

    def log_message(self, *_: object) -> None:
        """Suppresses the log of requests."""

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        path = re.fullmatch(r"/(?:(\w+)/)?storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", parts.path)
        kind, bucket, name = path.groups() if path else ("", "", None)
        with self.store.lock:
            if bucket != "bucket":
                self.answer(
                    404, {"error": {"code": 404, "message": f"no such bucket: {parts.path}"}}
                )
            elif kind == "upload":
                self.upload(query, body)
            elif name is not None:
                self.object(f"bucket/{urllib.parse.unquote(name)}", query)
            else:
                self.list_objects(query)

    do_GET = do_POST = do_PUT = do_DELETE = respond  # noqa: N815

    def answer(
        self, code: int, value: object = None, data: bytes | None = None, **headers: str
    ) -> None:
        text = (b"" if value is None else json.dumps(value).encode()) if data is None else data
        self.send_response(code)
        for name, header in headers.items():
            self.send_header(name.replace("_", "-"), header)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def describe(self, name: str) -> dict[str, object]:
        generation, data = self.store.objects[name]
        return {
            "name": name.removeprefix("bucket/"),
            "bucket": "bucket",
            "size": str(len(data)),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
        }

    def matches(self, name: str, query: dict[str, str]) -> bool:
        """Returns whether an object's generation is the one that a request asks for.

        If the generation differs, the method also answers the request with an error.
        """
        generation = self.store.objects.get(name, (0, b""))[0]
        if int(query.get("ifGenerationMatch", generation)) != generation:
            self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            return False
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            self.answer(304)
            return False
        return True

    def object(self, name: str, query: dict[str, str]) -> None:
        if name not in self.store.objects:
            self.answer(404, {"error": {"code": 404, "message": f"no such object: {name}"}})
        elif not self.matches(name, query):
            return
        elif self.command == "DELETE":
            del self.store.objects[name]
            self.answer(204)
        elif query.get("alt") == "media":
            self.media(name)
        else:
            self.answer(200, self.describe(name))

    def media(self, name: str) -> None:
        generation, data = self.store.objects[name]
        headers = {"x-goog-generation": str(generation)}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self.answer(200, data=data, **headers)
            return
        first = int(asked[1])
        last = min(int(asked[2] or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.answer(206 if first < len(data) else 416, data=data[first : last + 1], **headers)

    def list_objects(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items = []
        prefixes = set()
        for full in self.store.names(f"bucket/{prefix}"):
            name = full.removeprefix("bucket/")
            if query.get("startOffset", "") > name or name >= query.get("endOffset", "\U0010ffff"):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest[: rest.index(delimiter) + 1])
            else:
                items.append(self.describe(full))
        self.answer(200, {"items": items, "prefixes": sorted(prefixes)})

    def upload(self, query: dict[str, str], body: bytes) -> None:
        if query["uploadType"] == "multipart":  # the metadata and the data
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip("\"'").encode()
            described, body = (
                part.partition(b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n")[2]
                for part in body.split(b"--" + boundary)[1:3]
            )
            query = {**json.loads(described), **query}
            body = body.removesuffix(b"\n").removesuffix(b"\r")
        elif query["uploadType"] == "resumable":  # an upload in a single part
            rest = urllib.parse.urlencode({**json.loads(body), **query, "uploadType": "media"})
            address = f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o?{rest}"
            self.answer(200, {}, Location=address)
            return
        name = f"bucket/{query['name']}"
        if self.matches(name, query):
            self.store.put(name, body)
            self.answer(200, self.describe(name))


@contextlib.contextmanager
def serve() -> Iterator[Buckets]:
    """Context manager that serves buckets."""
    buckets = Buckets()
    try:
        yield buckets
    finally:
        buckets.server.shutdown()
        buckets.server.server_close()
