"""Rows for sampling tests."""

from collections.abc import Callable

import pytest
import torch

from contracts.sampling import SamplingParams
from engine.execution.interface import ScheduledRequest

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_row() -> Callable[..., ScheduledRequest]:
    """row(prompt=…, output=…, **sampling): a request whose last known token is computed in this step."""

    def row(prompt=(5, 6, 7), output=(), **sampling) -> ScheduledRequest:
        token_ids = [*prompt, *output]
        return ScheduledRequest(
            request_id="r",
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            num_computed_tokens=len(token_ids) - 1,
            num_scheduled_tokens=1,
            block_ids=[0],
            sampling=SamplingParams(**{"max_tokens": 1000, **sampling}),
        )

    return row
