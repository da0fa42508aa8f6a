"""How well answer lengths can be predicted for the model that is served: collect answers, train, judge."""
