"""The Ray of the tests of the launcher."""

from tests.launch.conftest import local_ray

__all__ = ["local_ray"]
