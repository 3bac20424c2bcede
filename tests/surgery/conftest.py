import pytest
from torch import distributed


@pytest.fixture
def group(tmp_path):
    """A process group of one."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
