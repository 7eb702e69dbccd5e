#!/usr/bin/env python3
"""A registry with one image, for tests of pulls: registry.py TREE PORT serves the directory TREE as `team/web:1` on
127.0.0.1, to who says to be ann with the password secret. It holds no more of the registry's protocol than a pull needs."""
import base64
import gzip
import hashlib
import http.server
import io
import json
import sys
import tarfile

TREE, PORT = sys.argv[1], int(sys.argv[2])
AUTH = "Basic " + base64.b64encode(b"ann:secret").decode()
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


archive = io.BytesIO()
with tarfile.open(fileobj=archive, mode="w") as tar:
    tar.add(TREE, arcname=".")
layer = gzip.compress(archive.getvalue(), mtime=0)
config = json.dumps({
    "architecture": "amd64", "os": "linux", "config": {"Env": ["OF_IMAGE=yes"]},
    "rootfs": {"type": "layers", "diff_ids": [digest(archive.getvalue())]},
}).encode()
manifest = json.dumps({
    "schemaVersion": 2, "mediaType": MANIFEST,
    "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "size": len(config), "digest": digest(config)},
    "layers": [{"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": len(layer), "digest": digest(layer)}],
}).encode()
ANSWERS = {"/v2/": (b"{}", "application/json")}
for blob in (layer, config):
    ANSWERS["/v2/team/web/blobs/" + digest(blob)] = (blob, "application/octet-stream")
for name in ("1", digest(manifest)):
    ANSWERS["/v2/team/web/manifests/" + name] = (manifest, MANIFEST)


class Registry(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, with_body):
        if self.headers.get("Authorization") != AUTH:
            status, body, kind = 401, b'{"errors":[{"code":"UNAUTHORIZED","message":"who are you"}]}', "application/json"
        elif self.path in ANSWERS:
            status, (body, kind) = 200, ANSWERS[self.path]
        else:
            status, body, kind = 404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}', "application/json"
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="test"')
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 200 and self.path != "/v2/":
            self.send_header("Docker-Content-Digest", digest(body))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_GET(self):
        self.answer(True)

    def do_HEAD(self):
        self.answer(False)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Registry).serve_forever()
