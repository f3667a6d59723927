"""A stand-in for Google Cloud Storage, for programs that are started with `Buckets.environment`.

TensorStore and Google's client ask it directly; TensorFlow's file system knows Google's hosts alone, and
reaches it as an HTTPS proxy with a certificate of its own.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import itertools
import json
import pathlib
import re
import ssl
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOSTS = ("www.googleapis.com", "storage.googleapis.com", "oauth2.googleapis.com")


class Buckets:
    """Objects by ``bucket/name``, over HTTP."""

    def __init__(self, directory: pathlib.Path):
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.buckets = {"bucket"}
        self.generations = itertools.count(1)
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self.lock = threading.RLock()
        self.certificate, key = directory / "certificate.pem", directory / "key.pem"
        names = ",".join(f"DNS:{host}" for host in HOSTS)
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=buckets", "-addext", f"subjectAltName={names}"),
                *("-keyout", str(key), "-out", str(self.certificate)),
            ],
            check=True,
            capture_output=True,
        )
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(self.certificate, key)
        handler = type("Handler", (_Handler,), {"store": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What a program must see to use these buckets in the place of Google's."""
        address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return {
            "https_proxy": address,
            "HTTPS_PROXY": address,
            "no_proxy": "127.0.0.1,localhost",
            "CURL_CA_BUNDLE": str(self.certificate),
            "TENSORSTORE_GCS_HTTP_URL": address,
            "STORAGE_EMULATOR_HOST": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "NO_GCE_CHECK": "true",
        }

    def put(self, name: str, data: bytes) -> None:
        """Stores an object."""
        with self.lock:
            self.objects[name] = next(self.generations), data

    def names(self, prefix: str = "") -> list[str]:
        """Names of the objects, in order."""
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def upload(self, directory: pathlib.Path, prefix: str) -> None:
        """Stores the files of a directory under a prefix, as ``gcloud storage cp`` does."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())


class _Handler(BaseHTTPRequestHandler):
    """The part of the JSON and XML interfaces that TensorFlow and TensorStore use."""

    protocol_version = "HTTP/1.1"
    store: Buckets

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_CONNECT(self) -> None:
        self.send_response_only(200)
        self.end_headers()
        self.connection = self.store.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb", self.rbufsize)
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False

    def respond(self) -> None:
        body = self.body()
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        path = parts.path
        with self.store.lock:
            if found := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
                self.begin_upload(found[1], query, body)
            elif found := re.fullmatch(r"/uploads/([0-9]+)", path):
                self.go_on_with_upload(found[1], body)
            elif found := re.fullmatch(r"/storage/v1/b/([^/]+)", path):
                there = found[1] in self.store.buckets
                self.answer(200 if there else 404, {"name": found[1], "location": "EU"})
            elif re.fullmatch(r"/storage/v1/b/([^/]+)/storageLayout", path):
                self.answer(200, {"hierarchicalNamespace": {"enabled": False}})
            elif found := re.fullmatch(r"/storage/v1/b/([^/]+)/o", path):
                self.list_objects(found[1], query)
            elif found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/(.+)/rewriteTo/b/(.+)/o/(.+)", path):
                one, two, three, four = map(urllib.parse.unquote, found.groups())
                if self.exists(f"{one}/{two}"):
                    self.store.put(f"{three}/{four}", self.store.objects[f"{one}/{two}"][1])
                    self.answer(200, {"done": True})
            elif found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/(.+)", path):
                self.object(f"{found[1]}/{urllib.parse.unquote(found[2])}", query)
            elif self.command == "GET":
                self.media(urllib.parse.unquote(path[1:]), {})
            else:
                self.answer(400, {"error": path})

    do_GET = do_POST = do_PUT = do_DELETE = respond  # noqa: N815

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, code: int, value: object = None, data: bytes | None = None, **headers: str) -> None:
        text = (b"" if value is None else json.dumps(value).encode()) if data is None else data
        self.send_response(code)
        for name, header in headers.items():
            self.send_header(name.replace("_", "-"), header)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def exists(self, name: str) -> bool:
        there = name in self.store.objects
        if not there:
            self.answer(404, {"error": {"code": 404, "message": f"no such object: {name}"}})
        return there

    def describe(self, name: str) -> dict[str, object]:
        generation, data = self.store.objects[name]
        bucket, _, rest = name.partition("/")
        return {
            "name": rest,
            "bucket": bucket,
            "size": str(len(data)),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
            "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
        }

    def matches(self, name: str, query: dict[str, str]) -> bool:
        """Answers that an object has another generation than the one that was asked for."""
        generation = self.store.objects.get(name, (0, b""))[0]
        if int(query.get("ifGenerationMatch", generation)) != generation:
            self.answer(412, {"error": {"code": 412, "message": "conditionNotMet"}})
            return False
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            self.answer(304)
            return False
        return True

    def object(self, name: str, query: dict[str, str]) -> None:
        if self.command == "DELETE":
            if self.exists(name) and self.matches(name, query):
                del self.store.objects[name]
                self.answer(204)
        elif query.get("alt") == "media":
            self.media(name, query)
        elif self.exists(name) and self.matches(name, query):
            self.answer(200, self.describe(name))

    def media(self, name: str, query: dict[str, str]) -> None:
        if not self.exists(name) or not self.matches(name, query):
            return
        generation, data = self.store.objects[name]
        now = email.utils.formatdate(usegmt=True)
        headers = {"x-goog-generation": str(generation), "Last-Modified": now}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            self.answer(200, data=data, **headers)
            return
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first >= len(data):
            self.answer(416, {"error": "range"})
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self.answer(206, data=data[first : last + 1], **headers)

    def list_objects(self, bucket: str, query: dict[str, str]) -> None:
        if bucket not in self.store.buckets:
            self.answer(404, {"error": {"code": 404, "message": "no such bucket"}})
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        for full in self.store.names(f"{bucket}/{prefix}"):
            name = full.partition("/")[2]
            if query.get("startOffset", "") > name or name >= query.get("endOffset", "\U0010ffff"):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest[: rest.index(delimiter) + 1])
            else:
                items.append(self.describe(full))
        self.answer(200, {"items": items, "prefixes": sorted(prefixes)})

    def begin_upload(self, bucket: str, query: dict[str, str], body: bytes) -> None:
        if query["uploadType"] == "multipart":  # a description and the data, between boundaries
            boundary = self.headers["Content-Type"].partition("boundary=")[2].strip('"').encode()
            described, data = (
                part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
                for part in body.split(b"--" + boundary)[1:3]
            )
            query, body = {**json.loads(described), **query, "uploadType": "media"}, data
        name = f"{bucket}/{query['name']}"
        if bucket not in self.store.buckets:
            self.answer(404, {"error": {"code": 404, "message": "no such bucket"}})
        elif not self.matches(name, query):
            return
        elif query["uploadType"] == "media":
            self.store.put(name, body)
            self.answer(200, self.describe(name))
        else:
            number = str(len(self.store.uploads) + 1)
            self.store.uploads[number] = name, bytearray()
            host = self.headers["Host"]
            secure = isinstance(self.connection, ssl.SSLSocket)
            self.answer(200, {}, Location=f"http{'s' * secure}://{host}/uploads/{number}")

    def go_on_with_upload(self, number: str, body: bytes) -> None:
        name, data = self.store.uploads[number]
        data += body
        whole = re.fullmatch(r"bytes .*/(\d+)", self.headers.get("Content-Range") or f"bytes /{len(data)}")
        if whole and len(data) >= int(whole[1]):
            self.store.put(name, bytes(data))
            self.answer(200, self.describe(name))
        else:
            self.answer(308, Range=f"bytes=0-{len(data) - 1}")


@contextlib.contextmanager
def serve(directory: pathlib.Path) -> Iterator[Buckets]:
    """Buckets for a block; `directory` takes their certificate."""
    buckets = Buckets(directory)
    try:
        yield buckets
    finally:
        buckets.server.shutdown()
        buckets.server.server_close()
