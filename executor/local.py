"""A model in this process: one decode worker, which computes prompts itself, with the gateway's code in front of it.

Between a request's body and the worker everything is the gateway's own code; only HTTP is left out. The two communicate over a
ZeroMQ socket in a private directory, so there are no ports. The worker's model thread is the only other thread that computes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from kvrelay.common.errors import ModelError
from kvrelay.common.fair_queue import Flow
from kvrelay.common.sampling import SampledToken
from kvrelay.common.settings import setting
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker, load_drafting
from kvrelay.engine.factory import load_engine, load_guides, load_images
from kvrelay.engine.guides.guidance import GuideCompiler, NoGuides
from kvrelay.engine.images.interface import ImageReader
from kvrelay.engine.load_progress import LoggedProgress
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings, sequences_at_a_time
from kvrelay.engine.step.interface import Engine
from kvrelay.executor.executor import Stats
from kvrelay.executor.outputs import Logprob, Piece, TokenLogprobs
from kvrelay.executor.progress import Progress
from kvrelay.executor.request import Chat, Request, encode_body
from kvrelay.gateway.apis.answering import choose
from kvrelay.gateway.apis.openai.bodies import ChatBody, CompletionBody
from kvrelay.gateway.apis.openai.completion_answer import finite
from kvrelay.gateway.apis.prompts import prompt_of
from kvrelay.gateway.chat.image_prompt import Prompt
from kvrelay.gateway.http.request import parse_body
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.model import Model, ModelFiles
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.text.output import TextDelta, Usage
from kvrelay.gateway.text.tokenizer import aside
from kvrelay.gateway.workers.pool import WorkerPool, static_workers
from kvrelay.launcher.models import resolve_model
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.worker.setup import Setup

logger = logging.getLogger(__name__)

# Both ends of the link are on one loop. Silence means that the loop or the whole process was held up, not that an end is
# gone.
_LINK = LinkSettings(ping_interval_s=0.2, peer_timeout_s=3600.0)
_CONNECT_S = 30.0
_LONGEST_DIRECTORY = 80  # characters; a socket's path may have 107


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Options of a worker in this process and of the line in front of it, under the components' own names."""

    model: ModelSettings
    kv: KvSettings
    fake: FakeSettings
    scheduler: DecodeSchedulerSettings
    relay: RelaySettings
    images: bool = setting(True, "read the images of prompts. What encodes images takes memory from KV")


@dataclass(slots=True)
class _Running:
    """The objects that exist between start and stop."""

    directory: Path  # for the sockets
    worker: DecodeWorker
    metrics: GatewayMetrics
    model: Model


class LocalBackend:
    """Implements :class:`kvrelay.executor.executor.Backend`."""

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        settings: LocalSettings,
        guides: GuideCompiler | None = None,
        draft_engine: Engine | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """``directory``: of the model; its tokenizer and chat template are loaded. Raises ModelError.

        ``guides``: compiles guides; None: requests with a guide are refused. ``draft_engine``: a loaded draft model. ``images``:
        None: prompts have none.
        """
        self._settings = settings
        self.max_num_seqs = sequences_at_a_time(settings.scheduler.max_num_seqs, engine.card.device_type)
        self._files = ModelFiles.load(directory)
        self._model_name = directory.name
        self._engine: Engine | None = engine  # until a worker takes it over
        self._guides = guides
        self._draft_engine = draft_engine  # like the engine
        self._images = images
        self._running: _Running | None = None

    @classmethod
    def load(cls, settings: LocalSettings) -> LocalBackend:
        """Find the model and load it; takes seconds. Raises ModelError, DownloadError or SettingsError."""
        directory = resolve_model(settings.model.model, needs_weights=not settings.fake.is_fake)
        model = dataclasses.replace(settings.model, model=str(directory))
        scheduler, draft_model = settings.scheduler, settings.scheduler.draft_model
        if draft_model is not None:
            found = resolve_model(draft_model, needs_tokenizer=scheduler.speculation != "head")
            scheduler = dataclasses.replace(scheduler, draft_model=str(found))
            settings = dataclasses.replace(settings, scheduler=scheduler)
        drafting = load_drafting(scheduler, model, settings.kv, settings.fake)
        engine = load_engine(
            model,
            settings.kv,
            settings.fake,
            max_num_seqs=settings.scheduler.max_num_seqs,
            max_batched_tokens=settings.scheduler.max_batched_tokens,
            decodes=True,
            reads_images=settings.images,
            progress=LoggedProgress(logger, time.monotonic),
            guessing=drafting.guessing,
        )
        guides = load_guides(model, settings.fake, engine.card.vocab_size)
        images = load_images(model, settings.fake, engine.card)
        return cls(engine, directory, settings, guides, drafting.draft_engine, images)

    @property
    def worker(self) -> DecodeWorker:
        """The worker, while it is running."""
        return self._up.worker

    async def start(self) -> None:
        """See Backend. Raises SettingsError or ModelError if worker and gateway cannot connect."""
        assert self._engine is not None, "a backend is started once"
        settings = self._settings
        directory = _private_directory()
        try:
            setup = Setup(
                "executor",
                time.time_ns(),
                f"ipc://{directory}/control",
                CollectorRegistry(),
                Network.open(),
                link_settings=_LINK,
                max_retained_share=settings.kv.max_retained_share,
                guides=self._guides or NoGuides(),
                images=self._images,
            )
            worker = DecodeWorker(
                self._engine,
                settings.scheduler,
                f"ipc://{directory}/blocks",
                setup,
                draft_engine=self._draft_engine,
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._engine = self._draft_engine = None
        metrics = GatewayMetrics(CollectorRegistry())
        network, of_model = Network.open(), metrics.of_model(self._model_name)
        pool = WorkerPool(f"executor-{secrets.token_hex(8)}", of_model, _LINK, network, needs_prefill_workers=False)
        # With one worker, no record of cached prefixes is needed.
        relay = Relay(pool, dataclasses.replace(settings.relay, policy="least_loaded"), of_model, network.clock)
        self._running = _Running(
            directory=directory,
            worker=worker,
            metrics=metrics,
            model=Model(self._model_name, self._files, relay),
        )
        await worker.start()
        pool.update(static_workers((), (worker.address,)))
        try:
            async with asyncio.timeout(_CONNECT_S):
                # Only the worker's first report says how many requests it computes at a time.
                while any(one.status is None for one in pool.workers):
                    pool.changed.clear()
                    await pool.changed.wait()
        except TimeoutError as error:
            reasons = "; ".join(pool.not_ready()) or "it does not report"
            raise ModelError(f"the worker in this process did not come up: {reasons}") from error

    async def run(self, request: Request, progress: Progress, *, stream: bool) -> None:
        """See Backend."""
        model, received_s = self._up.model, time.monotonic()
        flow = Flow(priority=request.priority)
        model.check(flow)
        shown = "" if isinstance(request.prompt, Chat) else request.prompt
        body = parse_body(CompletionBody, None, encode_body(request.body(shown, stream=stream)))
        spec = body.spec(max_tokens=body.max_tokens, num_logprobs=body.logprobs)
        prompt, spec = await _prompt(model, request, spec)
        sequences = model.sequences(
            [prompt.token_ids],
            spec,
            request_id=f"{request.request_id}.{secrets.token_hex(4)}",
            received_s=received_s,
            prompt_param="prompt",
            flow=flow,
            timeout_s=math.inf if request.timeout_s is None else request.timeout_s,
            images=prompt.images,
        )
        progress.on_prompt(sequences[0].prompt_token_ids)
        usages = [Usage(len(prompt.token_ids)) for _ in sequences]
        # The best outputs, or the beams, are known only at the end.
        is_choice_late = len(sequences) > spec.num_choices or spec.beam_search is not None
        late: list[list[TextDelta]] = [[] for _ in sequences]

        def write(index: int, delta: TextDelta) -> None:
            if delta.prompt_logprobs is not None:
                progress.on_prompt(logprobs=[None, *map(token_logprobs, delta.prompt_logprobs)])
            progress.add(index, _piece(delta, tells_logprobs=spec.num_logprobs is not None))

        def take(index: int, delta: TextDelta) -> None:
            if delta.finish_reason is not None or stream:
                progress.on_prompt(num_cached_tokens=usages[0].num_cached_tokens)
            if is_choice_late:
                late[index].append(delta)
            else:
                write(index, delta)

        await model.run(sequences, usages, take)
        if is_choice_late:
            for choice in choose(sequences, late):
                for delta in choice.deltas:
                    write(choice.index, delta)

    async def stats(self) -> Stats:
        """See Backend."""
        up = self._up
        status = up.worker.service.status()

        def counted(name: str) -> int:
            return int(up.metrics.registry.get_sample_value(name, {"model": up.model.name}) or 0)

        return {
            "num_running": status.num_running,
            "num_waiting": status.num_waiting + counted("kvrelay_requests_queued"),
            "num_used_blocks": status.num_blocks - status.num_free_blocks,
            "num_free_blocks": status.num_free_blocks,
            "num_prompt_tokens": counted("kvrelay_gateway_prompt_tokens_total"),
            "num_output_tokens": counted("kvrelay_gateway_output_tokens_total"),
        }

    def not_live(self) -> list[str]:
        """See Backend."""
        return self._up.worker.not_live()

    async def stop(self) -> None:
        """See Backend."""
        up, engine, self._running, self._engine = self._running, self._engine, None, None
        if engine is not None:  # no worker took it over, and its ranks are processes
            await asyncio.to_thread(engine.close)
        if up is not None:
            await up.model.pool.stop()
            await up.worker.stop()
            await asyncio.to_thread(shutil.rmtree, up.directory, ignore_errors=True)

    @property
    def _up(self) -> _Running:
        assert self._running is not None, "requests come between start and stop"
        return self._running


async def _prompt(model: Model, request: Request, spec: GenerationSpec) -> tuple[Prompt, GenerationSpec]:
    """The request's prompt, and ``spec`` with what a chat adds.

    Raises InvalidRequestError, UnavailableError if the worker does not tell how to read images.
    """
    params = request.sampling_params
    match request.prompt:
        case str(text):
            adds_special_tokens = params.add_special_tokens
            encode = partial(model.encode, text, "prompt", add_special_tokens=adds_special_tokens)
            return Prompt(await aside(encode, len(text))), spec
        case Chat() as chat:
            body = encode_body(chat.body())
            read = parse_body(ChatBody, None, body)
            read_chat, _, prompt = await prompt_of(
                model,
                lambda: (read.chat(model), None),
                lambda text: model.encode(text, "messages", add_special_tokens=False),
                len(body),
            )
            return prompt, msgspec.structs.replace(
                spec,
                continues_text=chat.continue_final_message,  # else its answer begins a text, as over HTTP
                image_params=tuple(image.param for image in read_chat.images),
            )
        case token_ids:
            model.check_token_ids(token_ids, "prompt")
            return Prompt(list(token_ids)), spec


def _piece(delta: TextDelta, *, tells_logprobs: bool) -> Piece:
    return Piece(
        text=delta.text,
        token_ids=[token.token_id for token in delta.tokens],
        logprobs=[token_logprobs(token) for token in delta.tokens] if tells_logprobs else None,
        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        stop_reason=delta.stop_reason,
    )


def token_logprobs(token: SampledToken) -> TokenLogprobs:
    """The log probabilities of one token; empty if unknown. The numbers are those of a gateway's answer."""
    logprob = finite(token.logprob)
    if logprob is None:
        return {}
    ranked = {
        token_id: Logprob(finite(other) or 0.0, rank + 1) for rank, (token_id, other) in enumerate(token.top_logprobs)
    }
    return {token.token_id: Logprob(logprob), **ranked}


def _private_directory() -> Path:
    """A new directory that only this user can enter, whose path is short enough for a socket."""
    directory = tempfile.mkdtemp(prefix="kvrelay-")
    if len(directory) > _LONGEST_DIRECTORY:
        Path(directory).rmdir()
        directory = tempfile.mkdtemp(prefix="kvrelay-", dir="/tmp")
    return Path(directory)
