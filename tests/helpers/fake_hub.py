"""A Hugging Face Hub with one data set, on this machine: as much of its protocol as the datasets library asks for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class FakeHub(ThreadingHTTPServer):
    """Serves ``content`` as ``train.jsonl`` of the data set ``somebody/stories``; notes what is asked of it."""

    def __init__(self, content: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.content = content
        self.furthest = 0  # the last byte of it that was asked for by a range
        self.downloads = 0
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def fake_hub(content: bytes) -> Iterator[FakeHub]:
    with FakeHub(content) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        file = {"type": "file", "oid": "b" * 40, "size": len(self.server.content), "path": "train.jsonl"}
        if path == "/api/datasets/somebody/gated":
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/datasets/somebody/stories/revision/gone"):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"/api/datasets/somebody/stories/tree/{COMMIT}/data":
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif path.startswith(("/api/datasets/somebody/stories/revision/", "/api/datasets/somebody/stories/tree/")):
            self._answer(200, json.dumps([file] if "/tree/" in path else self._info()).encode())
        elif path == "/api/datasets/somebody/stories":
            self._answer(200, json.dumps(self._info()).encode())
        elif path == f"/datasets/somebody/stories/resolve/{COMMIT}/train.jsonl":
            self._send_file()
        elif "/resolve/" in path and "somebody/stories" in path:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _info(self) -> dict:
        return {"id": "somebody/stories", "sha": COMMIT, "private": False, "siblings": [{"rfilename": "train.jsonl"}]}

    def _send_file(self) -> None:
        content, size = self.server.content, len(self.server.content)
        headers = {"ETag": f'"{"b" * 40}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is None:
            self.server.downloads += self.command == "GET"
            self._answer(200, content, headers)
            return
        start, stop = asked.removeprefix("bytes=").split("-")
        first, last = int(start), min(int(stop or size), size - 1)
        self.server.furthest = max(self.server.furthest, last)
        self._answer(206, content[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{size}"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object, **__: object) -> None:
        """Nothing on the terminal."""
