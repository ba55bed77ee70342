"""--split-max-size: a sidecar in several files."""

import numpy as np
import pytest

import engine
from gguf_tools import info
from gguf_tools.reader import Reader
from hobbit_cpp.convert import ConvertError, convert, main
from makers import make_model


@pytest.fixture(scope="module")
def source():
    return make_model(engine.cache_dir() / "parts.gguf", "qwen3moe", n_layer=4, n_expert=8, n_used=2, ff=256)


def files(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("link", [False, True])
def test_parts(source, tmp_path, link, capsys):
    limit = 1_600_000 if link else 5 << 20  # 1 MiB of it is for a header
    whole, parts = convert(source, tmp_path / "w.gguf", link=link), convert(source, tmp_path / "p.gguf", link=link, split_max_bytes=limit)
    assert parts.parts > 1 and whole.parts == 1 and parts.sidecar_bytes >= whole.sidecar_bytes
    names = [f"p.experts-{i + 1:05}-of-{parts.parts:05}.gguf" for i in range(parts.parts)]
    assert files(tmp_path) == sorted(["p.gguf", *names, "w.experts.gguf", "w.gguf"])
    assert all((tmp_path / n).stat().st_size <= limit for n in names)
    with Reader(str(tmp_path / "w.experts.gguf")) as a, Reader(parts.sidecar) as b:
        assert list(a.tensors) == list(b.tensors)
        assert all(a.read(t) == b.read(b.tensors[t.name]) for t in a.tensors.values())
    with engine.Model(source) as stock:
        prompt = engine.prompt(20, stock.n_vocab)
        expected = engine.run(stock, prompt, generate=5)
    with engine.Model(tmp_path / "p.gguf", budget_kind=engine.MIN) as model:
        assert np.array_equal(engine.run(model, prompt, generate=5)[0], expected[0])
    assert info.main([str(tmp_path / "p.gguf")]) == 0 and "a pair" in capsys.readouterr().out


def test_parts_that_do_not_belong(source, tmp_path):
    report = convert(source, tmp_path / "p.gguf", split_max_bytes=5 << 20)
    last = tmp_path / f"p.experts-{report.parts:05}-of-{report.parts:05}.gguf"
    data = last.read_bytes()
    last.unlink()
    with pytest.raises(ValueError, match=f"{last.name}: cannot open"):
        engine.Model(tmp_path / "p.gguf")
    last.write_bytes(data[:len(data) // 2])
    with pytest.raises(ValueError, match=f"{last.name}.*truncated|{last.name}.*damaged"):
        engine.Model(tmp_path / "p.gguf")
    other = convert(source, tmp_path / "q.gguf", low="q4_0", split_max_bytes=5 << 20)
    last.write_bytes((tmp_path / f"q.experts-{other.parts:05}-of-{other.parts:05}.gguf").read_bytes())
    with pytest.raises(ValueError, match=f"{last.name}: belongs to another conversion"):
        engine.Model(tmp_path / "p.gguf")


def test_sizes_that_are_refused(source, tmp_path, capsys):
    with pytest.raises(ConvertError, match="alone has .* a tensor is not divided"):
        convert(source, tmp_path / "p.gguf", split_max_bytes=1_900_000)
    for size, why in (("many", "is not a size"), ("1M", "a tensor is not divided")):
        assert main([str(source), "-o", str(tmp_path / "p.gguf"), "--split-max-size", size]) == 1
        assert why in capsys.readouterr().err
    assert files(tmp_path) == []


def test_existing_parts(source, tmp_path):
    report = convert(source, tmp_path / "p.gguf", split_max_bytes=5 << 20)
    (tmp_path / "p.gguf").unlink()
    with pytest.raises(ConvertError, match="00001-of-.* exists already"):
        convert(source, tmp_path / "p.gguf", split_max_bytes=5 << 20)
    assert convert(source, tmp_path / "p.gguf", split_max_bytes=5 << 20, force=True).parts == report.parts
