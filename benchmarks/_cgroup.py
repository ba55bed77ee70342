"""A memory cgroup (v1 or v2) for one run: create, limit, read, remove. Needs root."""

import os
import time


class CgroupError(Exception):
    """No cgroup can be had; the message is one sentence."""


def _mount(v1, v2):
    """(version, folder in which a group can be made) of a controller, by its names in cgroup v1 and v2."""
    unified = None
    with open("/proc/mounts") as f:
        for line in f:
            _, folder, kind, options = line.split()[:4]
            if kind == "cgroup" and v1 in options.split(","):
                return 1, folder
            if kind == "cgroup2":
                unified = unified or folder
    if unified:
        try:
            with open(os.path.join(unified, "cgroup.controllers")) as f:
                if v2 in f.read().split():
                    return 2, unified
        except OSError:
            pass
    raise CgroupError(f"no cgroup file system with the {v1} controller is mounted")


def _remove(folder):
    for _ in range(50):
        try:
            return os.rmdir(folder)
        except FileNotFoundError:
            return None
        except OSError:
            time.sleep(0.1)  # the last process is still leaving
    return None


class MemoryCgroup:
    """limit: bytes of RAM, page cache included, for all processes in the group; no swap beyond it.

    .procs is the file into which a process writes its id to join.
    """

    def __init__(self, name, limit):
        self.version, root = _mount("memory", "memory")
        self.folder = os.path.join(root, name)
        self.procs = os.path.join(self.folder, "cgroup.procs")
        try:
            if self.version == 2:
                with open(os.path.join(root, "cgroup.subtree_control"), "w") as f:
                    f.write("+memory")
            os.mkdir(self.folder)
        except OSError as e:
            raise CgroupError(f"cannot make the memory cgroup {self.folder} ({e.strerror}); run as root, "
                              "where the cgroup file system is writable") from None
        try:
            if self.version == 1:
                self._write("memory.limit_in_bytes", limit)
                self._write("memory.memsw.limit_in_bytes", limit, optional=True)
                self._write("memory.swappiness", 0, optional=True)
            else:
                self._write("memory.max", limit)
                self._write("memory.swap.max", 0, optional=True)
        except OSError as e:
            self.remove()
            raise CgroupError(f"cannot limit {self.folder} to {limit} bytes ({e.strerror})") from None

    def _write(self, name, value, optional=False):
        try:
            with open(os.path.join(self.folder, name), "w") as f:
                f.write(str(value))
        except OSError:
            if not optional:
                raise

    def _read(self, name):
        try:
            with open(os.path.join(self.folder, name)) as f:
                return f.read()
        except OSError:
            return ""

    def max_usage(self):
        """Largest memory use so far, bytes, page cache included; None where the kernel does not tell."""
        text = self._read("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")
        return int(text) if text.strip() else None

    def oom_kills(self):
        text = self._read("memory.oom_control" if self.version == 1 else "memory.events")
        return sum(int(n) for key, n in (line.split() for line in text.splitlines()) if key == "oom_kill")

    def remove(self):
        self._write("memory.force_empty", 0, optional=True)
        _remove(self.folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.remove()


def drop_caches():
    """Write back and drop the machine's page cache; CgroupError where that is not allowed."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("3")
    except OSError as e:
        raise CgroupError(f"cannot drop the page cache ({e.strerror}); run as root") from None


class ReadLimit:
    """Everything that the processes of a group read past the page cache from the disk of a file, limited to bytes per second.

    .procs is the file into which a process writes its id to join. CgroupError where that cannot be had.
    """

    def __init__(self, name, path, rate):
        version, root = _mount("blkio", "io")
        self.folder = os.path.join(root, name)
        self.procs = os.path.join(self.folder, "cgroup.procs")
        device = _disk_of(path)
        try:
            if version == 2:
                with open(os.path.join(root, "cgroup.subtree_control"), "w") as f:
                    f.write("+io")
            os.makedirs(self.folder, exist_ok=True)
            with open(os.path.join(self.folder, "blkio.throttle.read_bps_device" if version == 1 else "io.max"), "w") as f:
                f.write(f"{device} {rate}" if version == 1 else f"{device} rbps={rate}")
        except OSError as e:
            _remove(self.folder)
            raise CgroupError(f"cannot limit reads of {device} in {self.folder} ({e.strerror}); run as root, "
                              "where the cgroup file system is writable and the disk is a local one") from None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _remove(self.folder)


def _disk_of(path):
    """MAJOR:MINOR of the whole disk that a file is on."""
    device = os.stat(path).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    folder = f"/sys/dev/block/{name}"
    if os.path.exists(os.path.join(folder, "partition")):
        with open(os.path.join(folder, "..", "dev")) as f:
            return f.read().strip()
    return name
