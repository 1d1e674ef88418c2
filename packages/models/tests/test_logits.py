"""check_logits(): whether what is scored through a head are the log-probabilities of the model's own logits."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from rl_kernels.models.head import head_logp
from rl_kernels.models.logits import check_logits, logit_options
from rl_kernels.models.swap import replaced

TEMPERATURE = 0.7
FAMILIES = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 3.0, "head_dim": 16, "query_pre_attn_scalar": 16},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.3},
    "RecurrentGemma": {"logits_soft_cap": 3.0, "lru_width": 32},
    "Phi": {},  # its head has a bias
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.5},  # it calls a part of its body
    "GPT2": {"resid_pdrop": 0.5},
}


def model_of(family, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {f"{name}_token_id": int(name == "eos") for name in ("pad", "bos", "eos", "cls", "sep")}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **FAMILIES.get(family, {}) | options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def score_of(model, **options):
    options = {"temperature": TEMPERATURE, **logit_options(model), **options}

    def score(hidden, ids):
        return head_logp(model.get_output_embeddings(), hidden, ids, **options)

    return score


@pytest.mark.parametrize("family", FAMILIES)
def test_models_whose_logits_are_known_pass(family):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = model_of(family).to(dtype)
        state, flags = torch.get_rng_state(), [module.training for module in model.modules()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_logits(model, score_of(model), TEMPERATURE)
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in model.modules()] == flags
        assert "forward" not in vars(model.base_model)


OTHER = (
    r"^model: expected logits that follow from the last hidden states and the head, those of {}ForCausalLM are .* off$"
)


def test_what_is_not_scored_as_the_model_does_is_refused():
    for family in ("Gemma2", "Granite", "Cohere", "RecurrentGemma", "ModernBertDecoder"):
        model = model_of(family).to(torch.bfloat16)
        with pytest.raises(TypeError, match=OTHER.format(family)):
            check_logits(model, score_of(model, softcap=0.0, logit_scale=1.0), TEMPERATURE)
        assert "forward" not in vars(model.base_model)
    # A cap shows though the logits of a new model are small.
    model = model_of("Gemma2", final_logit_softcapping=50.0)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-3)
    with pytest.raises(TypeError, match=OTHER.format("Gemma2")):
        check_logits(model, score_of(model, softcap=0.0), TEMPERATURE)
    model = model_of("Llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(TypeError, match=r"nan off$"):
        check_logits(model, score_of(model), TEMPERATURE)


def test_caps_by_every_name():
    config = SimpleNamespace(model_type="any", output_logit_soft_cap=30.0)
    config.get_text_config = lambda: config
    assert logit_options(SimpleNamespace(config=config)) == {"softcap": 30.0, "logit_scale": 1.0}


def test_temperatures_and_factors_far_from_one():
    for temperature in (0.05, 5.0):
        model = model_of("Llama").to(torch.bfloat16)
        check_logits(model, score_of(model, temperature=temperature), temperature)
        with pytest.raises(TypeError, match=OTHER.format("Llama")):
            check_logits(model, score_of(model, temperature=temperature, logit_scale=1.1), temperature)
    for scaling in (1 / 16, 64.0):
        model = model_of("Granite", logits_scaling=scaling).to(torch.bfloat16)
        check_logits(model, score_of(model), TEMPERATURE)
        with pytest.raises(TypeError, match=OTHER.format("Granite")):
            check_logits(model, score_of(model, logit_scale=1.03 / scaling), TEMPERATURE)


def test_heads_that_are_small_pass():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (0.0, 1e-3):
            model = model_of("Llama")
            with torch.no_grad():
                model.lm_head.weight.mul_(size)
            check_logits(model.to(dtype), score_of(model), TEMPERATURE)


def test_defaults_and_settings_do_not_matter():
    model = model_of("Llama", return_dict=False)
    with torch.device("meta"):
        check_logits(model, score_of(model), TEMPERATURE)


def test_what_was_replaced_comes_back_after_an_error():
    class Thing:
        pass

    thing = Thing()
    thing.one = None
    for name in ("one", "two"):
        with pytest.raises(ZeroDivisionError), replaced(thing, name, len):
            getattr(thing, name)("") / 0
    assert vars(thing) == {"one": None}


def test_models_that_cannot_be_looked_at():
    model = model_of("Llama")
    model.forward = None
    with pytest.warns(UserWarning, match=r"^model: could not compare its logits with the scores: 'NoneType'"):
        check_logits(model, score_of(model))
    shard = torch.nn.Parameter(torch.ones(50, 32))
    shard.full_tensor = None
    parts = torch.empty(50, 32, device="meta"), torch.empty(0), torch.empty(9)
    for weight in (*map(torch.nn.Parameter, parts), shard):
        model.lm_head.weight = weight
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_logits(model, score_of(model))
    model.base_model_prefix = ""
    with pytest.raises(TypeError, match=r"^model: expected a base_model that gives last hidden states, .* has none"):
        check_logits(model, score_of(model))
