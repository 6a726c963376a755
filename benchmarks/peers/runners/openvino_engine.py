"""openvino-genai's continuous batching, on the GGUF file as it is (4-bit weights). Arguments: MODEL.gguf THREADS."""

from __future__ import annotations

import sys
import time
from typing import Any

from protocol import Job, serve, take_stdout

_CACHE_GIB = 2
_MAX_SEQS = 64


def main() -> None:
    """Load the model, then run jobs until stdin ends."""
    channel = take_stdout()
    import numpy as np  # noqa: PLC0415 - after take_stdout
    import openvino as ov  # noqa: PLC0415 - after take_stdout
    import openvino_genai as ov_genai  # noqa: PLC0415 - after take_stdout

    model, threads = sys.argv[1], int(sys.argv[2])
    scheduler = ov_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIB
    scheduler.max_num_seqs = _MAX_SEQS
    scheduler.enable_prefix_caching = False
    pipeline = ov_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(job: Job) -> list[dict[str, Any]]:
        config = ov_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = job.output_len
        config.ignore_eos = True
        config.do_sample = False
        waiting = list(enumerate(job.prompts()))[::-1]
        running: dict[int, tuple[Any, dict[str, Any]]] = {}
        records: list[dict[str, Any]] = []
        start_s = time.monotonic()
        while waiting or running:
            while waiting and len(running) < job.concurrency:
                number, prompt = waiting.pop()
                record: dict[str, Any] = {"sent_s": time.monotonic() - start_s, "token_s": [], "tokens": 0}
                tensor = ov.Tensor(np.array([prompt], dtype=np.int64))
                running[number] = (pipeline.add_request(number, tensor, config), record)
            pipeline.step()
            now_s = time.monotonic() - start_s
            for number, (handle, record) in list(running.items()):
                if handle.can_read():
                    record["tokens"] += sum(len(output.generated_ids) for output in handle.read().values())
                    record["token_s"].append(now_s)
                if handle.get_status() != ov_genai.GenerationStatus.RUNNING:
                    record["finished_s"] = now_s
                    records.append(record)
                    del running[number]
        return records

    serve({"engine": "openvino-genai", "version": ov_genai.__version__, "weights": "Q4_1"}, run, channel)


if __name__ == "__main__":
    main()
