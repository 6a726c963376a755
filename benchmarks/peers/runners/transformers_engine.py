"""transformers: `generate` in static batches, or `generate_batch` (continuous batching).

Arguments: MODEL_DIRECTORY THREADS static|continuous DTYPE.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from protocol import Job, serve, take_stdout

_NUM_PAGES = 160  # of 256 tokens; by default it would take nine tenths of the machine's memory
_MAX_BATCH_TOKENS = 1024


def main() -> None:
    """Load the model, then run jobs until stdin ends."""
    channel = take_stdout()
    import torch  # noqa: PLC0415 - after take_stdout
    import transformers  # noqa: PLC0415 - after take_stdout

    directory, threads, mode, dtype = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.eval()
    model.generation_config.pad_token_id = 0

    def static(job: Job) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        prompts = job.prompts()
        start_s = time.monotonic()
        for first in range(0, len(prompts), job.concurrency):
            batch = torch.tensor(prompts[first : first + job.concurrency])
            sent_s = time.monotonic() - start_s
            stamps: list[float] = []

            def stamp(ids: Any, _scores: Any, stamps: list[float] = stamps, **_rest: Any) -> Any:
                stamps.append(time.monotonic() - start_s)
                return torch.zeros(ids.shape[0], dtype=torch.bool)

            with torch.inference_mode():
                output = model.generate(
                    batch,
                    attention_mask=torch.ones_like(batch),
                    max_new_tokens=job.output_len,
                    min_new_tokens=job.output_len,
                    do_sample=False,
                    stopping_criteria=transformers.StoppingCriteriaList([stamp]),
                )
            tokens = output.shape[1] - batch.shape[1]
            record = {"sent_s": sent_s, "finished_s": stamps[-1], "token_s": stamps, "tokens": tokens}
            records += [record] * batch.shape[0]
        return records

    def continuous(job: Job) -> list[dict[str, Any]]:
        config = transformers.ContinuousBatchingConfig(
            num_blocks=_NUM_PAGES,
            max_batch_tokens=_MAX_BATCH_TOKENS,
            max_requests_per_batch=job.concurrency,
            allow_block_sharing=False,
        )
        generation = transformers.GenerationConfig(
            max_new_tokens=job.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        start_s = time.monotonic()
        answers = model.generate_batch(
            job.prompts(), generation, config, record_timestamps=True, max_new_tokens=job.output_len
        )
        end_s = time.monotonic() - start_s
        return [
            {"sent_s": 0.0, "finished_s": end_s, "token_s": [end_s], "tokens": len(answer.generated_tokens)}
            for answer in answers.values()
        ]

    info = {"engine": f"transformers {mode}", "version": transformers.__version__, "weights": dtype}
    serve(info, {"static": static, "continuous": continuous}[mode], channel)


if __name__ == "__main__":
    main()
