"""A length predictor that says anything: stands in for the real one in tests of what wrong predictions cost.

    python -m tests.e2e.equality.random_predictor --config … --instance … --run-dir …

Every request is given a random length, up to three times what its client may get, and another one as a revision.
"""

from __future__ import annotations

from random import Random

from cohort.common.addresses import MANAGER
from cohort.common.messages import Predicted, PredictLength, RevisePrediction
from cohort.common.process.service import ServiceContext, service_main
from cohort.common.types import Prediction


async def build(context: ServiceContext) -> None:
    random = Random(7)
    bus = context.bus
    bus.connect(MANAGER, context.endpoint_of("manager"))
    context.ready = True

    def anything(max_tokens: int) -> Prediction:
        length = float(random.randint(1, 3 * max_tokens))
        return Prediction(length, length, length, length, "random")

    while True:
        sender, message = await bus.receive()
        if isinstance(message, PredictLength):
            bus.send(sender, Predicted(message.request_id, anything(message.facts.max_tokens)))
            bus.send(MANAGER, RevisePrediction(message.request_id, anything(message.facts.max_tokens)))


if __name__ == "__main__":
    service_main("length_predictor", build)
