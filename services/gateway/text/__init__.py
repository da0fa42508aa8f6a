"""Text and tokens: tokenizer, detokenizer, stop strings, chat templates and grammars, each in a process of its own.

The room knows `common/` alone.
"""
