"""Fair shares between tenants through the OpenAI-compatible endpoint: who sends little beside who holds all
rows with long answers. The same by a clock of steps: tests/unit/scheduler/test_fairness.py."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import RunningServer
from tests.e2e.openai_stack import Endpoint, running_endpoint

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(900)]

ROWS, TOKENS_A_SECOND = 16, 20  # of each stream: the server's pace is to count, not that of this client
LONG, SHORT = 40, 8  # tokens of an answer
MANY, FEW, ROUNDS = 200, 4, 5


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    options = {
        "runner": "null",
        "null_runner_rate": str(TOKENS_A_SECOND),
        "fair_shares": "true",
        "max_running_requests": str(ROWS),
    }
    with (
        RunningServer(tmp_path_factory.mktemp("fair"), options) as server,
        running_endpoint(server, tenants="user") as found,
    ):
        yield found


def test_who_sends_little_does_not_wait_for_who_sends_much(shared: Endpoint) -> None:
    few, _ = asyncio.run(beside(shared, FEW))
    _, alone = asyncio.run(beside(shared, MANY, rounds=0))
    many, seconds = min((asyncio.run(beside(shared, MANY)) for _ in range(2)), key=lambda found: found[1])
    told = f"first token beside {FEW}: {few:.3f} s, beside {MANY}: {many:.3f} s; {MANY} answers in {seconds:.1f} s, "
    told += f"alone in {alone:.1f} s"
    print(told)
    assert many <= 2 * few, told
    assert seconds <= alone / 0.95 + ROUNDS * FEW * SHORT / (ROWS * TOKENS_A_SECOND), told
    found = shared.server.metrics_when(lambda values: any('tenant="little"' in name for name in values))
    assert any(name.startswith("minisgl_tenant_generated_tokens_total") for name in found)


async def beside(endpoint: Endpoint, count: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds to the first tokens of FEW requests in each of the rounds, and until the other tenant has all of
    its `count` long answers."""
    async with endpoint.async_client() as client:
        begun = asyncio.Semaphore(0)  # of long answers

        async def ask(user: str, tokens: int) -> float:
            begin, first = time.perf_counter(), 0.0
            stream = await client.completions.create(
                model="demo", prompt="Count", max_tokens=tokens, user=user, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                if not first:
                    first = time.perf_counter() - begin
                    begun.release()
            return first

        async def hold_rows() -> list[asyncio.Task[float]]:
            """Long answers, as many of them on their way as there are rows."""
            tasks = [asyncio.create_task(ask("much", LONG)) for _ in range(count)]
            for _ in range(min(ROWS, count)):
                await begun.acquire()
            await asyncio.sleep(0.3 * LONG / TOKENS_A_SECOND)
            return tasks

        await ask("much", SHORT)
        await begun.acquire()
        begin = time.perf_counter()
        long = await hold_rows()
        waits: list[float] = []
        for _ in range(rounds):
            waits += await asyncio.gather(*(ask("little", SHORT) for _ in range(FEW)))
            if count == FEW:  # the next round is beside new answers
                await asyncio.gather(*long)
                begun = asyncio.Semaphore(0)
                long = await hold_rows()
        await asyncio.gather(*long)
        return statistics.median(waits) if waits else 0.0, time.perf_counter() - begin
