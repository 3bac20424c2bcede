"""LoRA adapters of peft and torchao's quantised weights, before heads are frozen and after it."""

import pytest
import torch

import saf
from saf.errors import UnsupportedError
from saf.heads import HeadSet
from saf.models.adapter import adapter_for, language_model
from tests.integrations.training import opened, trainer
from tests.transformers_models import freeze, logits, make, tokens

CONFIG = saf.FreezeConfig(count=3, max_fit_kl=99)


def with_lora(model, *modules):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[*modules], r=4, task_type="CAUSAL_LM"))
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
    return adapted


@pytest.mark.parametrize(("family", "module"), [("llama", "q_proj"), ("gpt2", "c_attn")])
def test_lora_on_attention_is_refused_before_freezing_and_merged_it_is_frozen(family, module):
    adapted = with_lora(make(family), module)
    with pytest.raises(UnsupportedError, match=r"peft\.tuners\.lora\.layer\.Linear: merge adapters"):
        saf.freeze_(adapted, [tokens()], CONFIG)
    expected = logits(adapted)
    assert language_model(adapted).token_log_probs(tokens(), tokens()).isfinite().all(), "measured all the same"
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-3)
    assert len(saf.freeze_(merged, [tokens()], CONFIG).heads) == 3


def test_lora_elsewhere_stays_when_heads_freeze_but_under_a_trainer(tmp_path):
    adapted = with_lora(make("llama"), "up_proj")
    freezing = saf.integrations.transformers.FreezeCallback(CONFIG, [tokens()])
    with pytest.raises(UnsupportedError, match="adapters alone"):
        trainer(tmp_path, freezing, model=adapted).train()
    base = adapted.get_base_model()
    report = saf.freeze_(base, [tokens()], CONFIG)
    assert adapter_for(base).heads("frozen") == report.heads
    adapted.save_pretrained(tmp_path / "adapter")
    saf.save(base, tmp_path / "heads")
    peft = pytest.importorskip("peft")
    again = peft.PeftModel.from_pretrained(saf.load(make("llama"), tmp_path / "heads"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again), logits(adapted))


@pytest.mark.parametrize(
    ("family", "modules"), [("llama", ("q_proj", "k_proj", "v_proj", "o_proj")), ("gpt2", ("c_attn", "c_proj"))]
)
def test_lora_after_freezing_trains_merges_and_opens_on_the_saved_model(family, modules, tmp_path):
    model = make(family)
    freeze(model, HeadSet([(0, 1), *((1, head) for head in range(4))]))
    model.save_pretrained(tmp_path / "frozen")
    adapted = with_lora(opened(tmp_path, "frozen"), *modules)
    ids = tokens()
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path / "adapter")
    peft = pytest.importorskip("peft")
    again = peft.PeftModel.from_pretrained(opened(tmp_path, "frozen"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again), logits(adapted))
    with pytest.raises(UnsupportedError, match="frozen first"):
        opened(tmp_path, "adapter")
    for refused in (saf.uninstall_, lambda model: model.get_base_model().save_pretrained(tmp_path / "base")):
        with pytest.raises(UnsupportedError, match="merge adapters"):
            refused(again)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), logits(again), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_are_quantised_after_freezing_and_then_neither_edited_nor_saved(family, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model, ordinary, ids = make(family), make(family), tokens(2, seed=6)
    freeze(model, HeadSet([(0, head) for head in range(4)] + [(1, 1)]))
    before = [logits(each) for each in (model, ordinary)]
    for each in (model, ordinary):
        # By itself it would change the compiler's settings of the whole process.
        scheme = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
        quantization.quantize_(each, scheme)
    lost = [(logits(each) - old).norm() / old.norm() for each, old in zip((model, ordinary), before, strict=True)]
    assert 0 < lost[0] < 2 * lost[1]
    options = {"attention_mask": torch.ones_like(ids[:, :9]), "max_new_tokens": 4, "do_sample": False}
    cached = model.generate(ids[:, :9], **options, eos_token_id=None)
    assert torch.equal(cached[:, 9], logits(model, ids[:, :9])[:, -1].argmax(-1))
    before = logits(model)
    for refused in (
        lambda: saf.freeze_(ordinary, [ids], CONFIG),
        lambda: saf.uninstall_(model),
        lambda: saf.prune_(model, [(1, 0)]),
        lambda: saf.save(model, tmp_path / "heads"),
        lambda: model.save_pretrained(tmp_path / "whole"),
    ):
        with pytest.raises(UnsupportedError, match="before weights are quantised"):
            refused()
    assert torch.equal(logits(model), before)
    assert not any(tmp_path.iterdir())
