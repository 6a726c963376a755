"""transformers' own greedy generation, as a process: one JSON task on stdin, one JSON line a prompt on stdout.

A process of its own, so that its weights and threads are gone before the deployments under test start. Nothing of kvrelay's
engine is imported here: this is what it is compared with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvrelay.launcher.errors import VerifyError


def generate(
    directory: Path, prompts: Sequence[Sequence[int]], *, dtype: str, device: str, threads: int, max_tokens: int
) -> Iterator[list[int]]:
    """``max_tokens`` greedy tokens of each prompt, one by one as they come. Raises VerifyError."""
    task = _task(directory, dtype, device, threads) | {"prompts": [list(p) for p in prompts], "max_tokens": max_tokens}
    for line in _run(task):
        yield line["token_ids"]


def score(
    directory: Path, questions: Sequence[tuple[Sequence[int], int, int]], *, dtype: str, device: str, threads: int
) -> Iterator[float]:
    """For each (context, a, b): how much the logit of token a exceeds that of b after the context. Raises VerifyError."""
    task = _task(directory, dtype, device, threads) | {"questions": [[list(c), a, b] for c, a, b in questions]}
    for line in _run(task):
        yield line["gap"]


def _task(directory: Path, dtype: str, device: str, threads: int) -> dict[str, Any]:
    return {"directory": str(directory), "dtype": dtype, "device": device, "threads": threads}


def _run(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lifeline = [sys.executable, "-P", "-m", "kvrelay.common.lifeline", str(os.getpid())]
    command = [*lifeline, sys.executable, "-P", "-m", "kvrelay.launcher.reference"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_NUM_THREADS": str(task["threads"])}
    with subprocess.Popen(  # noqa: S603 - our own module, no shell
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None, "started with a pipe"
        assert process.stdout is not None, "started with a pipe"
        try:
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise VerifyError(f"transformers cannot run {task['directory']}: {answer['error']}")
                yield answer
        except BaseException:  # also of a consumer that stops asking: the process would compute on, and we wait for it
            process.kill()
            raise
    if process.returncode != 0:
        raise VerifyError(f"the transformers process ended with exit code {process.returncode}")


def main() -> None:
    """The process's side."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what libraries print must not mix with the answers
        try:
            for answer in _answers(json.load(sys.stdin)):
                print(json.dumps(answer), file=answers, flush=True)
        except Exception as error:  # the parent tells it to the operator
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)


def _answers(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import torch  # noqa: PLC0415 - only in the process
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415

    torch.set_num_threads(task["threads"])
    device = task["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(task["directory"], dtype=getattr(torch, task["dtype"]))
    model = model.to(device).eval()
    # Nothing of the model's own: no sampling, no penalties, and no token that ends it early, as with ignore_eos.
    greedy = GenerationConfig(do_sample=False, max_new_tokens=task.get("max_tokens"), eos_token_id=None, pad_token_id=0)
    model.generation_config = greedy
    with torch.inference_mode():
        for prompt in task.get("prompts", ()):
            ids = torch.tensor([prompt], device=device)
            output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            new_tokens = output[0, len(prompt) :].tolist()
            assert len(new_tokens) == task["max_tokens"], f"{len(new_tokens)} tokens instead of {task['max_tokens']}"
            yield {"token_ids": new_tokens}
        for context, ours, theirs in task.get("questions", ()):
            logits = model(torch.tensor([context], device=device)).logits[0, -1].float()
            yield {"gap": float(logits[ours] - logits[theirs])}


if __name__ == "__main__":
    main()
