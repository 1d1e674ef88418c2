"""A real client: verl's FSDP engine prepares a batch, a model that verl patched scores it, the engine reads that."""

from __future__ import annotations

import copy
import importlib
import warnings
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")
# verl and its libraries warn of what does not concern this.
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    # Of engines whose frameworks are not here.
    warnings.simplefilter("ignore")
    from verl.models.transformers import dense_common, monkey_patch
    from verl.utils import tensordict_utils
    from verl.workers.engine.fsdp import transformer_impl

import rl_kernels.models.clients.verl as client  # noqa: E402
from rl_kernels.core.dispatch import record_dispatch  # noqa: E402
from rl_kernels.models import invariant  # noqa: E402

LENGTHS = (5, 9, 3)
VOCAB = 61
FAMILIES = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Granite": {"logits_scaling": 4.0},
    "Phi": {},  # its head has a bias
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8},
}


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    transformers = importlib.import_module("transformers")
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**sizes, eos_token_id=2, **FAMILIES[family])
    torch.manual_seed(0)
    # A class of its own: verl replaces the forward of the class.
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = type(kind.__name__, (kind,), {"__module__": kind.__module__})(config).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def engine_of(module: Any) -> Any:
    """Return what the engine's methods need of an engine; those that it calls are its own."""
    kind = transformer_impl.FSDPEngineWithLMHead
    engine = SimpleNamespace(module=module, pad_to_length=None, use_ulysses_sp=False, ulysses_sequence_parallel_size=1)
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = importlib.import_module("verl.utils.torch_functional").entropy_from_logits
    for name in ("_get_packed_pad_size", "_gather_and_unpad_packed", "prepare_model_inputs", "prepare_model_outputs"):
        setattr(engine, name, getattr(kind, name).__get__(engine))
    return engine


def batch_of(temperature: float | torch.Tensor, *, fused: bool, packed: bool) -> Any:
    source = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, VOCAB, (length,), generator=source) for length in LENGTHS]
    places = [torch.arange(length) for length in LENGTHS]
    tensors = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor(places, layout=torch.jagged),
    }
    options = {"use_fused_kernels": fused, "use_remove_padding": packed, "calculate_entropy": True}
    if isinstance(temperature, torch.Tensor):
        tensors["temperature"] = temperature
    else:
        options["temperature"] = temperature
    return tensordict_utils.get_tensordict(tensors, non_tensor_dict=options)


def scored(model: Any, temperature: float | torch.Tensor, *, fused: bool, packed: bool) -> tuple[torch.Tensor, ...]:
    """Return log-probabilities and entropies of all tokens with one behind them, and gradients, by verl's engine."""
    model, batch = copy.deepcopy(model), batch_of(temperature, fused=fused, packed=packed)
    engine = engine_of(model)
    inputs, others = engine.prepare_model_inputs(batch)
    if packed:
        # Without flash attention nothing keeps packed sequences apart: they are given one after the other.
        inputs["attention_mask"] = apart(model.dtype)
    output = model(**inputs, use_cache=False)
    found = engine.prepare_model_outputs(output, others, batch, None)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    kept = torch.ones(sum(LENGTHS), dtype=torch.bool).index_fill(0, last, False)
    values = [found[name].values()[kept] for name in ("log_probs", "entropy")]
    weights = torch.linspace(-1, 1, len(values[0]))
    ((values[0] * weights).sum() + (values[1] * weights.flip(0)).sum()).backward()
    return *values, *(parameter.grad for parameter in model.parameters())


def apart(dtype: torch.dtype) -> torch.Tensor:
    blocks = torch.block_diag(*(torch.ones(length, length).tril() for length in LENGTHS))
    return torch.where(blocks.bool(), 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


def patched(model: Any, backend: str = "torch") -> Any:
    options = {"use_remove_padding": False, "use_fused_kernels": True, "fused_kernels_backend": backend}
    monkey_patch.apply_monkey_patch(model, **options)
    return model


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.6, 1.0, 1.9])], ids=["1", "0.7", "of each sample"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_logits(family: str, temperature: float | torch.Tensor, packed: bool) -> None:
    expected = scored(model_of(family), temperature, fused=False, packed=packed)
    model = patched(model_of(family))
    with record_dispatch() as log:
        found = scored(model, temperature, fused=True, packed=packed)
    assert [choice.operator for choice in log].count("linear_logp") == 1
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    model = model_of("Llama")
    theirs = type(model).forward

    def louder(self: Any, *args: Any, **given: Any) -> Any:
        found = theirs(self, *args, **given)
        found.logits = found.logits * 1.1
        return found

    type(model).forward = louder
    with pytest.raises(TypeError, match=r"^model: expected logits that follow from the last hidden states and the "):
        patched(model)
    # Other backends of verl score by themselves.
    type(model).forward = louder
    patched(model, "liger")
    # One that is patched already, as the actor's twin is.
    patched(patched(model_of("Llama")))


def test_padded_and_alone_have_the_same_bits_under_invariant() -> None:
    model = patched(model_of("Llama", torch.bfloat16))
    temperature = torch.tensor([0.6, 1.0, 1.9])
    with invariant(model, strict=True):
        batch = batch_of(temperature, fused=True, packed=False)
        engine = engine_of(model)
        inputs, others = engine.prepare_model_inputs(batch)
        with torch.no_grad():
            together = engine.prepare_model_outputs(model(**inputs), others, batch, None)["log_probs"].unbind()
            for row, ids in enumerate(batch["input_ids"].unbind()):
                given = {"temperature": temperature[row : row + 1], "return_dict": True}
                alone = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **given).log_probs[0]
                assert torch.equal(alone[:-1], together[row][:-1])


def test_the_engine_hands_a_temperature_on_and_keeps_the_batch() -> None:
    model = patched(model_of("Llama"))
    batch = batch_of(torch.tensor([0.6, 1.0, 1.9]), fused=True, packed=True)
    inputs, _ = engine_of(model).prepare_model_inputs(batch)
    expected = [value for value, length in zip((0.6, 1.0, 1.9), LENGTHS, strict=True) for _ in range(length)]
    assert inputs["temperature"].tolist() == [pytest.approx(expected)]
    assert inputs["shift_labels"].shape == inputs["temperature"].shape == (1, sum(LENGTHS))
    assert tensordict_utils.get_non_tensor_data(data=batch, key="use_fused_kernels", default=None) is True
    del batch["position_ids"]
    with pytest.raises(KeyError, match="position_ids"):
        engine_of(model).prepare_model_inputs(batch)
    assert tensordict_utils.get_non_tensor_data(data=batch, key="use_fused_kernels", default=None) is True


def test_the_engine_finds_the_model_inside_of_wrappers() -> None:
    """And labels are those that it has cut: a process that shares a sequence has a part, and not its last label."""
    model = patched(model_of("Llama"))
    adapter = SimpleNamespace(get_base_model=lambda: model)
    engine = engine_of(SimpleNamespace(module=SimpleNamespace(module=adapter)))
    inputs, others = engine.prepare_model_inputs(batch_of(torch.ones(3), fused=True, packed=True))
    assert inputs["temperature"].shape == (1, sum(LENGTHS))
    assert inputs["shift_labels"].data_ptr() == others["input_ids_rmpad_rolled"].data_ptr()


def test_without_fused_kernels_the_engine_stays_verls() -> None:
    batch = batch_of(torch.ones(3), fused=False, packed=True)
    inputs, _ = engine_of(patched(model_of("Llama"))).prepare_model_inputs(batch)
    assert "shift_labels" not in inputs
    assert tensordict_utils.get_non_tensor_data(data=batch, key="use_fused_kernels", default=None) is False


def test_other_backends_stay_verls() -> None:
    model = patched(model_of("Llama"), "triton")
    assert type(model).forward is dense_common.forward_with_triton_backend
    model = patched(model_of("Llama"), "liger")
    with record_dispatch() as log, suppress(ImportError, RuntimeError), torch.no_grad():
        # Where Liger is not installed verl falls back, or says so.
        model(input_ids=torch.ones(1, 3, dtype=torch.long), return_dict=True)
    assert not log


def test_other_backends_and_models_still_refuse_a_temperature_of_each_sample() -> None:
    patched(model_of("Llama"))
    for backend in ("triton", "liger", None):
        model = model_of("Llama") if backend is None else patched(model_of("Llama"), backend)
        with pytest.raises(AssertionError, match="per sample temperature"):
            engine_of(model).prepare_model_inputs(batch_of(torch.tensor([0.6, 1.0, 1.9]), fused=True, packed=True))


def test_liger_is_given_what_was_given() -> None:
    given = {"labels": 1, "shift_labels": 2, "temperature": 0.7, "return_dict": True, "use_cache": False}
    forward = client.forward_of(lambda self, input_ids, **options: (input_ids, options), SimpleNamespace)
    assert forward(SimpleNamespace(_verl_fused_kernels_backend="liger"), 0, **given) == (0, given)


def test_labels_and_what_else_is_asked_for() -> None:
    model, ids = patched(model_of("Llama")), torch.arange(3, 9)[None]
    labels, logits = ids.flip(-1), model_of("Llama")(input_ids=ids).logits
    logps = logits.div(0.7).log_softmax(-1)
    given = {"input_ids": ids, "temperature": torch.tensor(0.7), "return_dict": True}
    for name, wanted in (("shift_labels", labels), ("labels", labels.roll(-1, -1))):
        found = model(**given, **{name: labels}, output_hidden_states=True)
        torch.testing.assert_close(found.log_probs, logps.gather(-1, wanted[..., None])[..., 0], rtol=1e-4, atol=1e-5)
        assert len(found.hidden_states) == 3


def test_a_second_install_changes_nothing() -> None:
    before = dense_common.forward_with_torch_backend, monkey_patch.patch_forward_with_backends
    client.install()
    assert (dense_common.forward_with_torch_backend, monkey_patch.patch_forward_with_backends) == before
    client.engine.install(transformer_impl)
    method = transformer_impl.FSDPEngineWithLMHead.prepare_model_inputs
    client.engine.install(transformer_impl)
    assert transformer_impl.FSDPEngineWithLMHead.prepare_model_inputs is method


def test_a_verl_without_a_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"^verl: expected the hooks of verl 0\.9\.1, .*prepare_model_inputs"):
        client.engine.install(SimpleNamespace())
    monkeypatch.delattr(monkey_patch, "patch_forward_with_backends")
    with pytest.raises(ImportError, match=r"^verl: expected the hooks of verl 0\.9\.1, .*patch_forward_with_backends"):
        client.install()


@pytest.mark.parametrize("memory", ["lean", "fast"])
def test_the_variable_chooses_the_memory_and_no_bit(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scored(patched(model_of("Llama")), 0.7, fused=True, packed=True)
    monkeypatch.setenv("RL_KERNELS_MEMORY", memory)
    assert all(map(torch.equal, scored(patched(model_of("Llama")), 0.7, fused=True, packed=True), plain))
    monkeypatch.setenv("RL_KERNELS_MEMORY", f"{memory}er")
    with pytest.raises(ValueError, match=r"^memory: expected 'lean', 'fast' or .*er'"):
        scored(patched(model_of("Llama")), 0.7, fused=True, packed=True)


def test_bad_calls_are_named() -> None:
    model, ids = patched(model_of("Llama")), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^return_dict: expected True"):
        model(input_ids=ids)
    with pytest.raises(TypeError, match=r"^forward: expected all but input_ids by name"):
        model(ids, None, return_dict=True)
    with pytest.raises(ValueError, match=r"^input_ids: expected ids or labels"):
        model(inputs_embeds=torch.zeros(1, 3, 32), return_dict=True)
