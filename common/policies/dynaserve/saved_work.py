"""The work that a split at the end of a prompt saves, in seconds of the instance that computes the prompt.

Asked by the placement. A balance of loads (`split_search`) never sees it: there work costs the same wherever it runs,
and what one instance is relieved of the other has to do. That does not hold on unlike instances, nor where an iteration
with prompts and decodes takes longer than both alone. Pure.
"""

from __future__ import annotations

from cohort.common.policies.dynaserve.instance_work import InstanceWork, work_seconds
from cohort.common.policies.dynaserve.timeline import SegmentWork

PRICED = 0.15
"""What mixing costs at the least, as learned, before decodes are kept apart. Half of it is the most that this can win,
and it costs every request a longer gap where it changes hands: at 0.1, two A100 and the 14B model served 0 to 2 % more
and 27 % of the requests had a gap beyond the bound. Fits scatter by up to 0.1 where there is no price."""


def cheaper_elsewhere_s(prompts: InstanceWork, decodes: InstanceWork, whole: SegmentWork) -> float:
    """D3 · saved if `decodes` takes the response and `prompts` computes prompts instead; negative: it costs more there.

    Seconds of unlike instances are not of equal worth. Under load each of them is one less for prompts, so a response
    costs as many prompt tokens as could have been computed meanwhile. An instance with much bandwidth for its compute
    decodes at the price of few; on equal ones the two numbers are the same.
    """
    response = SegmentWork(0, whole.prefill, whole.decode)
    here, there = prompts.times, decodes.times
    return work_seconds(here, response) - work_seconds(there, response) * here.token_s / there.token_s


def unmixed_s(prompts: InstanceWork, decodes: InstanceWork, whole: SegmentWork) -> float:
    """D3 · saved where mixing has a price: as long as this response is decoded, the iterations of its instance hold
    decodes beside prompts, and it shares that with the other responses there.

    So an instance with hardly any decodes saves a whole iteration's price for every token, one with many next to
    nothing: instances with few decodes pass theirs on and end without any, the others compute the rest of the prompts.
    No pair of instances has roles that are set; a balance of each request by itself never gets there.
    """
    share = prompts.times.mixed_share
    if share < PRICED:
        return 0.0
    fewer = 1.0 / (prompts.decodes + 1) - 1.0 / (decodes.decodes + 1)
    return max(0.0, share * prompts.pass_s * whole.decode * fewer)
