"""Models as folders that a worker can load: the default one made, a GGUF file given a folder.

The room knows `common/` alone.
"""
