"""cmake/prepare_llama_cpp.py: source, hash and patches. Tiny trees; nothing is downloaded or compiled."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile

import pytest

LLAMA = "int one() {\n    return 1;\n}\n\nint two() {\n    return 2;\n}\n"
FILES = {"CMakeLists.txt": "project(x)\n", "ggml/CMakeLists.txt": "\n", "src/llama.cpp": LLAMA, "tools/unused.cpp": "\n"}

PATCH = """Two becomes three.

diff --git a/src/llama.cpp b/src/llama.cpp
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -4,4 +4,4 @@

 int two() {
-    return 2;
+    return 3;
 }
"""


class Tree:
    """A tiny llama.cpp, a pin and a folder of patches, in a folder with an awkward name."""

    def __init__(self, top, repo):
        self.repo, self.top = repo, top / "a b" / "é"
        self.root, self.patches, self.out = self.top / "source", self.top / "patches", self.top / "build" / "llama.cpp"
        self.patches.mkdir(parents=True)
        for name, text in FILES.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        self.pin = self.top / "_version.py"
        self.write_pin("0" * 64)

    def write_pin(self, digest):
        self.pin.write_text(f'LLAMA_CPP_PYTHON_VERSION = "9.9"\nLLAMA_CPP_PYTHON_SHA256 = "{digest}"\n')

    def sdist(self):
        path = self.top / "llama_cpp_python-9.9.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, text in FILES.items():
                info = tarfile.TarInfo(f"llama_cpp_python-9.9/vendor/llama.cpp/{name}")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
        return path

    def patch(self, name, text):
        (self.patches / name).write_bytes(text.encode())

    def run(self, source=None, ok=True):
        result = subprocess.run(
            [sys.executable, str(self.repo / "cmake" / "prepare_llama_cpp.py"), "--pin", str(self.pin), "--patches", str(self.patches),
             "--download", str(self.top / "download"), "--out", str(self.out), "--source", str(source or self.root)],
            capture_output=True, text=True, encoding="utf-8", env={**os.environ, "PYTHONUTF8": "1"})
        assert (result.returncode == 0) == ok, result.stdout + result.stderr
        return result.stdout + result.stderr

    def read(self, name="src/llama.cpp"):
        return (self.out / name).read_bytes().decode()


@pytest.fixture
def tree(tmp_path, repo):
    return Tree(tmp_path, repo)


def test_applies_and_leaves_the_source_alone(tree):
    tree.patch("0001-three.patch", PATCH)
    assert "applied 0001-three.patch (src/llama.cpp)" in tree.run()
    assert tree.read() == LLAMA.replace("return 2", "return 3")
    assert (tree.root / "src/llama.cpp").read_text() == LLAMA
    assert not (tree.out / "tools").exists()  # only what the build needs


def test_order_offset_and_new_file(tree):
    tree.patch("0001-first.patch", "--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -1,1 +1,3 @@\n+// a\n+// b\n int one() {\n")
    tree.patch("0002-three.patch", PATCH)  # two lines further down now
    tree.patch("0003-new.patch", "--- /dev/null\n+++ b/src/new.cpp\n@@ -0,0 +1,2 @@\n+int n;\n+int m;\n")
    tree.run()
    assert tree.read() == "// a\n// b\n" + LLAMA.replace("return 2", "return 3")
    assert tree.read("src/new.cpp") == "int n;\nint m;\n"


def test_crlf_patch_and_crlf_source(tree):
    tree.patch("0001-three.patch", PATCH.replace("\n", "\r\n"))
    tree.run()
    assert tree.read() == LLAMA.replace("return 2", "return 3")
    (tree.root / "src/llama.cpp").write_bytes(LLAMA.replace("\n", "\r\n").encode())
    tree.run()
    assert tree.read() == LLAMA.replace("return 2", "return 3").replace("\n", "\r\n")


def test_no_newline_at_end(tree):
    (tree.root / "src/llama.cpp").write_bytes(b"a\nb")
    end = "\\ No newline at end of file\n"
    tree.patch("1.patch", f"--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -1,2 +1,2 @@\n a\n-b\n{end}+c\n")
    tree.run()
    assert tree.read() == "a\nc\n"
    tree.patch("2.patch", f"--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -1,2 +1,2 @@\n a\n-c\n+d\n{end}")
    tree.run()
    assert tree.read() == "a\nd"


@pytest.mark.parametrize("text, said", [
    (PATCH.replace("return 2", "return 5"), "file src/llama.cpp, hunk 1 (@@ -4,4 +4,4 @@) does not fit"),
    (PATCH.replace("@@ -4,4", "@@ -4,9"), "does not have as many lines as it says"),
    (PATCH.replace("src/llama.cpp", "src/gone.cpp"), "file src/gone.cpp: no such file"),
    (PATCH.replace("src/llama.cpp", "tools/unused.cpp"), "file tools/unused.cpp: no such file"),
    ("only words\n", "holds no hunk"),
    ("diff --git a/x b/y\nrename from x\nrename to y\n", "is not supported"),
    ("--- /dev/null\n+++ b/src/llama.cpp\n@@ -0,0 +1,1 @@\n+x\n", "to be created, but it exists"),
    ("--- a/src/llama.cpp\n+++ b/src/llama.cpp\n@@ -90,1 +90,2 @@\n }\n+// x\n", "fits in several places"),
])
def test_a_patch_that_does_not_apply_names_itself_and_changes_nothing(tree, text, said):
    tree.run()
    tree.patch("0007-bad.patch", text)
    output = tree.run(ok=False)
    assert "error: patch 0007-bad.patch" in output and said in output
    assert "Traceback" not in output
    assert tree.read() == LLAMA
    tree.run(ok=False)  # and the failure is not forgotten


def test_only_what_changed_is_written(tree):
    tree.run()
    times = {name: (tree.out / name).stat().st_mtime_ns for name in ("CMakeLists.txt", "src/llama.cpp")}
    assert "up to date" in tree.run()
    tree.patch("0001-three.patch", PATCH)
    assert "1 files changed" in tree.run()
    assert (tree.out / "CMakeLists.txt").stat().st_mtime_ns == times["CMakeLists.txt"]
    assert (tree.out / "src/llama.cpp").stat().st_mtime_ns > times["src/llama.cpp"]
    (tree.patches / "0001-three.patch").unlink()
    tree.run()
    assert tree.read() == LLAMA


def test_sdist_and_hash(tree):
    sdist = tree.sdist()
    output = tree.run(sdist, ok=False)
    assert "sha256" in output and "0" * 64 in output and str(sdist) in output
    tree.write_pin(hashlib.sha256(sdist.read_bytes()).hexdigest())
    tree.run(sdist)
    assert tree.read() == LLAMA
    # A file of that name already fetched serves as well, without a network.
    (tree.top / "download").mkdir()
    sdist.rename(tree.top / "download" / sdist.name)
    result = subprocess.run(
        [sys.executable, str(tree.repo / "cmake" / "prepare_llama_cpp.py"), "--pin", str(tree.pin),
         "--download", str(tree.top / "download"), "--sdist"], capture_output=True, text=True)
    assert result.stdout.splitlines() == [str(tree.top / "download" / sdist.name)], result.stderr


def test_a_new_pin_unpacks_again(tree):
    tree.patch("0001-three.patch", PATCH)
    sdist = tree.sdist()
    tree.write_pin(hashlib.sha256(sdist.read_bytes()).hexdigest())
    tree.run(sdist)
    tree.write_pin("1" * 64)
    assert "is not the pinned" in tree.run(sdist, ok=False)


@pytest.mark.parametrize("make, said", [
    (lambda top: None, "does not exist"),
    (lambda top: top.mkdir(), "holds neither llama.cpp nor"),
])
def test_wrong_source_folder(tree, make, said):
    make(tree.top / "elsewhere")
    assert said in tree.run(tree.top / "elsewhere", ok=False)


def test_unpacked_sdist_of_another_version(tree):
    folder = tree.top / "unpacked"
    (folder / "vendor").mkdir(parents=True)
    tree.root.rename(folder / "vendor" / "llama.cpp")
    tree.run(folder)
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    assert "is llama-cpp-python 1.2.3, wanted 9.9" in tree.run(folder, ok=False)
