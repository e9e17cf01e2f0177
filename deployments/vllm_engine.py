"""A vLLM engine behind vLLM's own OpenAI layer, for one replica.

vLLM promises nothing of the modules used here and in ``publishing_scheduler``: vLLM is pinned, and
no other file imports them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pydantic
from starlette.datastructures import State
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from app.config import VllmEngineSettings
from deployments.messages import (
    Accepted,
    EngineEvent,
    EngineRequest,
    Failed,
    Finished,
    FirstToken,
    Payload,
)
from deployments.publishing_scheduler import (
    EXTRA_ARGS_KEY,
    PublishingAsyncScheduler,
    PublishingScheduler,
    SnapshotTarget,
)
from sfs_ext import SchedulerConfig, SnapshotReader

logger = logging.getLogger(__name__)

OWN_ARGS = {
    "model",
    "served_model_name",
    "tensor_parallel_size",
    "scheduler_cls",
    "additional_config",
}
"""Engine arguments that follow from the pool's settings."""


class VllmEngine:
    """Engine (``deployments.messages``) of one vLLM replica; its engine core is another process."""

    def __init__(self, engine: AsyncLLM, state: State, snapshot_path: str) -> None:
        self._engine = engine
        self._chat = state.openai_serving_chat
        self._completions = state.openai_serving_completion
        self.snapshot_path = snapshot_path
        self.scheduler: SchedulerConfig = SnapshotReader(snapshot_path).config

    @classmethod
    async def start(
        cls, model_name: str, settings: VllmEngineSettings, snapshot_path: str
    ) -> VllmEngine:
        """Loads the model: minutes for a large one.

        Raises ValueError for arguments vLLM does not know, and what vLLM raises where it refuses.
        """
        os.environ.update(settings.env)
        engine_args, frontend = _arguments(model_name, settings)
        config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError(
                f"model {model_name}: pipeline_parallel_size must be 1: the schedule of a pipeline "
                "is not simulated"
            )
        if config.speculative_config is not None:
            raise ValueError(
                f"model {model_name}: speculative_config must be left out: the schedule of "
                "speculative decoding is not simulated"
            )
        # Which scheduler is right is known only now: the platform has the last word on asynchrony.
        scheduler = (
            PublishingAsyncScheduler
            if config.scheduler_config.async_scheduling
            else PublishingScheduler
        )
        config.scheduler_config.scheduler_cls = f"{scheduler.__module__}.{scheduler.__qualname__}"
        config.additional_config = SnapshotTarget(snapshot_path)
        engine = _ObservedLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
        )
        try:
            state = State()
            await init_app_state(engine, state, frontend, await engine.get_supported_tasks())
            return cls(engine, state, snapshot_path)
        except BaseException:
            engine.shutdown()
            raise

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        flight = _Flight(request)
        task = asyncio.create_task(self._serve(flight), name=request.decision_id)
        try:
            while (event := await flight.events.get()) is not None:
                yield event
        finally:
            # Cancelling vLLM's own coroutine, wherever it waits, aborts the engine's request.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def stop(self) -> None:
        self._engine.shutdown()
        Path(self.snapshot_path).unlink(missing_ok=True)  # left behind by an engine that was killed

    async def _serve(self, flight: _Flight) -> None:
        _current_flight.set(flight)
        try:
            async for event in self._answer(flight):
                flight.events.put_nowait(event)
        except Exception as error:
            failed = _failed(error)
            if failed.status >= 500:
                logger.exception("request %s failed", flight.request.decision_id)
            flight.events.put_nowait(failed)
        finally:
            flight.events.put_nowait(None)

    async def _answer(self, flight: _Flight) -> AsyncIterator[EngineEvent]:
        if flight.request.endpoint == "chat":
            answer = await self._chat.create_chat_completion(_chat_request(flight.request))
        else:
            answer = await self._completions.create_completion(_completion_request(flight.request))
        if isinstance(answer, ErrorResponse):
            yield _refused(answer)
            return
        if not isinstance(answer, AsyncGenerator):
            yield Payload(answer.model_dump_json().encode())
        else:
            async with aclosing(answer) as events:
                async for event in events:
                    if event.startswith('data: {"error"'):  # how vLLM ends a stream that fails
                        data = event.removeprefix("data: ")
                        yield _refused(ErrorResponse.model_validate_json(data))
                        return
                    yield Payload(event.encode())
        yield flight.finished()


class _Flight:
    """One request on its way through vLLM, and what its engine told of it."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.events: asyncio.Queue[EngineEvent | None] = asyncio.Queue()
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._finish_reason = ""
        self._accepted = False
        self._started = False

    def accepted(self) -> None:
        if not self._accepted:  # a beam search makes many engine requests of one
            self._accepted = True
            self.events.put_nowait(Accepted(time.time()))

    def received(self, output: RequestOutput) -> None:
        if not self._started:
            self._started = True
            self.events.put_nowait(FirstToken(time.time()))
            self._prompt_tokens = len(output.prompt_token_ids or ())

    def counted(self, choice: CompletionOutput) -> None:
        """Tokens not counted before."""
        self._output_tokens += len(choice.token_ids)
        self._finish_reason = choice.finish_reason or self._finish_reason

    def finished(self) -> Finished:
        return Finished(self._prompt_tokens, self._output_tokens, self._finish_reason)


_current_flight: ContextVar[_Flight] = ContextVar("current_flight")
"""vLLM's OpenAI layer calls the engine client with no room for a companion of the request."""


class _ObservedLLM(AsyncLLM):
    """The engine client under vLLM's OpenAI layer: sees what an engine request yields, and when."""

    async def add_request(self, *args: Any, **kwargs: Any) -> Any:
        collector = await super().add_request(*args, **kwargs)
        _current_flight.get().accepted()
        return collector

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        flight = _current_flight.get()
        ours = {
            "request_key": flight.request.request_key,
            "predicted_output_tokens": flight.request.predicted_output_tokens,
        }
        sampling_params.extra_args = {**(sampling_params.extra_args or {}), EXTRA_ARGS_KEY: ours}
        whole = sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
        if whole:
            # Otherwise vLLM would say nothing before the last token, and the first would go unseen.
            sampling_params.output_kind = RequestOutputKind.CUMULATIVE
        choices: dict[int, CompletionOutput] = {}
        async with aclosing(
            super().generate(prompt, sampling_params, request_id, **kwargs)
        ) as outputs:
            async for output in outputs:
                flight.received(output)
                if whole:
                    choices.update((choice.index, choice) for choice in output.outputs)
                    continue
                for choice in output.outputs:
                    flight.counted(choice)
                yield output
        if whole:
            output.outputs = [choices[index] for index in sorted(choices)]
            for choice in output.outputs:
                flight.counted(choice)
            yield output


def _arguments(model_name: str, settings: VllmEngineSettings) -> tuple[AsyncEngineArgs, Namespace]:
    """Splits the settings' ``args`` into the engine's and those of vLLM's OpenAI layer."""
    frontend_names = {field.name for field in dataclasses.fields(FrontendArgs)}
    engine_names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in settings.args:
        if name in OWN_ARGS:
            raise ValueError(
                f"model {model_name}: engine.args.{name} follows from other settings; remove it"
            )
        if name not in frontend_names | engine_names:
            raise ValueError(f"model {model_name}: vLLM knows no argument engine.args.{name}")
    engine_args = AsyncEngineArgs(
        model=settings.model,
        served_model_name=[model_name],
        tensor_parallel_size=settings.tensor_parallel_size,
        **{name: value for name, value in settings.args.items() if name in engine_names},
    )
    frontend = FrontendArgs(
        **{name: value for name, value in settings.args.items() if name in frontend_names}
    )
    return engine_args, Namespace(**{**vars(engine_args), **vars(frontend)})


def _chat_request(request: EngineRequest) -> ChatCompletionRequest:
    body = {name: value for name, value in request.body.items() if name != "max_tokens"}
    # vLLM's own way to hand over a chat prompt's ids, so that it is neither templated nor tokenised
    # again. It re-renders the messages in two cases, ``echo`` and content other than text.
    transfer = {
        **(body.get("kv_transfer_params") or {}),
        "prompt_token_ids": request.prompt_token_ids.tolist(),
    }
    return ChatCompletionRequest.model_validate(
        {
            **body,
            "max_completion_tokens": request.max_tokens,
            "kv_transfer_params": transfer,
            "priority": request.priority,
            "request_id": request.decision_id,
        }
    )


def _completion_request(request: EngineRequest) -> CompletionRequest:
    return CompletionRequest.model_validate(
        {
            **request.body,
            "prompt": request.prompt_token_ids.tolist(),
            "max_tokens": request.max_tokens,
            "priority": request.priority,
            "request_id": request.decision_id,
        }
    )


def _failed(error: Exception) -> Failed:
    if isinstance(error, pydantic.ValidationError):
        first = error.errors(include_url=False)[0]
        param = ".".join(str(step) for step in first["loc"])
        return _refused(create_error_response(f"{param}: {first['msg']}", param=param))
    return _refused(create_error_response(error))


def _refused(response: ErrorResponse) -> Failed:
    return Failed(response.error.code, response.error.model_dump())
