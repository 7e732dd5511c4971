"""A stand-in for the model hub on this machine: one repository, its files, a renamed id, and faults on demand."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from voxport.files import sha256_file

REVISION = "a7f70853f163c4cccbdd27ce9a80dd97961fc581"
OLD_ID, NEW_ID = "bosonai/higgs-audio-v3-tts-4b", "bosonai/higgs-tts-3-4b"


def is_large(file: Path) -> bool:
    """Whether the hub keeps the file apart from git and lists its SHA-256."""
    return file.suffix == ".safetensors"


@dataclass
class Hub:
    """What is served, and what was asked: `requests` holds (method, path, Range header)."""

    folder: Path
    cut: set[str] = field(default_factory=set)  # files whose first download breaks off after three quarters
    gone: set[str] = field(default_factory=set)  # files that are listed but not there
    spoilt: set[str] = field(default_factory=set)  # files that are sent with another last byte
    deaf: bool = False  # files are sent from the first byte, whatever was asked for
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> set[str]:
        """Names of the files that were downloaded, whole or in part."""
        asked = [path for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]
        return {path.split(f"/resolve/{REVISION}/")[1] for path in asked if REVISION in path}

    def ranges(self, file: str) -> list[str | None]:
        return [header for method, path, header in self.requests if method == "GET" and path.endswith(f"/{file}")]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if OLD_ID in path:
            self.reply(307, b"", {"Location": path.replace(OLD_ID, NEW_ID)}, body)
        elif path == f"/api/models/{NEW_ID}":
            self.reply_json({"_id": "0", "id": NEW_ID, "sha": REVISION, "siblings": [], "tags": []}, body)
        elif path == f"/api/models/{NEW_ID}/tree/{REVISION}":
            self.reply_json([self.entry(file) for file in sorted(self.hub.folder.iterdir()) if file.is_file()], body)
        elif path.startswith(f"/{NEW_ID}/resolve/{REVISION}/"):
            self.reply_file(path.rsplit("/", 1)[1], body)
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def entry(self, file: Path) -> dict:
        found = {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": f"{hash(file.name) & 0xFFFFFFFF:040x}"}
        return found | ({"lfs": {"oid": sha256_file(file), "size": found["size"], "pointerSize": 134}} if is_large(file) else {})

    def reply_json(self, value: object, body: bool) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def reply_file(self, name: str, body: bool) -> None:
        if name in self.hub.gone:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION}, body)
            return
        content, status = (self.hub.folder / name).read_bytes(), 200
        tag = sha256_file(self.hub.folder / name) if is_large(Path(name)) else f"{name}-{len(content)}"
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": REVISION, "Accept-Ranges": "bytes"}
        if name in self.hub.spoilt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.headers.get("Range") and not self.hub.deaf:
            start, status = int(self.headers["Range"].removeprefix("bytes=").split("-")[0]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        cut = body and name in self.hub.cut
        self.hub.cut.discard(name) if cut else None
        self.reply(status, content, headers, body, sent=len(content) * 3 // 4 if cut else None)

    def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool, sent: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve `folder` as the repository until the block ends."""
    hub = Hub(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
