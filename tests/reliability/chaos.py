"""Random faults in a fleet of real processes on the demo model, while clients compare every answer with the right one.

    python -m tests.reliability.chaos [--seconds 240] [--seed 1] [--clients 16] [--questions 24] [--dtype bfloat16]
        [--draft-layers 1 | --head]

There are two gateways and two workers of each role. At random moments a member is killed (SIGKILL), stopped (SIGSTOP) or drained
(SIGTERM), or a worker's connections are cut or held. Only one member of a role is struck at a time, so that there is a spare one. A
process that ends is started anew.

Every question is answered once before, without faults. Each later answer must be the same: text, token ids, finish reason, usage
and log probabilities. Half of the questions are greedy, half sampled with a seed; some have stop strings. Half go to one of two
adapters.

Decode workers speculate by look-up. With ``--draft-layers`` they have a draft model of the model's first layers, and with
``--head`` an EAGLE-3 head that was trained on the answers. Few tokens of the draft model are accepted. Draft model and head need
few clients.

A client whose gateway is killed sees its connection break, as on a cluster, and asks again. Clients may notice no other fault.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from kvrelay.wire.security.keys import make_keys
from tests.adapters import linear_shapes, write_adapter

from .chaos_report import Report
from .drafts import Drafter, DraftWatch, first_layers, known_head, look_up
from .fleet import MODEL_NAME, Fleet, Life, Member, fleet
from .questions import ANSWER_S, Answer, HonestError, Question, StreamCutError, ask, questions, reference

FAULTS = {"kill": 5, "drain": 3, "pause": 2, "freeze": 1, "cut": 4, "hold": 2}  # relative frequencies
PAUSE_S = (0.5, 4.0)  # a stop that is shorter than peers' time-outs
FREEZE_S = (11.0, 13.0)  # a stop that is longer than peers' time-outs
BETWEEN_S = (0.2, 2.5)
MODEL_OPTIONS = ["--threads", "1", "--kv-memory-mb", "512", "--device", "cpu"]
ADAPTERS = ("first", "second")
MODELS = (MODEL_NAME, ADAPTERS[0], MODEL_NAME, ADAPTERS[1])
IDLE_S = 45.0  # after the last fault: time for a stopped worker's leases and sends to run out


class Chaos:
    """Clients and faults over one fleet."""

    def __init__(self, up: Fleet, seed: int, report: Report, well_s: float) -> None:
        """``well_s``: how long all members of a role must have been ready before one of them is struck."""
        self._fleet = up
        self._well_s = well_s
        self._chance = random.Random(seed)
        self.report = self._report = report
        self._is_over = False
        self._aside: set[asyncio.Task[None]] = set()

    async def run(self, asked: list[Question], num_clients: int, seconds: float) -> None:
        """Send questions and cause faults for ``seconds``, and wait until all questions are answered."""
        clients = [asyncio.create_task(self._client(asked, index)) for index in range(num_clients)]
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            await asyncio.sleep(self._chance.uniform(*BETWEEN_S))
            await self._disturb()
        await asyncio.gather(*self._aside)
        self._is_over = True
        await asyncio.gather(*clients)

    async def roll(self, asked: list[Question], num_clients: int) -> None:
        """Drain every member in turn, each when all are ready again, and wait until all questions are answered."""
        clients = [asyncio.create_task(self._client(asked, index)) for index in range(num_clients)]
        for member in self._fleet.members.values():
            while not all(self._is_whole(role) for role in ("prefill", "decode", "gateway")):
                await asyncio.sleep(0.1)
            self._report.faults[f"drain {member.role}"] += 1
            num_ends = len(member.exit_codes)
            member.signal(signal.SIGTERM, Life.ENDING)
            while len(member.exit_codes) == num_ends:
                await asyncio.sleep(0.1)
        await self._fleet.wait_ready()
        self._is_over = True
        await asyncio.gather(*clients)

    async def run_calmly(self, asked: list[Question]) -> None:
        """Ask each question once, all at the same time, without faults."""
        async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
            answers = await asyncio.gather(*(self._answer(http, one, self._chance) for one in asked))
        for question, answer in zip(asked, answers, strict=True):
            if answer is not None and (difference := answer.differs(question.answer)) is not None:
                self._report.different.append(f"in the calm after: {question.body['prompt'][-60:]!r}: {difference}")

    async def _client(self, asked: list[Question], index: int) -> None:
        chance = random.Random(index)
        limits = httpx.Limits(max_keepalive_connections=0)  # any gateway may get the next question, as behind a Service
        async with httpx.AsyncClient(timeout=ANSWER_S, limits=limits, trust_env=False) as http:
            while not self._is_over:
                question = chance.choice(asked)
                begun_s = time.monotonic()
                answer = await self._answer(http, question, chance)
                self._report.longest_s = max(self._report.longest_s, time.monotonic() - begun_s)
                if answer is None:
                    continue
                if (difference := answer.differs(question.answer)) is None:
                    self._report.same += 1
                else:
                    self._report.different.append(f"{question.body['prompt'][-60:]!r}: {difference}")

    async def _answer(self, http: httpx.AsyncClient, question: Question, chance: random.Random) -> Answer | None:
        """The answer that a client of a Service gets: it asks a ready gateway, and asks again if the connection breaks.

        Returns None if the gateway reports an error.
        """
        while True:
            gateways = [one for one in self._fleet.of("gateway") if one.ready_s is not None]
            if not gateways:
                await asyncio.sleep(0.1)
                continue
            gateway = chance.choice(gateways)
            pid = gateway.pid
            try:
                return await ask(http, gateway.url, question.body)
            except HonestError as error:
                self._report.errors.append(str(error))
                return None
            except StreamCutError as error:
                if gateway.life is Life.RUNNING and gateway.pid == pid:
                    self._report.errors.append(f"{gateway.name} broke a stream, and nobody had touched it: {error}")
                    return None
                if str(error) == "ConnectError":
                    self._report.refused_connections += 1
                else:
                    self._report.cut += 1

    # -- faults ----------------------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        """Cause one fault in a role whose members are all ready."""
        fault = self._chance.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
        roles = [role for role in ("prefill", "decode", "gateway") if self._is_whole(role)]
        if fault in ("cut", "hold", "freeze", "pause"):
            roles = [role for role in roles if role != "gateway"]
        if not roles:
            return
        member = self._chance.choice(self._fleet.of(self._chance.choice(roles)))
        self._report.faults[f"{fault} {member.role}"] += 1
        match fault:
            case "kill":
                member.signal(signal.SIGKILL, Life.DEAD)
            case "drain":
                member.signal(signal.SIGTERM, Life.ENDING)
            case "pause":
                self._begin(self._stop(member, self._chance.uniform(*PAUSE_S)))
            case "freeze":
                self._begin(self._stop(member, self._chance.uniform(*FREEZE_S)))
            case "cut":
                assert member.cable is not None
                member.cable.cut()
            case "hold":
                assert member.cable is not None
                self._begin(self._hold(member, self._chance.uniform(*PAUSE_S)))

    def _is_whole(self, role: str) -> bool:
        """Whether all members of a role have been ready for ``well_s``, so that their peers have linked to them again."""
        now_s = time.monotonic()
        return all(one.ready_s is not None and one.ready_s < now_s - self._well_s for one in self._fleet.of(role))

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _stop(self, member: Member, seconds: float) -> None:
        member.signal(signal.SIGSTOP, Life.STOPPED)
        await asyncio.sleep(seconds)
        member.signal(signal.SIGCONT, Life.RUNNING)

    async def _hold(self, member: Member, seconds: float) -> None:
        member.ready_s = None
        assert member.cable is not None
        await member.cable.hold(seconds)


async def chaos(
    model: Path,
    seconds: float | None,
    seed: int,
    *,
    num_clients: int = 16,
    worker_options: list[str],
    num_questions: int = 24,
    well_s: float = 2.0,
    drafter: Drafter = look_up,
) -> Report:
    """The whole run. With ``seconds`` None there is one rolling restart of all members instead of faults.

    Raises AssertionError if the fleet does not come up, or if a worker holds blocks or requests at the end.
    """
    report = Report()
    with tempfile.TemporaryDirectory() as directory:
        keys, adapters = Path(directory) / "keys", Path(directory) / "adapters"
        make_keys(keys)
        for number, name in enumerate(ADAPTERS):
            # The adapters are small, so that answers are still words.
            write_adapter(adapters / name, linear_shapes(model), rank=8 * (number + 1), seed=number, size=0.15)
        both = ["--adapters", str(adapters), "--drain-s", str(ANSWER_S)]
        bodies = questions(num_questions, random.Random(seed), MODELS)
        speculation = await asyncio.to_thread(drafter, model, Path(directory) / "drafter", bodies)
        async with fleet(
            Path(directory),
            model=model,
            num_prefills=2,
            num_decodes=2,
            num_gateways=2,
            worker_options=[*worker_options, *both],
            gateway_options=both,
            decode_options=speculation,
            keys=keys,
        ) as up:
            urls = [gateway.url for gateway in up.of("gateway")]
            asked = await reference(urls, bodies, num_clients, MODEL_NAME)
            await up.wait_idle(10.0)
            before = await up.calm_figures()
            trouble, drafts = Chaos(up, seed, report, well_s), DraftWatch(up)
            watching = asyncio.create_task(drafts.run())
            await (trouble.roll(asked, num_clients) if seconds is None else trouble.run(asked, num_clients, seconds))
            await up.wait_ready()
            report.idle_after_s = await up.wait_idle(IDLE_S)
            # All members, also those that have just started, open their connections before they are measured again.
            calm = Chaos(up, seed, Report(), well_s)
            await calm.run_calmly(asked)
            report.errors += calm.report.errors
            report.different += calm.report.different
            await up.wait_idle(10.0)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await drafts.look()
            report.drafts = drafts.totals
            after = await up.calm_figures(before)
            report.figures = {name: (before[name], after[name]) for name in up.members}
            for member in up.members.values():
                # A member may end by our SIGKILL, or with 0 after a drain.
                report.bad_exits += [
                    f"{member.name}: {code}" for code in member.exit_codes if code not in (0, -signal.SIGKILL)
                ]
    return report


def main() -> int:
    """Print the reports. Returns 1 if there are problems."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--questions", type=int, default=24)
    # bf16 takes half as long, and gives equal answers if only our own kernels are used (docs/reliability.md).
    parser.add_argument("--dtype", default="float32")
    drafters = parser.add_mutually_exclusive_group()
    drafters.add_argument(
        "--draft-layers", type=lambda count: first_layers(int(count)), dest="drafter", default=look_up
    )
    drafters.add_argument("--head", action="store_const", const=known_head, dest="drafter")
    arguments = parser.parse_args()
    from kvrelay.launcher.models import resolve_model  # noqa: PLC0415 - its imports take a second

    num_problems = 0
    for seconds in (arguments.seconds, None):
        what = "a rolling restart of everything" if seconds is None else f"{seconds:g} s of faults"
        sys.stdout.write(f"== {what}, seed {arguments.seed}, {arguments.clients} clients\n")
        sys.stdout.flush()
        work = chaos(
            resolve_model("demo"),
            seconds,
            arguments.seed,
            num_clients=arguments.clients,
            worker_options=["--dtype", arguments.dtype, *MODEL_OPTIONS],
            num_questions=arguments.questions,
            drafter=arguments.drafter,
        )
        report = asyncio.run(work)
        problems = report.problems(max_growth_mib=250)
        if seconds is None and report.cut:
            problems.append(f"{report.cut} streams were cut, and no gateway was killed")
        elif seconds is not None and arguments.drafter is not look_up and not report.drafts[1]:
            problems.append("no draft came true: nothing is shown of speculation")
        for line in [*report.lines(), *(f"FAILED: {problem}" for problem in problems)]:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
        num_problems += len(problems)
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
