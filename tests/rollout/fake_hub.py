"""A server on this machine that plays the hub's endpoints for repositories and commits."""

import base64
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """What was asked of it, and how it shall fail."""

    def __init__(self):
        self.repositories = {}
        """Name → visibility that was asked for."""
        self.commits = []
        """(repository, message, {path: bytes}) of each."""
        self.tokens = set()
        self.refuse_creation = None
        """An HTTP status for every request to make a repository."""
        self.refuse_commits = None
        self.url = ""


@contextmanager
def serve_hub():
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def do_POST(self):
            body = self._body()
            hub.tokens.add(self.headers.get("authorization"))
            if self.path == "/api/repos/create":
                self._create(json.loads(body))
            elif self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
                files = json.loads(body)["files"]
                modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
                self._answer({"files": modes})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
                self._commit(match[1], body)
            else:
                self._answer({"error": self.path}, 404)

        def do_GET(self):
            self._answer({"error": "not here"}, 404)

        def _create(self, asked):
            if hub.refuse_creation:
                return self._answer({"error": "no"}, hub.refuse_creation)
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            hub.repositories[name] = asked.get("visibility")
            return self._answer({"url": f"{hub.url}/{name}", "name": name, "id": name})

        def _commit(self, repository, body):
            if hub.refuse_commits:
                return self._answer({"error": "no"}, hub.refuse_commits)
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            hub.commits.append((repository, message, files))
            url = f"{hub.url}/{repository}/commit/{'0' * 40}"
            return self._answer({"commitUrl": url, "commitOid": "0" * 40, "hookOutput": "", "success": True})

        def _body(self):
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, value, status=200):
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
