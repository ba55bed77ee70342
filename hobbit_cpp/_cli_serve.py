"""hobbit serve: OpenAI's interface over HTTP."""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys

NEEDS = "hobbit serve needs more packages ({}): pip install '.[server]' in hobbit-cpp's folder"
SLOW = 10  # seconds more than --grace, for a forward pass to end and a client to read
POOLING = {"mean": 1, "cls": 2, "last": 3}  # enum llama_pooling_type


def add_parser(commands) -> None:
    from .cli import add_model_arguments, add_offload_arguments

    p = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI's interface", description="Serve a model over HTTP, as OpenAI's interface. "
                            "Every option may also stand in the environment (HOBBIT_SERVE_PORT=8080) or in a file (port: 8080).")
    p.add_argument("model", metavar="MODEL.gguf", nargs="?")
    p.add_argument("--config", metavar="FILE", help="settings in a .json or .yaml file; flags and environment go before it")
    p.add_argument("--alias", action="append", metavar="NAME", help="the model's name in requests; may be repeated (default: the file's)")
    p.add_argument("--embedding", action="store_true", help="serve /v1/embeddings, too")
    p.add_argument("--pooling", choices=POOLING, help="how embeddings come from tokens (default: the model's, or mean)")
    p.add_argument("--chat-format", metavar="NAME", help="for a model without a chat template, such as chatml")
    p.add_argument("--logits-all", action="store_true", help="serve requests for logprobs, too (takes memory)")
    p.add_argument("--lora", metavar="FILE.gguf", help="adapter to load")
    p.add_argument("--batch", type=int, metavar="N", help="tokens of a prompt at once (default: 512)")
    p.add_argument("--ubatch", type=int, metavar="N", help="tokens in a forward pass, at most (default: 512)")
    add_model_arguments(p)
    add_offload_arguments(p)
    g = p.add_argument_group("server")
    g.add_argument("--host", metavar="ADDRESS", help="(default: 127.0.0.1)")
    g.add_argument("--port", type=int, metavar="N", help="0: any that is free (default: 8000)")
    g.add_argument("--api-key", action="append", metavar="KEY", help="ask for it; better in the environment, where others cannot see it (default: none)")
    g.add_argument("--cors-origin", action="append", metavar="URL", help="web pages that may use the server from a browser (default: none)")
    g.add_argument("--root-path", metavar="PATH", help="behind a proxy that strips it")
    g.add_argument("--ssl-keyfile", metavar="FILE")
    g.add_argument("--ssl-certfile", metavar="FILE")
    g.add_argument("--max-body", metavar="SIZE", help="largest request (default: 4MiB)")
    g.add_argument("--max-queue", type=int, metavar="N", help="requests that may wait for the model (default: 512)")
    g.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of one answer (default: the context)")
    g.add_argument("--client-timeout", type=float, metavar="SECONDS", help="for a client to send a request, or to go on reading its answer (default: 60)")
    g.add_argument("--grace", type=int, metavar="SECONDS", help="for the running request when the server is stopped (default: 10)")
    p.set_defaults(function=serve)


def serve(args: argparse.Namespace) -> int:
    try:
        import uvicorn
        from ._serve_settings import ServeSettings, settings
        flags = {k: v for k in ServeSettings.model_fields if (v := getattr(args, k, None)) is not None and v is not False}
        s = settings(flags, args.config)
        from ._serve_app import create_app
        from ._serve_slow import impatient
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("hobbit_cpp", "llama_cpp")):
            raise
        raise ImportError(NEEDS.format(error.name)) from None

    # before the model is loaded, which takes long
    with _listen(s.host, s.port) as listener:
        host, port = listener.getsockname()[:2]
        address = f"{'https' if s.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}/v1"
        with load(s) as llm:
            app = create_app(llm, s)
            config = uvicorn.Config(app, log_level="info" if s.verbose else "warning", ssl_keyfile=s.ssl_keyfile, ssl_certfile=s.ssl_certfile,
                                    timeout_graceful_shutdown=s.grace + SLOW)
            config.load()
            config.http_protocol_class = impatient(config.http_protocol_class, s.client_timeout)
            _server(uvicorn, config, app.state.service, address).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        what = {errno.EADDRINUSE: f"port {port} of {host} is in use: give another --port",
                errno.EADDRNOTAVAIL: f"this machine does not have the address {host}: give another --host"}
        raise ValueError(what.get(error.errno, f"cannot listen at port {port} of {host}: {error.strerror or error}")) from None


def load(s):
    """The Llama of ServeSettings."""
    from . import _load
    from ._cli_run import open_model

    more = {"n_batch": s.batch, "n_ubatch": s.ubatch, "chat_format": s.chat_format, "embedding": s.embedding, "logits_all": s.logits_all, "lora_path": s.lora}
    if s.pooling and not s.embedding:
        raise ValueError("--pooling is for embeddings: give --embedding, too")
    if s.embedding:
        metadata = _load.read_metadata(_load.check_path(s.model))
        own = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
        if s.pooling or not own:  # without pooling there is a vector for every token
            more["pooling_type"] = POOLING[s.pooling or "mean"]
    return open_model(s, **more)


def _server(uvicorn, config, service, address: str):
    """uvicorn's, which ends well at SIGTERM: it raises the signal again when it has stopped, for what there was before it."""
    early = []
    signal.signal(signal.SIGTERM, lambda *_: early.append(True))

    class Server(uvicorn.Server):
        async def startup(self, *args, **kwargs):
            await super().startup(*args, **kwargs)
            self.should_exit = self.should_exit or bool(early)
            print(f"serving {', '.join(service.names)} at {address}; Ctrl-C stops", file=sys.stderr, flush=True)
            if not service.keys and not address.partition("://")[2].startswith(("127.0.0.1:", "[::1]:")):
                print("warning: everybody who can reach this address can use the server: give --api-key", file=sys.stderr, flush=True)

        async def shutdown(self, *args, **kwargs):
            service.queue.stop(service.settings.grace)
            await super().shutdown(*args, **kwargs)

    return Server(config)
