"""The public names: adding one is a decision, losing one breaks users."""

import saf

NAMES = """
GPT AttentionStatistics CompactPattern DensePattern FreezeConfig FreezeReport FrozenHeads GPTConfig Gradual HeadLayout
HeadSet OneTime Prefill QKGradient SafError TrainLoss ValidationBudget calibrate dense_pattern finalize_ fit
fit_compact fit_heldout fit_kl freeze_ frozen_attention gate_gradients head_outputs install_ load mixed_attention ops
preset prune_ save score select storage_report uninstall_
"""
PUBLIC = NAMES.split()


def test_the_public_names_are_these():
    assert saf.__all__ == PUBLIC
    assert all(hasattr(saf, name) for name in PUBLIC)
