"""The length predictor: how long will the answer be? Learns from every finished request.

    gateway ── PredictLength ──▶ service.py ── features.py ──▶ model.py ──▶ Predicted
            ── ObserveLength ─▶     │                            ▲
                                    └─▶ trainer.py ══ pipe ══▶ trainer_process.py (training.py, state.py)

Serving never trains: all fitting happens in a child process at low priority, so a prediction costs the same
microseconds while a training runs. The serving process imports NumPy only; scikit-learn lives in the child.
"""
