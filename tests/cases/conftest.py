"""Implementations that need something around them, and refusals by kernels that cannot run a case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests import interpreted
from tests.conftest import CPU_IMPLEMENTATIONS


@pytest.fixture(autouse=True)
def known_by_name(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("interpreted") is None:
        yield
        return
    if jax.default_backend() != "cpu":
        pytest.skip("the interpreter is for a CPU")
    with interpreted.by_name():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Any:
    """A kernel that refuses a call by name has not failed it."""
    try:
        return (yield)
    except NotImplementedError as error:
        parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        name = parameters.get("implementation", parameters.get("kernel"))
        if name is None or name in CPU_IMPLEMENTATIONS or "cannot compute this call" not in str(error):
            raise
        pytest.skip(str(error))
