"""Sizes in text, memory readings of made-up machines, the automatic budget, and the estimate of what a model takes."""

import pytest

from hobbit_cpp import memory, model_memory
from hobbit_cpp.memory import GIB, MIB, Group, Readings, auto_budget, available, format_bytes, limit, parse_bytes, read_memory, reserve


@pytest.mark.parametrize("text, n", [
    ("4096", 4096), ("8GiB", 8 * GIB), ("8 GB", 8 * 10**9), ("512MiB", 512 * MIB), ("1.5G", 3 * GIB // 2), ("1k", 1024),
    (" 2 tib ", 2 * 1024**4), ("3KB", 3000), ("7b", 7), (".5m", MIB // 2), ("9007199254740993", 9007199254740993),
])
def test_parse_bytes(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1,5G", "1.2.3", "8 GiBs", "8e9", "1/2", "nan", "inf", "8 G B", "٣"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3.5 * MIB, 5000 * GIB)] == ["0 B", "1023 B", "1.0 KiB", "3.5 MiB", "5000.0 GiB"]


# --- readings --------------------------------------------------------------------------------


class Machine:
    """A root folder with /proc and /sys/fs/cgroup as somebody's machine has them."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal:       67108864 kB\nMemFree:         3145728 kB\nMemAvailable:   57671680 kB\n"
                                   "Cached:         50000000 kB\nSwapFree:        8388608 kB\n")  # 64, 3, 55, 8 GiB

    def write(self, path, text):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def v2(self, own, levels, mount_root="/", mount="/sys/fs/cgroup"):
        """levels: {folder below the mount point: (memory.max, memory.current, active_file + inactive_file)}"""
        self.write("proc/self/cgroup", f"0::{own}\n")
        self.write("proc/self/mountinfo", f"22 1 0:21 / /proc rw - proc proc rw\n30 23 0:26 {mount_root} {mount} rw,nosuid - cgroup2 cgroup rw\n")
        for folder, (most, used, cache) in levels.items():
            base = f"sys/fs/cgroup/{folder}".rstrip("/")
            self.write(f"{base}/memory.max", f"{most}\n")
            self.write(f"{base}/memory.current", f"{used}\n")
            self.write(f"{base}/memory.stat", f"anon {used - cache}\nfile {cache}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}\n")

    def v1(self, own, levels, mount_root="/", hierarchical=None):
        self.write("proc/self/cgroup", f"9:name=systemd:/\n4:memory:{own}\n1:cpu,cpuacct:/\n0::/\n")
        self.write("proc/self/mountinfo", "31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                                          f"35 30 0:31 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                                          "36 30 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
        for folder, (most, used, cache) in levels.items():
            base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
            self.write(f"{base}/memory.limit_in_bytes", f"{most}\n")
            self.write(f"{base}/memory.usage_in_bytes", f"{used}\n")
            extra = "" if hierarchical is None else f"hierarchical_memory_limit {hierarchical}\n"
            self.write(f"{base}/memory.stat", f"cache 1\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n{extra}")

    def read(self):
        return read_memory(str(self.root))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_no_groups_counts_page_cache_as_free_and_no_swap(machine):
    r = machine.read()
    assert (r.total, r.available, r.swap_free, r.groups) == (64 * GIB, 55 * GIB, 8 * GIB, ())
    assert available(r) == 55 * GIB and limit(r) == 64 * GIB


def test_old_kernel_without_available(machine):
    machine.write("proc/meminfo", "MemTotal: 8192 kB\nMemFree: 1024 kB\nCached: 2048 kB\n")
    assert machine.read().available == 3072 * 1024


def test_v2_own_limit(machine):
    machine.v2("/box", {"box": (GIB, 700 * MIB, 600 * MIB), "": ("max", 9 * GIB, 0)})
    assert available(machine.read()) == GIB - 100 * MIB and limit(machine.read()) == GIB


def test_v2_limit_on_the_parent_only(machine):
    machine.v2("/pod/box", {"pod/box": ("max", 100 * MIB, 0), "pod": (2 * GIB, GIB, 512 * MIB), "": ("max", 0, 0)})
    r = machine.read()
    assert [g.limit for g in r.groups] == [None, 2 * GIB, None]
    assert available(r) == 2 * GIB - 512 * MIB


def test_v2_soft_limit(machine):
    machine.v2("/box", {"box": (4 * GIB, 0, 0)})
    machine.write("sys/fs/cgroup/box/memory.high", f"{GIB}\n")
    assert available(machine.read()) == GIB


def test_v2_inside_a_container(machine):
    """The namespace shows the own group as the root, and elsewhere as a path that leads out of it."""
    machine.v2("/", {"": (GIB, 0, 0)})
    assert limit(machine.read()) == GIB
    machine.v2("/../other", {"": (GIB, 0, 0)})
    assert limit(machine.read()) == GIB


def test_v1_own_and_parent(machine):
    none = 9223372036854771712
    machine.v1("/pod/box", {"pod/box": (none, 200 * MIB, 0), "pod": (GIB, 900 * MIB, 800 * MIB), "": (none, 30 * GIB, 0)})
    r = machine.read()
    assert [g.limit for g in r.groups] == [None, GIB, None]
    assert available(r) == GIB - 100 * MIB


def test_v1_container_sees_its_own_subtree_only(machine):
    machine.v1("/docker/abc", {"": (GIB, 300 * MIB, 100 * MIB)}, mount_root="/docker/abc")
    assert available(machine.read()) == GIB - 200 * MIB


def test_v1_parent_that_cannot_be_seen(machine):
    machine.v1("/docker/abc", {"": (9223372036854771712, 0, 0)}, mount_root="/docker/abc", hierarchical=GIB)
    assert limit(machine.read()) == GIB


def test_group_over_its_limit_leaves_nothing():
    assert available(Readings(8 * GIB, 4 * GIB, 0, (Group("g", GIB, 2 * GIB, 0),))) == 0


def test_unreadable_groups_are_no_limit(machine):
    machine.write("proc/self/cgroup", "garbage\n0::/x\n")
    machine.write("proc/self/mountinfo", "garbage\n30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    assert machine.read().groups == ()


# --- the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize("total, want", [(GIB, GIB // 4), (2 * GIB, 512 * MIB), (4 * GIB, 512 * MIB), (64 * GIB, 64 * GIB // 10)])
def test_reserve(total, want):
    assert reserve(Readings(total, total, 0, ())) == want


def test_auto_budget():
    r = Readings(16 * GIB, 10 * GIB, 0, ())
    assert auto_budget(r, 2 * GIB, 100 * GIB) == 10 * GIB - 16 * GIB // 10 - 2 * GIB
    assert auto_budget(r, 2 * GIB, GIB) == GIB            # not more than everything
    assert auto_budget(r, 20 * GIB, 100 * GIB) == 0       # no room
    small = Readings(16 * GIB, 10 * GIB, 0, (Group("g", GIB, 100 * MIB, 0),))
    assert auto_budget(small, 100 * MIB, GIB) == GIB - 100 * MIB - 128 * MIB - 100 * MIB


@pytest.mark.parametrize("machine, group, want", [
    (16 * GIB, 400 * MIB, 100 * MIB), (16 * GIB, GIB, 128 * MIB), (16 * GIB, 2 * GIB, 2 * GIB // 10), (64 * GIB, 20 * GIB, 2 * GIB)])
def test_reserve_in_a_control_group(machine, group, want):
    """A group's own, as long as the machine has more room than that."""
    assert reserve(Readings(machine, machine, 0, (Group("g", group, 0, 0), Group("parent", None, 0, 0)))) == want


def test_the_level_that_has_least_room_decides():
    tight = Readings(16 * GIB, 3 * GIB, 0, (Group("g", 2 * GIB, 0, 0), Group("parent", 4 * GIB, 3 * GIB, GIB)))
    assert available(tight) == 2 * GIB and auto_budget(tight, 0, 100 * GIB) == 3 * GIB - 16 * GIB // 10  # the machine
    full = Readings(16 * GIB, 15 * GIB, 0, (Group("g", 2 * GIB, 0, 0), Group("parent", 4 * GIB, 3 * GIB, 512 * MIB)))
    assert auto_budget(full, 0, 100 * GIB) == 3 * GIB // 2 - 4 * GIB // 10  # the parent
    none = Readings(16 * GIB, 0, 0, ())
    assert available(none) == reserve(none) == auto_budget(none, 0, GIB) == 0


def test_this_machine():
    r = read_memory()
    assert 0 < available(r) <= r.total
    assert 10 * MIB < memory.peak_rss() < r.total


# --- what a model takes ----------------------------------------------------------------------

MIXTRAL = {
    "general.architecture": "llama", "llama.block_count": 32, "llama.embedding_length": 4096, "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32, "llama.attention.head_count_kv": 8, "llama.expert_count": 8, "llama.expert_used_count": 2,
    "llama.vocab_size": 32000, "llama.context_length": 32768,
}


def test_kv_cache_of_mixtral():
    need = model_memory.estimate(MIXTRAL, n_ctx=4096)
    assert need.kv_cache == 4096 * 32 * 2 * 8 * 128 * 2 and need.plain
    assert model_memory.estimate(MIXTRAL, n_ctx=0).kv_cache == 8 * need.kv_cache
    q8 = model_memory.estimate(MIXTRAL, n_ctx=4096, type_k=8, type_v=8)
    assert q8.kv_cache == need.kv_cache * 34 // 64
    assert model_memory.estimate(MIXTRAL, n_ctx=1).kv_cache == need.kv_cache // 16  # whole blocks of 256


def test_estimate_grows_with_each_argument():
    base = model_memory.estimate(MIXTRAL, n_ctx=4096)
    assert 308 * MIB < base.compute < 500 * MIB  # llama.cpp allocates 308 MiB
    assert 220 * MIB < model_memory.estimate(MIXTRAL, n_ctx=4096, flash_attn=True).compute < base.compute  # and 220
    for more in ({"n_ctx": 8192}, {"n_ctx": 4096, "n_batch": 1024, "n_ubatch": 1024}, {"n_ctx": 4096, "logits_all": True},
                 {"n_ctx": 4096, "resident_bytes": GIB}, {"n_ctx": 4096, "n_used": 8}):
        assert model_memory.estimate(MIXTRAL, **more).total > base.total, more


def test_heads_per_layer_and_unusual_models():
    layers = {**MIXTRAL, "llama.attention.head_count_kv": [8] * 16 + [0] * 16}
    assert model_memory.estimate(layers, n_ctx=4096).kv_cache * 2 == model_memory.estimate(MIXTRAL, n_ctx=4096).kv_cache
    assert not model_memory.estimate({**MIXTRAL, "llama.attention.sliding_window": 1024}).plain
    recurrent = {**MIXTRAL, "llama.ssm.inner_size": 8192, "llama.ssm.state_size": 128, "llama.ssm.conv_kernel": 4, "llama.ssm.group_count": 8}
    assert model_memory.estimate(recurrent).kv_cache > model_memory.estimate(MIXTRAL).kv_cache
