"""Weights in files: what is written comes back, what is damaged does not, GPT-2 is GPT-2."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import checkpoint, generate
from models.weights import build, from_gpt2, load_tensors, parameters_of, save_tensors
from tests.serving import CONFIG, TOKENIZER, make_model

# On a GPU these fp32 models run on plain XLA, which says so.
pytestmark = pytest.mark.filterwarnings("ignore:jax_flash. attention:UserWarning")

TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a.half": np.ones((2, 1, 2), jnp.bfloat16),
    "scalar": np.asarray(7, np.int64),
    "empty": np.zeros((0, 3), np.float16),
    "flags": np.array([True, False, True]),
}


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert (tensor.dtype, tensor.shape) == (others[name].dtype, others[name].shape)
        np.testing.assert_array_equal(tensor, others[name])


def test_tensors_and_metadata_come_back(tmp_path):
    save_tensors(tmp_path / "file", TENSORS, {"who": "é"})
    tensors, metadata = load_tensors(tmp_path / "file")
    assert_equal(tensors, TENSORS)
    assert metadata == {"who": "é"}


def test_the_official_package_reads_what_is_written_and_writes_what_is_read(tmp_path):
    official = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
    tensors = {name: x for name, x in TENSORS.items() if x.dtype != jnp.bfloat16}
    save_tensors(tmp_path / "ours", tensors)
    assert_equal(official.load_file(tmp_path / "ours"), tensors)
    official.save_file(tensors, tmp_path / "theirs", {"who": "they"})
    again, metadata = load_tensors(tmp_path / "theirs")
    assert_equal(again, tensors)
    assert metadata == {"who": "they"}


def file_of(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 20, "its header would not fit"),
        (file_of(b"{]"), "damaged header"),
        (file_of(b"[]"), "damaged header"),
        (file_of({"x": {}}), "damaged header"),
        (file_of(entry(dtype="F8")), "damaged header"),
        (file_of(entry(shape=[-2])), "damaged header"),
        (file_of(entry(shape=[3])), "x does not have the bytes"),
        (file_of(entry(data_offsets=[8, 16])), "x does not have the bytes"),
        (file_of(entry(data_offsets=[8, 0])), "x does not have the bytes"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_tensors(tmp_path / "file")
    (tmp_path / "whole").write_bytes(file_of(entry()))
    assert load_tensors(tmp_path / "whole")[0]["x"].tolist() == [0, 0]


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(TypeError, match="x has dtype complex64"):
        save_tensors(tmp_path / "file", {"x": np.zeros(2, np.complex64)})


@pytest.mark.parametrize(
    "config",
    [CONFIG, dataclasses.replace(CONFIG, norm="rmsnorm", mlp="swiglu", tie_weights=False)],
    ids=["rope", "modern, untied"],
)
def test_a_model_comes_back_bit_by_bit(tmp_path, config):
    model = make_model(config)
    save_tensors(tmp_path / "file", parameters_of(model))
    again = build(config, load_tensors(tmp_path / "file")[0])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(again))


def test_tensors_of_another_model_are_named():
    tensors = parameters_of(make_model())
    assert "blocks.1.attention.qkv.kernel" in tensors
    with pytest.raises(ValueError, match=r"no place for \['extra'\]"):
        build(CONFIG, {**tensors, "extra": np.zeros(2)})
    with pytest.raises(ValueError, match=r"norm.scale has shape \(2,\), and .* \(32,\)"):
        build(CONFIG, {**tensors, "norm.scale": np.zeros(2)})
    del tensors["norm.scale"]
    with pytest.raises(ValueError, match=r"no tensor 'norm.scale', which this model has"):
        build(CONFIG, tensors)


@pytest.fixture
def run_folder(tmp_path):
    record = checkpoint.Record(
        step=3,
        val_loss=1.5,
        best_loss=1.5,
        model=dataclasses.asdict(CONFIG),
        train={},
        tokenizer=TOKENIZER.to_json(),
        text_sha256="",
    )
    checkpoint.save(tmp_path / "run/best", record, nnx.to_pure_dict(nnx.state(make_model())))
    return tmp_path / "run"


def test_a_run_is_exported_to_one_file_that_generates_the_same(run_folder, tmp_path, capsys):
    file = tmp_path / "tiny.safetensors"
    assert checkpoint.main([str(run_folder), str(file)]) == 0
    arguments = ["abc", "--max-new-tokens", "12", "--no-cache", "--checkpoint"]
    assert generate.main([*arguments, str(run_folder)]) == 0
    expected = capsys.readouterr().out
    assert generate.main([*arguments, str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert "tiny.safetensors: step 3, validation loss 1.500" in printed.err


def test_exporting_and_loading_say_what_is_wrong(tmp_path, capsys):
    assert checkpoint.main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "no folder" in capsys.readouterr().err
    save_tensors(tmp_path / "bare", {"x": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="bare has no record of a run"):
        checkpoint.load_model(tmp_path / "bare")


# GPT-2, written down once more in float64 NumPy after the paper's own code.

HEADS, WIDTH, LAYERS, VOCAB, POSITIONS = 2, 16, 2, 11, 8


def gpt2_tensors(prefix="", width=WIDTH):
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (VOCAB, width), "wpe.weight": (POSITIONS, width)}
    for i in range(LAYERS):
        for name, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes[f"h.{i}.{name}.weight"] = (inputs, outputs)
            shapes[f"h.{i}.{name}.bias"] = (outputs,)
    norms = [*(f"h.{i}.ln_{k}" for i in range(LAYERS) for k in (1, 2)), "ln_f"]
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    tensors = {prefix + name: rng.normal(0, 0.4, shape) for name, shape in shapes.items()}
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def gpt2_logits(p, tokens):
    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    p = {name: tensor.astype(np.float64) for name, tensor in p.items()}
    x = p["wte.weight"][tokens] + p["wpe.weight"][: len(tokens)]
    for i in range(LAYERS):
        qkv = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        outs = []
        for q, k, v in zip(*(np.split(part, HEADS, axis=-1) for part in qkv), strict=True):
            logits = q @ k.T / np.sqrt(WIDTH // HEADS)
            logits[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            outs.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + linear(np.concatenate(outs, -1), f"h.{i}.attn.c_proj")
        inside = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        inside *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inside + 0.044715 * inside**3)))
        x = x + linear(inside, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ p["wte.weight"].T


def test_gpt2_weights_give_gpt2s_logits(tmp_path):
    old = {f"h.{i}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for i in range(LAYERS)}
    tensors = {**gpt2_tensors(), **old, "lm_head.weight": gpt2_tensors()["wte.weight"]}
    save_tensors(tmp_path / "model.safetensors", tensors)
    model = from_gpt2(load_tensors(tmp_path / "model.safetensors")[0], num_heads=HEADS)
    tokens = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    run = nnx.jit(lambda model, tokens: model(tokens)[0])
    expected = gpt2_logits(gpt2_tensors(), tokens)
    assert expected.std() > 0.5
    logits = run(model, jnp.asarray(tokens[None], jnp.int32))
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    prefixed = from_gpt2(gpt2_tensors("transformer."), num_heads=HEADS)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(prefixed))


def test_what_is_not_gpt2_is_named():
    with pytest.raises(ValueError, match=r"GPT-2 has no tensor 'h.0.mlp.gate.weight'"):
        from_gpt2({**gpt2_tensors(), "h.0.mlp.gate.weight": np.zeros(2)})
    with pytest.raises(ValueError, match="no tensor for token_embedding"):
        from_gpt2({})
    tensors = gpt2_tensors()
    del tensors["h.1.ln_2.bias"]
    with pytest.raises(ValueError, match=r"no tensor 'blocks.1.norm_mlp.bias'"):
        from_gpt2(tensors, num_heads=HEADS)


def test_heads_are_64_wide_unless_said_otherwise():
    assert from_gpt2(gpt2_tensors(width=128)).config.num_heads == 2
    assert from_gpt2(gpt2_tensors(width=128), num_heads=4).config.num_heads == 4
