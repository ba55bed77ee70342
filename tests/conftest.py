"""Shared fixtures; keep small."""

import os
import pathlib
import signal

import pytest

# Before any library is loaded, and for the processes that tests start: threads that wait for each other sleep.
# Spinning, two of them on a core that something else uses too take minutes for what takes a second.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPO = pathlib.Path(__file__).resolve().parent.parent

# a shell in the background starts its children with SIGINT ignored, and ours would inherit that: some tests send one
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repo():
    """The checkout that the tests are in."""
    return REPO


@pytest.fixture(scope="session")
def shared_dir():
    """Material that is not in the repository: HOBBIT_SHARED, or a folder `shared` beside the checkout."""
    path = pathlib.Path(os.environ.get("HOBBIT_SHARED") or REPO.parent / "shared")
    if not path.is_dir():
        pytest.skip(f"no shared material: {path} does not exist (set HOBBIT_SHARED)")
    return path


@pytest.fixture
def hobbit(capfd):
    """Call the command in this process: (status, stdout, stderr)."""
    from hobbit_cpp.cli import main  # not above: the core tests need no library

    def call(*argv):
        try:
            status = main([str(a) for a in argv])
        except SystemExit as end:
            status = end.code
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return status, out, err
    return call
