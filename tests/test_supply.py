"""Supply: pinned inputs, licences of what is shipped, no network at run time."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest

from hobbit_cpp import _libs, _version
from makers import make_model

GUARD = """
    import sys
    def guard(event, args):
        if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request", "ftplib.connect"):
            sys.stderr.write(f"NETWORK {event} {args}\\n")
            raise SystemExit(99)
    sys.addaudithook(guard)
    from hobbit_cpp.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def test_no_command_opens_a_connection(tmp_path):
    source = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=2, ff=256)
    (tmp_path / "text").write_text("a b c d " * 50)
    main = tmp_path / "o.gguf"

    def run(*argv):
        p = subprocess.run([sys.executable, "-c", textwrap.dedent(GUARD), *map(str, argv)], capture_output=True, text=True, timeout=120)
        assert "NETWORK" not in p.stderr and p.returncode == 0, (argv, p.stderr[-1000:])

    p = subprocess.run([sys.executable, "-c", textwrap.dedent(GUARD).replace("sys.exit(main(", "import socket; socket.create_connection(('127.0.0.1', 9)); sys.exit(main(")],
                       capture_output=True, text=True)
    assert p.returncode == 99 and "NETWORK" in p.stderr  # the guard sees what it should see
    run("convert", source, "-o", main, "--low", "q4_0")
    for command in (["info", main], ["verify", main], ["run", main, "-p", "a", "-n", "2", "--threads", "1", "--cache", "min"], ["doctor"],
                    ["trace", main, "--text", tmp_path / "text", "-o", tmp_path / "t.npy", "--threads", "1"]):
        run(*command)


@pytest.mark.skipif(not shutil.which("nm") or sys.platform == "win32", reason="nm")
def test_the_libraries_know_no_sockets():
    for path in _libs.lib_dir().glob("*.so"):
        if "rpc" in path.name:
            continue
        wanted = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"\bU (socket|connect|getaddrinfo|gethostbyname|sendto|curl_\w+|SSL_\w+)\b", wanted)
        assert not found, (path.name, found)


def test_build_inputs_are_pinned_by_hash(repo):
    assert re.fullmatch(r"[0-9a-f]{64}", _version.LLAMA_CPP_PYTHON_SHA256)
    lines = [line for line in (repo / "cmake" / "build-requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert lines and all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert "--require-hashes -r cmake/build-requirements.txt" in (repo / "Makefile").read_text()
    for path in [repo / "CMakeLists.txt", *(repo / "cmake").glob("*.cmake")]:
        assert not re.search(r"FetchContent|ExternalProject|file\(DOWNLOAD", path.read_text()), path


def test_licences_of_what_is_shipped(repo):
    text = (repo / "THIRD_PARTY.md").read_text()
    for name in _libs.build_info()["libraries"]:
        assert "libllama" in text if name == "llama" else "libggml" in text
    for name in ("llama.cpp", "Mozilla", "Apache-2.0", "NumPy"):
        assert name in text
    for name in ("SECURITY.md", "THIRD_PARTY.md"):
        assert name in (repo / "MANIFEST.in").read_text()


def test_bill_of_materials(repo, tmp_path):
    if importlib.util.find_spec("cyclonedx_py") is None:
        pytest.skip("cyclonedx-bom is not installed (make sbom does that)")
    out = tmp_path / "bom.json"
    subprocess.run([sys.executable, repo / "cmake" / "sbom.py", sys.executable, "-o", out], check=True, env=dict(os.environ))
    bom = json.loads(out.read_text())
    names = {c["name"]: c for c in bom["components"]}
    assert {"llama.cpp", "numpy", "gguf"} <= set(names)
    assert names["llama.cpp"]["externalReferences"][0]["hashes"][0]["content"] == _version.LLAMA_CPP_PYTHON_SHA256
