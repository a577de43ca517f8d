"""Text as it comes: nothing is shown that might have to be taken back."""

import pytest

from models.metrics import Metrics, prometheus
from models.text_stream import TextStream


def decode_bytes(tokens):
    return bytes(tokens).decode(errors="replace")


def pieces(text, *stop):
    stream = TextStream(decode_bytes, stop)
    shown = [stream.push(token) for token in text.encode()]
    return [*shown, stream.flush()], stream.stopped


def test_characters_come_whole():
    shown, _ = pieces("aé😀b")
    assert shown == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_wrong_bytes_are_shown_in_the_end():
    stream = TextStream(decode_bytes)
    shown = [stream.push(0xFF) for _ in range(9)]
    assert "".join([*shown, stream.flush()]) == "\ufffd" * 9
    assert any(shown)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("hello world", ("wo",), "hello ", True),
        ("hello", ("world",), "hello", False),
        ("ababac", ("abac",), "ab", True),  # the first "aba" was a false start
        ("one END two", ("END", "e"), "on", True),
        ("almost EN", ("END",), "almost EN", False),  # held back, then shown after all
        ("é!", ("!",), "é", True),
    ],
)
def test_stop_strings(text, stop, expected, stopped):
    shown, was_stopped = pieces(text, *stop)
    assert "".join(shown) == expected
    assert was_stopped is stopped


def test_what_may_begin_a_stop_string_is_held_back():
    shown, _ = pieces("aENbEND", "END")
    assert shown == ["a", "", "", "ENb", "", "", "", ""]


def test_metrics_time_first_tokens_and_gaps():
    metrics = Metrics()
    metrics.token(10.5, submitted_s=10.0, last_s=None)
    metrics.token(10.75, submitted_s=10.0, last_s=10.5)
    metrics.step(0.25, 0.5, None)
    metrics.step(0.25, 0.0, 0.1)
    metrics.finish("stop")
    assert metrics.snapshot() == {
        "requests_submitted_total": 0,
        "generated_tokens_total": 2,
        "steps_total": 2,
        "busy_seconds_total": 0.5,
        "finished_stop_total": 1,
        "tokens_per_busy_second": 4.0,
        "time_to_first_token_seconds_p50": 0.5,
        "time_to_first_token_seconds_p99": 0.5,
        "inter_token_seconds_p50": 0.25,
        "inter_token_seconds_p99": 0.25,
        "page_occupancy_mean": 0.25,
        "page_waste_mean": 0.1,
    }


def test_prometheus_reads_names_and_numbers():
    text = prometheus({"steps_total": 3, "page_waste_mean": 0.25})
    assert text == (
        "# TYPE jax_flash_steps_total counter\njax_flash_steps_total 3\n"
        "# TYPE jax_flash_page_waste_mean gauge\njax_flash_page_waste_mean 0.25\n"
    )
