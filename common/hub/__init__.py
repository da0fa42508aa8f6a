"""Models by name: which folder or file of this machine a name means, and how it gets here.

The room knows the reading of model files (`common/engine/config/`), never a service.
"""
