#!/usr/bin/env python3
"""Put the pinned llama.cpp, with csrc/patches/*.patch applied, into the build folder.

Called by CMakeLists.txt when it configures; standard library only, so that it runs under any
Python. The source is, in this order:

    --source PATH   a folder (llama.cpp itself, or an unpacked llama-cpp-python) or an sdist file
    otherwise       the sdist of llama-cpp-python named in hobbit_cpp/_version.py, fetched with pip

Files are patched in memory and only those that changed are written, so that a changed patch
recompiles only what it touches. Nothing is written if any patch does not fit. A stamp beside the
output makes a second call with the same source and patches return at once (edits made by hand in
the output survive until the stamp changes).
"""

import argparse
import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tarfile

# What the build needs of llama.cpp, and its converter of checkpoints, which is shipped: 35 MB of 176.
KEEP = ("CMakeLists.txt", "LICENSE", "cmake", "conversion", "convert_hf_to_gguf.py", "ggml", "gguf-py", "include", "licenses", "src", "vendor")
KEEP_FOR_TOOLS = ("common", "scripts", "tools")  # with --tools: 11 MB more


class PrepareError(Exception):
    """A problem that stops the build, in one message for the user."""


def read_pin(path):
    text = pathlib.Path(path).read_text(encoding="utf-8")
    pin = dict(re.findall(r'^(\w+) = "(.*)"\s*$', text, re.M))
    return pin["LLAMA_CPP_PYTHON_VERSION"], pin["LLAMA_CPP_PYTHON_SHA256"]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


# --- the source --------------------------------------------------------------------------------


def check_sdist(path, want):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    if digest.hexdigest() != want:
        raise PrepareError(f"{path} is not the pinned llama-cpp-python source: its sha256 is {digest.hexdigest()}, wanted {want}")


def fetch_sdist(folder, version, want):
    """The verified sdist in `folder`; fetched with pip if it is not there yet."""
    path = folder / f"llama_cpp_python-{version}.tar.gz"
    if path.is_file():
        try:
            check_sdist(path, want)
            return path
        except PrepareError:  # a download that was cut short, or an earlier pin
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching llama-cpp-python {version} (source distribution, 77 MB) with pip", file=sys.stderr)
    env = dict(os.environ)
    # pip prepares the metadata of what it downloads: the flags of our build are not meant for that,
    # and when we run inside a pip build the tracker of the outer pip is not ours.
    for name in ("CMAKE_ARGS", "PIP_BUILD_TRACKER", "PIP_REQ_TRACKER"):
        env.pop(name, None)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--no-binary", "llama-cpp-python", "--dest", str(folder), f"llama-cpp-python=={version}"]
    if subprocess.run(command, env=env).returncode != 0 or not path.is_file():
        raise PrepareError(f"could not fetch llama-cpp-python {version} with '{sys.executable} -m pip download'; "
                           "set HOBBIT_LLAMA_CPP_SOURCE to its sdist file or to an unpacked copy")
    try:
        check_sdist(path, want)
    except PrepareError:
        path.unlink()
        raise
    return path


def find_root(folder, version):
    """The llama.cpp root in `folder`, which is that root itself or an unpacked llama-cpp-python."""
    for root in (folder / "vendor" / "llama.cpp", folder):
        if (root / "src" / "llama.cpp").is_file() and (root / "ggml" / "CMakeLists.txt").is_file():
            break
    else:
        raise PrepareError(f"{folder} holds neither llama.cpp nor an unpacked llama-cpp-python")
    init = folder / "llama_cpp" / "__init__.py"
    if init.is_file():
        found = re.search(r'__version__ = "(.*)"', init.read_text(encoding="utf-8"))
        if found and found.group(1) != version:
            raise PrepareError(f"{folder} is llama-cpp-python {found.group(1)}, wanted {version}")
    return root


def list_folder(root, keep):
    for name in keep:
        top = root / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file():
                yield path.relative_to(root).as_posix(), path


def read_folder(root, keep):
    """{relative path: (bytes, executable)}"""
    return {name: (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for name, path in list_folder(root, keep)}


def read_sdist(path, keep):
    files = {}
    with tarfile.open(path) as tar:
        for member in tar:
            _, found, name = member.name.partition("/vendor/llama.cpp/")
            parts = name.split("/")
            if found and member.isfile() and parts[0] in keep and ".." not in parts:
                files[name] = (tar.extractfile(member).read(), bool(member.mode & 0o100))
    if "CMakeLists.txt" not in files:
        raise PrepareError(f"{path} holds no vendor/llama.cpp")
    return files


# --- patches -----------------------------------------------------------------------------------
# A strict applier of unified diffs: line numbers may be off, context may not. It is here, and not
# patch(1) or git, because a fresh machine may have neither and both can skip a hunk quietly.


def read_patches(folder):
    """[(name, text)] in name order, line ends made \\n (a checkout may have turned them into CRLF)."""
    paths = sorted(folder.glob("*.patch"), key=lambda p: p.name)
    return [(p.name, p.read_bytes().replace(b"\r\n", b"\n").decode("utf-8", "surrogateescape")) for p in paths]


def parse_patch(name, text):
    """[(old path or None, new path or None, [hunk])], hunk = (header, start, [(mark, line)], ends)."""
    lines = text.split("\n")
    files, i = [], 0

    def path_of(line):
        path = line[4:].split("\t")[0].strip()
        return None if path == "/dev/null" else path.partition("/")[2]

    while i < len(lines):
        if lines[i].startswith(("rename from ", "copy from ", "GIT binary patch", "Binary files ")):
            raise PrepareError(f"patch {name}: '{lines[i]}' is not supported")
        if not (lines[i].startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ ")):
            i += 1
            continue
        hunks = []
        files.append((path_of(lines[i]), path_of(lines[i + 1]), hunks))
        i += 2
        while i < len(lines) and lines[i].startswith("@@ "):
            header = lines[i]
            found = re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", header)
            if not found:
                raise PrepareError(f"patch {name}: malformed hunk '{header}'")
            start, n_old, _, n_new = (1 if g is None else int(g) for g in found.groups())
            body, ends = [], {}
            i += 1
            while n_old > 0 or n_new > 0 or (i < len(lines) and lines[i].startswith("\\")):
                # an empty line is an empty line of context whose blank was lost in the mail
                mark, line = (lines[i][:1] or " ", lines[i][1:]) if i < len(lines) else ("", "")
                if mark == "\\" and body:
                    ends[body[-1][0]] = True  # "\ No newline at end of file"
                elif mark in (" ", "-", "+") and mark:
                    body.append((mark, line))
                    n_old -= mark != "+"
                    n_new -= mark != "-"
                if mark not in (" ", "-", "+", "\\") or n_old < 0 or n_new < 0:
                    raise PrepareError(f"patch {name}: the hunk '{header}' does not have as many lines as it says")
                i += 1
            hunks.append((header, start, body, ends))
    if not any(hunks for _, _, hunks in files):
        raise PrepareError(f"patch {name} holds no hunk")
    return files


def apply_hunks(where, data, hunks):
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    newline_at_end = lines[-1] == ""
    if newline_at_end:
        lines.pop()
    crlf = sum(line.endswith("\r") for line in lines) * 2 > len(lines)
    shift, done = 0, 0  # shift: how far the last hunk was from its line number; done: lines settled
    for number, (header, start, body, ends) in enumerate(hunks, 1):
        old = [line for mark, line in body if mark != "+"]

        def fits(at):
            return at >= done and [line.rstrip("\r") for line in lines[at:at + len(old)]] == [line.rstrip("\r") for line in old]

        guess = start + shift if not old else start - 1 + shift
        if old and not fits(guess):
            places = [at for at in range(done, len(lines) - len(old) + 1) if fits(at)]
            if len(places) != 1:
                why = "fits in several places" if places else "does not fit"
                raise PrepareError(f"{where}, hunk {number} ({header}) {why}")
            shift += places[0] - guess
            guess = places[0]
        elif not done <= guess <= len(lines):
            raise PrepareError(f"{where}, hunk {number} ({header}) lies outside the file")
        result, at = [], guess
        for mark, line in body:
            if mark == "+":
                result.append(line.rstrip("\r") + "\r" if crlf else line)
            else:
                if mark == " ":
                    result.append(lines[at])
                at += 1
        if at == len(lines):  # the hunk reaches the end of the file
            if "+" in ends or " " in ends:
                newline_at_end = False
            elif "-" in ends or not lines:
                newline_at_end = True
        lines[guess:at] = result
        shift += len(result) - (at - guess)
        done = guess + len(result)
    return ("\n".join(lines) + ("\n" if newline_at_end and lines else "")).encode("utf-8", "surrogateescape")


def apply_patch(name, text, files):
    """Change `files` as the patch says; returns the paths touched."""
    touched = []
    for old, new, hunks in parse_patch(name, text):
        path = new or old
        where = f"patch {name}, file {path}"
        if not path or (old and new and old != new) or ".." in path.split("/"):
            raise PrepareError(f"{where}: bad path (patches are made with -p1, against the llama.cpp root)")
        if old is None and path in files:
            raise PrepareError(f"{where}: to be created, but it exists")
        if old is not None and path not in files:
            raise PrepareError(f"{where}: no such file among those that the build uses ({', '.join(KEEP)})")
        data, executable = files.get(path, (b"", False))
        data = apply_hunks(where, data, hunks)
        if new is None:
            if data:
                raise PrepareError(f"{where}: to be deleted, but lines remain")
            del files[path]
        else:
            files[path] = (data, executable)
        touched.append(path)
    return touched


# --- the output --------------------------------------------------------------------------------


def write_tree(out, files):
    """Make `out` hold exactly `files`; returns how many files were written or removed."""
    changed = 0
    for path in sorted(out.rglob("*"), reverse=True) if out.is_dir() else []:
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(out).as_posix() not in files:
            path.unlink()
            changed += 1
    for name, (data, executable) in files.items():
        path = out / name
        if path.is_file() and path.read_bytes() == data:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)  # with a new time stamp: it has to be compiled
        path.chmod(0o755 if executable else 0o644)
        changed += 1
    return changed


def prepare(pin, patches, out, download, source=None, tools=False):
    version, want = read_pin(pin)
    keep = KEEP + KEEP_FOR_TOOLS if tools else KEEP
    texts = read_patches(patches)
    stamp = out.with_name(out.name + ".stamp")

    root = None
    if source and not source.exists():
        raise PrepareError(f"HOBBIT_LLAMA_CPP_SOURCE: {source} does not exist")
    if source and source.is_dir():
        root = find_root(source, version)
        stats = [f"{name} {p.stat().st_size} {p.stat().st_mtime_ns}" for name, p in list_folder(root, keep)]
        origin = f"folder {root.resolve()} {sha256(chr(10).join(stats).encode('utf-8', 'surrogateescape'))}"
    else:
        if source:
            check_sdist(source, want)
        origin = f"sdist {want}"
    state = "\n".join(
        [origin, f"kept {' '.join(keep)}", f"script {sha256(pathlib.Path(__file__).read_bytes())}"]
        + [f"patch {name} {sha256(text.encode('utf-8', 'surrogateescape'))}" for name, text in texts]
    ) + "\n"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == state and (out / "CMakeLists.txt").is_file():
        print(f"llama.cpp of llama-cpp-python {version} with {len(texts)} patches: up to date")
        return

    files = read_folder(root, keep) if root else read_sdist(source or fetch_sdist(download, version, want), keep)
    for name, text in texts:
        touched = apply_patch(name, text, files)
        print(f"applied {name} ({', '.join(touched)})")
    if stamp.exists():
        stamp.unlink()  # until the tree is whole again
    changed = write_tree(out, files)
    stamp.write_text(state, encoding="utf-8")
    print(f"llama.cpp of llama-cpp-python {version} with {len(texts)} patches: {changed} files changed in {out}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pin", type=pathlib.Path, required=True, help="hobbit_cpp/_version.py")
    parser.add_argument("--download", type=pathlib.Path, required=True, help="folder for the sdist")
    parser.add_argument("--source", help="folder or sdist to use instead of a download")
    parser.add_argument("--patches", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--tools", action="store_true", help="llama.cpp's own tools, too")
    parser.add_argument("--sdist", action="store_true", help="only fetch the sdist and print its path")
    args = parser.parse_args()
    source = pathlib.Path(args.source).expanduser() if args.source else None
    try:
        if args.sdist:
            version, want = read_pin(args.pin)
            if source and source.is_file():
                check_sdist(source, want)
                print(source)
            else:
                print(fetch_sdist(args.download, version, want))
        else:
            prepare(args.pin, args.patches, args.out, args.download, source, args.tools)
    except PrepareError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
