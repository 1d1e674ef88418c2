"""The plugin's parts in vLLM: what it refuses by name, and the log-probs of a step of vLLM's sampler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")


def config(**changes: Any) -> Any:
    text = SimpleNamespace(**{"rope_parameters": {"rope_type": "default"}, **changes.pop("text", {})})
    model = {
        "architectures": ["LlamaForCausalLM"],
        "hf_text_config": text,
        "quantization": None,
        "dtype": torch.bfloat16,
        "head_dtype": torch.bfloat16,
        "logprobs_mode": "raw_logprobs",
        "model_impl": "auto",
        "logits_processors": None,
    }
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    parallel |= {"enable_expert_parallel": False, "enable_eplb": False}
    of = {
        "attention_config": SimpleNamespace(backend=SimpleNamespace(name="CUSTOM")),
        "lora_config": None,
        "speculative_config": None,
        "watermark_config": None,
        "kernel_config": SimpleNamespace(moe_backend="auto"),
        "aux_output_config": SimpleNamespace(enable_return_routed_experts=False),
        "compilation_config": SimpleNamespace(static_forward_context={}),
    }
    for name, value in changes.items():
        next(part for part in (model, parallel, of) if name in part)[name] = value
    return SimpleNamespace(model_config=SimpleNamespace(**model), parallel_config=SimpleNamespace(**parallel), **of)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_config": SimpleNamespace(backend=None)}, "attention_backend: expected 'CUSTOM'"),
        # vLLM runs OLMo 2 on transformers' code, and replaces some of its layers.
        (
            {"architectures": ["Olmo2ForCausalLM"]},
            "architectures: expected Gemma2ForCausalLM or .* or Qwen3ForCausalLM",
        ),
        ({"quantization": "fp8"}, "quantization: expected None"),
        ({"head_dtype": torch.float32}, "head_dtype: expected torch.bfloat16"),
        ({"watermark_config": object()}, "watermark_config: expected None"),
        ({"lora_config": object()}, "enable_lora: expected None"),
        ({"speculative_config": object()}, "speculative_config: expected None"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: expected 1"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode: expected 'raw_logprobs'"),
        ({"model_impl": "transformers"}, "model_impl: expected 'auto'"),
        ({"logprobs_mode": "processed_logprobs", "logits_processors": ["mine"]}, "logits_processors: expected None"),
        *(
            ({"text": {name: 8}}, f"{name}: expected None")
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
        ),
        ({"text": {"use_bidirectional_attention": True}}, "use_bidirectional_attention: expected None"),
        ({"text": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type: expected default or linear or llama3"),
        (
            {"text": {"rope_parameters": {"sliding_attention": {}, "full_attention": {"rope_type": "yarn"}}}},
            "rope_type: expected default or linear or llama3 with RL_KERNELS_VLLM=1, got 'yarn'",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    from rl_kernels.models.clients.vllm.refusals import check

    check(config())
    check(config(logprobs_mode="processed_logprobs"))
    check(config(logits_processors=["mine"]))
    with pytest.raises(ValueError, match=message):
        check(config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "fp8"}, "quantization: expected None"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: expected 1"),
        ({"data_parallel_size": 2}, "data_parallel_size: expected 1"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel: expected False"),
        ({"enable_eplb": True}, "enable_eplb: expected False"),
        ({"kernel_config": SimpleNamespace(moe_backend="triton")}, "moe_backend: expected 'auto'"),
        (
            {"aux_output_config": SimpleNamespace(enable_return_routed_experts=True)},
            "enable_return_routed_experts: expected False",
        ),
        ({"text": {"hidden_act": "gelu"}}, "hidden_act: expected 'silu'"),
        ({"text": {"shared_expert_intermediate_size": 64}}, "shared_expert_intermediate_size: expected None"),
        ({"text": {"sliding_window": 4096}}, "sliding_window: expected None"),
        ({"text": {"clip_qkv": 8.0}}, "clip_qkv: expected None"),
        ({"text": {"attention_bias": True}}, "attention_bias: expected None"),
        *(
            ({"architectures": [f"{name}ForCausalLM"]}, f"architectures: expected .*, got {name}ForCausalLM")
            for name in ("Glm4Moe", "DeepseekV3", "GraniteMoe", "PhiMoE", "GptOss")
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"], "text": {"qkv_bias": False}}, "qkv_bias: expected True"),
        ({"architectures": ["OlmoeForCausalLM"], "text": {"rms_norm_eps": 1e-6}}, "rms_norm_eps: expected 1e-05"),
    ],
)
def test_mixtures_that_are_not_covered_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    from rl_kernels.models.clients.vllm.refusals import MIXTURES, check

    def of(architecture: str, text: dict[str, Any], **changes: Any) -> Any:
        sizes = {"num_experts": 8, "num_local_experts": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5}
        return config(**{"architectures": [architecture], "text": sizes | text} | changes)

    for architecture in MIXTURES:
        check(of(architecture, {}))
    check(of("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 64}))
    # As vLLM 0.24 and 0.26 have it.
    older = of(MIXTURES[0], {})
    older.model_config.enable_return_routed_experts = older.aux_output_config.enable_return_routed_experts
    del older.aux_output_config
    check(older)
    with pytest.raises(ValueError, match=message):
        check(of(**{"architecture": MIXTURES[-1], "text": {}} | changes))


def test_experts_that_another_method_holds_are_refused() -> None:
    from rl_kernels.models.clients.vllm.mixtures import Family, _replace

    class Model:
        def load_weights(self) -> None:
            pass

    class Block:
        def __init__(self) -> None:
            self.experts = SimpleNamespace(routed_experts=SimpleNamespace(quant_method=object()))

        def forward(self) -> None:
            pass

    _replace(Family(Model, Block, None))
    with pytest.raises(ValueError, match="experts: expected unquantized ones with RL_KERNELS_VLLM=1, got object"):
        Block()


def test_a_router_that_the_installed_transformers_defines_otherwise_is_refused() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    from rl_kernels.models.clients.vllm.mixtures import form_in

    class Squared(MixtralTopKRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights**2, ids

    sizes = MixtralConfig(hidden_size=64, num_local_experts=8)
    form = form_in(MixtralTopKRouter, sizes)
    assert (form.scoring, form.normalize, form.rounds, form.wide) == ("softmax", True, True, (False, True))
    with pytest.raises(ValueError, match="model: Squared is an unknown kind of router"):
        form_in(Squared, sizes)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def installed() -> Any:
    """Return the module of log-probs, installed; vLLM takes a layer once."""
    from rl_kernels.models.clients.vllm import logprobs

    logprobs.install()
    return logprobs


def test_names_of_tokens_get_the_numbers_of_sampled_ones(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    logprobs = installed
    assert getattr(sampler, logprobs.TOP_TOKENS) is logprobs._top_tokens
    sampled, ranks = torch.tensor([4, 7]), torch.zeros(2)
    ids = torch.tensor([[4, 9, 4], [7, 0, 7]], dtype=torch.int32)
    theirs = torch.tensor([[-1.0, -2.0, -1.0], [-3.0, -4.0, -torch.inf]])
    monkeypatch.setattr(logprobs, "scores", lambda ids: torch.tensor([-0.5, -0.25]))
    for shown in (3, 1):
        given = []

        def stock(*args: Any, shown: int = shown, given: list[Any] = given, **options: Any) -> LogprobsTensors:
            given.append((args, options))
            return LogprobsTensors(ids[:, :shown], theirs[:, :shown], ranks)

        monkeypatch.setitem(logprobs._originals, "top_tokens", stock)
        logits = torch.zeros(2, 10)
        got = getattr(sampler, logprobs.TOP_TOKENS)(logits, shown - 1, sampled, [0, 1, 2], max_per_req_token_ids=5)
        expected = torch.tensor([[-0.5, -2.0, -0.5], [-0.25, -4.0, -torch.inf]])
        assert torch.equal(got.logprobs, expected[:, :shown])
        assert given == [((logits, shown - 1, sampled, [0, 1, 2]), {"max_per_req_token_ids": 5})]


def processor_of(
    module: Any, monkeypatch: pytest.MonkeyPatch, *sizes: int, layers: dict[str, Any] | None = None, **options: float
) -> Any:
    """Return the processor of logits of an engine with these layers; vLLM's own reads a configuration too."""
    from vllm.model_executor.layers import logits_processor

    made = config(compilation_config=SimpleNamespace(static_forward_context=layers or {}))
    for each in (module, logits_processor):
        monkeypatch.setattr(each, "get_current_vllm_config", lambda: made, raising=False)
    return module.Logits(*sizes, **options)


def test_scaled_logits_are_refused_by_name(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="logit_scale"):
        processor_of(installed, monkeypatch, 512, scale=2.0)


def test_layers_with_another_attention_are_refused_by_name(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform of vLLM may take another backend than the selected one, as vLLM's own for CPUs does."""
    layers = {"attn": SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN")), "experts": object()}
    with pytest.raises(ValueError, match=r"attention_backend: expected 'CUSTOM' .* got 'CPU_ATTN'"):
        processor_of(installed, monkeypatch, 512, layers=layers)


@pytest.fixture(params=[None, 3.0], ids=["plain", "capped"])
def cap(request: pytest.FixtureRequest) -> float | None:
    """Return the soft cap of a step's logits."""
    return request.param


def stepped(module: Any, monkeypatch: pytest.MonkeyPatch, cap: float | None = None, rows: int = 5) -> tuple[Any, ...]:
    """Return ids, the logits of a step and what training has for them; the head has rows of padding, and a bias."""
    from rl_kernels.linear_logp import linear_logp

    made = processor_of(module, monkeypatch, 96, 90, soft_cap=cap)
    head = SimpleNamespace(weight=torch.randn(96, 16))
    hidden, bias, ids = torch.randn(rows, 16), torch.randn(96), torch.tensor([0, 89, 3, 4, 5])[:rows]
    logits = made.forward(head, hidden, bias)
    assert logits.shape == (rows, 90)
    assert cap is None or 1.0 < float(logits.abs().max()) <= cap
    return ids, logits, linear_logp(hidden, head.weight[:90], ids, bias[:90], softcap=cap or 0.0)


def test_log_probs_are_of_logits_before_they_changed(
    installed: Any, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.sampler import Sampler

    ids, logits, expected = stepped(installed, monkeypatch, cap)
    # No copy for requests without log-probs.
    assert logits is installed._steps.last.logits
    Sampler.compute_logprobs(logits)
    logits.div_(0.5)
    assert torch.equal(installed.scores(ids), expected)
    with pytest.raises(RuntimeError, match="of 2 rows were asked for, the last logits are those of 5 rows"):
        installed.scores(ids[:2])
    with pytest.raises(RuntimeError, match="of 4 rows"):
        Sampler.compute_logprobs(logits[:4])


def test_each_thread_has_its_own_step(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _, expected = stepped(installed, monkeypatch)

    def other() -> torch.Tensor:
        for call in (installed.scores, installed._copied, installed._over_vocabulary):
            with pytest.raises(RuntimeError, match="the last logits are none"):
                call(ids)
        ids_of, _, expected_of = stepped(installed, monkeypatch, rows=3)
        return installed.scores(ids_of) - expected_of

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result().tolist() == [0.0] * 3
    assert torch.equal(installed.scores(ids), expected)


def test_numbers_of_other_tokens_are_vllms_and_ranks_count_logits(
    cap: float | None, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.sampler import Sampler

    for shown in (0, 3):
        ids, logits, expected = stepped(installed, monkeypatch, cap)
        # A tie counts.
        logits[2, 7] = logits[2, 3]
        exact, ranks = logits.log_softmax(-1), (logits >= logits.gather(1, ids[:, None])).sum(-1)
        theirs = installed._originals["gathered"](exact, 3, ids)
        copy = Sampler.compute_logprobs(logits)
        logits.zero_()
        sampler = Sampler()
        sampler.pin_memory = False
        named = sampler.gather_specific_token_logprobs(copy, {1: [7, 89]}, ids)
        assert torch.equal(named.logprobs[:, 0], expected)
        assert named.logprobs[1].tolist() == [expected[1].item(), exact[1, 7].item(), expected[1].item()]
        found = Sampler.gather_logprobs(copy, shown, ids)
        assert torch.equal(found.selected_token_ranks, ranks)
        assert found.selected_token_ranks.dtype == theirs.selected_token_ranks.dtype
        assert torch.equal(found.logprob_token_ids, theirs.logprob_token_ids[:, : shown + 1])
        assert found.logprob_token_ids.dtype == theirs.logprob_token_ids.dtype
        assert torch.equal(found.logprobs[:, 0], expected)
        own = found.logprob_token_ids[:, 1:] == ids[:, None]
        assert torch.equal(
            found.logprobs[:, 1:], torch.where(own, expected[:, None], theirs.logprobs[:, 1 : shown + 1])
        )
        # Nothing of the step stays in memory.
        with pytest.raises(RuntimeError, match="the last logits are none"):
            installed.scores(ids)


def test_what_is_a_log_prob_already_stays_it(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, logits, _ = stepped(installed, monkeypatch)
    exact = logits.log_softmax(-1)
    assert installed._over_vocabulary(exact) is exact


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_whole_step_of_the_sampler(
    mode: str, temperature: float, cap: float | None, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    _, logits, _ = stepped(installed, monkeypatch, cap)
    exact, greedy = logits.log_softmax(-1), temperature == 0.0
    empty = {"top_k": None, "top_p": None, "generators": {}, "allowed_token_ids_mask": None, "bad_words_token_ids": {}}
    penalties = {f"{name}_penalties": torch.zeros(5) for name in ("frequency", "presence", "repetition")}
    metadata = SamplingMetadata(
        temperature=None if greedy else torch.full((5,), temperature),
        all_greedy=greedy,
        all_random=not greedy,
        max_num_logprobs=2,
        no_penalties=True,
        prompt_token_ids=None,
        output_token_ids=[[]] * 5,
        logitsprocs=LogitsProcessors(),
        **empty,
        **penalties,
    )
    made = Sampler(logprobs_mode=mode)
    # Log-probs of the vocabulary after sampling are the same numbers, formed twice.
    formed = installed.KEEPING if mode == "processed_logprobs" else mode
    assert made.logprobs_mode == made.topk_topp_sampler.logprobs_mode == formed
    found = made(logits, metadata).logprobs_tensors
    wanted = exact.gather(1, found.logprob_token_ids.long())
    torch.testing.assert_close(found.logprobs, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("asks", [False, True])
def test_the_smallest_kept_logit_is_for_requests_that_ask(installed: Any, asks: bool) -> None:
    """It comes in a column of its own, in a batch with requests that do not ask, and with those that drop nothing."""
    from vllm import SamplingParams
    from vllm.v1.engine import logprobs
    from vllm.v1.outputs import LogprobsTensors

    from rl_kernels.models.clients.vllm import outputs

    outputs.install()
    params = SamplingParams(logprobs=1, extra_args={"rl_kernels_min_logit": asks})
    own = logprobs.LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=params))
    scored = LogprobsTensors(torch.tensor([[4, 9], [7, 7]]), torch.tensor([[-1.0, -0.5], [-2.0, -2.0]]), torch.ones(2))
    whole = installed._with_smallest(scored, torch.tensor([0.25, -torch.inf]))
    own._update_sample_logprobs(whole.tolists())
    own._update_sample_logprobs(scored.tolists())
    assert [list(each) for each in own.logprobs] == [[4, 9, -1] if asks else [4, 9], [7], [4, 9], [7]]
    if asks:
        assert own.logprobs[0][-1].logprob == 0.25
        assert own.logprobs[0][-1].rank > 512
    assert own.cumulative_logprob == -6.0


def test_the_second_runner_gets_the_sampled_tokens_from_our_statistics(
    installed: Any, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler

    # No kernel of vLLM runs: they need a GPU.
    monkeypatch.setitem(installed._originals, "top_tokens", None)
    ids, logits, expected = stepped(installed, monkeypatch, cap)
    ranks = (logits >= logits.gather(1, ids[:, None])).sum(-1)
    options = {"logprob_token_ids_state": object(), "expanded_idx_mapping": torch.arange(5)}
    found = getattr(sampler, installed.TOP_TOKENS)(logits, 0, ids, None, max_per_req_token_ids=0, **options)
    assert isinstance(found, LogprobsTensors)
    assert torch.equal(found.logprobs, expected[:, None])
    assert torch.equal(found.logprob_token_ids, ids[:, None])
    assert torch.equal(found.selected_token_ranks, ranks)
    with pytest.raises(RuntimeError, match="the last logits are none"):
        installed.scores(ids)


@pytest.mark.parametrize(
    ("name", "value"), [("none", 1.0), ("temperature", 0.7), ("min_p", 0.1), ("top_p", 0.9), ("top_k", 7)]
)
def test_the_second_runner_may_change_logits_in_place(
    installed: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    """As it does in vLLM 0.26; a step that changes none makes no copy."""
    from rl_kernels.linear_logp import linear_logp

    def divide(states: Any, logits: torch.Tensor, *_: Any) -> None:
        logits.div_(states.temperature.gpu[:, None])

    monkeypatch.setitem(installed._originals, "temperature", divide)
    ids, logits, plain = stepped(installed, monkeypatch)
    hidden, weight, bias = installed._steps.head
    neutral = {
        "temperature": torch.ones(5),
        "min_p": torch.zeros(5),
        "top_p": torch.ones(5),
        "top_k": torch.full((5,), 90),
    }
    settings = (
        neutral if name == "none" else {**neutral, name: neutral[name].clone().index_fill_(0, torch.arange(3), value)}
    )
    states = SimpleNamespace(
        vocab_size=90, **{key: SimpleNamespace(np=x.numpy(), gpu=x) for key, x in settings.items()}
    )
    temperature, rows = settings["temperature"], torch.arange(5)
    z = logits / temperature[:, None]
    installed._temperature(states, logits, rows, rows.numpy())
    if name == "none":
        assert installed._steps.last.logits is logits
        assert torch.equal(installed._top_tokens(logits, 0, ids).logprobs, plain[:, None])
        return
    least = torch.full((5,), -torch.inf) if name == "temperature" else z.gather(1, ids[:, None])[:, 0]
    # vLLM masks none of the other rows.
    least[3:] = -torch.inf
    logits.masked_fill_(z < least[:, None], -torch.inf)
    read = []
    monkeypatch.setattr(installed, "linear_logp", lambda *args, **more: read.append(args) or linear_logp(*args, **more))
    found = installed._top_tokens(logits, 0, ids).logprobs
    assert torch.equal(found[:, 0], linear_logp(hidden, weight, ids, bias, temperature=temperature, min_logit=least))
    is_cut = (z < least[:, None]).any(-1)
    assert torch.equal(found[:, 1], torch.where(is_cut, least, -torch.inf))
    assert [len(args[0]) for args in read] == [3]


def test_prompts_of_the_second_runner_get_our_numbers(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample import prompt_logprob

    from rl_kernels.linear_logp import linear_logp

    made = processor_of(installed, monkeypatch, 96, 90)
    # Two chunks of vLLM, and an id that nothing has written yet.
    hidden, head, ids = torch.randn(1030, 16), SimpleNamespace(weight=torch.randn(96, 16)), torch.randint(90, (1030,))
    ids[-1] = -1
    found = prompt_logprob.compute_prompt_logprobs_with_chunking(ids, hidden, lambda x: made.forward(head, x), 0)
    assert torch.equal(found[1][:-1, 0], linear_logp(hidden[:-1], head.weight[:90], ids[:-1]))
    assert torch.equal(found[0][:, 0], ids)
