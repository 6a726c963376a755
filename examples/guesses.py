"""The same answer with and without speculation. Guessed tokens are faster if the answer repeats the prompt."""

import time

from kvrelay.executor import LLM, Chat, SamplingParams

CODE = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height
"""
question = f"Rename width to w in this code. Answer with all of the code.\n\n```python\n{CODE}```"
prompt = Chat([{"role": "user", "content": question}])
params = SamplingParams(temperature=0, max_tokens=60)

texts = []
for speculation in ("off", "ngram"):
    with LLM("demo", speculation=speculation) as llm:
        llm.generate(prompt, params)  # fills the prefix cache
        begun_s = time.perf_counter()
        [output] = llm.generate(prompt, params)
        texts.append(output.outputs[0].text)
        print(f"speculation {speculation}: {time.perf_counter() - begun_s:.2f} s")
print(f"the same text: {texts[0] == texts[1]}")
