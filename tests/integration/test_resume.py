"""A scheduler dies under running streams and comes back without any memory of them: their clients bring it along."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from everystop.channel import client_channel
from everystop.client import (
    Accepted,
    AsyncClient,
    Client,
    Completion,
    Delta,
    Event,
    Finished,
    GenerateOptions,
    Retry,
    completion_from_events,
)
from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc
from everystop.testing import serve_mock
from everystop_lab.supervised import SupervisedService

NUM_STREAMS = 16
MAX_TOKENS = 400
RETRY = Retry(max_backoff_s=0.2)


@asynccontextmanager
async def services(folder: Path, *scheduler_flags: str) -> AsyncIterator[tuple[SupervisedService, SupervisedService]]:
    """A mock executor that runs, and a scheduler that does not yet; both end with the block."""
    with (folder / "log").open("wb") as log:
        executor = SupervisedService("executor_svc", ["--backend=mock", "--mock-step-ms=4"], folder, log)
        flags = [f"--executor-address={executor.address}", *scheduler_flags]
        scheduler = SupervisedService("scheduler_svc", flags, folder, log)
        try:
            await executor.start()
            yield executor, scheduler
        finally:
            await scheduler.stop()
            await executor.stop()


def options_of(index: int) -> GenerateOptions:
    """Greedy and drawn, with and without a stop string, with and without log-probabilities."""
    return GenerateOptions(
        max_tokens=MAX_TOKENS,
        temperature=index % 2,
        seed=index,
        stop_strings=["zzqzz"] if index % 3 == 0 else [],
        logprobs=1 if index % 4 == 0 else None,
        prompt_logprobs=0 if index % 5 == 0 else None,
    )


class Answering:
    """One answer while it comes, to either client."""

    def __init__(self, index: int) -> None:
        self.prompt = f"stream {index} " * (index + 1)
        self.options = options_of(index)
        self.events: list[Event] = []
        self.progress = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def read(self, client: AsyncClient) -> Completion:
        async for event in client.generate(self.prompt, **self.options):
            self._take(event)
        return completion_from_events(self.events)

    def read_in_thread(self, client: Client) -> Completion:
        for event in client.generate(self.prompt, **self.options):
            self._take(event)
        return completion_from_events(self.events)

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Delta) and event.token_ids:
            self._loop.call_soon_threadsafe(self.progress.set)

    @property
    def has_finished(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished)


async def all_get_further(answers: Sequence[Answering]) -> None:
    for answering in answers:
        answering.progress.clear()
    await asyncio.gather(*[answering.progress.wait() for answering in answers])
    assert not any(answering.has_finished for answering in answers), "nothing is left to lose"


def what_counts(completion: Completion) -> tuple[object, ...]:
    """All of it but id and timings."""
    return (
        *(completion.token_ids, completion.text, completion.logprobs, completion.prompt_logprobs, completion.seed),
        *(completion.finish_reason, completion.matched_stop, completion.usage),
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_survive_two_deaths_of_the_scheduler(tmp_path: Path, number: signal.Signals) -> None:
    async with services(tmp_path, "--drain-grace-s=0.1") as (_, scheduler):
        with Client(scheduler.address, retry=RETRY) as sync_client:
            async with AsyncClient(scheduler.address, retry=RETRY) as client:
                await _check_survival(scheduler, client, sync_client, number)


async def _check_survival(
    scheduler: SupervisedService, client: AsyncClient, sync_client: Client, number: signal.Signals
) -> None:
    early = [asyncio.create_task(Answering(index).read(client)) for index in range(NUM_STREAMS)]
    await scheduler.start()  # the first requests were there before it
    undisturbed = await asyncio.gather(*early)

    answers = [Answering(index) for index in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(answering.read(client)) for answering in answers[:-4]]
    tasks += [asyncio.create_task(asyncio.to_thread(it.read_in_thread, sync_client)) for it in answers[-4:]]
    for _ in range(2):
        await all_get_further(answers)
        pid = scheduler.pid
        os.kill(pid, number)
        while scheduler.pid == pid:
            await asyncio.sleep(0.01)
        await scheduler.ready.wait()
    disturbed = await asyncio.gather(*tasks)

    assert [what_counts(answer) for answer in disturbed] == [what_counts(answer) for answer in undisturbed]
    for answering in answers:
        assert [type(event) for event in answering.events if not isinstance(event, Delta)] == [Accepted, Finished]


async def test_a_client_that_never_asked_for_it_sees_unavailable(tmp_path: Path) -> None:
    request = pb.GenerateRequest(text="Hello", stop=pb.StopConditions(max_tokens=50_000, ignore_eos=True))
    async with services(tmp_path) as (_, scheduler):
        await scheduler.start()
        async with AsyncClient(scheduler.address, retry=RETRY) as client:
            await client.complete("Is anybody there?", max_tokens=1)
        async with client_channel(scheduler.address) as channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request)
            await _read_until(call, "delta")
            await scheduler.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_until(call, "finished")
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_command_line_goes_on_as_well(tmp_path: Path) -> None:
    async with services(tmp_path) as (_, scheduler):
        await scheduler.start()
        command = ["-m", "everystop", "generate", "Once upon", f"--max-tokens={MAX_TOKENS}", "--ignore-eos"]
        command.append(f"--address={scheduler.address}")
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=PIPE)
        assert process.stdout is not None
        begin = await process.stdout.readexactly(1)
        await scheduler.kill()
        rest, errors = await process.communicate()
        assert errors.startswith(f"{MAX_TOKENS} tokens".encode())
        async with AsyncClient(scheduler.address) as client:
            whole = await client.complete("Once upon", max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    assert (begin + rest).decode() == whole.text + "\n"


async def _read_until(call: AsyncIterable[pb.GenerateResponse], kind: str) -> None:
    async for response in call:
        if response.HasField(kind):
            return


def test_who_finds_the_queue_full_comes_back() -> None:
    async def answers(address: str, retry: Retry | None) -> list[Completion | BaseException]:
        async with AsyncClient(address, retry=retry) as client:
            calls = [client.complete(f"p{index}", max_tokens=20, temperature=0) for index in range(6)]
            return await asyncio.gather(*calls, return_exceptions=True)

    with serve_mock(max_waiting=1, max_num_seqs=1, mock_step_ms=5.0) as busy:
        refused = [answer for answer in asyncio.run(answers(busy.address, None)) if isinstance(answer, BaseException)]
        assert {error.reason for error in refused if isinstance(error, ServiceError)} == {Reason.QUEUE_FULL}
        served = asyncio.run(answers(busy.address, RETRY))
    assert [len(answer.token_ids) for answer in served if isinstance(answer, Completion)] == [20] * 6


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_mock() as running:
        yield running.address


def test_an_answer_that_has_ended_takes_no_step(address: str) -> None:
    with Client(address) as client:
        whole = client.complete("Hello", max_tokens=8, temperature=0, request_id="again")
        num_steps = client.get_status().counters.num_steps
        with grpc.insecure_channel(address) as channel:
            request = pb.GenerateRequest(text="Hello", request_id="again", resume=pb.Resume(token_ids=whole.token_ids))
            request.stop.max_tokens = 8
            request.sampling.temperature = 0
            events = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=10))
        status = client.get_status()
    assert [event.WhichOneof("event") for event in events] == ["accepted", "finished"]
    assert events[1].finished.reason == pb.FINISH_REASON_LENGTH
    assert events[1].finished.usage == pb.Usage(num_prompt_tokens=5, num_output_tokens=8)
    assert (status.counters.num_steps, status.num_running, status.num_waiting) == (num_steps, 0, 0)


def test_the_id_of_a_running_answer_can_not_be_taken_over(address: str) -> None:
    with Client(address) as client:
        running = client.generate("Hello", request_id="mine", max_tokens=50_000, ignore_eos=True, temperature=0)
        first = next(event for event in running if isinstance(event, Delta))
        request = pb.GenerateRequest(text="Hello", request_id="mine", resume=pb.Resume(token_ids=first.token_ids))
        request.sampling.temperature = 0
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=10))
        running.close()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
