"""What tests of several files share: DeepSpeed can be initialized only once in a process."""

import os

import pytest

from grpo.ranks import Ranks


@pytest.fixture(scope="session")
def group_of_one():
    """A process group of one, and the environment variables that go with it."""
    before = dict(os.environ)
    group = Ranks(timeout=60)
    own = {name: value for name, value in os.environ.items() if before.get(name) != value}
    os.environ.clear()
    os.environ.update(before)
    yield group, own
    group.close()


@pytest.fixture(scope="module")
def ranks(group_of_one):
    """The process group of one; processes that tests of other files start do not inherit its variables."""
    group, own = group_of_one
    before = dict(os.environ)
    os.environ.update(own)
    yield group
    os.environ.clear()
    os.environ.update(before)
