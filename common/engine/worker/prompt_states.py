"""The model's final hidden state at the end of a prompt, for the length predictor.

Asked by the worker loop after every step that drew first tokens, if the configuration wants refined predictions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.messages import PromptState
from cohort.common.sequence import Sequence


def prompt_states(runner: ModelRunner, sampled: Seq[Sequence]) -> list[PromptState]:
    """One message per sequence that has just sampled its very first token; `sampled` as the batch builder named them.

    Empty for models that keep no states and for steps that ran in parts.
    """
    first = [index for index, each in enumerate(sampled) if each.output_tokens == 1 and not each.request.output_known]
    states = runner.sampled_states(len(sampled)) if first else None
    if states is None:
        return []
    return [PromptState(sampled[index].key, states[index].tobytes()) for index in first]
