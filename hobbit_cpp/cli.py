"""The command hobbit and its subcommands."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import warnings

from ._cli_evaluate import add_evaluate_arguments
from ._version import __version__
from .errors import HobbitError
from .settings import MISS, POLICIES, PREFETCH_COPY

DESCRIPTION = "Run mixture-of-experts models that do not fit into memory."
EPILOG = "A model is converted once (hobbit convert SRC.gguf -o OUT.gguf) and then run (hobbit run OUT.gguf)."


def add_offload_arguments(p: argparse.ArgumentParser) -> None:
    g = p.add_argument_group("offloading (for converted models)")
    g.add_argument("--t1", type=float, metavar="X", help="experts within this share of the gate weights come at high precision; 1: all (default: 0.6)")
    g.add_argument("--t2", type=float, metavar="X", help="beyond it they are skipped; between the two they come at low precision (default: 1, no skips)")
    g.add_argument("--skip-mass", type=float, metavar="X", help="skip at most this share of a token's gate weights in a layer (default: 1, no bound)")
    g.add_argument("--cache", metavar="SIZE", help="memory for experts: 8GiB, 512MiB, 25%%, min, or auto (default: auto)")
    g.add_argument("--policy", choices=POLICIES, help="which expert gives up its place (default: hobbit)")
    g.add_argument("--low-fraction", type=float, metavar="X", help="share of that memory for low copies (default: 0)")
    g.add_argument("--no-profile", action="store_true", help="leave aside what hobbit calibrate found for this model (NAME.profile.json)")
    g.add_argument("--io-threads", type=int, metavar="N", help="reads in flight (default: 4)")
    g.add_argument("--no-direct-io", action="store_true", help="read through the page cache")
    g.add_argument("--verify", action="store_true", help="compare what is read from the files with their checksums; what is damaged is an error")
    g.add_argument("--host-copies", metavar="SIZE", help="copies of experts in RAM: all, none, 16GiB of them, or auto (default: on a GPU as many as fit)")
    g.add_argument("--unified-memory", choices=("auto", "on", "off"), help="slots in memory that CPU and GPU share (default: auto, as the GPU says)")
    g.add_argument("--miss", choices=MISS, help="with all copies in RAM, misses are fetched, computed by the CPU, or divided (default: auto, divided)")
    g.add_argument("--prefetch", type=_layers, metavar="N", help="while decoding, predict the experts of so many layers ahead and load them: 0 to 3, or auto (default: 0)")
    g.add_argument("--prefetch-copy", choices=PREFETCH_COPY, help="which copies of those (default: rule, as on a miss)")
    g.add_argument("--prefetch-ranks", type=int, metavar="N", help="of a token's predicted experts the N heaviest, 0: all (default: 1)")
    g.add_argument("--no-prompt-prefetch", action="store_true", help="do not load a prompt's next layers ahead")
    g.add_argument("--lean", type=float, metavar="X", help="while decoding, the choice of experts leans to those in memory by this share of the "
                   "router's spread, such as 0.05; changes the output (default: 0, off)")


def _layers(text: str):
    if text != "auto" and not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"give a number of layers from 0 to 3, or auto, not {text!r}")
    return text if text == "auto" else int(text)


def add_model_arguments(p: argparse.ArgumentParser, ctx: str = "context in tokens (default: the model's, at most 4096)") -> None:
    p.add_argument("-c", "--ctx", type=int, metavar="N", help=ctx)
    p.add_argument("-t", "--threads", type=int, metavar="N", help="computing threads (default: half of the cores, for prompts all)")
    p.add_argument("-ngl", "--gpu-layers", type=int, metavar="N", help="layers on the GPU, -1: all (default: none)")
    p.add_argument("--verbose", action="store_true", help="show llama.cpp's log")


def add_sampling_arguments(p: argparse.ArgumentParser, tokens: str, seed: str) -> None:
    p.add_argument("-n", "--tokens", type=int, metavar="N", help=tokens)
    p.add_argument("--temp", type=float, default=0.8, metavar="X", help="temperature; 0: always the likeliest token (default: 0.8)")
    p.add_argument("--top-k", type=int, metavar="N", help="choose among the N likeliest tokens, 0: all (default: 40)")
    p.add_argument("--top-p", type=float, metavar="X", help="among the likeliest that have this probability together (default: 0.95)")
    p.add_argument("--min-p", type=float, metavar="X", help="among those at least this share as likely as the likeliest (default: 0.05)")
    p.add_argument("--repeat-penalty", type=float, metavar="X", help="make the last 64 tokens less likely by this factor (default: 1, off)")
    p.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    p.add_argument("--seed", type=int, metavar="N", help=seed)


def llama_arguments(args) -> dict:
    """Keyword arguments for Llama; what was not given is left out. ValueError for layers on a GPU without one, and for numbers that are none."""
    for name in ("ctx", "threads"):
        if getattr(args, name, None) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.gpu_layers:
        from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries
        import llama_cpp

        if not llama_cpp.llama_supports_gpu_offload():
            raise ValueError("--gpu-layers: this build has no GPU back end, or there is no GPU; for NVIDIA's build with CMAKE_ARGS=-DGGML_CUDA=ON make setup")
    if args.unified_memory == "on" and not args.gpu_layers:
        raise ValueError("--unified-memory on is about a GPU: give --gpu-layers")
    given = {"t1": args.t1, "t2": args.t2, "skip_mass": args.skip_mass, "cache_bytes": args.cache, "policy": args.policy, "low_fraction": args.low_fraction,
             "n_io_threads": args.io_threads, "direct_io": False if args.no_direct_io else None,
             "host_copies": {"all": True, "none": False}.get(args.host_copies, args.host_copies), "miss": args.miss,
             "unified_memory": {"on": True, "off": False}.get(args.unified_memory, args.unified_memory),
             "prefetch": args.prefetch, "prefetch_copy": args.prefetch_copy, "prefetch_ranks": args.prefetch_ranks,
             "prefetch_prompts": False if args.no_prompt_prefetch else None, "lean": args.lean,
             "verify": args.verify or None, "profile": False if args.no_profile else None, "n_gpu_layers": args.gpu_layers, "n_threads": args.threads, "n_threads_batch": args.threads}
    return {k: v for k, v in given.items() if v is not None}


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="hobbit", description=DESCRIPTION, epilog=EPILOG)
    p.add_argument("-V", "--version", action="version", version=f"hobbit-cpp {__version__}")
    commands = p.add_subparsers(dest="command", metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="generate text, or chat", description="Generate text from a prompt; without a prompt, chat.")
    run.add_argument("model", metavar="MODEL.gguf", help="main file of a converted model, or an ordinary GGUF")
    text = run.add_mutually_exclusive_group()
    text.add_argument("-p", "--prompt", metavar="TEXT")
    text.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file, - for standard input")
    add_sampling_arguments(run, "most tokens to generate (default: 128, in a chat until the reply ends)", "for the same text again (default: another each time)")
    how = run.add_mutually_exclusive_group()
    how.add_argument("--raw", action="store_true", help="continue the text, even if the model has a chat template")
    how.add_argument("--chat", action="store_true", help="use the chat template; an error if the model has none")
    run.add_argument("--system", metavar="TEXT", help="in a chat template: how the model is to behave")
    run.add_argument("--stats", action="store_true", help="print a table of what the expert cache did")
    run.add_argument("--json", action="store_true", help="print text and statistics of a prompt as JSON, when it is done")
    add_model_arguments(run)
    add_offload_arguments(run)

    commands.add_parser("convert", help="make a model with two copies of every expert", add_help=False)
    commands.add_parser("info", help="say what a GGUF file holds", add_help=False)

    demo = commands.add_parser("demo", help="see it work with the small model that comes along",
                               description="Convert the small model that comes along, run it with memory for a quarter of its experts, and measure.")
    demo.add_argument("-p", "--prompt", metavar="TEXT", help="text to continue")
    demo.add_argument("--threads", type=int, metavar="N", help="computing threads (default: half of the cores)")

    bench = commands.add_parser("bench", help="measure speed", description="Median speed of a model, each run in a process of its own.")
    bench.add_argument("model", metavar="MODEL.gguf")
    bench.add_argument("--against", metavar="SRC.gguf", help="an ordinary GGUF to load the usual way, side by side")
    bench.add_argument("--prompt-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    bench.add_argument("-n", "--tokens", type=int, default=64, metavar="N", help="tokens to generate (default: %(default)s)")
    bench.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each (default: %(default)s)")
    bench.add_argument("--json", action="store_true", help="print all numbers as JSON: seconds, tokens per second, bytes")
    add_model_arguments(bench)
    add_offload_arguments(bench)

    evaluate = commands.add_parser("evaluate", help="measure what a setting costs in quality",
                                   description="Perplexity, divergence from a reference, minimal pairs and structured output under a setting.")
    add_evaluate_arguments(evaluate)
    add_model_arguments(evaluate, "tokens of a chunk, of which the second half counts (default: 512)")
    add_offload_arguments(evaluate)
    from . import _cli_calibrate, _cli_chat, _cli_doctor, _cli_env, _cli_frontier, _cli_imatrix, _cli_serve, _cli_trace, _cli_verify
    _cli_trace.add_parsers(commands)
    for module in (_cli_frontier, _cli_calibrate, _cli_imatrix, _cli_verify, _cli_chat, _cli_serve, _cli_doctor, _cli_env):
        module.add_parser(commands)
    return p


def _command(argv: list[str]) -> int:
    # imported here: convert and info need neither llama_cpp nor the engine
    if argv[:1] == ["convert"]:
        from .convert import main as convert
        return convert(argv[1:], "hobbit convert")
    if argv[:1] == ["info"]:
        from gguf_tools.info import main as info
        return info(argv[1:], "hobbit info")
    if argv in ([], ["help"]):
        _parser().print_help(sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    args, rest = _parser().parse_known_args(argv)
    if rest:
        print(f"error: hobbit {args.command} knows no {rest[0]} (hobbit {args.command} --help)", file=sys.stderr)
        return 2
    _look_at_variables(args)
    if args.command == "run":
        from ._cli_run import run
        return run(args)
    if args.command == "demo":
        from .demo import demo
        return demo(args.prompt, args.threads)
    if args.command == "evaluate":
        from ._cli_evaluate import evaluate
        return evaluate(args)
    if "function" in args:
        return args.function(args)
    from ._cli_bench import bench
    return bench(args)


def _look_at_variables(args) -> None:
    """Settings in the environment are for llama.cpp's own programs (docs/tools.md); say so where somebody may think otherwise."""
    offloading = argparse.ArgumentParser()
    add_offload_arguments(offloading)
    for setting in sorted(vars(offloading.parse_args([]))):
        name = f"HOBBIT_{setting.upper()}"
        if name in os.environ and hasattr(args, setting):
            warnings.warn(f"{name} counts for llama.cpp's own programs, not here: give --{setting.replace('_', '-')}", RuntimeWarning, stacklevel=2)


# Arguments of Python's, as the commands call them: what is said of them is said by the modules for both.
_FLAGS = {"cache_bytes": "--cache", "n_ctx": "--ctx", "n_io_threads": "--io-threads", "low_fraction": "--low-fraction", "skip_mass": "--skip-mass",
          "prefetch_ranks": "--prefetch-ranks", "host_copies": "--host-copies", "unified_memory": "--unified-memory", "n_gpu_layers": "--gpu-layers",
          "n_threads": "--threads", "n_threads_batch": "--threads", "max_kl": "--max-kl", "t1": "--t1", "t2": "--t2"}
_NAMES = re.compile(rf"(?<![\w./-])({'|'.join(_FLAGS)})(?![\w./-])")


def _told(message, command: str = "") -> str:
    flags = {**_FLAGS, "cache_bytes": "--budget"} if command == "calibrate" else _FLAGS
    text = _NAMES.sub(lambda m: flags[m[1]], str(message))
    return f"{text}: give a larger --ctx" if "exceed context window" in text else text


def _silence_stdout() -> None:
    """The reader of our pipe is gone; Python would complain once more when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    command = argv[0] if argv else ""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a result is not lost for a character that the terminal's encoding lacks
                stream.reconfigure(errors="replace")
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print(f"warning: {_told(message, command)}", file=sys.stderr)
            status = _command(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except MemoryError:
        print("error: out of memory", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}" if error.filename and error.strerror else f"error: {error}", file=sys.stderr)
    except (HobbitError, ImportError, RuntimeError, TypeError, ValueError) as error:
        print(f"error: {_told(error, command)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
