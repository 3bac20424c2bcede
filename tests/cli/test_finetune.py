import pytest

from saf.cli.finetune import parse_words
from saf.errors import InputError


def test_what_finetuning_begins_with_must_be_named():
    with pytest.raises(InputError, match="name it with --parent"):
        parse_words([])
