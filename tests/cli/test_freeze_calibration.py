"""`saf freeze` states what calibration holds before it starts, and shows how far it is."""


def words(arms, out, *more):
    return ("freeze", arms[0], "--out", out, "--sequences", 4, "--batch-size", 2, "--device", "cpu", *more)


def test_a_calibration_is_stated_before_it_starts_and_shown_while_it_goes_on(saf, arms, tmp_path):
    code, _, err = saf(*words(arms, tmp_path / "quarter"))
    assert code == 0
    first, last = err.splitlines()
    assert first.startswith("calibration of 8 heads on 4 sequences of 32 tokens: ")
    assert last == "calibrating 2/2 layers, 0s left"


def test_what_scores_and_patterns_keep_is_stated(saf, arms, tmp_path):
    more = ("--score", "residual_cosine", "--pattern", "gaussian", "--storage", "dense")
    code, _, err = saf(*words(arms, tmp_path / "out", *more))
    assert code == 0
    first, second = err.splitlines()[:2]
    # The mean's rows of 8 heads at 16 positions of 32 keys; two 32 x 32 arrays of each head.
    assert first.endswith("; 16 KiB collected on the CPU")
    assert second == ("for the patterns, logit_mean, logit_variance of up to 8 heads at a time: 64 KiB on the CPU")


def test_too_little_memory_is_refused_by_its_option(saf, arms, tmp_path):
    code, _, err = saf(*words(arms, tmp_path / "out", "--capture-gb", 1e-9))
    assert code == 2
    assert "at most 1 bytes (capture_bytes)" in err
