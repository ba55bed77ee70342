"""Every architecture with experts converts, runs, and equals the ordinary file (architectures.py says how it is checked).

HOBBIT_FULL=1 checks both presets; without it f16+q4 alone.
"""

import os
import subprocess

import pytest

import architectures
import llama_source
from hobbit_cpp._convert_plan import FUSED_ARCHITECTURES, UNUSED_EXPERTS

FULL = os.environ.get("HOBBIT_FULL", "") not in ("", "0")
PRESETS = tuple(architectures.STORED) if FULL else ("f16+q4",)


@pytest.fixture(scope="module")
def all_names():
    try:
        return architectures.names()
    except llama_source.NoSource as why:
        pytest.skip(str(why))
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the maker of models does not compile: {error.stderr}")


def test_all(all_names):
    fused, refused, wrong, seen = set(), set(), {}, 0
    for arch in all_names:
        rows = architectures.in_process(arch, PRESETS)
        if isinstance(rows, str):
            wrong[arch] = rows
        elif rows and "refused" in rows[0]:
            refused.add(arch)
        elif rows:
            seen += 1
            fused |= {arch} if len(rows) == 2 else set()
    assert not wrong
    assert seen >= 60
    assert fused == set(FUSED_ARCHITECTURES)
    assert refused == set(UNUSED_EXPERTS)
