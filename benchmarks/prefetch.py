"""What prefetching brings where experts are read from slow storage: predicted experts while decoding, and a prompt's next layers.

    python benchmarks/prefetch.py PAIR.gguf --text FILE [--rate 100MB] [--cache 25%] [--t1 0.6] [--tokens 300]
    python benchmarks/prefetch.py PAIR.gguf --text FILE --prompt 512

Each line is a process of its own, in a cgroup whose reads are limited to --rate (needs root; without --rate as fast as the storage is). The text is
read token by token, or with --prompt as one prompt. Bytes and shares are exact; times are of the machine as it was.

Decoding: chosen: of the experts predicted 1, 2, 3 layers ahead, those that the router chose then. useful: of the predicted loads those that
served their layer; late: of the useful ones, still loading when they were asked for; wasted: of the bytes loaded by prediction.
The prompt's floor is the bytes read over --rate.
"""

import argparse
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from _cgroup import ReadLimit  # noqa: E402

from hobbit_cpp.memory import parse_bytes  # noqa: E402


def child(job):
    if job["procs"]:
        with open(job["procs"], "w") as f:
            f.write(str(os.getpid()))
    from hobbit_cpp import Llama

    with open(job["text"], "rb") as f:
        text = f.read(16 * job["tokens"])
    with Llama(job["pair"], n_ctx=job["tokens"] + 8, n_batch=2048, n_ubatch=512, n_threads=job["threads"], n_threads_batch=job["threads"], verbose=False,
               **job["settings"]) as llm:
        tokens = llm.tokenize(text)[:job["tokens"]]
        begin = time.monotonic()
        for part in ([tokens] if job["prompt"] else [[t] for t in tokens]):
            llm.eval(part)
        print(json.dumps({**llm.offload_stats()["totals"], "seconds": time.monotonic() - begin, "tokens": len(tokens)}))


def run(a, procs, **settings):
    job = {"pair": a.pair, "text": a.text, "procs": procs, "prompt": a.prompt > 0, "tokens": a.prompt or a.tokens, "threads": a.threads,
           "settings": {"t1": a.t1, "cache_bytes": a.cache, "profile": False, **settings}}
    out = subprocess.run([sys.executable, os.path.abspath(__file__), "--child", json.dumps(job)], stdout=subprocess.PIPE, check=True)
    return json.loads(out.stdout)


def decode_table(a, procs):
    print("| layers ahead | copies | ranks | chosen: 1, 2, 3 ahead | loads | useful | late | wasted | MB/token | | ms/token |\n|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    copies = a.copies or (["high"] if a.t1 >= 1 else ["low", "high", "rule"])
    cases = [(0, None, None)] + [(d, c, r) for c in copies for r in a.ranks for d in a.depths]
    base = None
    for depth, copy, ranks in cases:
        more = {"prefetch": depth, "prefetch_copy": copy, "prefetch_ranks": ranks} if depth else {}
        s = run(a, procs, **more)
        per_token = s["bytes_per_token"]
        base = base or per_token
        chosen = ", ".join(f"{100 * s[f'correct_{d}'] / s[f'predicted_{d}']:.0f} %" for d in (1, 2, 3) if s[f"predicted_{d}"])
        share = lambda n, of: f"{100 * n / of:.0f} %" if of else ""  # noqa: E731
        print(f"| {depth} | {copy or ''} | {'all' if ranks == 0 else ranks or ''} | {chosen} | {s['predicted_loads']} | {share(s['useful'], s['predicted_loads'])} "
              f"| {share(s['late'], s['useful'])} | {share(s['bytes_wasted'], s['bytes_predicted'])} | {per_token / 1e6:.2f} | {100 * (per_token / base - 1):+.1f} % "
              f"| {1000 * s['seconds'] / s['tokens']:.1f} |", flush=True)


def prompt_table(a, procs):
    print("| next layers loaded ahead | MB read | seconds | floor | to the floor |\n|---|---|---|---|---|", flush=True)
    rate = parse_bytes(a.rate) if a.rate else None
    for on in (False, True) * a.repeat:
        s = run(a, procs, prefetch_prompts=on)
        floor = s["bytes_read"] / rate if rate else None
        print(f"| {'yes' if on else 'no'} | {s['bytes_read'] / 1e6:.1f} | {s['seconds']:.2f} | " +
              (f"{floor:.2f} | {s['seconds'] / floor:.2f}x |" if floor else " | |"), flush=True)


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(json.loads(sys.argv[2]))
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pair")
    p.add_argument("--text", required=True)
    p.add_argument("--rate", help="bytes a second that can be read, such as 100MB")
    p.add_argument("--cache", default="25%")
    p.add_argument("--t1", type=float, default=0.6)
    p.add_argument("--tokens", type=int, default=300)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--depths", nargs="+", default=[1, 2, 3], type=lambda x: x if x == "auto" else int(x))
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 0])
    p.add_argument("--copies", nargs="+", choices=("low", "high", "rule"))
    p.add_argument("--prompt", type=int, default=0, metavar="N", help="one prompt of N tokens instead")
    p.add_argument("--repeat", type=int, default=3, help="of a prompt")
    a = p.parse_args()
    print(f"{os.path.basename(a.pair)}, T1 {a.t1:g}, {a.cache} of the experts in slots, reads at {a.rate or 'full speed'}\n")
    table = prompt_table if a.prompt else decode_table
    if not a.rate:
        return table(a, None)
    with ReadLimit(f"hobbit-prefetch-{os.getpid()}", a.pair, parse_bytes(a.rate)) as limit:
        return table(a, limit.procs)


if __name__ == "__main__":
    sys.exit(main())
