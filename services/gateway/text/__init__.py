"""Text and tokens: tokenizer, detokenizer, chat templates and grammars, each in a process of its own.

The room knows `common/` alone.
"""
