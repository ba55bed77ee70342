"""hobbit doctor: what was built, what this machine has, and what a model would get here."""

from __future__ import annotations

import argparse
import json

from . import _board, doctor
from .memory import format_bytes


def add_parser(commands) -> None:
    from .cli import add_model_arguments, add_offload_arguments

    p = commands.add_parser("doctor", help="say what this machine has, and what a model would get here",
                            description="Say what was built, what this machine has, how fast its disk reads, and what would be chosen for a model. Loads no model.")
    p.add_argument("model", metavar="MODEL.gguf", nargs="?")
    p.add_argument("--no-disk", action="store_true", help="do not measure the disk (which takes a second)")
    p.add_argument("--board", action="store_true", help="what a small board (Jetson) has, too, and what on it costs speed")
    p.add_argument("--json", action="store_true", help="print everything as JSON")
    add_model_arguments(p)
    add_offload_arguments(p)
    p.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    report = {"build": doctor.build(), "machine": doctor.machine()}
    if args.board:
        report["board"] = {**(board := _board.read()), "remarks": _board.remarks(board)}
    if args.model:
        report["model"] = doctor.model(args)
    if not args.no_disk:
        report["disk"] = doctor.disk(report.get("model", {}).get("sidecar") or args.model)
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines(report)))
    return 0


def lines(report: dict):
    b, m, d, x = report["build"], report["machine"], report.get("disk"), report.get("model")
    yield f"build       hobbit-cpp {b['version']}, llama.cpp {b['llama_cpp']}, llama-cpp-python {b['llama_cpp_python']}, Python {b['python']}"
    yield f"libraries   {b['folder']}, {b['build_type']}, API version {b['api_version']}"
    yield f"CPU         {m['cores']} cores; {b['cpu_features']}"
    for device in m["devices"]:
        yield f"device      {device['name']}: {device['description']}" + (f", {format_bytes(device['free'])} of {format_bytes(device['total'])} free" if device["gpu"] else "")
    if not m["gpu"]:
        yield "GPU         none that this build can use: no link, experts stay on the CPU"
    else:
        yield "link        measured when a model is loaded; hobbit run --stats"
    memory = m["memory"]
    yield f"memory      {format_bytes(memory['available'])} available of {format_bytes(memory['limit'])}, page cache counted as free" + (
        f" (a control group's limit; the machine has {format_bytes(memory['total'])})" if memory["limited"] else "")
    yield f"reserve     {format_bytes(memory['reserve'])} that cache_bytes='auto' leaves alone"
    if "board" in report:
        yield from _board.lines(report["board"])
    if d:
        yield (f"disk        {format_bytes(d['bytes_per_second'])}/s, {format_bytes(d['bytes'])} in pieces of {format_bytes(d['piece'])}, {d['threads']} at a time, "
               f"{'past' if d['direct'] else 'through'} the page cache, from {d['path']}")
    if x:
        yield ""
        yield (f"model       {x['path']}: {x['architecture']}, context of {x['n_ctx']} tokens, {x['threads']} thread{'s' if x['threads'] > 1 else ''}"
               + (f", {x['threads_batch']} for prompts" if x["threads_batch"] != x["threads"] else ""))
        yield f"besides     {format_bytes(x['residents'])} of residents, {format_bytes(x['kv_cache'])} of KV cache, at most {format_bytes(x['compute'])} of buffers"
        if x["offloaded"]:
            yield f"experts     {x['layers']} layers, {x['n_used']} of {x['n_expert']} used; all take {format_bytes(x['high_bytes'])} high and {format_bytes(x['low_bytes'])} low"
            yield f"rule        T1 {x['t1']:g}, T2 {x['t2']:g}, policy {x['policy']}" + (f", from {x['profile']}" if x["profile"] else "")
            if x["budget"] is None:
                yield "budget      what the GPU has left when the rest of the model is there"
            else:
                yield f"budget      {format_bytes(x['budget'])} (floor {format_bytes(x['floor_bytes'])}; buffers and bookkeeping included)"
        yield f"advice      {x['advice']}"
