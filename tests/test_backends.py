"""Which implementation runs a call: the choice, its reasons, its report, and what it costs."""

import functools
import inspect
import os
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import (
    UnsupportedError,
    backends,
    chunked,
    cudnn,
    decode_attention,
    dot_product_attention,
    explain,
    paged_attention,
    ragged_attention,
)
from jax_flash.spec import Device
from tests.fake_kernels import FakeKernels, register
from tests.tolerance import fast_jit

CPU = Device("cpu", None, "cpu")
HOPPER = Device("gpu", "9.0", "NVIDIA H200")
MISSING = "no_such_kernel_package.backend"
struct = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True)
def no_kernel_packages(monkeypatch):
    """An installation without kernels, whatever this one has; and nothing warned of before."""
    for name in ("mosaic", "cuda"):
        monkeypatch.setitem(backends._TABLE, name, MISSING)
    monkeypatch.setattr(backends, "_warned", set())
    backends.load.cache_clear()
    yield
    backends.load.cache_clear()


@pytest.fixture
def on_gpu(monkeypatch):
    """A CPU that says it is an H200; cuDNN's place is taken by the oracle."""
    monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
    monkeypatch.setattr(cudnn, "forward", lambda *call: backends.load("xla").forward(*call))


def qkv(batch=1, tq=16, tk=16, hq=2, hk=2, d=64, dv=None, dtype="bfloat16"):
    shapes = ((tq, hq, d), (tk, hk, d), (tk, hk, dv or d))
    return [struct((batch, *shape), dtype) for shape in shapes]


def decide(names=None, *, device=CPU, arrays=None, function=dot_product_attention, **terms):
    (decision,) = explain(function, *(arrays or qkv()), **terms).decisions
    return backends.decide(decision.spec, names, device)


# The choice.


def test_the_table_is_in_order_of_speed_and_ends_in_what_does_everything():
    assert backends.NAMES == ("mosaic", "cuda", "cudnn", "chunked", "xla")
    assert backends.load("xla").supports(None, CPU) is None


def test_auto_takes_the_first_that_can_and_says_why_not_the_ones_before():
    decision = decide()
    assert decision.chosen == "xla"
    assert list(decision.reasons) == ["mosaic", "cuda", "cudnn", "chunked"]
    for name in ("mosaic", "cuda"):
        assert decision.reasons[name] == f"not built: this installation has no module {MISSING}"
    assert decision.reasons["cudnn"] == "needs an NVIDIA GPU; the device is cpu"
    assert decision.reasons["chunked"] == "not needed: the call has only 512 logits"


@pytest.mark.parametrize(("length", "chosen"), [(2**12, "xla"), (2**12 + 1, "chunked")])
def test_auto_takes_the_chunked_one_when_the_logits_are_many(length, chosen):
    assert chunked._DENSE_LOGITS == 2 * 2**12 * 2**12
    assert decide(arrays=qkv(tq=2**12, tk=length)).chosen == chosen


@pytest.mark.parametrize(
    ("names", "chosen", "refused"),
    [("chunked", "chunked", []),  # named, so it does not stand back
     (["xla"], "xla", []),
     (("xla", "chunked"), "xla", []),
     (("chunked", "xla"), "chunked", []),
     (("cudnn", "mosaic", "chunked"), "chunked", ["cudnn", "mosaic"]),
     (("cuda", "cudnn"), None, ["cuda", "cudnn"])],
)  # fmt: skip
def test_names_are_tried_in_the_order_given(names, chosen, refused):
    decision = decide(names)
    assert decision.chosen == chosen
    assert list(decision.reasons) == refused


def test_the_implementation_named_is_the_one_that_runs(monkeypatch):
    ran = []

    def spy(name):
        forward = backends.load(name).forward
        return lambda *call: ran.append(name) or forward(*call)

    for name in ("chunked", "xla"):
        monkeypatch.setattr(backends.load(name), "forward", spy(name))
    for implementation in ("chunked", "xla", ("cudnn", "chunked"), None):
        jax.eval_shape(
            functools.partial(dot_product_attention, implementation=implementation), *qkv()
        )
    assert ran == ["chunked", "xla", "chunked", "xla"]


@pytest.mark.parametrize("names", ["flash", ("xla", "flash"), ["flash"]])
def test_unknown_names_are_refused_even_behind_one_that_can(names):
    with pytest.raises(ValueError, match="implementation='flash': must be None or of"):
        decide(names)


@pytest.mark.parametrize(
    ("source", "reason"),
    [(None, "this installation has no module broken_kernels"),
     ("import no_such_library",
      "broken_kernels needs the module no_such_library, which is not installed"),
     ("raise ImportError('libcudart.so.13: cannot open')",
      "broken_kernels cannot be imported (ImportError: libcudart.so.13: cannot open)")],
    ids=["absent", "dependency", "broken"],
)  # fmt: skip
def test_what_cannot_be_imported_says_what_is_missing(monkeypatch, tmp_path, source, reason):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_kernels", raising=False)
    monkeypatch.setitem(backends._TABLE, "mosaic", "broken_kernels")
    if source is not None:
        (tmp_path / "broken_kernels.py").write_text(source)
    assert decide("mosaic").reasons == {"mosaic": f"not built: {reason}"}
    assert decide().chosen == "xla"


def test_a_kernel_that_refuses_gives_its_reason_and_one_that_accepts_is_chosen(monkeypatch):
    kernels = register(monkeypatch, FakeKernels)
    assert decide("fake").chosen == "fake"
    monkeypatch.setattr(kernels, "supports", lambda spec, device: f"not on {device.platform}")
    decision = decide(("fake", "xla"))
    assert decision.chosen == "xla"
    assert decision.reasons == {"fake": "not on cpu"}


ODD_CALLS = [
    (dot_product_attention, qkv(d=7, dv=3, dtype="float32"), {}),
    (dot_product_attention, qkv(batch=0), {"is_causal": True}),
    (dot_product_attention, qkv(tk=0), {"return_residual": True}),
    (dot_product_attention, qkv(hq=0, hk=0), {}),
    (dot_product_attention, qkv(), {"sinks": struct((2,), "float32"), "logits_soft_cap": 3.0}),
    (dot_product_attention, qkv(), {"mask": struct((16, 16), bool), "local_window_size": (0, 9)}),
    (ragged_attention, [struct((5, 2, 64), "float16")] * 3 + [struct((1,), "int32")],
     {"is_causal": True}),
    (decode_attention, [*qkv(tq=40)[:1], *qkv(dtype="int8")[1:], struct((1,), "int32")], {}),
    (paged_attention, [*qkv(tq=1)[:1], *[struct((0, 2, 8, 64), "bfloat16")] * 2,
                       struct((1, 3), "int32"), struct((1,), "int32")], {}),
]  # fmt: skip


@pytest.mark.parametrize("device", [CPU, HOPPER, Device("tpu", None, "TPU v5")], ids=str)
@pytest.mark.parametrize("call", ODD_CALLS, ids=lambda call: call[0].__name__)
def test_auto_never_fails(call, device):
    function, arrays, terms = call
    assert decide(device=device, arrays=arrays, function=function, **terms).chosen is not None


def test_a_valid_call_that_no_named_implementation_can_run_says_why():
    names = ("mosaic", "cudnn")
    call = functools.partial(dot_product_attention, is_causal=True, implementation=names)
    with pytest.raises(UnsupportedError) as info:
        jax.eval_shape(call, *qkv(hq=4))
    assert isinstance(info.value, NotImplementedError)
    assert str(info.value) == (
        "implementation=('mosaic', 'cudnn') cannot compute "
        "dense B1 Tq16 Tk16 H4/2 D64 bfloat16 causal: "
        f"mosaic: not built: this installation has no module {MISSING}; "
        "cudnn: needs an NVIDIA GPU; the device is cpu. "
        "Use implementation=None to fall through to one that can."
    )


# Devices.


def test_device_facts_come_from_the_default_device():
    assert backends.device_of() == Device("cpu", None, jax.devices()[0].device_kind)
    gpu = types.SimpleNamespace(
        platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200", id=0
    )
    assert backends.device_facts(gpu) == HOPPER
    with jax.default_device(jax.devices()[1]):
        assert backends.device_of().platform == "cpu"
    with jax.default_device("cpu"):
        assert backends.device_of().platform == "cpu"


# The warning on a GPU.


@pytest.mark.usefixtures("on_gpu")
def test_plain_xla_on_a_gpu_is_warned_of_once_with_the_reasons():
    def trace(**options):
        jax.eval_shape(functools.partial(dot_product_attention, is_causal=True), *qkv(**options))

    with pytest.warns(UserWarning, match="runs on plain XLA") as caught:
        trace(dtype="float32")
    (warning,) = caught
    for part in (
        "dense B1 Tq16 Tk16 H2/2 D64 float32 causal",
        "'xla'",
        f"mosaic: not built: this installation has no module {MISSING}",
        "cudnn: only float16 and bfloat16; got float32",
    ):
        assert part in str(warning.message)
    trace(dtype="float32")  # warnings are errors: nothing is said twice
    trace(dtype="float32", batch=3)
    with pytest.warns(UserWarning, match="got 7"):  # another reason is
        trace(d=7)


@pytest.mark.usefixtures("on_gpu")
def test_the_warning_points_at_the_line_that_made_the_call():
    with pytest.warns(UserWarning, match="plain XLA") as caught:
        jax.eval_shape(lambda *qkv: dot_product_attention(*qkv), *qkv(dtype="float32"))
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("on_gpu")
def test_nothing_is_warned_of_where_a_fused_one_runs_or_xla_was_asked_for():
    assert explain(dot_product_attention, *qkv(), is_causal=True).chosen == ("cudnn",)
    jax.eval_shape(functools.partial(dot_product_attention, is_causal=True), *qkv())
    for implementation in ("xla", "chunked", ("cudnn", "xla")):
        call = functools.partial(dot_product_attention, implementation=implementation)
        jax.eval_shape(call, *qkv(dtype="float32"))
    assert explain(dot_product_attention, *qkv(dtype="float32")).chosen == ("xla",)
    assert not backends._warned


def test_nothing_is_warned_of_on_a_cpu():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(dot_product_attention, *qkv())
    assert not backends._warned


# explain.


def test_explain_shows_a_table_and_runs_nothing():
    x = struct((1, 10**6, 8, 64), "bfloat16")  # its logits would fill 16 TB
    report = explain(dot_product_attention, x, x, x, is_causal=True)
    assert report.chosen == ("chunked",)
    kind = jax.devices()[0].device_kind
    assert str(report).splitlines() == [
        f"dense B1 Tq1000000 Tk1000000 H8/8 D64 bfloat16 causal on cpu ({kind})",
        f"  mosaic   not built: this installation has no module {MISSING}",
        f"  cuda     not built: this installation has no module {MISSING}",
        "  cudnn    needs an NVIDIA GPU; the device is cpu",
        "  chunked  chosen",
        "  xla      could run it, but is not asked: it comes later or was not named",
    ]


@pytest.mark.usefixtures("on_gpu")
def test_explain_names_the_gpu():
    head, *lines = str(explain(dot_product_attention, *qkv())).splitlines()
    assert head.endswith("on gpu (NVIDIA H200, compute capability 9.0)")
    assert "  cudnn    chosen" in lines


def test_explain_takes_arrays_structs_and_anything_else_in_pytrees():
    def model(params, batch, *, causal, note):
        assert note == "not an array"
        assert causal is True
        return {"out": dot_product_attention(*params["qkv"], is_causal=causal), "n": len(batch)}

    q, k, v = qkv()
    params = {"qkv": (q, k, np.zeros(v.shape, v.dtype))}
    report = explain(model, params, [1, 2], causal=True, note="not an array")
    assert report.chosen == ("xla",)
    assert report.decisions[0].spec.mask.is_causal


def test_explain_reports_every_call_in_order():
    def model(q, k, v):
        x = dot_product_attention(q, k, v, implementation="chunked")
        x, _ = jax.lax.scan(lambda x, _: (dot_product_attention(x, k, v), None), x, length=3)
        return dot_product_attention(x, k[:, :4], v[:, :4], implementation=("cudnn", "xla"))

    report = explain(model, *qkv())
    assert report.chosen[0] == "chunked"
    assert set(report.chosen[1:-1]) == {"xla"}
    assert [d.spec.kv_len for d in report.decisions][-2:] == [16, 4]
    assert str(report).count("\n\n") == len(report.decisions) - 1


def test_explain_says_so_when_there_is_no_call():
    report = explain(jnp.sin, struct((3,), "float32"))
    assert report.chosen == ()
    assert str(report) == "The function makes no attention call of jax_flash."


def test_explain_misses_no_call_of_a_function_that_was_traced_before():
    inner = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))
    outer = jax.jit(lambda *qkv: jnp.sum(inner(*qkv).astype(jnp.float32)))
    arrays = [jnp.zeros(x.shape, x.dtype) for x in qkv(tq=4, tk=4, d=8)]
    outer(*arrays)
    for function in (inner, outer, jax.grad(outer), jax.jit(jax.grad(outer)), outer):
        assert explain(function, *arrays).chosen == ("xla",)


def test_explain_sees_the_calls_of_a_loss_under_grad():
    def loss(weights, x):
        x = dot_product_attention(x @ weights, x, x)
        remat = jax.checkpoint(functools.partial(dot_product_attention, implementation="chunked"))
        return jnp.sum(remat(x, x, x) ** 2)

    arrays = struct((8, 8), "float32"), qkv(d=8, dtype="float32")[0]
    assert explain(jax.value_and_grad(loss), *arrays).chosen == ("xla", "chunked")


def test_explain_of_an_impossible_call_leaves_no_trace_of_it_behind():
    function = jax.jit(functools.partial(dot_product_attention, implementation="cudnn"))
    arrays = [jnp.zeros(x.shape, x.dtype) for x in qkv(tq=4, tk=4)]
    report = explain(function, *arrays)
    assert report.chosen == (None,)
    assert "  cudnn    needs an NVIDIA GPU" in str(report)
    with pytest.raises(UnsupportedError, match="cudnn: needs an NVIDIA GPU"):
        function(*arrays)
    assert explain(function, *arrays).chosen == (None,)


def test_explain_stops_recording_when_the_function_fails():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(fails, struct((1,), "float32"))
    assert backends._recording.get() is None


# cuDNN's refusals, one for each item of its docstring.


def arrays_of(**shapes):
    return {name: struct(shape, dtype) for name, (shape, dtype) in shapes.items()}


REFUSALS = [  # a piece of the docstring's item, a piece of the reason, the call
    ("ragged, decode and paged calls", "jax.nn has no ragged attention",
     {"function": ragged_attention, "is_causal": True,
      "arrays": [struct((5, 2, 64), "bfloat16")] * 3 + [struct((3,), "int32")]}),
    ("ragged, decode and paged calls", "jax.nn has no decode attention",
     {"function": decode_attention, "arrays": [*qkv(), struct((1,), "int32")]}),
    ("fp32 and fp64 inputs", "only float16 and bfloat16; got float32",
     {"arrays": qkv(dtype="float32")}),
    ("fp32 and fp64 inputs", "multiples of 8 up to 256; got 36", {"arrays": qkv(d=36)}),
    ("fp32 and fp64 inputs", "multiples of 8 up to 256; got 264", {"arrays": qkv(d=264)}),
    ("fp32 and fp64 inputs", "the value dim must be the head dim", {"arrays": qkv(dv=32)}),
    ("odd lengths", "must be even", {"arrays": qkv(tq=15)}),
    ("odd lengths", "must be even", {"arrays": qkv(tk=15)}),
    ("a boolean mask", "all-False mask row", arrays_of(mask=((16, 16), bool))),
    ("a bias", "bias of -inf", arrays_of(bias=((1, 2, 16, 16), "bfloat16"))),
    ("sequence lengths", "length of 0", arrays_of(query_seq_lengths=((1,), "int32"))),
    ("sequence lengths", "length of 0", arrays_of(key_value_seq_lengths=((1,), "int32"))),
    ("a window without", "sees the future", {"local_window_size": (4, 0)}),
    ("a window that leaves", "leaves queries without keys",
     {"is_causal": True, "local_window_size": (4, 0), "arrays": qkv(tq=22)}),
    ("and segment ids", "q_offset is not supported", {"q_offset": 3}),
    ("and segment ids", "q_offset is not supported", arrays_of(q_offset=((1,), "int32"))),
    ("and segment ids", "segment ids", arrays_of(query_segment_ids=((1, 16), "int32"))),
    ("soft cap, sinks, ALiBi slopes", "logits_soft_cap", {"logits_soft_cap": 2.0}),
    ("soft cap, sinks, ALiBi slopes", "sinks", arrays_of(sinks=((2,), "float32"))),
    ("soft cap, sinks, ALiBi slopes", "alibi_slopes", arrays_of(alibi_slopes=((2,), "float32"))),
    ("soft cap, sinks, ALiBi slopes", "dropout mask",
     {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}),
    ("return_residual", "log-sum-exp is rounded", {"return_residual": True}),
    ("deterministic", "not deterministic", {"deterministic": True}),
    ("zero-size arrays", "zero-size arrays", {"arrays": qkv(tk=0)}),
    ("zero-size arrays", "zero-size arrays", {"arrays": qkv(batch=0)}),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case[1])
def test_cudnn_refuses_where_its_semantics_differ(case):
    _, reason, terms = case
    assert reason in decide("cudnn", device=HOPPER, **terms).reasons["cudnn"]


def test_cudnns_docstring_lists_every_refusal_and_no_other():
    items = inspect.getdoc(cudnn).partition(":\n\n")[2].partition("\n\n")[0].split("\n- ")
    for item in items:
        assert any(start in item for start, _, _ in REFUSALS), f"not tested: {item}"
    for start, _, _ in REFUSALS:
        assert sum(start in item for item in items) == 1, f"not documented: {start}"


@pytest.mark.parametrize(
    ("capability", "d", "accepted"),
    [("7.5", 64, False), ("8.0", 128, True), ("8.9", 136, False), ("9.0", 256, True),
     ("10.0", 256, True), (None, 64, False)],
)  # fmt: skip
def test_cudnn_depends_on_the_compute_capability(capability, d, accepted):
    decision = decide("cudnn", device=Device("gpu", capability, "a GPU"), arrays=qkv(d=d))
    assert (decision.chosen == "cudnn") == accepted


@pytest.mark.parametrize(
    "terms",
    [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": (4, 2), "scale": 0.3},
     {"arrays": qkv(tq=20), "is_causal": True, "local_window_size": (4, 0)},
     {"arrays": qkv(hq=4, tq=2, dtype="float16")}],
    ids=str,
)  # fmt: skip
def test_cudnn_accepts_and_passes_on_what_it_computes_exactly(monkeypatch, terms):
    terms = dict(terms)
    arrays = terms.pop("arrays", qkv())
    assert decide("cudnn", device=HOPPER, arrays=arrays, **terms).chosen == "cudnn"
    seen = {}

    def jax_nn(q, k, v, **keywords):
        seen.update(keywords)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", jax_nn)
    monkeypatch.setattr(backends, "device_of", lambda *_: HOPPER)
    jax.eval_shape(lambda *a: dot_product_attention(*a, implementation="cudnn", **terms), *arrays)
    defaults = {"scale": 64**-0.5, "is_causal": False, "local_window_size": None}
    assert seen == defaults | terms | {"implementation": "cudnn"}


# What importing and running costs.

IMPORT = """
import sys, time
import jax
before = set(sys.modules)
start = time.perf_counter()
import jax_flash
seconds = time.perf_counter() - start
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing jax_flash touched a device"
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = {name for name in sys.modules if "pallas" in name or "cudnn" in name or "triton" in name}
unwanted = new & {"pallas_kernels", "cuda_ffi", "flax", "optax", "models", "bench"}
assert not unwanted, f"importing jax_flash imported {unwanted}"
assert not {name for name in heavy - before}, heavy
print(seconds)
"""


def test_importing_the_package_touches_no_device_and_takes_no_time():
    command = [sys.executable, "-c", IMPORT]
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(jax_flash.__file__))}
    seconds = []
    for _ in range(5):  # the best of several, as the machine may be busy
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        seconds.append(float(result.stdout))
        if min(seconds) < 0.2:
            break
    assert min(seconds) < 0.2, seconds


def memory(implementation, tokens):
    """Bytes that a compiled training step of H1 D64 holds at once, without running it."""
    x = struct((1, tokens, 1, 64), "float32")

    def loss(q, k, v):
        call = functools.partial(dot_product_attention, implementation=implementation)
        return jnp.sum(call(q, k, v, is_causal=True))

    compiled = fast_jit(jax.value_and_grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes


def test_chunked_attention_to_64k_tokens_fits_into_two_gigabytes_and_is_linear():
    at_16k, at_64k = (memory("chunked", n) for n in (2**14, 2**16))
    assert at_64k < 2e9
    assert at_64k < 4.4 * at_16k
    assert memory("xla", 2**14) > 2e9  # the dense one is past it with a quarter of the tokens
