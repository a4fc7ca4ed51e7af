"""A model in this process, without services: `from offline import LLM, SamplingParams`."""

from offline.llm import LLM as LLM
from offline.output import CompletionOutput as CompletionOutput
from offline.output import RequestOutput as RequestOutput
from offline.params import SamplingParams as SamplingParams
