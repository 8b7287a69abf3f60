import fsspec
import pytest


@pytest.fixture(params=["path", "file URL", "memory URL"])
def place(request, tmp_path):
    """Where something can be stored, and nothing is yet."""
    if request.param == "memory URL":
        yield "memory://storage-test/deep/p"
        fsspec.filesystem("memory").rm("/storage-test", recursive=True)
    else:
        path = tmp_path / "deep" / "p"
        yield path if request.param == "path" else f"file://{path}"
