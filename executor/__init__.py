"""The executor: kvrelay for programs that embed a model instead of calling HTTP.

    from kvrelay.executor import LLM, SamplingParams

    with LLM("demo") as llm:
        for output in llm.generate(["The sky is", "Grass is"], SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

It uses all other components except the launcher's, and no component imports it. Not for a cluster: use any OpenAI client with the
cluster's gateway.
"""

from kvrelay.executor.errors import ShutDownError, WorkerDiedError
from kvrelay.executor.llm import LLM
from kvrelay.executor.outputs import CompletionOutput, Logprob, RequestOutput
from kvrelay.executor.request import Chat, Prompt, Request
from kvrelay.executor.result import GenerationResult
from kvrelay.executor.sampling import SamplingParams, StructuredOutputsParams
from kvrelay.gateway.errors import ApiError, InvalidRequestError, UnavailableError

__all__ = [
    "LLM",
    "ApiError",
    "Chat",
    "CompletionOutput",
    "GenerationResult",
    "InvalidRequestError",
    "Logprob",
    "Prompt",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "ShutDownError",
    "StructuredOutputsParams",
    "UnavailableError",
    "WorkerDiedError",
]
