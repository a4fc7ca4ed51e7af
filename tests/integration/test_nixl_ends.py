"""Hand-offs through NIXL whose processes die: a typed failure, KV held for another target, every block back, the same tokens."""

import os
import signal
from pathlib import Path

import pytest

from engine.execution.fake import expected_tokens
from kv_transfer.nixl_agent import why_not
from tests.integration.pools import MODEL, Decoding, Prefilling, Setup, joined, pools, request

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def nixl_processes() -> list[int]:
    """Those of this process's workers."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"kv_transfer.nixl_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_a_hand_off_whose_nixl_died_is_made_again(number: signal.Signals) -> None:
    async with pools(Setup(connector="nixl")) as made:
        decoding = Decoding(made.decode[0])
        for turn in range(2):
            asked, target, prefilling = request(40 + 16 * turn, 5), made.target(), Prefilling(made.prefill[0])
            pids = nixl_processes()
            assert len(pids) == 2
            for pid in pids:
                os.kill(pid, number)
            await decoding.attach(target.handoff_id)
            await prefilling.run(asked, target)
            first = await prefilling.first()
            while (event := await prefilling.event()).WhichOneof("event") != "handed_off":
                assert event.handoff_failed.error.code == "UNAVAILABLE"
                target = made.target()
                await decoding.attach(target.handoff_id)
                await prefilling.retarget(target)
            answer = joined([first, *await decoding.whole(target.handoff_id)])
            assert answer.token_ids == expected_tokens(asked, MODEL)
        await decoding.close()
        await made.idle()
