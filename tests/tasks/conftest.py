import pytest

from saf.data import TokenData
from tests.report.synthetic import write_data


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> TokenData:
    """A small data folder."""
    return TokenData.open(write_data(tmp_path_factory.mktemp("evaluate")))
