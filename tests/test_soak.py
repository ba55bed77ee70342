"""A short run of benchmarks/soak.py: no token lost, counters add up, stock's logits after each cycle. Memory needs longer runs."""

import json
import subprocess
import sys


def test_mixed_use_for_a_while(repo):
    done = subprocess.run([sys.executable, str(repo / "benchmarks" / "soak.py"), "--seconds", "8", "--uses", "8", "--growth", "10"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["cycles"] >= 5 and result["uses"]["compare"] == result["cycles"] and result["tokens"] > 500 and result["more_of"] == []
