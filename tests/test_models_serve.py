"""The HTTP server, over real sockets: answers, refusals, and clients that are slow or vanish."""

import asyncio
import collections
import contextlib
import dataclasses
import http.client
import json
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra 'serve'")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

from models import serve  # noqa: E402 (after the check that it can be)
from models.engine import Engine, EngineConfig  # noqa: E402
from tests.serving import (  # noqa: E402
    TOKENIZER,
    greedy_tokens,
    log_probabilities,
    make_model,
    prompt_of,
)

# On a GPU these fp32 models run on plain XLA, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:jax_flash. attention:UserWarning")

LIMITS = serve.Limits(body_bytes=4000, body_s=0.5, max_tokens=400)
CONFIG = EngineConfig(
    max_batch_size=4,
    max_length=448,
    num_pages=60,
    max_prefill_tokens=32,
    min_prefill_tokens=32,
    max_waiting=4,
)
SOAK_S = float(os.environ.get("JAX_FLASH_SOAK_S", "2"))


@contextlib.contextmanager
def serving(engine, limits=LIMITS):
    """A server on a free port, in a thread."""
    server = serve.Server(engine, TOKENIZER, "tiny", limits)
    config = uvicorn.Config(server.app(), host=serve.HOST, port=0, log_level="critical", ws="none")
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        while not runner.started:
            assert thread.is_alive()
            time.sleep(0.01)
        server.port = runner.servers[0].sockets[0].getsockname()[1]
        yield server
    finally:
        runner.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server():
    with serving(Engine(make_model(), CONFIG, TOKENIZER)) as server:
        yield server


@contextlib.contextmanager
def connected(server):
    with contextlib.closing(http.client.HTTPConnection(serve.HOST, server.port, 60)) as connection:
        yield connection


def ask(server, body, path="/v1/completions", method="POST", headers=None):
    """Status, headers and body of an answer."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    with connected(server) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def complete(server, **fields):
    status, _, body = ask(server, {"temperature": 0, "max_tokens": 8, **fields})
    assert status == 200, body
    return json.loads(body)


def events(server, **fields):
    status, headers, body = ask(server, {"temperature": 0, "stream": True, **fields})
    assert status == 200
    assert headers["content-type"] == "text/event-stream"
    lines = [line.removeprefix("data: ") for line in body.split("\n\n")]
    assert lines[-2:] == ["[DONE]", ""]
    return [json.loads(line)["choices"][0] for line in lines[:-2]]


def numbers(server):
    _, _, text = ask(server, b"", "/metrics", "GET")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("jax_flash_"): float(value) for name, value in lines}


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


PROMPT = TOKENIZER.decode(prompt_of(9))


def expected(count=8):
    return TOKENIZER.decode(greedy_tokens(prompt_of(9), count))


def test_a_completion_is_what_the_model_says(server):
    answer = complete(server, prompt=PROMPT)
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": expected(), "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 8, "total_tokens": 17}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert complete(server, prompt=prompt_of(9))["choices"] == answer["choices"]
    assert complete(server, prompt=[PROMPT])["choices"] == answer["choices"]


def test_a_stream_brings_the_same_piece_by_piece(server):
    pieces = events(server, prompt=PROMPT, max_tokens=8)
    assert "".join(piece["text"] for piece in pieces) == expected()
    assert len(pieces) == 8
    assert [piece["finish_reason"] for piece in pieces] == [None] * 7 + ["length"]


def test_several_texts_an_echo_and_log_probabilities(server):
    (first, second) = complete(server, prompt=PROMPT, n=2, echo=True, logprobs=0)["choices"]
    assert first["text"] == second["text"] == PROMPT + expected()
    table = log_probabilities([*prompt_of(9), *greedy_tokens(prompt_of(9), 8)])
    assert first["logprobs"]["token_logprobs"] == pytest.approx(table[8:-1].max(-1), abs=1e-3)
    assert "".join(first["logprobs"]["tokens"]) == expected()
    pieces = events(server, prompt=PROMPT, n=2, echo=True, logprobs=0, max_tokens=3)
    texts = collections.defaultdict(str)
    for piece in pieces:
        texts[piece["index"]] += piece["text"]
    assert texts == {0: PROMPT + expected(3), 1: PROMPT + expected(3)}


def test_a_seed_repeats_and_its_absence_does_not(server):
    draw = {"prompt": PROMPT, "temperature": 3, "top_p": 0.99, "top_k": 14, "max_tokens": 30}
    texts = [complete(server, **draw, seed=5)["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    assert complete(server, **draw)["choices"][0]["text"] != texts[0]


def test_stop_strings(server):
    stop = expected()[3:5]
    (choice,) = complete(server, prompt=PROMPT, stop=stop)["choices"]
    assert choice["text"] == expected()[: expected().find(stop)]
    assert choice["finish_reason"] == "stop"


def test_null_is_the_default_and_an_empty_prompt_starts_with_a_newline(server):
    assert (
        complete(server, prompt=None, stop=None, seed=None, user="me")["choices"]
        == (complete(server, prompt="\n")["choices"])
    )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "not JSON"),
        (b"[" * 3000, None, "not JSON"),
        (b"\xff", None, "not JSON"),
        (b"[]", None, "must be a JSON object"),
        ({"prompt": "Ω"}, "prompt", "'Ω' (U+03A9) at position 0"),
        ({"prompt": "\ud800"}, "prompt", "ud800"),
        ({"prompt": [99]}, "prompt", "token id 99 is outside"),
        ({"prompt": ["a", "b"]}, "prompt", "one string, or a list of token ids"),
        ({"prompt": [True]}, "prompt", "list of token ids"),
        ({"prompt": []}, "prompt", "list of token ids"),
        ({"prompt": 5}, "prompt", "must be str or list"),
        ({"prompt": "a" * 300, "max_tokens": 400}, None, "shorten one of them"),
        ({"max_tokens": 0}, "max_tokens", "[1, 400]"),
        ({"max_tokens": 1.5}, "max_tokens", "must be int"),
        ({"max_tokens": True}, "max_tokens", "must be int"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"temperature": 10**400}, "temperature", "temperature must be"),
        (b'{"temperature": NaN}', "temperature", "temperature must be"),
        ({"top_p": 2}, "top_p", "top_p must be"),
        ({"top_k": -1}, "top_k", "top_k must be"),
        ({"seed": -1}, "seed", "seed must be"),
        ({"n": 9}, "n", "[1, 8]"),
        ({"n": 5}, None, "max_waiting"),
        ({"stop": [""]}, "stop", "1 to 64 characters"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 strings"),
        ({"stop": [1]}, "stop", "at most 4 strings"),
        ({"logprobs": 5}, "logprobs", "null or 0"),
        ({"stream": "yes"}, "stream", "must be bool"),
        ({"model": "gpt-4"}, "model", "'tiny' only"),
        ({"best_of": 3}, "best_of", "'best_of' is not supported"),
        ({"\ud800": 3}, "?", "not supported"),
    ],
)
def test_a_wrong_request_is_answered_with_what_is_wrong(server, body, param, message):
    status, _, text = ask(server, body)
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    assert error["param"] == param


def test_other_places_methods_and_hosts(server):
    assert ask(server, b"", "/nowhere", "GET")[0] == 404
    assert ask(server, b"", "/v1/completions", "GET")[0] == 405
    assert ask(server, b"", "/health", "GET", {"host": "evil.example"})[0] == 400
    assert ask(server, b"", "/health", "GET", {"host": f"localhost:{server.port}"})[0] == 200
    models = json.loads(ask(server, b"", "/v1/models", "GET")[2])
    assert [model["id"] for model in models["data"]] == ["tiny"]


def test_a_body_that_is_too_large_or_too_slow(server):
    assert ask(server, b" " * 5000)[0] == 413
    with connected(server) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408


@contextlib.contextmanager
def held(server):
    """Keeps the engine's thread from doing anything, so that what comes in meets there."""
    event = threading.Event()
    server.worker._commands.put((event.wait, lambda result, error: None))
    try:
        yield
    finally:
        event.set()


def test_a_full_queue_is_429_with_a_time_to_come_back(server):
    statuses, threads = [], []

    def client():
        status, headers, _ = ask(server, {"prompt": PROMPT, "max_tokens": 4})
        statuses.append((status, headers["retry-after"]))

    with held(server):
        threads = [threading.Thread(target=client) for _ in range(7)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.worker._commands.qsize() == 7)
    for thread in threads:
        thread.join()
    assert collections.Counter(statuses) == {(200, None): 4, (429, "1"): 3}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_request(server, stream):
    before = numbers(server).get("finished_cancelled_total", 0)
    with connected(server) as connection:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "stream": stream})
        connection.request("POST", "/v1/completions", body)
        if stream:
            assert connection.getresponse().read(5) == b"data:"
        else:
            wait_until(lambda: numbers(server)["running"] == 1)
    wait_until(lambda: numbers(server)["pages_owned"] == 0)
    assert numbers(server)["finished_cancelled_total"] == before + 1


def test_a_client_that_hangs_up_while_it_is_being_queued_leaves_nothing(server):
    before = numbers(server)
    with held(server):
        with connected(server) as connection:
            body = json.dumps({"prompt": PROMPT, "max_tokens": 400})
            connection.request("POST", "/v1/completions", body)
            wait_until(lambda: server.worker._commands.qsize() == 1)
        time.sleep(0.1)
    wait_until(lambda: numbers(server)["pages_owned"] == 0)
    after = numbers(server)
    assert after["requests_submitted_total"] == before["requests_submitted_total"] + 1
    assert after["finished_length_total"] == before["finished_length_total"]


def test_clients_that_do_not_read_stall_nobody(server):
    body = json.dumps({"prompt": PROMPT, "max_tokens": 400, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
    lazy = []
    for _ in range(3):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect((serve.HOST, server.port))
        one.sendall(request % (len(body), body))
        lazy.append(one)
    assert complete(server, prompt=PROMPT)["choices"][0]["text"] == expected()
    wait_until(lambda: numbers(server)["running"] == 0)  # their texts are finished all the same
    for one in lazy:
        one.close()


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_random_clients_leave_no_page_behind(server):
    """For JAX_FLASH_SOAK_S seconds; 600 for the long run."""
    before, end = numbers(server), time.monotonic() + SOAK_S
    statuses, problems = collections.Counter(), []

    def client(seed):
        rng = random.Random(seed)
        while time.monotonic() < end and not problems:
            fields = {
                "prompt": PROMPT[: rng.randrange(10)] + TOKENIZER.decode(prompt_of(9, seed)),
                "max_tokens": rng.choice([1, 8, 60, 0]),
                "temperature": rng.choice([0, 1]),
                "n": rng.choice([1, 1, 3]),
                "stream": rng.random() < 0.5,
            }
            try:
                if rng.random() < 0.3:
                    with connected(server) as connection:
                        connection.request("POST", "/v1/completions", json.dumps(fields))
                        if rng.random() < 0.5:
                            connection.getresponse().read(20)
                    statuses["left"] += 1
                else:
                    statuses[ask(server, fields)[0]] += 1
            except Exception as problem:
                problems.append(problem)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    memory_mib = []
    while any(thread.is_alive() for thread in threads):
        memory_mib.append(resident_mib())
        time.sleep(SOAK_S / 20)
    assert not problems
    assert max(memory_mib) - memory_mib[len(memory_mib) // 2] < 50
    assert statuses.keys() <= {200, 400, 429, "left"}
    assert statuses[200] > 0
    wait_until(lambda: numbers(server)["running"] + numbers(server)["waiting"] == 0)
    after = numbers(server)
    assert after["pages_owned"] == 0
    assert after["compiled_programs"] == before["compiled_programs"]
    server.worker._engine.blocks.check()
    print(f"\n{dict(statuses)}, MiB {memory_mib}, {after}")


def test_an_engine_that_fails_is_503_to_all_now_and_later():
    engine = Engine(make_model(), dataclasses.replace(CONFIG, max_batch_size=1), TOKENIZER)
    with serving(engine) as server:
        assert ask(server, b"", "/health", "GET")[0] == 200
        engine.step = lambda: 1 / 0
        status, _, text = ask(server, {"prompt": PROMPT})
        assert (status, json.loads(text)["error"]["type"]) == (503, "server_error")
        assert "division by zero" in text
        for path in ("/health", "/metrics"):
            assert ask(server, b"", path, "GET")[0] == 503


def test_a_broken_model_is_500_or_an_error_in_the_stream():
    broken = make_model.__wrapped__()
    broken.norm.scale[...] = broken.norm.scale[...] * float("nan")
    engine = Engine(broken, dataclasses.replace(CONFIG, max_batch_size=1), TOKENIZER)
    with serving(engine) as server:
        assert ask(server, {"prompt": PROMPT})[0] == 500
        text = ask(server, {"prompt": PROMPT, "stream": True})[2]
        assert "not finite" in json.loads(text.removeprefix("data: "))["error"]["message"]


async def read_all(subscription):
    while await subscription.next():
        pass


def test_stopping_ends_what_runs():
    async def run():
        worker = serve.Worker(Engine(make_model(), CONFIG, TOKENIZER))
        worker.start()
        subscription = serve.Subscription()
        await worker.submit(subscription, [1], serve.SamplingParams(400))
        await subscription.next()
        await asyncio.to_thread(worker.stop)
        with pytest.raises(serve.WorkerDeadError, match="stopped"):
            await read_all(subscription)
        with pytest.raises(serve.WorkerDeadError, match="stopped"):
            await worker.snapshot()

    asyncio.run(run())


def test_the_command_answers_a_bad_argument_in_one_line(capsys):
    assert serve.main(["--checkpoint", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: no folder nowhere")
