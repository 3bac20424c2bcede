import pytest

from saf.cli.finetune import Finetune
from saf.errors import InputError


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--freeze.rate", "nan"], "rate must be a finite number"),
        (["--schedule", "validation_budget", "--schedule.validation-budget.every", "-1"], "every"),
        ([], "name it with --parent"),
    ],
)
def test_a_setting_that_no_run_can_use_is_named_before_the_parent(words, named):
    with pytest.raises(InputError, match=named):
        Finetune.from_words(words)
