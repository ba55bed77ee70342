"""hobbit doctor --board on boards that are not there: their files below another root."""

import json

import pytest

from hobbit_cpp import _board, cli


@pytest.fixture
def orin(tmp_path):
    def write(path, text):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    write("proc/device-tree/model", "NVIDIA Jetson Orin Nano Developer Kit\0")
    write("proc/device-tree/compatible", "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0")
    write("etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025\n")
    write("proc/meminfo", "MemTotal:        7802880 kB\nMemFree:          210000 kB\nMemAvailable:    6100000 kB\nSwapFree: 3900000 kB\n")
    write("proc/swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/dev/zram0   partition\t650240\t0\t5\n/dev/zram1   partition\t650240\t0\t5\n")
    write("sys/devices/system/cpu/online", "0-5\n")
    write("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "1728000\n")
    write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    write("sys/class/devfreq/17000000.gpu/max_freq", "1020000000\n")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    write("sys/block/mmcblk0/size", "122142720\n")
    write("sys/block/loop0/size", "100\n")
    write("sys/class/thermal/thermal_zone0/type", "cpu-thermal\n")
    write("sys/class/thermal/thermal_zone0/temp", "91500\n")
    write("sys/class/thermal/cooling_device0/type", "pwm-fan\n")
    return tmp_path


def test_a_board(orin):
    b = _board.read(str(orin))
    assert b["model"] == "NVIDIA Jetson Orin Nano Developer Kit" and b["chip"] == _board.ORIN and b["l4t"] == "36.4.3"
    assert b["memory"] == 7802880 * 1024 and b["gpu_hz"] == 1020000000 and b["large_pages"] == "madvise"
    assert [s["name"] for s in b["swap"]] == ["/dev/zram0", "/dev/zram1"]
    assert b["disks"] == [{"name": "mmcblk0", "bytes": 122142720 * 512, "model": None}]
    assert b["celsius"] == {"cpu-thermal": 91.5}
    said = " ".join(_board.remarks(b))
    for word in ("zram", "governor is powersave", "no NVMe", "hot (cpu-thermal 92"):
        assert word in said
    text = "\n".join(_board.lines(b))
    assert "L4T 36.4.3" in text and "CPU 1.73 GHz, GPU 1.02 GHz" in text and text.count("remark") == 4


def test_a_board_that_is_ready(orin):
    (orin / "proc/swaps").write_text("Filename Type Size Used Priority\n/swapfile file 8388604 0 -2\n")
    (orin / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").write_text("performance\n")
    (orin / "sys/block/nvme0n1").mkdir()
    (orin / "sys/block/nvme0n1/size").write_text("976773168\n")
    (orin / "sys/class/thermal/thermal_zone0/temp").write_text("48000\n")
    assert _board.remarks(_board.read(str(orin))) == []


def test_a_folder_that_tells_nothing(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1024 kB\nMemAvailable: 512 kB\n")
    b = _board.read(str(tmp_path))
    assert b["model"] is None and b["l4t"] is None and b["swap"] == [] and b["disks"] == [] and b["celsius"] == {}
    assert _board.remarks(b) == []
    assert "without a device tree" in "\n".join(_board.lines(b))


def test_the_command(capsys):
    assert cli.main(["doctor", "--board", "--no-disk", "--json"]) == 0
    b = json.loads(capsys.readouterr().out)["board"]
    assert b["memory"] > 0 and isinstance(b["remarks"], list)
    assert cli.main(["doctor", "--board", "--no-disk"]) == 0
    assert "\nboard " in capsys.readouterr().out
