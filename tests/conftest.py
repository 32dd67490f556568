"""What every test shares: options, the device, seeds, and a check that global state is left alone.

Options:
    --runslow       also run the tests marked ``slow`` (more than ten seconds each)
    --device NAME   where the tests that take the ``device`` fixture run: ``cpu`` or ``cuda``

Real data (the ``data_dir`` fixture) is read from the folder named by ``STIEFEL_DATA``, else from
``../shared/data`` beside the checkout; tests that need it skip with a reason where it is absent.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--device", default="cpu", choices=("cpu", "cuda"), help="device of the `device` fixture"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device on this machine")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", share)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--runslow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --runslow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device named by ``--device``."""
    return torch.device(str(request.config.getoption("--device")))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; skips the test where there is none."""
    named = os.environ.get("STIEFEL_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (set STIEFEL_DATA to its folder)")
    return folder


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """A generator on the device, seeded with 0."""
    return torch.Generator(device=device).manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries under test may use the global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forgets what earlier tests compiled: torch counts recompilations, and refuses after eight."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Many small operations: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _global_state() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "overwrite on conversion": torch.__future__.get_overwrite_module_params_on_conversion(),
        "swap on conversion": torch.__future__.get_swap_module_params_on_conversion(),
    }


@pytest.fixture(autouse=True)
def _global_state_is_restored() -> Iterator[None]:
    """No test, and nothing that a test calls, leaves torch's global settings changed."""
    before = _global_state()
    yield
    after = _global_state()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert not changed, f"global settings left changed (before, after): {changed}"
