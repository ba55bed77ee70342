"""The catalogue of bad files (malformed.py) through everything that reads them: gguf_tools, the converter, the C API and Llama.

Every one is a sentence, none a signal, and none takes memory by what a header says. HOBBIT_FULL=1: at every truncation through
Llama, too.
"""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile

import pytest

import engine  # noqa: F401  libraries first
from gguf_tools import ggml, info
from gguf_tools.errors import GGUFError
from gguf_tools.reader import Reader
from hobbit_cpp.convert import ConvertError, convert
from hobbit_cpp.verify import verify
from makers import make_model
from malformed import ACCEPTED, CATALOGUE, LINKED, MAIN, SIDECAR, Gguf, truncations
import malformed_pairs  # noqa: F401  fills the tables

ROOM = 1 << 30  # bytes of address space that a bad file may cost


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    convert(make_model(folder / "m.gguf", n_layer=2, n_expert=4), folder / "pair.gguf", "keep", "q4_0", threads=1)
    convert(folder / "m.gguf", folder / "linked.gguf", "keep", "q4_0", link=True, threads=1)
    return folder


def sentence(error, path):
    text = str(error)
    assert "\n" not in text and path.name in text and len(text) < 1000, text


def test_the_builder_builds_what_it_took_apart(made):
    for name in ("m", "pair", "pair.experts", "linked.experts"):
        data = (made / f"{name}.gguf").read_bytes()
        assert Gguf.parse(data).build() == data


def test_reader_info_and_converter(made, tmp_path):
    source = Gguf.parse((made / "m.gguf").read_bytes())
    path = tmp_path / "x.gguf"
    for name, change in CATALOGUE.items():
        path.write_bytes(change(source))
        for call, error in ((Reader, GGUFError), (info.describe, GGUFError), (verify, GGUFError), (lambda p: convert(p, tmp_path / "o.gguf"), ConvertError)):
            if name == "HEADER_EMPTY" and call in (Reader, info.describe):
                continue
            try:
                call(path)
            except error as e:
                sentence(e, path)
            else:
                pytest.fail(f"{name} passed")
    for name, change in ACCEPTED.items():
        path.write_bytes(change(source))
        assert "routed experts are" in info.describe(path)
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_reader_at_every_truncation(made, tmp_path):
    for name in ("m", "pair.experts"):
        whole = Gguf.parse((made / f"{name}.gguf").read_bytes())
        lengths, data, path = truncations(whole), whole.build(), tmp_path / "x.gguf"
        assert len(lengths) > 100
        for n in lengths:
            path.write_bytes(data[:n])
            with pytest.raises(GGUFError) as e:
                Reader(path)
            sentence(e.value, path)


def test_lists_that_are_too_long_for_a_model(tmp_path):
    """A sparse file really holds so many elements; nothing is made of them."""
    for kind, item in ((0, 1), (10, 8)):
        path = tmp_path / "x.gguf"
        head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
        head += (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + kind.to_bytes(4, "little") + (1 << 25).to_bytes(8, "little")
        with open(path, "wb") as f:
            f.write(head)
            f.truncate(len(head) + (1 << 25) * item)
        with pytest.raises(GGUFError, match="33554432 elements, more than any model has"):
            Reader(path)


def cases(which):
    """{name: (table, name)} of the cases that a child tries on one half of a pair."""
    if which == "linked":
        return [("LINKED", n) for n in LINKED]
    own = "MAIN" if which == "main" else "SIDECAR"
    return [("CATALOGUE", n) for n in CATALOGUE] + [("ACCEPTED", n) for n in ACCEPTED] + [(own, n) for n in (MAIN if which == "main" else SIDECAR)]


def attempt(folder, which, table, name):
    """In the child: {way: "" if it loaded, or the error} for one case."""
    from hobbit_cpp import Llama, bindings
    import llama_cpp

    stem = "linked" if which == "linked" else "pair"
    main = folder / f"{stem}.gguf"
    path = main if which == "main" else folder / f"{stem}.experts.gguf"
    good = path.read_bytes()
    tables = {"CATALOGUE": CATALOGUE, "ACCEPTED": ACCEPTED, "MAIN": MAIN, "SIDECAR": SIDECAR, "LINKED": LINKED}
    path.write_bytes(tables[table][name](Gguf.parse(good)))
    ends = {}
    settings = bindings.hobbit_params()
    bindings.hobbit_default_params(settings)
    settings.budget_kind = 3  # the least that will do
    bindings.hobbit_set_load_params(settings)
    try:
        ends["probe"] = "" if bindings.hobbit_probe(str(main).encode(), 0, bindings.hobbit_info()) == 0 else bindings.hobbit_last_error().decode("utf-8", "replace")
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        model = llama_cpp.llama_model_load_from_file(str(main).encode(), params)  # past our checks in Python
        ends["C"] = "" if model else "refused"
        if model:
            llama_cpp.llama_model_free(model)
        bindings.hobbit_set_load_params(None)
        try:
            with Llama(main, n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, cache_bytes="min") as llm:
                llm.eval([1, 5])
            ends["Llama"] = ""
        except ValueError as error:
            ends["Llama"] = str(error)
        try:
            info.describe(str(main))
            info.summary(str(main))
        except (GGUFError, ggml.GGMLError) as error:
            ends["info"] = str(error)
        try:
            ends["verify"] = "; ".join(verify(main).damaged)
        except GGUFError as error:
            ends["verify"] = str(error)
    finally:
        path.write_bytes(good)
    return ends


def child(folder, which, first):
    folder = pathlib.Path(folder)
    import hobbit_cpp  # noqa: F401
    import llama_cpp
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    for i, (table, name) in enumerate(cases(which)):
        if i >= first:
            print(json.dumps({"case": i}), flush=True)
            print(json.dumps({"ends": attempt(folder, which, table, name)}), flush=True)


def run(made, which):
    """[(table, name, ends or "ended with ...")] of all cases, in one process as long as none ends it."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=made))
    for path in made.glob("*.gguf"):
        shutil.copy(path, folder)
    all_cases, results, first = cases(which), [], 0
    while first < len(all_cases):
        p = subprocess.run([sys.executable, __file__, str(folder), which, str(first)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=300,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        lines = [json.loads(line) for line in p.stdout.decode().splitlines() if line.startswith('{"')]
        for line in lines:
            if "case" in line:
                first = line["case"] + 1
            else:
                results.append((*all_cases[first - 1], line["ends"]))
        if p.returncode != 0:
            assert lines, p.stderr.decode()[-2000:]
            results.append((*all_cases[first - 1], f"ended with {p.returncode}: {p.stderr.decode()[-500:]}"))
    shutil.rmtree(folder)
    return results


@pytest.mark.parametrize("which", ["main", "sidecar", "linked"])
def test_the_whole_way(made, which):
    wrong = []
    for table, name, ends in run(made, which):
        if isinstance(ends, str):
            wrong.append((name, ends))
            continue
        said = ends["Llama"]
        if table == "ACCEPTED":
            good = said == "" and ends["C"] == ""
        else:  # what the checks in Python refuse, the library may load, but then it must be right for it
            good = said != "" and "\n" not in said and len(said) < 1000 and made.name in said
        if not good:
            wrong.append((table, name, ends))
    assert not wrong, "\n".join(str(x)[:600] for x in wrong)


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
