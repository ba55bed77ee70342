"""hobbit serve, as clients see it."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import threading
from types import SimpleNamespace

import pytest

import engine
from hobbit_cpp import Llama

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("prometheus_client", reason="the extra `server` is not installed")
pytest.importorskip("pydantic", reason="the extra `server` is not installed")

from hobbit_cpp._serve_slow import impatient  # noqa: E402
from serving import Server, until  # noqa: E402

PROMPT = "The old man walked along the road"
ENDLESS = {"prompt": PROMPT, "max_tokens": 100_000, "temperature": 0.9, "logit_bias": {"2": -100.0}}  # never the token that ends a text


@pytest.fixture(scope="module")
def dual():
    return engine.pair(engine.DEFAULT_MODEL, "q2_k")


@pytest.fixture(scope="module")
def server(dual):
    with Server(dual, "--alias", "small", "--alias", "other", "--t1", 1, "--cache", "50%", "--ctx", 512, "--chat-format", "chatml", "--embedding") as s:
        yield s


@pytest.fixture(scope="module")
def library(dual):
    with Llama(dual, t1=1.0, cache_bytes="50%", n_ctx=512, n_threads=1, n_threads_batch=1, chat_format="chatml", embedding=True, pooling_type=1, verbose=False) as llm:
        yield llm


# --- the official client -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai", reason="the openai package is not installed (extra `test`)")
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=120) as c:
        yield c


def test_client_models(client):
    assert [m.id for m in client.models.list()] == ["small", "other"] and client.models.retrieve("other").id == "other"


def test_client_completion(client, library):
    expected = library.create_completion(PROMPT, max_tokens=20, temperature=0.9, seed=5, repeat_penalty=1.1)
    answer = client.completions.create(model="small", prompt=PROMPT, max_tokens=20, temperature=0.9, seed=5)
    assert answer.choices[0].text == expected["choices"][0]["text"] and answer.model == "small"
    assert answer.usage.model_dump(include=set(expected["usage"])) == expected["usage"]
    parts = list(client.completions.create(model="small", prompt=PROMPT, max_tokens=20, temperature=0.9, seed=5, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in parts[:-1]) == answer.choices[0].text and len(parts) > 5
    assert parts[-1].choices == [] and parts[-1].usage.total_tokens == answer.usage.total_tokens


def test_client_chat(client, library):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    expected = library.create_chat_completion(messages, max_tokens=16, temperature=0.7, seed=9, repeat_penalty=1.1)["choices"][0]
    answer = client.chat.completions.create(model="other", messages=messages, max_completion_tokens=16, temperature=0.7, seed=9).choices[0]
    assert (answer.message.content, answer.finish_reason) == (expected["message"]["content"], expected["finish_reason"])
    parts = client.chat.completions.create(model="other", messages=messages, max_tokens=16, temperature=0.7, seed=9, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts) == answer.message.content


def test_client_json_schema(client):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
    answer = client.chat.completions.create(model="small", messages=[{"role": "user", "content": "How old?"}], max_tokens=60, seed=1,
                                            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
    assert isinstance(json.loads(answer.choices[0].message.content)["age"], int)


def test_client_embeddings(client, server, library):
    texts = ["The old man", "A longer sentence about the sea"]
    expected = library.embed(texts)
    answer = client.embeddings.create(model="small", input=texts, encoding_format="float")
    assert [d.embedding for d in answer.data] == expected and [d.index for d in answer.data] == [0, 1]
    got = client.embeddings.create(model="small", input=texts[0]).data[0].embedding  # it asks for base64
    assert got == pytest.approx(expected[0])
    data = server.post("/v1/embeddings", {"input": texts[0], "encoding_format": "base64"})[1]["data"][0]["embedding"]
    assert struct.unpack("<256f", base64.b64decode(data)) == tuple(expected[0])


def test_client_sees_its_errors(client):
    import openai
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="exceed context window") as info:
        client.completions.create(model="small", prompt="word " * 600)
    assert info.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n: .*must be 1"):
        client.completions.create(model="small", prompt="x", n=3)


# --- wrong requests ----------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize("path, body, status, message", [
    ("completions", '{"prompt": "x"', 400, "the body is not valid"),
    ("completions", b"\xff\xfe", 400, ""),
    ("completions", "[1]", 400, ""),
    ("completions", "[" * 100_000, 400, ""),
    ("completions", {"prompt": 5}, 400, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, 400, "one prompt at a time"),
    ("completions", {"prompt": [1, 99999]}, 400, "token 99999 is not in the vocabulary"),
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": "many"}, 400, "max_tokens"),
    ("completions", '{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("completions", {"prompt": "x", "top_p": 2}, 400, "top_p"),
    ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("completions", {"max_tokens": 5}, 400, "prompt"),
    ("completions", {"prompt": "x", "stop": [""]}, 400, "an empty text stops before the first token"),
    ("completions", {"prompt": "x", "logprobs": 0}, 400, "--logits-all"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, 400, "--logits-all"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "content must be text"),
    ("completions", {"prompt": "x", "seed": -5}, 400, "seed"),
    ("completions", {"prompt": "x", "best_of": 2}, 400, "must be 1"),
    ("completions", {"prompt": "x", "logprobs": 2}, 400, "logprobs"),
    ("completions", {"prompt": "x", "logit_bias": {"word": 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "token 99999"),
    ("completions", {"prompt": "x", "grammar": "root ::= ["}, 400, "grammar"),
    ("completions", {"prompt": "x", "grammar": "root ::= root"}, 400, "grammar"),
    ("completions", {"prompt": "word " * 600}, 400, "exceed context window of 512"),
    ("completions", {"prompt": "x", "model": "../../../../etc/passwd"}, 404, "does not exist"),
    ("completions", {"prompt": "x", "model": ""}, 404, "does not exist"),
    ("completions", {"prompt": "x", "model": "/etc/passwd\0.gguf"}, 404, "does not exist"),
    ("chat/completions", {}, 400, "messages"),
    ("chat/completions", {"messages": []}, 400, "messages: List should have at least 1 item"),
    ("chat/completions", {"messages": "x"}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages"),
    ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object", "schema": {"type": "nonsense"}}}, 400, "JSON schema"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400, "json_schema needs"),
    ("embeddings", {}, 400, "input"),
    ("embeddings", {"input": []}, 400, "nothing to embed"),
    ("embeddings", {"input": "x", "dimensions": 3}, 400, "dimensions"),
    ("nothing", {}, 404, ""),
])
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests(server, path, body, status, message, stream):
    if stream:
        if not isinstance(body, dict) or path in ("embeddings", "nothing"):
            pytest.skip("nothing to stream")
        body = {**body, "stream": True}
    got, answer = server.post(f"/v1/{path}", body)
    assert got == status and message in answer["error"]["message"] and set(answer["error"]) == {"message", "type", "param", "code"}
    assert server.complete()[0] == 200  # it goes on


def test_other_routes(server):
    for path in ("/v1/models/../../../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/../../etc/passwd", "/v1/models/nosuch"):
        status, answer = server.get(path)
        assert status == 404 and "error" in answer and "root:" not in str(answer)
    assert server.ask("GET", "/v1/completions")[0] == 405
    tokens = server.post("/extras/tokenize", {"input": PROMPT})[1]["tokens"]
    assert server.post("/extras/tokenize/count", {"input": PROMPT})[1] == {"count": len(tokens)}
    assert server.post("/extras/detokenize", {"tokens": tokens})[1]["text"].strip() == PROMPT
    assert server.post("/extras/detokenize", {"tokens": [-1]})[0] == 400
    assert server.get("/health") == (200, {"status": "ok", "model": "small", "waiting": 0, "running": 0})


def test_size_of_requests(dual):
    with Server(dual, "--max-body", "4KiB", "--max-tokens", 3, "--cache", "50%") as server:
        assert server.complete("word " * 200)[0] == 200
        status, answer = server.complete("word " * 2000)
        assert status == 413 and "larger than 4096 bytes" in answer["error"]["message"]
        with contextlib.closing(server.connection()) as c:  # without a length
            c.request("POST", "/v1/completions", (b"x" * 1000 for _ in range(20)), {"Content-Type": "application/json"}, encode_chunked=True)
            assert c.getresponse().status == 413
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port))) as raw:  # what is no HTTP
            raw.sendall(b"\0\1\2 nonsense\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        answer = server.complete(max_tokens=50)[1]
        assert answer["usage"]["completion_tokens"] == 3
        assert server.post("/v1/chat/completions", CHAT)[0] == 400  # no template
        assert server.post("/v1/embeddings", {"input": "x"})[0] == 400


def test_log_probabilities(dual):
    with Server(dual, "--cache", "50%", "--ctx", 128, "--chat-format", "chatml", "--logits-all") as server:
        for stream in False, True:
            assert b'"logprobs": {' in server.ask("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 2, "logprobs": 1, "stream": stream}),
                                                 {"Content-Type": "application/json"})[1]
        status, answer = server.post("/v1/chat/completions", {**CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 1})
        assert status == 200 and answer["choices"][0]["logprobs"]


def test_api_keys(dual):
    with Server(dual, "--cache", "min", HOBBIT_SERVE_API_KEY="first,sécond") as server:
        for path in ("/v1/models", "/v1/models/x"):
            assert server.get(path)[0] == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/extras/tokenize", "/extras/tokenize/count", "/extras/detokenize"):
            assert server.post(path, {})[0] == 401
        for given in ("Bearer wrong", "Bearer ", "Bearer firs", "Basic first", "first"):
            assert server.get("/v1/models", Authorization=given)[0] == 401
        assert server.get("/v1/models", Authorization="Bearer first")[0] == 200
        assert server.get("/v1/models", Authorization="bearer  sécond".encode())[0] == 200
        assert server.get("/health")[0] == 200


# --- many at once, and those that leave --------------------------------------------------------


def test_200_clients_at_once(server):
    expected = {i: server.complete(f"Story {i}", max_tokens=3)[1]["choices"][0]["text"] for i in range(4)}
    answers = []

    def work(i):
        try:
            status, answer = server.complete(f"Story {i % 4}", max_tokens=3)
            answers.append(status == 200 and answer["choices"][0]["text"] == expected[i % 4])
        except OSError as error:
            answers.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(200)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == [True] * 200
    assert server.get("/health")[1]["waiting"] == 0


def idle(server):
    return until(lambda: server.get("/health")[1]["running"] == 0, "the model is free")


def test_a_client_that_leaves_in_the_middle_of_a_stream(server):
    before = server.metric("hobbit_disconnects_total")
    c = server.begin("/v1/completions", {**ENDLESS, "stream": True})
    answer = c.getresponse()
    assert answer.readline().startswith(b"data: ")
    assert server.get("/health")[1]["running"] == 1
    answer.close()
    c.close()
    idle(server)
    passes = server.metric("hobbit_forward_passes_total")
    assert server.metric("hobbit_disconnects_total") == before + 1
    assert server.complete()[0] == 200
    assert server.metric("hobbit_forward_passes_total") - passes < 20  # those of the last request alone


def test_a_client_that_leaves_before_its_answer(server):
    before = server.metric("hobbit_disconnects_total")
    c = server.begin("/v1/completions", ENDLESS)
    until(lambda: server.get("/health")[1]["running"], "it runs")
    waiting = [server.begin("/v1/completions", {**ENDLESS, "stream": stream}) for stream in (False, True)]
    until(lambda: server.get("/health")[1]["waiting"] == 2, "two wait")
    for w in waiting:
        w.close()
    until(lambda: server.get("/health")[1]["waiting"] == 0, "nobody waits")
    assert server.get("/health")[1]["running"] == 1
    c.close()
    idle(server)
    assert server.metric("hobbit_disconnects_total") == before + 3 and server.complete()[0] == 200


def test_full_queue(dual):
    with Server(dual, "--cache", "50%", "--max-queue", 2, "--grace", 0) as server:
        running = server.begin("/v1/completions", ENDLESS)
        until(lambda: server.get("/health")[1]["running"], "it runs")
        waiting = [server.begin("/v1/completions", ENDLESS) for _ in range(2)]
        until(lambda: server.get("/health")[1]["waiting"] == 2, "two wait")
        status, answer = server.complete()
        assert status == 503 and "2 requests are waiting" in answer["error"]["message"]
        for c in (running, *waiting):
            c.close()
        idle(server)
        assert server.complete()[0] == 200


def test_slow_clients_are_cut_off(dual):
    request = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(request)
    good = head + request
    with Server(dual, "--cache", "50%", "--client-timeout", 1) as server:
        for begun in (b"", head[:40], head + request[:-1], good + head[:40], good + head + request[:-1]):
            with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as raw:
                raw.sendall(begun)
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while part := raw.recv(65536):  # until the server closes; it sends what it owes
                        answer += part
            assert answer.startswith(b"HTTP/1.1 200") == begun.startswith(good)
        assert server.complete()[0] == 200 and server.get("/health")[1]["running"] == 0


def test_answers_that_are_not_read():
    """Timers alone: the system's buffers hold more than the small model writes."""
    class Plain:
        cycle = None

        def connection_made(self, transport):
            self.transport = transport

        def pause_writing(self):
            pass

        resume_writing = pause_writing

        def connection_lost(self, error):
            pass

    class Transport:
        aborted = False

        def abort(self):
            self.aborted = True

    async def run(uses):
        connection, transport = impatient(Plain, 0.05)(), Transport()
        connection.connection_made(transport)
        connection.cycle = SimpleNamespace(response_complete=False, more_body=False)
        connection._expect_request()
        for use in uses:
            getattr(connection, use)(*[None] * (use == "connection_lost"))
        await asyncio.sleep(0.5)
        return transport.aborted

    for uses, expected in ([], False), (["pause_writing"], True), (["pause_writing", "resume_writing"], False), (["pause_writing", "connection_lost"], False):
        assert asyncio.run(run(uses)) == expected


# --- the end -----------------------------------------------------------------------------------


def test_sigterm_lets_the_running_request_finish(dual):
    server = Server(dual, "--cache", "50%", "--grace", 60)
    with server:
        running = server.begin("/v1/completions", {**ENDLESS, "max_tokens": 300, "stream": True})
        answer = running.getresponse()
        first = answer.readline()
        waiting = server.begin("/v1/completions", ENDLESS)
        until(lambda: server.get("/health")[1]["waiting"] == 1, "one waits")
        server.process.send_signal(signal.SIGTERM)
        assert waiting.getresponse().status == 503
        assert (first + answer.read()).rstrip().endswith(b"data: [DONE]")
        assert server.stop() == (0, "")


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_without_grace(dual, stream):
    server = Server(dual, "--cache", "50%", "--grace", 0)
    with server:
        running = server.begin("/v1/completions", {**ENDLESS, "stream": stream})
        until(lambda: server.get("/health")[1]["running"], "it runs")
        status, said = server.stop()
        assert status == 0 and "Traceback" not in said
        running.close()


def test_interrupt(dual):
    server = Server(dual, "--cache", "50%")
    with server:
        assert server.stop(signal.SIGINT) == (130, "\ninterrupted\n")


# --- statistics and failures -------------------------------------------------------------------


def test_metrics_add_up(server):
    server.complete(max_tokens=5)
    total = {name: server.metric(f"hobbit_{name}_total") for name in ("expert_requests", "expert_hits", "expert_misses", "expert_skips", "expert_read_bytes")}
    assert total["expert_requests"] == total["expert_hits"] + total["expert_misses"] + total["expert_skips"] > 0 and total["expert_read_bytes"] > 0
    assert server.metric("hobbit_expert_requests_total", wanted="high") == total["expert_requests"]  # t1 = 1
    assert server.metric("hobbit_slot_bytes") <= server.metric("hobbit_budget_bytes") <= server.metric("hobbit_high_bytes")
    assert server.metric("hobbit_t1") == 1
    tokens = server.metric("hobbit_tokens_total", kind="decode")
    requests = server.metric("hobbit_http_requests_total", path="/v1/completions", status="200")
    server.complete(max_tokens=5)
    assert server.metric("hobbit_tokens_total", kind="decode") == tokens + 4  # the first comes with the prompt
    assert server.metric("hobbit_http_requests_total", path="/v1/completions", status="200") == requests + 1
    assert server.ask("GET", "/../etc/passwd")[0] == 404
    text = server.ask("GET", "/metrics")[1].decode()
    assert 'path="other",status="404"' in text and "passwd" not in text  # no label of a client's making


def test_storage_that_fails(dual, tmp_path):
    for path in (dual, dual.with_name(dual.name.replace(".gguf", ".experts.gguf"))):
        shutil.copy(path, tmp_path)
    side = tmp_path / dual.name.replace(".gguf", ".experts.gguf")
    whole = side.read_bytes()
    with Server(tmp_path / dual.name, "--cache", "min", "--t1", 1) as server:
        good = server.complete()
        os.truncate(side, 200_000)
        for stream in (False, True):
            status, answer = server.complete("Quite another beginning of a story", stream=stream)
            assert status == 500 and "failed: the file ends after" in answer["error"]["message"]
        side.write_bytes(whole)
        again = server.complete()
        assert again[0] == 200 and again[1]["choices"] == good[1]["choices"]


def test_an_ordinary_file():
    with Server(engine.DEFAULT_MODEL) as server:
        assert server.complete()[0] == 200
        assert server.metric("hobbit_info", model="books-8x2-small-q8_0") == 1 and server.metric("hobbit_budget_bytes") == 0
