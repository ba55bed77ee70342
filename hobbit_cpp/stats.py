"""Statistics of offloading as plain dictionaries, and their printed form.

A counters dictionary has every field of struct hobbit_stats (csrc/include/hobbit.h) and:

    hit_rate         share of the served requests whose copy was resident
    share_high, share_low, share_skip   how requests were served
    bytes_per_token  bytes brought into slots per token; of a layer: per token and layer

Shares are 0 where there was nothing to share.
"""

from __future__ import annotations

from .memory import format_bytes


def counters(raw: dict, n_layers: int) -> dict:
    """raw: the fields of hobbit_stats; n_layers: how many layers `tokens` adds up (1 for a layer's own)."""
    served = raw["requests"] - raw["skips"]

    def share(n, of):
        return n / of if of else 0.0

    return {
        **raw,
        "hit_rate": share(raw["hits_high"] + raw["hits_low"], served),
        "share_high": share(raw["hits_high"] + raw["misses_high"], raw["requests"]),
        "share_low": share(raw["hits_low"] + raw["misses_low"], raw["requests"]),
        "share_skip": share(raw["skips"], raw["requests"]),
        "bytes_per_token": share(raw["bytes_read"] * n_layers, raw["tokens"]),
    }


def difference(after: dict, before: dict) -> dict:
    """Raw counters between two readings; not below 0, should they have been reset in between."""
    return {k: max(0, after[k] - before[k]) for k in after}


def _types(text: str) -> str:
    """"gate q8_0, up q8_0, down q8_0" -> "q8_0"."""
    kinds = {part.split()[-1] for part in text.split(", ")}
    return kinds.pop() if len(kinds) == 1 else text


def settings_lines(s: dict) -> list[str]:
    """What offload_stats() says is in force."""
    if s["mode"] == "none":
        return [f"{s['model']} is an ordinary GGUF; no experts are offloaded"]
    b, p = s["budget"], s["settings"]
    return [
        f"{'mixed precision' if s['mode'] == 'mixed' else 'all experts at high precision'}, sidecar {s['sidecar']}",
        f"budget {format_bytes(b['budget_bytes'])} (floor {format_bytes(b['floor_bytes'])}); all experts at high precision take {format_bytes(b['high_bytes'])}",
        *(f"{g['high_slots']} high ({_types(g['high_types'])}) and {g['low_slots']} low ({_types(g['low_types'])}) slots on {g['backend']} "
          f"for {g['n_layers']} layers of {g['n_expert']} experts" for g in s["groups"]),
        *([f"{format_bytes(b['host_bytes'])} of copies in {'pinned ' if p['host_pinned'] else ''}host memory; misses: {'divided between link and CPU' if p['miss'] == 'auto' else p['miss']}"]
          if p["host_copies"] else []),
        *(["slots in memory that CPU and GPU share"] if p["unified_memory"] else []),
        *([f"profile {p['profile']}"] if p["profile"] else []),
        *([f"prefetch {p['prefetch']}, copies: {p['prefetch_copy']}, ranks: {p['prefetch_ranks'] or 'all'}"] if p["prefetch"] else []),
        *([f"routing leans to residents by {p['lean']:g}"] if p["lean"] else []),
        f"T1 {p['t1']:g}, T2 {p['t2']:g}, policy {p['policy']}, {p['n_io_threads']} {'direct' if p['direct_io'] else 'buffered'} reads at a time",
    ]


def one_line(s: dict) -> str:
    return "hobbit: " + "; ".join(settings_lines(s))


def table(s: dict) -> str:
    """offload_stats() as a table: settings, totals, one line per layer."""
    if s["mode"] == "none":
        return one_line(s)
    t = s["totals"]
    lines = [*settings_lines(s), "",
             "layer  block   requests   hits %   high %    low %   skip %   loads  evictions   read/token"]
    rows = [(f"{i:>5}  {x['block']:>5}", x) for i, x in enumerate(s["layers"])] + [("  all       ", t)]
    for name, x in rows:
        lines.append(f"{name} {x['requests']:>10} {100 * x['hit_rate']:>8.1f} {100 * x['share_high']:>8.1f} {100 * x['share_low']:>8.1f} "
                     f"{100 * x['share_skip']:>8.1f} {x['loads_high'] + x['loads_low']:>7} {x['evictions']:>10} {format_bytes(x['bytes_per_token']):>12}")
    lines.append("")
    lines.append(f"read {format_bytes(t['bytes_read'])} in {t['graphs']} forward passes; time: {t['compute_us'] / 1e6:.2f} s computing, "
                 f"{t['wait_us'] / 1e6:.2f} s waiting for experts, {t['plan_us'] / 1e6:.2f} s planning")
    if t["bytes_cpu"]:
        lines.append(f"the CPU computed {format_bytes(t['bytes_cpu'])} of missed experts in {t['cpu_us'] / 1e6:.2f} s")
    if t["host_hits"]:
        lines.append(f"{t['host_hits']} loads came from copies in host memory, {format_bytes(t['bytes_storage'])} from the file")
    if t["prefetches"]:
        lines.append(f"prefetched {t['prefetches']} experts, {t['prefetch_hits']} of them used")
    ahead = [f"{100 * t[f'correct_{d}'] / t[f'predicted_{d}']:.1f} % {d} layer{'s' if d > 1 else ''} ahead" for d in (1, 2, 3) if t[f"predicted_{d}"]]
    if ahead:
        lines.append(f"predicted experts that were chosen: {', '.join(ahead)}; loaded {t['predicted_loads']}, {t['useful']} useful ({t['late']} of them late), "
                     f"{format_bytes(t['bytes_wasted'])} of {format_bytes(t['bytes_predicted'])} wasted")
    if s["settings"]["lean"]:
        lines.append(f"routing leaned to residents in {t['leaned']} of {t['requests']} requests")
    return "\n".join(lines)
