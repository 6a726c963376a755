"""Sides without a server: an engine in a process of its own, which runs a job at a time (``runners/protocol.py``).

They have no HTTP, no tokens sent one by one and no generator beside them, which is to their advantage.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvrelay.launcher.bench.records import CpuUse, RequestRecord, RunResult
from peers.errors import PeerError
from peers.load import SAMPLE_S, Load, SideMeter, judged
from peers.sides import Places, Side
from peers.trees import ProcessTree

_START_S = 300.0
_RUN_S = 400.0


@dataclass(slots=True)
class EngineSide(Side):
    """One process that reads jobs and writes records."""

    command: Sequence[str]
    environment: Mapping[str, str]
    info: dict[str, str] = field(default_factory=dict)  # what it says of itself; after ``start``

    def start(self) -> None:
        log = self.places.work / f"{self.name}-0.log"
        self._launch(ProcessTree(self.name, self.command, environment=self.environment, log=log, has_pipes=True))
        answer, _ = self._answer(_START_S)
        self.info = dict(answer["ready"])

    def probe(self, seed: int) -> None:
        self.measure(Load(1, output_len=8, requests=1), seed)

    def measure(self, load: Load, seed: int) -> RunResult:
        if load.requests is None or load.burst is not None or load.rate is not None:
            raise PeerError(f"{self.name} has no server: it takes a number of requests, without bursts or a rate")
        job = {
            "concurrency": load.concurrency,
            "requests": load.requests,
            "input_len": load.input_len,
            "output_len": load.output_len,
            "seed": seed,
        }
        jobs, _ = self._trees[0].pipes
        started_at = datetime.now(UTC)
        print(json.dumps(job), file=jobs, flush=True)
        answer, cpu = self._answer(_RUN_S)
        records = [_record(index, load, item) for index, item in enumerate(answer["records"])]
        if len(records) != load.requests:
            raise PeerError(
                f"{self.name} answered {len(records)} of {load.requests} requests; see {self._trees[0].log}"
            )
        result = RunResult(
            name=self.name,
            started_at=started_at.isoformat(timespec="seconds"),
            duration_s=max(record.finished_s for record in records) - min(record.sent_s for record in records),
            url="",
            model=self.places.model.name,
            settings={"load": load.words, "prompt_seed": str(seed)},
            environment=self.info,
            requests=records,
            cpu=None,
        )
        return judged(result, cpu)

    def _answer(self, limit_s: float) -> tuple[dict[str, Any], CpuUse | None]:
        """The next line that the engine writes. Raises PeerError if none comes."""
        _, answers = self._trees[0].pipes
        meter = SideMeter(self.pids, list)
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            self.check_alive()
            meter.sample()
            if select.select([answers], [], [], SAMPLE_S)[0]:
                line = answers.readline()
                if line:
                    found: dict[str, Any] = json.loads(line)
                    return found, meter.stop()
                time.sleep(SAMPLE_S)  # its end of the pipe is closed: it is about to end
        raise PeerError(
            f"{self.name} did not answer within {limit_s:.0f} s; {self._trees[0].log} ends with: {self._trees[0].tail()}"
        )


def openvino(name: str, about: str, places: Places) -> EngineSide:
    """openvino-genai with both cores."""
    command = (places.program("openvino", "python"), _runner("openvino_engine.py"), places.need_gguf(), "2")
    return EngineSide(name, about, places, command, {"OPENVINO_TELEMETRY_DISABLE": "1"})


def transformers(name: str, about: str, places: Places, mode: str) -> EngineSide:
    """transformers with both cores; ``mode`` is static or continuous."""
    command = (sys.executable, _runner("transformers_engine.py"), str(places.model), "2", mode, places.dtype)
    return EngineSide(name, about, places, command, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"})


def _runner(name: str) -> str:
    return str(Path(__file__).parent / "runners" / name)


def _record(index: int, load: Load, item: dict[str, Any]) -> RequestRecord:
    tokens = int(item["tokens"])
    is_short = tokens != load.output_len
    return RequestRecord(
        index=index,
        stream="main",
        due_s=item["sent_s"],
        sent_s=item["sent_s"],
        finished_s=item["finished_s"],
        prompt_tokens=load.input_len,
        planned_output_tokens=load.output_len,
        output_tokens=tokens,
        chunk_s=item["token_s"],
        error="short answer" if is_short else None,
        error_text=f"{tokens} tokens instead of {load.output_len}" if is_short else None,
    )
