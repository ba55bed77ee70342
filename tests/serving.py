"""Starts `hobbit serve` for tests, and talks to it with the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time


def until(condition, what: str, seconds: float = 60):
    """The first true value of condition()."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} s")


class Server:
    """with Server(model, "--t1", "1") as server: status, value = server.post("/v1/completions", {...})"""

    def __init__(self, model, *flags, **environment):
        env = {k: v for k, v in os.environ.items() if not k.startswith("HOBBIT_SERVE_")}
        argv = [sys.executable, "-m", "hobbit_cpp", "serve", *([str(model)] if model else []), "--port", "0", "--threads", "1", *map(str, flags)]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**env, **environment})
        said, found = "", None
        while not found:  # llama.cpp may say something before
            line = self.process.stderr.readline()
            said += line
            found = re.search(r"at https?://[^:]+:(\d+)/v1", line)
            if not line:
                raise AssertionError(said)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def connection(self, timeout: float = 120):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method: str, path: str, body=None, headers=None):
        """(status, bytes)."""
        with contextlib.closing(self.connection()) as c:
            c.request(method, path, body, headers or {})
            answer = c.getresponse()
            return answer.status, answer.read()

    def get(self, path: str, **headers):
        status, data = self.ask("GET", path, headers=headers)
        return status, json.loads(data)

    def post(self, path: str, body, **headers):
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        status, answer = self.ask("POST", path, data, {"Content-Type": "application/json", **headers})
        return status, json.loads(answer)

    def complete(self, prompt="Once upon a time", **more):
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more})

    def begin(self, path: str, body):
        """A connection whose request was sent and whose answer was not read; close() it to leave."""
        c = self.connection()
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return c

    def metric(self, name: str, **labels) -> float:
        from prometheus_client.parser import text_string_to_metric_families

        text = self.ask("GET", "/metrics")[1].decode()
        return sum(s.value for f in text_string_to_metric_families(text) for s in f.samples
                   if s.name == name and all(s.labels.get(k) == v for k, v in labels.items()))

    def stop(self, sig=signal.SIGTERM) -> tuple[int, str]:
        """(exit status, what it said)."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            said = self.process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.process.returncode, said

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.process.poll() is None:
            status, said = self.stop()
            assert kind is not None or (status == 0 and "Traceback" not in said), said
