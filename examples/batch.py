"""Many prompts without a server: the model runs in this process. Usage: batch.py [MODEL]"""

import sys

from kvrelay.executor import LLM, SamplingParams

countries = ["France", "Italy", "Spain", "Japan", "Egypt", "Norway", "Greece", "Portugal"]
prompts = [f"The capital of {country} is" for country in countries]

with LLM(sys.argv[1] if sys.argv[1:] else "demo", kv_memory_mb=256) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    for prompt, output in zip(prompts, outputs, strict=True):
        print(prompt + output.outputs[0].text)
    print(llm.get_stats())
