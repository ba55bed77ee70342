"""hobbit_cpp.convert: what is in the two files."""

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_tools import ggml, info
from gguf_tools.reader import Reader
from hobbit_cpp._convert_plan import FUSED_ARCHITECTURES
from hobbit_cpp.convert import ConvertError, convert, fnv1a, main
from makers import make_imatrix, make_model, make_old_imatrix, values

pytestmark = pytest.mark.skipif(not ggml.available(), reason="libggml-base is not built (set HOBBIT_LIB_PATH)")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "m.gguf", n_expert=3)


def tensors(path):
    """{name: (type name, shape, bytes)} by the gguf package."""
    return {t.name: (t.tensor_type.name.lower(), tuple(t.shape.tolist()), t.data.tobytes())
            for t in gguf.GGUFReader(path).tensors}


def fields(path):
    return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}


def direct(kind, x, weights=None):
    """ggml_quantize_chunk() of rows x in one call, past gguf_tools' checks."""
    lib = ggml._library()
    t = ggml.type_info(kind)
    x = np.ascontiguousarray(x, np.float32)
    out = np.zeros((len(x), x.shape[1] // t.block * t.size), np.uint8)
    w = None if weights is None else np.ascontiguousarray(weights, np.float32)
    lib.ggml_quantize_chunk(t.id, x.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), 0, len(x), x.shape[1],
                            None if w is None else w.ctypes.data_as(ctypes.c_void_p))
    return out.tobytes()


def floats(t):
    kind, shape, data = t
    raw = np.frombuffer(data, {"f32": np.float32, "f16": np.float16}.get(kind, np.uint8)).reshape(int(np.prod(shape[1:])), -1)
    return raw.astype(np.float32) if kind in ("f32", "f16") else gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])


def check_pair(source, out, high, low):
    """Every byte of both files. high, low: functions of (name, source type) to a type name."""
    src, m, s = tensors(source), tensors(out), tensors(out.with_name(out.stem + ".experts.gguf"))
    experts = [n for n in src if n.endswith("exps.weight")]
    assert list(m) == [n for n in src if n not in experts]
    assert all(m[n] == src[n] for n in m)
    assert sorted(s) == sorted(f"{n}.{c}" for n in experts for c in ("high", "low"))
    for n in experts:
        kind, shape, data = src[n]
        h, l = high(n, kind), low(n, kind)
        assert s[n + ".high"] == (h, shape, data if h == kind else direct(h, floats(src[n]))), n
        assert s[n + ".low"] == (l, shape, direct(l, floats(src[n]))), n
    return experts


def check_pair_of(report, source):
    return check_pair(source, Path(report.main), lambda n, k: k, lambda n, k: "q2_k")


@pytest.mark.parametrize("source_type, high, low", [
    ("f16", "keep", "q2_k"), ("f16", "q8_0", "q2_k"), ("f32", "f16", "q4_0"), ("f32", "keep", "f16"), ("f16", "q5_k", "iq4_nl"),
    ("q8_0", "keep", "q3_k"), ("q4_k", "keep", "q2_k"), ("q6_k", "q6_k", "q4_1"), ("q5_0", "keep", "q4_0"), ("f16", "Q8_0", "Q2_K"),
])
def test_every_byte(tmp_path, source_type, high, low):
    source = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=3, types=source_type)
    out = tmp_path / "o.gguf"
    report = convert(source, out, high, low)
    high, low = high.lower(), low.lower()
    check_pair(source, out, lambda n, k: k if high == "keep" else high, lambda n, k: low)
    src = fields(source)
    main_fields, side = ({k: v for k, v in fields(p).items() if not k.startswith("hobbit.crc32.")} for p in (out, tmp_path / "o.experts.gguf"))
    assert {k: v for k, v in main_fields.items() if not k.startswith("hobbit.")} == src
    assert {k: v for k, v in main_fields.items() if k.startswith("hobbit.")} == {
        "hobbit.format_version": 1, "hobbit.role": "main", "hobbit.sidecar": "o.experts.gguf",
        "hobbit.pair_id": side["hobbit.pair_id"]}
    assert len(side.pop("hobbit.pair_id")) == 64 and len(side.pop("hobbit.source.id")) == 64
    assert side == {"general.architecture": "hobbit", "general.alignment": 4096, "hobbit.format_version": 1,
                    "hobbit.role": "experts", "hobbit.source.name": "m.gguf", "hobbit.high": high, "hobbit.low": low,
                    "hobbit.fallbacks": [], "hobbit.link": False}
    assert report.ratio < 1 and not report.fallbacks and not report.warnings


def test_sidecar_order_and_pages(tmp_path, model):
    convert(model, tmp_path / "o.gguf")
    listed = gguf.GGUFReader(tmp_path / "o.experts.gguf").tensors
    assert [t.name for t in listed] == [f"blk.{layer}.ffn_{p}_exps.weight.{c}" for layer in (0, 1) for c in ("high", "low")
                                        for p in ("gate", "up", "down")]
    assert all(t.data_offset % 4096 == 0 for t in listed)
    assert (tmp_path / "o.experts.gguf").stat().st_size % 4096 == 0


def test_report_numbers(tmp_path, model):
    report = convert(model, tmp_path / "o.gguf", "q8_0", "q2_k")
    src, side = tensors(model), tensors(tmp_path / "o.experts.gguf")
    for row in report.rows:
        names = [n for n in src if n.endswith(f"ffn_{row.projection}_exps.weight")]
        source, high = (np.concatenate([floats(t).ravel() for t in ts])
                        for ts in ([src[n] for n in names], [side[n + ".high"] for n in names]))
        low = np.concatenate([floats(side[n + ".low"]).ravel() for n in names])
        a, b = (source, high) if row.copy == "high" else (high, low)
        assert row.error == pytest.approx(((a - b).astype(np.float64) ** 2).sum() / (a.astype(np.float64) ** 2).sum(), rel=1e-4)
        assert row.bytes == sum(len(side[f"{n}.{row.copy}"][2]) for n in names)
        assert row.bits == pytest.approx({"high": 8.5, "low": 2.625}[row.copy])
    assert report.low_bytes == sum(len(t[2]) for n, t in side.items() if n.endswith(".low"))
    assert report.main_bytes == (tmp_path / "o.gguf").stat().st_size
    assert "0.309" in report.table()


def test_threads_and_runs_do_not_matter(tmp_path, model):
    for i, threads in enumerate((1, 5)):
        convert(model, tmp_path / f"{i}.gguf", "q8_0", threads=threads)
    assert (tmp_path / "0.experts.gguf").read_bytes() == (tmp_path / "1.experts.gguf").read_bytes()


def test_mixed_types(tmp_path):
    def types(name):  # the pattern of Q4_K_M, with two bf16 layers
        layer = int(name.split(".")[1])
        return "bf16" if layer in (0, 3) else "q6_k" if "down" in name and layer == 1 else "q4_k"

    source, out = make_model(tmp_path / "m.gguf", n_layer=4, n_expert=2, ff=256, types=types), tmp_path / "o.gguf"
    report = convert(source, out, high="<=q8_0")
    check_pair(source, out, lambda n, k: "q8_0" if k == "bf16" else k, lambda n, k: "q2_k")
    side = fields(tmp_path / "o.experts.gguf")
    assert side["hobbit.high"] == "q8_0" and len(side["hobbit.fallbacks"]) == 6
    assert side["hobbit.fallbacks"][0] == "blk.1.ffn_gate_exps.weight.high: q8_0 -> q4_k (the source is not wider)"
    assert "blk.1-2.ffn_up_exps.weight.high: q8_0 -> q4_k" in report.table()


def test_presets(tmp_path, model):
    quantized = make_model(tmp_path / "q.gguf", n_layer=1, n_expert=2, types="q5_k")
    for source, options, high, low in [(model, [], "q8_0", "q2_k"), (model, ["--preset", "f16+q4"], "f16", "q4_0"),
                                       (quantized, [], "keep", "q2_k"), (model, ["--low", "q4_0"], "q8_0", "q4_0"),
                                       (model, ["--high", "keep"], "keep", "q2_k")]:
        assert main([str(source), "-o", str(tmp_path / "o.gguf"), "--force", "--quiet", *options]) == 0
        side = fields(tmp_path / "o.experts.gguf")
        assert (side["hobbit.high"], side["hobbit.low"], side["hobbit.fallbacks"]) == (high, low, [])


# --- twins: same weights, another file ---

@pytest.mark.parametrize("change", [{"split": 3}, {"alignment": 8}, {"alignment": 64}, {"alignment": 4096}, {"reverse": True}],
                         ids=str)
def test_twins_give_the_same_bytes(tmp_path, model, change):
    twin = make_model(tmp_path / "t.gguf", n_expert=3, extra=[("a.pad", "x" * 37, "str")], **change)
    convert(model, tmp_path / "a.gguf", "q8_0")
    convert(twin, tmp_path / "b.gguf", "q8_0")
    assert tensors(tmp_path / "a.gguf") == tensors(tmp_path / "b.gguf")
    assert tensors(tmp_path / "a.experts.gguf") == tensors(tmp_path / "b.experts.gguf")
    main_fields = fields(tmp_path / "b.gguf")
    assert not any(k.startswith("split.") for k in main_fields)
    assert main_fields.get("general.alignment", 32) == change.get("alignment", 32)


def test_split_model_has_the_same_identity(tmp_path, model):
    split = make_model(tmp_path / "t.gguf", n_expert=3, split=2)
    ids = []
    for source, out in ((model, "a.gguf"), (split, "b.gguf")):
        convert(source, tmp_path / out)
        ids.append({k: v for k, v in fields(tmp_path / out).items() if k == "hobbit.pair_id"})
    assert ids[0] == ids[1]


def test_default_output_names(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    first = make_model(tmp_path / "models" / "s.gguf", n_layer=1, n_expert=2, ff=256, split=2)
    report = convert(first)
    assert (report.main, report.sidecar) == ("s-hobbit.gguf", "s-hobbit.experts.gguf")
    whole = make_model(tmp_path / "models" / "w.gguf", n_layer=1, n_expert=2, ff=256)
    assert convert(whole).main == "w-hobbit.gguf"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["models", "s-hobbit.experts.gguf", "s-hobbit.gguf",
                                                          "w-hobbit.experts.gguf", "w-hobbit.gguf"]


# --- kinds of models ---

def test_dense_layers_biases_and_shared_experts_stay(tmp_path):
    source = make_model(tmp_path / "m.gguf", "gpt-oss", n_layer=3, n_expert=2, ff=256, n_dense=1, bias=True,
                        rename={"blk.2.attn_norm.weight": "blk.2.ffn_up_shexp.weight"})
    experts = check_pair_of(convert(source, tmp_path / "o.gguf"), source)
    assert {n.split(".")[1] for n in experts} == {"1", "2"}
    kept = tensors(tmp_path / "o.gguf")
    assert "blk.1.ffn_up_exps.bias" in kept and "blk.2.ffn_up_shexp.weight" in kept and "blk.0.ffn_up.weight" in kept


def test_gate_and_up_in_one_tensor(tmp_path):
    for arch in ("qwen35moe", *FUSED_ARCHITECTURES[:1]):
        source = make_model(tmp_path / f"{arch}.gguf", arch, n_layer=1, n_expert=2, fused=True)
        experts = check_pair_of(convert(source, tmp_path / f"{arch}-o.gguf"), source)
        assert [n.split(".")[2] for n in experts] == ["ffn_gate_up_exps", "ffn_down_exps"]
    source = make_model(tmp_path / "l.gguf", "llama", n_layer=1, n_expert=2, fused=True)
    with pytest.raises(ConvertError, match="does not load for the architecture llama"):
        convert(source, tmp_path / "o.gguf")


def test_chunk_experts(tmp_path):
    names = {f"blk.0.ffn_{p}_exps.weight": f"blk.0.ffn_{p}_chexps.weight" for p in ("gate", "up", "down")}
    source = make_model(tmp_path / "m.gguf", "grovemoe", n_layer=1, n_expert=2, rename=names)
    convert(source, tmp_path / "o.gguf")
    assert set(tensors(tmp_path / "o.experts.gguf")) == {f"{n}.{c}" for n in names.values() for c in ("high", "low")}


def test_one_expert(tmp_path):
    source = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=1, n_used=1)
    check_pair_of(convert(source, tmp_path / "o.gguf"), source)


# --- types that do not fit ---

@pytest.mark.parametrize("ff, source, high, low, used_high, used_low", [
    (128, "f16", "q8_0", "q2_k", "q8_0", "q4_0"), (128, "f16", "keep", "q4_k", "f16", "q5_0"),
    (128, "f16", "keep", "q5_k", "f16", "q5_1"), (128, "f16", "keep", "q6_k", "f16", "q8_0"),
    (128, "f16", "keep", "iq3_s", "f16", "iq4_nl"), (128, "f16", "q6_k", "q3_k", "q8_0", "q4_0"),
    (128, "q4_0", "keep", "q2_k", "q4_0", "mxfp4"),  # the substitute q4_0 would not be smaller
    (48, "f32", "q8_0", "q2_k", "f16", None), (48, "f32", "keep", "q2_k", "f32", "f16"),
])
def test_fallbacks(tmp_path, ff, source, high, low, used_high, used_low):
    path, out = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=2, ff=ff, types=source), tmp_path / "o.gguf"
    if used_low is None:
        with pytest.raises(ConvertError, match="rows of 48 .* nothing else fits that is smaller than the high type f16"):
            convert(path, out, high, low)
        return
    report = convert(path, out, high, low)
    check_pair(path, out, lambda n, k: used_high if "down" in n else k if high == "keep" else high,
               lambda n, k: used_low if "down" in n else low)
    listed = fields(tmp_path / "o.experts.gguf")["hobbit.fallbacks"]
    assert listed == report.fallbacks
    assert f"blk.0.ffn_down_exps.weight.low: {low} -> {used_low} (rows of {ff} are no whole number of blocks of 256)" in listed
    assert len(listed) == 1 + (used_high != (source if high == "keep" else high))
    assert f"{low} -> {used_low}" in report.table()
    with pytest.raises(ConvertError, match="--no-fallback"):
        convert(path, tmp_path / "p.gguf", high, low, fallback=False)


def test_mxfp4_rows_of_2880_have_no_smaller_type(tmp_path):
    path = make_model(tmp_path / "m.gguf", "gpt-oss", n_layer=1, n_expert=2, d=64, ff=2880, types="mxfp4")
    with pytest.raises(ConvertError, match="smaller than the high type mxfp4 .* but q2_0, which"):
        convert(path, tmp_path / "o.gguf")
    convert(path, tmp_path / "o.gguf", low="q2_0")


def test_high_that_gains_nothing_is_noted(tmp_path):
    path = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=2, types="q4_k")
    assert "larger than their source" in convert(path, tmp_path / "o.gguf", "q8_0").notes[0]
    path = make_model(tmp_path / "n.gguf", n_layer=1, n_expert=2, types="q4_1")
    assert "90 %" in convert(path, tmp_path / "p.gguf", "keep", "q4_0").notes[0]


# --- importance matrix ---

def statistics(model_path, seed=0):
    """Sums and counts as llama-imatrix would have them."""
    rng = np.random.default_rng(seed)
    with Reader(model_path) as r:
        return {n: ((rng.random((t.shape[2], t.shape[0]), dtype=np.float32) + 0.01) * 40, np.full(t.shape[2], 40))
                for n, t in r.tensors.items() if n.endswith("exps.weight")}


@pytest.mark.parametrize("make, low", [(make_imatrix, "q2_k"), (make_imatrix, "iq2_xxs"), (make_old_imatrix, "q2_k")])
def test_imatrix(tmp_path, make, low):
    model = make_model(tmp_path / "m.gguf", n_expert=3, ff=256)
    entries = statistics(model)
    full = make(tmp_path / "full.imatrix", entries)
    convert(model, tmp_path / "a.gguf", low=low, imatrix=full)
    src, a = tensors(model), tensors(tmp_path / "a.experts.gguf")
    name = "blk.0.ffn_up_exps.weight"
    x = floats(src[name]).reshape(3, -1, 256)
    size = len(a[name + ".low"][2]) // 3
    for e in range(3):
        weights = entries[name][0][e] / np.float32(40)
        expected = np.frombuffer(direct(low, x[e], weights), np.uint8)
        got = np.frombuffer(a[name + ".low"][2][e * size:(e + 1) * size], np.uint8)
        assert np.array_equal(got, expected) if make is make_imatrix else (got == expected).mean() > 0.99

    # expert 1 of one tensor and all experts of another were never routed
    holes = {n: (sums.copy(), counts.copy()) for n, (sums, counts) in entries.items()}
    holes[name][0][1], holes[name][1][1] = 0, 0
    other = "blk.1.ffn_down_exps.weight"
    holes[other][0][:], holes[other][1][:] = 0, 0
    report = convert(model, tmp_path / "b.gguf", low=low, imatrix=make(tmp_path / "holes.imatrix", holes))
    b = tensors(tmp_path / "b.experts.gguf")
    assert b[name + ".low"][2][size:2 * size] == direct(low, x[1], np.ones(256, np.float32))
    assert b[other + ".low"][2] == direct(low, floats(src[other]), np.ones(256, np.float32))
    for n in a:
        if n == name + ".low":
            assert a[n][2][:size] == b[n][2][:size] and a[n][2][2 * size:] == b[n][2][2 * size:]
        elif n != other + ".low":
            assert a[n] == b[n]
    expected = ["layer 1: the importance matrix has no data for 3 of 3 experts (down); they get weight 1"]
    if make is make_imatrix:  # the old form does not say which experts have no data
        expected.insert(0, "layer 0: the importance matrix has no data for 1 of 3 experts (up); they get weight 1")
    assert report.warnings == expected


@pytest.mark.parametrize("make", [make_imatrix, make_old_imatrix])
def test_imatrix_of_another_model(tmp_path, model, make):
    def refused(entries, what):
        path = make(tmp_path / "i", entries)
        with pytest.raises(ConvertError, match=what):
            convert(model, tmp_path / "o.gguf", imatrix=path)

    name = "blk.0.ffn_down_exps.weight"
    ones = np.ones
    refused({name: (ones((8, 512)), ones(8))}, f"{name} has 4096 values .* needs 512 x 3 = 1536: it is of another model")
    refused({name: (ones((3, 256)), ones(3))}, f"{name} has 768 values")
    refused({"blk.0.ffn_down.weight": (ones((1, 512)), ones(1))}, "no entry for any routed expert tensor")
    refused({name: (ones((3, 512)) * np.nan, ones(3))}, "negative or not finite")


def test_files_that_are_no_imatrix(tmp_path, model):
    for data, what in ((b"hello world, this is text", "no importance matrix"), (b"", "no importance matrix"),
                       (b"\1\0\0\0", "no importance matrix")):
        (tmp_path / "i").write_bytes(data)
        with pytest.raises(ConvertError, match=what):
            convert(model, tmp_path / "o.gguf", imatrix=tmp_path / "i")
    with pytest.raises(ConvertError, match="holds no .*in_sum2"):
        convert(model, tmp_path / "o.gguf", imatrix=model)
    with pytest.raises(ConvertError, match="No such file"):
        convert(model, tmp_path / "o.gguf", imatrix=tmp_path / "none")


# --- link ---

@pytest.mark.parametrize("split", [1, 3])
def test_link(tmp_path, split, capsys):
    source = make_model(tmp_path / "s.gguf", n_expert=3, split=split)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for folder in (tmp_path, other):
        convert(source, folder / "o.gguf", link=True)
        side = fields(folder / "o.experts.gguf")
        listed = tensors(folder / "o.experts.gguf")
        with Reader(source) as r:
            experts = [t for t in r.tensors.values() if t.name.endswith("exps.weight")]
            assert side["hobbit.link"] is True and side["hobbit.high"] == "keep"
            assert sorted(listed) == sorted(t.name + ".low" for t in experts)
            files = side["hobbit.link.files"]
            assert files == [f.path.rsplit("/", 1)[1] if folder == tmp_path else f.path for f in r.files]
            assert side["hobbit.link.sizes"] == [f.size for f in r.files]
            for i, name in enumerate(side["hobbit.link.tensors"]):
                t = r.tensors[name]
                assert side["hobbit.link.types"][i] == t.type.id == 1
                path = folder / files[side["hobbit.link.file_index"][i]]
                at = side["hobbit.link.offsets"][i]
                assert path.read_bytes()[at:at + t.nbytes] == r.read(t)
            for path, size, fnv in zip(files, side["hobbit.link.sizes"], side["hobbit.link.header_fnv"]):
                head = (folder / path).read_bytes()[:min(t.data_offset for t in gguf.GGUFReader(folder / path).tensors)]
                assert fnv == fnv1a(head) and size == (folder / path).stat().st_size
    assert info.main([str(tmp_path / "o.gguf")]) == 0
    assert "present" in capsys.readouterr().out


def test_fnv1a():
    assert fnv1a(b"") == 0xcbf29ce484222325 and fnv1a(b"foobar") == 0x85944171f73967e8


def test_link_needs_unchanged_copies(tmp_path, model):
    with pytest.raises(ConvertError, match="would have to change from f16 to q8_0"):
        convert(model, tmp_path / "o.gguf", "q8_0", link=True)
    assert main([str(model), "-o", str(tmp_path / "o.gguf"), "--link", "--quiet"]) == 0


# --- the trained models ---

@pytest.mark.parametrize("name", ["books-8x2-small-f16", "books-64x8-f16"])
def test_trained_models(tmp_path, shared_dir, name):
    source = shared_dir / "models" / f"{name}.gguf"
    if not source.exists():
        pytest.skip(f"{source} does not exist")
    convert(source, tmp_path / "o.gguf", "<=q8_0", "q4_0")
    check_pair(source, tmp_path / "o.gguf", lambda n, k: "q8_0", lambda n, k: "q4_0")


def test_values_are_those_of_the_maker(tmp_path):
    source = make_model(tmp_path / "m.gguf", n_layer=1, n_expert=2, types="f32")
    name = "blk.0.ffn_up_exps.weight"
    assert np.array_equal(floats(tensors(source)[name]), values(name, (256, 512, 2)))
