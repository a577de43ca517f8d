"""The text, its tokenizer and its batches. Nothing here touches the network."""

import hashlib
import http.client
import io
import urllib.error

import numpy as np
import pytest

from models import data
from models.data import CharTokenizer, Corpus, load_text, training_batch, validation_batches

TEXT = "to be, or not to be\n" * 20


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a network that must not be touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(data.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *_, **__: pytest.fail("network"))
    return data.cache_folder() / "tinyshakespeare.txt"


@pytest.fixture
def serve(monkeypatch):
    """Makes the download answer with these bytes, which pass for tinyshakespeare if `true`."""

    def serve(content, *, true):
        if true:
            monkeypatch.setattr(data, "NUM_BYTES", len(content))
            monkeypatch.setattr(data, "SHA256", hashlib.sha256(content).hexdigest())
        monkeypatch.setattr(
            data.urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content)
        )

    return serve


def test_a_path_is_read_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_bytes("naïve\r\n☃".encode())
    text = load_text(tmp_path / "mine.txt")
    assert (text.content, text.name) == ("naïve\r\n☃", "mine")


def test_the_environment_variable_stands_in_for_a_path(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("hello")
    monkeypatch.setenv(data.ENVIRONMENT_VARIABLE, str(tmp_path / "mine.txt"))
    assert load_text().content == "hello"


def test_a_path_that_is_not_there_or_not_text_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        load_text(tmp_path / "missing.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="binary is not UTF-8"):
        load_text(tmp_path / "binary")


def test_a_download_is_checked_and_kept(serve, cache, monkeypatch):
    serve(TEXT.encode(), true=True)
    assert load_text().content == TEXT
    assert cache.read_text() == TEXT
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *_, **__: pytest.fail("network"))
    assert load_text().content == TEXT


def test_a_download_of_something_else_is_an_error_and_is_not_kept(serve, cache):
    serve(b"<html>please log in</html>", true=False)
    with pytest.raises(ValueError, match=r"sent 26 bytes with sha256 .* nothing was kept.*--data"):
        load_text()
    assert not cache.exists()


def test_a_damaged_copy_is_removed_and_fetched_again(serve, cache):
    serve(TEXT.encode(), true=True)
    cache.parent.mkdir(parents=True)
    cache.write_text(TEXT[:-1] + "X")
    said = []
    assert load_text(say=said.append).content == TEXT
    assert "damaged" in said[0]
    assert cache.read_text() == TEXT


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError("no route"),
        TimeoutError("timed out"),
        urllib.error.HTTPError("http://x", 404, "Not Found", None, io.BytesIO()),
        http.client.IncompleteRead(b""),
    ],
)
def test_without_a_network_it_says_so_and_takes_the_standard_library(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(data.urllib.request, "urlopen", fail)
    said = []
    text = load_text(say=said.append)
    assert "no network" in said[-1]
    assert "--data PATH" in said[-1]
    assert text.content == data.standard_library_text().content
    assert 0.5 * data.NUM_BYTES < len(text.content) <= data.NUM_BYTES
    assert text.content.isascii()


def test_the_tokenizer_gives_back_what_it_took_in():
    tokenizer = CharTokenizer("naïve ☃ 😀\0\n")
    ids = tokenizer.encode("😀naïve☃\0")
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == "😀naïve☃\0"
    again = CharTokenizer.from_json(tokenizer.to_json())
    assert again.characters == tokenizer.characters
    assert tokenizer.encode("").shape == (0,)


@pytest.mark.parametrize("character", ["ï", "😀", "\0", "\udcff"])
def test_an_unknown_character_is_named_with_its_place(character):
    with pytest.raises(ValueError, match="at position 2 is not among the 5 ") as error:
        CharTokenizer("hello\n").encode("he" + character)
    assert f"{character!r} (U+{ord(character):04X})" in str(error.value)
    assert "leave it out" in str(error.value)


@pytest.mark.parametrize("token", [-1, 5, 65536])
def test_an_id_out_of_range_is_refused(token):
    with pytest.raises(ValueError, match=rf"token id {token} is outside \[0, 5\)"):
        CharTokenizer("hello\n").decode([0, token])


def test_the_start_token_is_a_newline_if_there_is_one():
    assert CharTokenizer("a\n b").decode([CharTokenizer("a\n b").start_token]) == "\n"
    assert CharTokenizer("ab").start_token == 0


def test_a_vocabulary_must_fit_uint16_and_not_be_empty():
    with pytest.raises(ValueError, match="more than the 65,536"):
        CharTokenizer(chr(i) for i in range(0x10000, 0x10000 + 65537))
    with pytest.raises(ValueError, match="empty"):
        CharTokenizer("")


def test_the_split_is_ninety_to_ten_and_lies_in_memory_mapped_uint16_files(tmp_path):
    corpus = Corpus.from_text(TEXT)
    on_disk = corpus.memory_mapped(tmp_path / "run")
    assert isinstance(on_disk.training, np.memmap)
    assert on_disk.training.dtype == np.uint16
    assert (len(on_disk.training), len(on_disk.validation)) == (360, 40)
    both = np.concatenate([on_disk.training, on_disk.validation])
    assert corpus.tokenizer.decode(both) == TEXT


def test_a_text_too_short_for_a_window_is_refused_by_split_and_length():
    corpus = Corpus.from_text(TEXT)
    corpus.check(39)
    with pytest.raises(ValueError, match=r"the validation split has 40 tokens, .* needs 41"):
        corpus.check(40)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.uint16)
    options = {"batch_size": 8, "context_length": 16}
    batch = training_batch(tokens, seed=1, step=7, **options)
    assert (batch.shape, batch.dtype) == ((8, 17), np.int32)
    assert (np.diff(batch, axis=1) == 1).all()
    np.testing.assert_array_equal(batch, training_batch(tokens, seed=1, step=7, **options))
    for other in ({"seed": 2, "step": 7}, {"seed": 1, "step": 8}):
        assert (batch != training_batch(tokens, **other, **options)).any()


def test_batches_reach_every_window_and_none_beyond():
    tokens = np.arange(20, dtype=np.uint16)
    batch = training_batch(tokens, seed=0, step=0, batch_size=500, context_length=16)
    assert sorted(set(batch[:, 0].tolist())) == [0, 1, 2, 3]


def test_validation_windows_are_fixed_and_span_the_split():
    tokens = np.arange(100, dtype=np.uint16)
    batches = validation_batches(tokens, num_batches=3, batch_size=4, context_length=9)
    assert batches.shape == (3, 4, 10)
    assert (batches[0, 0, 0], batches[-1, -1, -1]) == (0, 99)
