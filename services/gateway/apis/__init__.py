"""The endpoints: OpenAI's completions, chat and Responses, Anthropic's Messages, tokens, tenants, probes.

The top of the gateway's rooms; only `service.py` and the description of the API know it.
"""
