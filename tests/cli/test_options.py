"""Every setting of FreezeConfig on the command line of pretrain and freeze."""

import json

import pytest

from saf.cli.command import in_flags, read_heads
from saf.cli.finetune import Finetune
from saf.cli.freeze import Freeze
from saf.cli.pretrain import Pretrain
from saf.errors import InputError
from saf.freezing.config import FreezeConfig
from saf.records.events import append_event, read_events
from saf.records.files import read_json
from saf.tasks import FinetuneSettings, MQARSettings
from saf.train import TrainConfig

TEXT = """--rate 0.5 --score random --pattern dirichlet --fitter adam --max-fit-kl 0.3 --strict
--exclude 0:1 1:11 --match variance --whole-groups --seed 7 --backend toeplitz --fitter-options steps 20
--pattern-options scale 4 bounds [0.1,10]"""
WORDS = TEXT.split()
CONFIG = FreezeConfig(
    rate=0.5,
    score="random",
    pattern="dirichlet",
    fitter="adam",
    max_fit_kl=0.3,
    strict=True,
    exclude=((0, 1), (1, 11)),
    match="variance",
    whole_groups=True,
    seed=7,
    backend="toeplitz",
    fitter_options={"steps": 20},
    pattern_options={"scale": 4, "bounds": [0.1, 10]},
)


def freeze(*words: str) -> FreezeConfig:
    return Freeze.from_words(["checkpoint", "--out", "out", *words]).settings.config


def pretrain(*words: str) -> TrainConfig:
    return Pretrain.from_words(["--data", "d", "--out", "out", *words]).settings


def test_freeze_takes_them_all():
    assert freeze(*WORDS) == CONFIG
    assert freeze("--storage", "dense_bfloat16") == FreezeConfig(storage="dense_bfloat16")


def test_pretrain_takes_them_all():
    words = [word.replace("--", "--freeze.", 1) for word in WORDS]
    config = pretrain(*words, "--track-gradients")
    assert config.freeze == CONFIG
    assert config.track_gradients


def test_a_number_of_heads_instead_of_a_rate():
    assert freeze("--count", "5") == FreezeConfig(count=5)
    for other, value in (("rate", "0.5"), ("heads", "0:0")):
        with pytest.raises(InputError, match=f"either a rate, a count or the heads.*got .*{other}"):
            freeze("--count", "5", f"--{other}", value)
    with pytest.raises(InputError, match="got rate and heads"):
        freeze("--rate", "0.9", "--heads", "0:0")
    # A value that is the default has been given all the same.
    with pytest.raises(InputError, match="got rate and count"):
        pretrain("--freeze.rate=0.25", "--freeze.count", "5")
    assert pretrain("--freeze.rate", "0.25").freeze == FreezeConfig()
    assert pretrain("--freeze.count", "5").freeze == FreezeConfig(count=5)


def test_messages_call_settings_by_their_flags(saf, text_data, arms, tmp_path):
    out = ["--out", tmp_path / "out"]
    (tmp_path / "one.txt").write_text("a few words\n")
    data = ["data", "prepare", tmp_path / "one.txt", *out]
    train = ["pretrain", "--data", text_data, *out, "--device", "cpu", "--length", "32"]
    event = ["freeze", arms[0], *out]
    many = 10**6
    for words, message in (
        (data, "or cut long documents with --split-characters"),
        ([*train, "--freeze.rate", "0.25", "--freeze.max-fit-kl", "-1"], "--freeze.max-fit-kl is in nats"),
        ([*event, "--max-fit-kl", "-1"], "freeze: --max-fit-kl is in nats"),
        ([*train, "--freeze.rate", "0.25", "--calibration-sequences", many], "ask for fewer with --calibration-seq"),
        ([*event, "--sequences", many], "ask for fewer with --sequences"),
        ([*event, "--score", "residual_cosine", "--heldout-sequences", many], "ask for fewer with --heldout-seq"),
        ([*train, "--length", many], f"the controller partition of {text_data} has "),
    ):
        code, _, err = saf(*words)
        assert (code, message in err) == (2, True), err


def test_what_settings_refuse_is_one_message_by_their_flags(saf):
    code, _, err = saf("data", "prepare", "--out", "out", "--heldout-fraction", "0.9")
    assert (code, err) == (2, "saf data: --heldout-fraction must be in (0, 0.5], got 0.9\n")


def test_names_in_paths_and_values_are_no_settings():
    for text in ("/data/batch_size/x", "batch_size.json", "got 'batch_size'", "my_batch_size", "length"):
        assert in_flags(text, Pretrain) == text
    assert in_flags("batch_size: 3. freeze.rate, max_fit_kl.", Pretrain) == (
        "--batch-size: 3. --freeze.rate, --freeze.max-fit-kl."
    )


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (lambda: FinetuneSettings(test="t", tokenizer="t", development=2.0), "--development"),
        (lambda: MQARSettings(development=1.5), "--mqar.development"),
        (lambda: FreezeConfig(rate="much"), "--freeze.rate"),
    ],
)
def test_what_a_setting_must_be_is_said_of_its_flag(settings, flag):
    with pytest.raises(InputError) as caught:
        settings()
    assert in_flags(str(caught.value), Finetune).startswith(f"{flag} must be a")


def test_settings_left_out_are_the_defaults():
    assert freeze() == FreezeConfig()
    assert pretrain() == TrainConfig(data="d", out="out")


def test_heads_come_from_words_and_files(tmp_path):
    (tmp_path / "pairs.json").write_text("[[2, 1], [0, 3]]")
    (tmp_path / "freeze.json").write_text(json.dumps({"heads": [[1, 2]]}))
    words = ["--freeze.heads", "0:0", str(tmp_path / "pairs.json"), str(tmp_path / "freeze.json")]
    assert pretrain(*words, "--freeze.max-fit-kl", "1").freeze == FreezeConfig(
        heads=((0, 0), (2, 1), (0, 3), (1, 2)), max_fit_kl=1.0
    )
    (tmp_path / "other.json").write_text("{}")
    for name in ("run", "undone"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    append_event(tmp_path / "undone", "freeze", {"heads": [[0, 1]]})
    append_event(tmp_path / "undone", "undo", {"heads": [[0, 1]], "undoes": 1})
    for word, message in (
        ("3", "LAYER:HEAD"),
        ("no.json", "there is no file or folder 'no.json'"),
        (tmp_path / "run", "run froze and pruned no heads, so that it has none to name"),
        (tmp_path / "run" / "events.jsonl", "events.jsonl froze and pruned no heads"),
        (tmp_path / "undone", "undone made all heads live again that it froze or pruned, so that it has none"),
        (tmp_path / "empty", "empty is a folder that tells of no heads"),
        (tmp_path / "other.json", "does not list heads"),
    ):
        with pytest.raises(InputError, match=message):
            read_heads([str(word)])


def test_options_are_pairs():
    assert freeze("--fitter", "adam", "--fitter-options", "steps", "2").fitter_options == {"steps": 2}
    with pytest.raises(InputError, match="--fitter-options takes pairs of a name and a value; got steps"):
        freeze("--fitter-options", "steps")


def test_fitter_options_are_checked_with_the_other_settings(saf, arms, tmp_path, monkeypatch):
    monkeypatch.setattr("saf.freezing.recipe.calibrate", lambda *args, **options: pytest.fail("calibrated"))
    code, _, err = saf("freeze", arms[0], "--out", tmp_path / "out", "--fitter-options", "steps", 200)
    assert code == 2
    assert "fitter 'proportional' takes" in err


def test_a_shortfall_is_a_plain_line_and_a_count_above_the_live_heads_an_error(saf, arms, tmp_path):
    common = ("--sequences", 4, "--device", "cpu")
    code, _, err = saf("freeze", arms[0], "--out", tmp_path / "none", "--max-fit-kl", 1e-12, *common)
    assert code == 0
    assert "\nsaf freeze: only 0 of 2 heads could be frozen: no further head fits within 1e-12 nats\n" in f"\n{err}"
    assert "Warning" not in err
    code, _, err = saf("freeze", arms[0], "--out", tmp_path / "many", "--count", 9, *common)
    assert code == 2
    assert "9 heads asked for; 8 of 8 are live" in err
    assert not (tmp_path / "many").exists()


def test_an_unknown_name_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        freeze("--score", "varience")
    assert "variance" in "".join(capsys.readouterr())


def test_freezing_a_checkpoint_by_scores_and_lists(saf, saf_json, arms, tmp_path):
    checkpoint = arms[0] / "checkpoints" / "step-12"
    common, heldout = ("--device", "cpu", "--sequences", 4, "--max-fit-kl", 10), ("--heldout-sequences", 3)
    printed = saf_json(
        "freeze", checkpoint, "--out", tmp_path / "cosine", "--score", "residual_cosine", *common, *heldout
    )
    assert (printed["score_name"], len(printed["heads"])) == ("residual_cosine", 2)
    named = saf_json(
        "freeze", checkpoint, "--out", tmp_path / "named", "--heads", tmp_path / "cosine" / "events.jsonl", *common
    )
    assert named["heads"] == printed["heads"] == read_events(tmp_path / "named")[0].heads
    code, _, err = saf("freeze", checkpoint, "--out", tmp_path / "gradient", "--score", "qk_gradient", *common)
    assert code == 2
    assert "--track-gradients" in err
    for words, reason in [(heldout, "--heldout-sequences has no effect"), (("--sequences", 1), "calibration has 1")]:
        code, _, err = saf("freeze", checkpoint, "--out", tmp_path / "variance", *common, *words)
        assert (code, reason in err) == (2, True), err


def test_freezing_by_gradients_that_the_run_kept(saf_json, text_data, tmp_path):
    shape = "--model-overrides num_layers 2 num_heads 4 hidden_size 32 --length 32 --batch-size 4 --updates 4"
    options = "--eval-every 0 --eval-windows 2 --save-every 0 --device cpu --no-tensorboard --quiet --track-gradients"
    saf_json("pretrain", "--data", text_data, "--out", tmp_path / "run", *shape.split(), *options.split())
    words = ("--sequences", 4, "--max-fit-kl", 10, "--device", "cpu", "--score", "qk_gradient")
    printed = saf_json("freeze", tmp_path / "run" / "checkpoints" / "step-2", "--out", tmp_path / "frozen", *words)
    state = read_json(tmp_path / "run" / "checkpoints" / "step-2" / "state.json")
    assert printed["scores"] == state["qk_gradient"]["average"]
